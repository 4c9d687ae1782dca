"""Where the images of a run come from, and how bytes become batches."""

# B images of a micro-batch
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from stoker import console
from stoker.data.cache import cache_folder, made_by_one
from stoker.data.order import ExactOrder, Order, RepeatedOrder, hashed
from stoker.data.plan import MicroBatch
from stoker.data.processes import Helper, Processes
from stoker.data.quarantine import Quarantine
from stoker.data.ragged import Indices
from stoker.data.samples import ListSubset, SampleTable, Subset
from stoker.data.stages import Stage
from stoker.errors import UserError
from stoker.recipe import RunConfig, RunData
from stoker.recipes.imagenet import crops
from stoker.recipes.imagenet.augment import NUMBERS_OF_ERASING, Erasing, Mixing, RandAugment
from stoker.recipes.imagenet.batch import HostImages
from stoker.recipes.imagenet.broken import BrokenImages, Policy
from stoker.recipes.imagenet.chance import Floats, uniforms
from stoker.recipes.imagenet.classes import ClassMap
from stoker.recipes.imagenet.decode import Box, Broken, Pixels, decode_all, decode_part, inside, size_of
from stoker.recipes.imagenet.draw import draw_set
from stoker.recipes.imagenet.gpu_decode import GpuDecoder
from stoker.recipes.imagenet.model import check_name
from stoker.recipes.imagenet.probe import check_labels
from stoker.recipes.imagenet.sources import Images, open_images, rows_of
from stoker.settings import AlsoCalled, config

# Host memory that a byte of JPEG needs on its way: its crop has two or three, and is copied.
BYTES_PER_BYTE = 8.0
PART = 64  # images that a process decodes at a time


@config
class ImageNetData:
    path: Annotated[Path, AlsoCalled("dir", "data_dir", "root")] | None = None  # None: images are drawn
    size: Annotated[int, Field(ge=8), AlsoCalled("image_size", "img_size", "resolution")] = 224  # pixels of a side
    first_size: Annotated[int, Field(ge=8)] | None = None  # grow from this, in steps of 32 pixels, by the epoch
    grown_after: Annotated[float, Field(gt=0, le=1)] = 0.8  # share of the epochs after which `size` is reached
    validation_size: Annotated[int, Field(ge=8)] | None = None  # None: `size`
    validation_crop: Annotated[float, Field(gt=0, le=1)] = 0.875  # share of the shorter side that validation sees
    crop: Literal["random", "shift"] = "random"  # a random part, or the whole moved by a few pixels (small images)
    smallest_crop: Annotated[float, Field(gt=0, le=1)] = 0.08  # share of the area
    shift: Annotated[int, Field(ge=0)] = 4  # pixels, of crop shift
    flip: bool = True  # left and right, half of the time

    rand_augment: Annotated[int, Field(ge=0)] = 0  # operations in a row
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9.0  # of 30
    magnitude_spread: Annotated[float, Field(ge=0)] = 0.0  # standard deviation of the magnitude
    erasing: Annotated[float, Field(ge=0, le=1)] = 0.0  # probability
    mixup: Annotated[float, Field(ge=0)] = 0.0  # alpha of its beta distribution
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    mix_probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    mix_switch: Annotated[float, Field(ge=0, le=1)] = 0.5  # share of cutmix where both are used
    repeats: Annotated[int, Field(ge=1)] = 1  # augmentations of the same image a step

    max_classes: Annotated[int, Field(ge=2)] | None = None  # a subset, drawn with subset_seed
    max_per_class: Annotated[int, Field(ge=1)] | None = None  # training images of each class
    subset_seed: Annotated[int, Field(ge=0)] = 0
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1  # share held out, where there is no validation folder
    processes: Annotated[int, Field(ge=0)] | None = (
        None  # that decode; None: one a loader thread beside a GPU, else none
    )
    decode_on_gpu: bool = False  # also, training images for which no process is free; not the same to the bit
    broken: Policy = "few"  # images that cannot be decoded: few (1 %) or all are skipped, or the first stops the run
    check_labels: bool = True  # a quick classifier tells before the first step whether labels of both sides agree

    draw_per_class: Annotated[int, Field(ge=1)] = 500  # images drawn where there is no path
    draw_held_out: Annotated[int, Field(ge=1)] = 60

    def __post_init__(self) -> None:
        if self.decode_on_gpu and self.crop == "shift":
            raise ValueError("decode_on_gpu is for crops of large images, and crop is shift")
        if self.first_size is not None and self.first_size > self.size:
            raise ValueError(f"first_size {self.first_size} is larger than size {self.size}")

    def without_effect(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why."""
        found = {"smallest_crop" if self.crop == "shift" else "shift": f"data.crop is {self.crop}"}
        found["loader.window"] = "the order of images is exact, wherever they lie"
        if self.first_size is None:
            found["grown_after"] = "data.first_size is not set"
        if not self.rand_augment:
            found |= dict.fromkeys(("magnitude", "magnitude_spread"), "data.rand_augment is 0")
        if not (self.mixup or self.cutmix):
            found["mix_probability"] = "data.mixup and data.cutmix are 0"
        if not (self.mixup and self.cutmix):
            found["mix_switch"] = "it chooses between data.mixup and data.cutmix, and not both are used"
        if self.max_classes is None and self.max_per_class is None:
            found["subset_seed"] = "neither data.max_classes nor data.max_per_class is set"
        if self.processes == 0:
            found["decode_on_gpu"] = "it helps the processes that decode, and data.processes is 0"
        if self.path is not None:
            found |= dict.fromkeys(("draw_per_class", "draw_held_out"), "data.path is given, nothing is drawn")
        return found


@dataclass(frozen=True)
class Chosen:
    """Images and classes of a run, after subsets are taken."""

    images: Images
    classes: ClassMap
    label: Indices  # of each class of the whole set, its label in the run; -1: left out
    training: Indices  # rows
    validation: Indices


def open_data(run: RunConfig, device: torch.device) -> RunData:
    check_name(run.model)  # before anything that takes long
    chosen, config = choose(run), run.data
    if run.loader.bad_shards != "stop":
        raise UserError("loader.bad_shards is not for images: data.broken says what an image does that cannot be read.")
    if run.loader.sample_cost is not None:
        raise UserError(
            "loader.sample_cost thins samples that are too long, and an image cannot be thinned: leave it out."
        )
    table = chosen.images.table
    if config.check_labels:
        threads = run.loader.num_threads
        check_labels(chosen.images, chosen.classes, chosen.label, chosen.training, chosen.validation, threads)
    broken = BrokenImages(chosen.images.reader, config.broken)
    processes = config.processes
    if processes is None:
        processes = run.loader.num_threads if device.type == "cuda" else 0
    if config.decode_on_gpu and (device.type != "cuda" or not processes):
        raise UserError(
            f"data.decode_on_gpu helps processes beside a GPU; this run is on {device.type} with {processes} processes."
        )
    maker = _Maker(run, chosen, broken, processes, device)

    def of_subset(subset: Subset) -> Callable[[int, int], Order]:
        def of_epoch(seed: int, epoch: int) -> Order:
            order = ExactOrder(len(subset), seed, epoch)
            return RepeatedOrder(order, config.repeats) if config.repeats > 1 else order

        return of_epoch

    def stages(training: bool) -> list[Stage]:
        return [Stage("decode", maker.train if training else maker.validate)]

    return RunData(
        table=table,
        training=ListSubset(chosen.training),
        validation=ListSubset(chosen.validation),
        order=of_subset,
        stages=stages(True),
        validation_stages=stages(False),
        where=lambda rows: ", ".join(chosen.images.reader.name(int(row)) for row in rows[:3]),
        quarantine=Quarantine(table, run.loader.bad_shards),
        description={
            "path": str(data_root(run)),
            "classes": len(chosen.classes),
            "training": len(chosen.training),
            "validation": len(chosen.validation),
            "fingerprint": table.fingerprint,
        },
        bytes_per_cost=BYTES_PER_BYTE,
        cache_bytes=processes * _room(config),
        repeated=config.repeats > 1,
        paired=bool(config.mixup or config.cutmix),
        keep={"classes.json": list(chosen.classes.names)},
    )


def data_root(run: RunConfig) -> Path:
    """The user's directory, or images drawn into the cache on first use."""
    config = run.data
    if config.path is not None:
        return Path(config.path)
    return _drawn(config.draw_per_class, config.draw_held_out, run.run.seed)


@cache
def _drawn(per_class: int, held_out: int, seed: int) -> Path:
    folder = cache_folder() / "drawn" / f"images-{per_class}-{held_out}-{seed}"
    with made_by_one(folder, "Another process draws the same images: waiting for it."):
        if not folder.exists():
            console.say(f"No data.path was given: drawing {10 * (per_class + held_out):,} images into {folder}.")
            draw_set(folder, per_class, held_out, seed)
    return folder


@cache
def _opened(root: Path, broken: Policy) -> Images:
    return open_images(root, keep_damaged=broken == "skip")


def choose(run: RunConfig) -> Chosen:
    config = run.data
    return choose_images(
        _opened(data_root(run), config.broken),
        config.max_classes,
        config.max_per_class,
        config.subset_seed,
        config.validation,
    )


def choose_images(
    images: Images, max_classes: int | None, max_per_class: int | None, seed: int, validation: float
) -> Chosen:
    classes = images.classes.chosen(max_classes, seed)
    label = classes.labels(images.classes)
    table = images.table
    used = label[np.asarray(table.columns["label"])] >= 0
    training, held = (rows[used[rows]] for rows in (rows_of(table, 0), rows_of(table, 1)))
    if not images.has_validation:
        drawn = hashed(np.asarray(table.columns["id"])[training].astype(np.uint64)) < np.uint64(validation * 2**64)
        training, held = training[~drawn], training[drawn]
    if max_per_class is not None:
        training = _some_of_each(table, training, max_per_class, seed)
    if not len(training) or not len(held):
        raise UserError(
            f"There are {len(training)} images to train on and {len(held)} to validate on: both are needed."
        )
    return Chosen(images, classes, label, training, held)


def _some_of_each(table: SampleTable, rows: Indices, most: int, seed: int) -> Indices:
    """At most so many rows of each class, drawn by a hash of their id."""
    labels = np.asarray(table.columns["label"])[rows]
    chance = hashed(np.asarray(table.columns["id"])[rows].astype(np.uint64) ^ np.uint64(seed * 0x9E3779B9 % 2**63))
    order = np.lexsort((chance, labels))
    ordered = labels[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return np.sort(rows[order[place < most]])


def size_at(config: ImageNetData, epoch: int, epochs: int) -> int:
    """Pixels of a side in an epoch: from first_size up, in steps of 32, and `size` from grown_after on."""
    if config.first_size is None:
        return config.size
    until = max(1.0, config.grown_after * epochs)
    share = min(1.0, epoch / until)
    grown = config.first_size + share * (config.size - config.first_size)
    return config.size if share >= 1 else min(config.size, int(grown // 32 * 32) or config.first_size)


@dataclass(frozen=True)
class _Asked:
    """What a decoder is told."""

    micro: MicroBatch
    training: bool


@dataclass(frozen=True)
class _Decoded:
    """What it answers; the pixels lie in the room it was given, or here if there was too little or they are on a GPU."""

    kept: Indices  # places in the micro-batch
    shapes: npt.NDArray[np.int32]
    broken: list[tuple[int, str]]  # row, reason
    pixels: npt.NDArray[np.uint8] | torch.Tensor | None


class _Maker:
    """From a micro-batch to a batch of crops, decoded here, in processes of their own, or on the GPU."""

    def __init__(
        self, run: RunConfig, chosen: Chosen, broken: BrokenImages, processes: int, device: torch.device
    ) -> None:
        self._config: ImageNetData = run.data
        self._epochs, self._chosen, self._broken = run.train.epochs, chosen, broken
        self._on_gpu = device.type == "cuda"
        columns = chosen.images.table.columns
        self._labels, self._ids = np.asarray(columns["label"]), np.asarray(columns["id"])
        self._processes: Processes[_Decoded] | None = None
        self._gpu = GpuDecoder(device)
        if processes:
            self._processes = Processes(self._decode, processes, _room(self._config), self._helper())

    def _helper(self) -> Helper[_Decoded] | None:
        if not (self._on_gpu and self._config.decode_on_gpu):
            return None
        return Helper(self._decode_on_gpu, lambda: self._gpu.works)

    def train(self, micro: MicroBatch) -> HostImages:
        return self._make(_Asked(micro, training=True))

    def validate(self, micro: MicroBatch) -> HostImages:
        return self._make(_Asked(micro, training=False))

    def _make(self, asked: _Asked) -> HostImages:
        if self._processes is None:
            nowhere = memoryview(b"")
            return self._batch(asked, [self._taken(self._decode(asked, nowhere)[0], nowhere)])
        # In small parts: every process helps with a large batch, and needs room for a few images only.
        parts = [
            _Asked(_part(asked.micro, first), asked.training) for first in range(0, max(1, len(asked.micro.rows)), PART)
        ]
        # Validation has the same pixels every time: a GPU rounds differently, and who decodes what is a matter of timing.
        return self._batch(asked, self._processes.run(parts, self._taken, helped=asked.training))

    def _taken(self, decoded: _Decoded, room: memoryview) -> tuple[_Decoded, torch.Tensor]:
        """A decoder's answer with its pixels, copied out of the memory that it will use again."""
        if decoded.pixels is not None:
            return decoded, torch.as_tensor(decoded.pixels)
        copy = torch.empty(len(room), dtype=torch.uint8, pin_memory=self._on_gpu)
        return decoded, copy.copy_(torch.frombuffer(room, dtype=torch.uint8))

    def _decode(self, asked: _Asked, room: memoryview) -> tuple[_Decoded, int]:
        """Reads and decodes every image of a micro-batch; the one part that is done for each image by itself."""
        micro, reader = asked.micro, self._chosen.images.reader
        part = self._part_of(asked)
        kept: list[int] = []
        parts: list[Pixels] = []
        broken: list[tuple[int, str]] = []
        for one, row in enumerate(micro.rows.tolist()):
            try:
                parts.append(part(reader.read(row), one))
                kept.append(one)
            except (Broken, OSError) as error:
                broken.append((row, str(error)))
        total = sum(part.size for part in parts)
        fits = 0 < total <= len(room)
        out = np.frombuffer(room, np.uint8)[:total] if fits else np.empty(total, np.uint8)
        first = 0
        for pixels in parts:
            out[first : first + pixels.size].reshape(pixels.shape)[:] = pixels
            first += pixels.size
        shapes = np.array([pixels.shape[:2] for pixels in parts], np.int32).reshape(-1, 2)
        decoded = _Decoded(np.array(kept, np.int64), shapes, broken, None if fits else out)
        return decoded, total if fits else 0

    def _decode_on_gpu(self, asked: _Asked) -> _Decoded:
        """The same; whatever is not for a GPU, broken images too, is left to this thread."""
        box, reader = self._box(asked), self._chosen.images.reader
        try:
            images = self._gpu.decode([reader.read(row) for row in asked.micro.rows.tolist()])
        except OSError:
            images = None
        if images is None:
            return self._decode(asked, memoryview(b""))[0]
        with self._gpu.stream() as stream:
            seen = [
                image[:, *inside(box(image.shape[1], image.shape[2], one))].permute(1, 2, 0)
                for one, image in enumerate(images)
            ]
            pixels = torch.cat([part.flatten() for part in seen])
            stream.synchronize()
        shapes = np.array([part.shape[:2] for part in seen], np.int32)
        return _Decoded(np.arange(len(seen)), shapes, [], pixels)

    def _numbers(self, micro: MicroBatch) -> Floats:
        count = _NUMBERS + 4 * self._config.rand_augment
        return uniforms(micro.seed, micro.epoch, self._ids[micro.rows], count, micro.copies)

    def _part_of(self, asked: _Asked) -> Callable[[bytes, int], Pixels]:
        """From the bytes of an image, and its place in the micro-batch, to what is seen of it."""
        config, micro = self._config, asked.micro
        if asked.training and config.crop == "shift":
            numbers = self._numbers(micro)
            return lambda content, one: crops.shifted(decode_all(content), config.shift, numbers[one, : crops.NUMBERS])
        box = self._box(asked)
        size = config.validation_size or config.size
        if asked.training:
            size = size_at(config, micro.epoch, self._epochs)

        def part(content: bytes, one: int) -> Pixels:
            height, width = size_of(content)
            return decode_part(content, box(height, width, one), height, width, size)

        return part

    def _box(self, asked: _Asked) -> Callable[[int, int, int], Box]:
        """From the height and width of an image, and its place in the micro-batch, to the part that is seen."""
        config = self._config
        if not asked.training:
            return lambda height, width, _: crops.centre_crop(height, width, config.validation_crop)
        numbers = self._numbers(asked.micro)[:, : crops.NUMBERS]
        area, shape = (config.smallest_crop, 1.0), (3 / 4, 4 / 3)
        return lambda height, width, one: crops.random_resized_crop(height, width, numbers[one], area, shape)

    def _batch(self, asked: _Asked, parts: "list[tuple[_Decoded, torch.Tensor]]") -> HostImages:
        """With what is drawn for each sample, in training."""
        config, micro = self._config, asked.micro
        self._broken.saw(len(micro.rows))
        for row, reason in (one for decoded, _ in parts for one in decoded.broken):
            self._broken.add(row, reason)
        kept = np.concatenate([decoded.kept + number * PART for number, (decoded, _) in enumerate(parts)])
        shapes = np.concatenate([decoded.shapes for decoded, _ in parts])
        rows = micro.rows[kept]
        offsets = np.zeros(len(rows), np.int64)
        np.cumsum(3 * shapes[:-1].astype(np.int64).prod(1), out=offsets[1:])
        size, flips = config.validation_size or config.size, np.zeros(len(rows), bool)
        augment = mixing = erasing = None
        if asked.training and len(rows):
            size, drawn = size_at(config, micro.epoch, self._epochs), self._numbers(micro)[kept]
            flips = (drawn[:, _FLIP] < 0.5) & config.flip
            if config.rand_augment:
                augment = RandAugment.draw(
                    drawn[:, _NUMBERS:], config.rand_augment, config.magnitude, config.magnitude_spread
                )
            if config.mixup or config.cutmix:
                mixing = Mixing.draw(
                    drawn[:, _MIX:_ERASE],
                    _partners(micro, kept),
                    config.mixup,
                    config.cutmix,
                    config.mix_probability,
                    config.mix_switch,
                )
            if config.erasing:
                erasing = Erasing.draw(drawn[:, _ERASE : _ERASE + NUMBERS_OF_ERASING], config.erasing)
        return HostImages(
            pixels=tuple(pixels for _, pixels in parts),
            offsets=torch.from_numpy(offsets),
            shapes=torch.from_numpy(shapes),
            flips=torch.from_numpy(flips.astype(np.uint8)),
            labels=torch.from_numpy(self._chosen.label[self._labels[rows]]),
            rows=torch.from_numpy(rows),
            size=size,
            augment=augment,
            mixing=mixing,
            erasing=erasing,
        )


def _part(micro: MicroBatch, first: int) -> MicroBatch:
    here = slice(first, first + PART)
    copies = None if micro.copies is None else micro.copies[here]
    return MicroBatch(micro.rows[here], micro.seed, micro.epoch, copies=copies)


def _partners(micro: MicroBatch, kept: Indices) -> Indices:
    """Places among the images that were kept; one whose partner is broken is its own."""
    assert micro.partners is not None
    place = np.full(len(micro.rows), -1)
    place[kept] = np.arange(len(kept))
    partners = place[micro.partners[kept]]
    return np.where(partners < 0, np.arange(len(kept)), partners)


def _room(config: ImageNetData) -> int:
    """Bytes for the crops of a part: a crop is decoded to at most about twice the size asked for."""
    side = 2 * max(config.size, config.validation_size or 0) + 32
    return PART * side * side * 3


# Places of the uniform numbers of a sample: crop, flip, mixing, erasing; RandAugment's come last.
_FLIP = crops.NUMBERS
_MIX = _FLIP + 1
_ERASE = _MIX + 6
_NUMBERS = _ERASE + NUMBERS_OF_ERASING
