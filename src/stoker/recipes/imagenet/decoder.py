"""From a micro-batch to a batch of crops: read, decoded, cut out, and what is drawn for each sample."""

# B images of a micro-batch
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stoker.data.plan import MicroBatch
from stoker.data.processes import Helper, Processes
from stoker.data.ragged import Indices
from stoker.recipe import RunConfig
from stoker.recipes.imagenet import crops
from stoker.recipes.imagenet.augment import NUMBERS_OF_ERASING, Erasing, Mixing, RandAugment
from stoker.recipes.imagenet.batch import HostImages
from stoker.recipes.imagenet.broken import BrokenImages
from stoker.recipes.imagenet.chance import Floats, uniforms
from stoker.recipes.imagenet.config import ImageNetData, size_at
from stoker.recipes.imagenet.decode import Box, Broken, Pixels, decode_all, decode_crop, inside, size_of
from stoker.recipes.imagenet.gpu_decode import GpuDecoder
from stoker.recipes.imagenet.subset import Chosen

CHUNK = 64  # images that a process decodes at a time


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


class Decoder:
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
            self._processes = Processes(self._decode, processes, room_bytes(self._config), self._helper())

    def _helper(self) -> Helper[_Decoded] | None:
        if not (self._on_gpu and self._config.decode_on_gpu):
            return None
        return Helper(self._decode_on_gpu, lambda: self._gpu.works)

    def make(self, training: bool, micro: MicroBatch) -> HostImages:
        with ExitStack() as held:  # processes read what lies in the cache, and fetch nothing themselves
            for file, numbers in self._chosen.images.reader.places(micro.rows):
                held.enter_context(file.held(numbers))
            return self._made(training, micro)

    def _made(self, training: bool, micro: MicroBatch) -> HostImages:
        asked = _Asked(micro, training)
        if self._processes is None:
            nowhere = memoryview(b"")
            return self._batch(asked, [self._taken(self._decode(asked, nowhere)[0], nowhere)])
        # In small chunks: every process helps with a large batch, and needs room for a few images only.
        chunks = [
            _Asked(_chunk(asked.micro, first), asked.training)
            for first in range(0, max(1, len(asked.micro.rows)), CHUNK)
        ]
        # Validation has the same pixels every time: a GPU rounds differently, and who decodes what is a matter of timing.
        return self._batch(asked, self._processes.run(chunks, self._taken, helped=asked.training))

    def _taken(self, decoded: _Decoded, room: memoryview) -> tuple[_Decoded, torch.Tensor]:
        """A decoder's answer with its pixels, copied out of the memory that it will use again."""
        if decoded.pixels is not None:
            return decoded, torch.as_tensor(decoded.pixels)
        copy = torch.empty(len(room), dtype=torch.uint8, pin_memory=self._on_gpu)
        return decoded, copy.copy_(torch.frombuffer(room, dtype=torch.uint8))

    def _decode(self, asked: _Asked, room: memoryview) -> tuple[_Decoded, int]:
        """Reads and decodes every image of a micro-batch; all else is done for many at once."""
        micro, reader = asked.micro, self._chosen.images.reader
        crop_of = self._crop_of(asked)
        kept: list[int] = []
        found: list[Pixels] = []
        broken: list[tuple[int, str]] = []
        for one, row in enumerate(micro.rows.tolist()):
            try:
                found.append(crop_of(reader.read(row), one))
                kept.append(one)
            except (Broken, OSError) as error:
                broken.append((row, str(error)))
        total = sum(pixels.size for pixels in found)
        fits = 0 < total <= len(room)
        out = np.frombuffer(room, np.uint8)[:total] if fits else np.empty(total, np.uint8)
        first = 0
        for pixels in found:
            out[first : first + pixels.size].reshape(pixels.shape)[:] = pixels
            first += pixels.size
        shapes = np.array([pixels.shape[:2] for pixels in found], np.int32).reshape(-1, 2)
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
            pixels = torch.cat([crop.flatten() for crop in seen])
            stream.synchronize()
        shapes = np.array([crop.shape[:2] for crop in seen], np.int32)
        return _Decoded(np.arange(len(seen)), shapes, [], pixels)

    def _numbers(self, micro: MicroBatch) -> Floats:
        count = _NUMBERS + 4 * self._config.rand_augment
        return uniforms(micro.seed, micro.epoch, self._ids[micro.rows], count, micro.copies)

    def _crop_of(self, asked: _Asked) -> Callable[[bytes, int], Pixels]:
        """From the bytes of an image, and its place in the micro-batch, to what is seen of it."""
        config, micro = self._config, asked.micro
        if asked.training and config.crop == "shift":
            numbers = self._numbers(micro)
            return lambda content, one: crops.shifted(decode_all(content), config.shift, numbers[one, : crops.NUMBERS])
        box = self._box(asked)
        size = config.validation_size or config.size
        if asked.training:
            size = size_at(config, micro.epoch, self._epochs)

        def crop(content: bytes, one: int) -> Pixels:
            height, width = size_of(content)
            return decode_crop(content, box(height, width, one), height, width, size)

        return crop

    def _box(self, asked: _Asked) -> Callable[[int, int, int], Box]:
        """From the height and width of an image, and its place in the micro-batch, to the part that is seen."""
        config = self._config
        if not asked.training:
            return lambda height, width, _: crops.centre_crop(height, width, config.validation_crop)
        numbers = self._numbers(asked.micro)[:, : crops.NUMBERS]
        area, shape = (config.smallest_crop, 1.0), (3 / 4, 4 / 3)
        return lambda height, width, one: crops.random_resized_crop(height, width, numbers[one], area, shape)

    def _batch(self, asked: _Asked, chunks: "list[tuple[_Decoded, torch.Tensor]]") -> HostImages:
        """With what is drawn for each sample, in training."""
        config, micro = self._config, asked.micro
        self._broken.saw(len(micro.rows))
        for row, reason in (one for decoded, _ in chunks for one in decoded.broken):
            self._broken.add(row, reason)
        kept = np.concatenate([decoded.kept + number * CHUNK for number, (decoded, _) in enumerate(chunks)])
        shapes = np.concatenate([decoded.shapes for decoded, _ in chunks])
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
            pixels=tuple(pixels for _, pixels in chunks),
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


def _chunk(micro: MicroBatch, first: int) -> MicroBatch:
    here = slice(first, first + CHUNK)
    copies = None if micro.copies is None else micro.copies[here]
    return MicroBatch(micro.rows[here], micro.seed, micro.epoch, copies=copies)


def _partners(micro: MicroBatch, kept: Indices) -> Indices:
    """Places among the images that were kept; one whose partner is broken is its own."""
    assert micro.partners is not None
    place = np.full(len(micro.rows), -1)
    place[kept] = np.arange(len(kept))
    partners = place[micro.partners[kept]]
    return np.where(partners < 0, np.arange(len(kept)), partners)


def room_bytes(config: ImageNetData) -> int:
    """Bytes for the crops of a chunk: a crop is decoded to at most about twice the size asked for."""
    side = 2 * max(config.size, config.validation_size or 0) + 32
    return CHUNK * side * side * 3


# Places of the uniform numbers of a sample: crop, flip, mixing, erasing; RandAugment's come last.
_FLIP = crops.NUMBERS
_MIX = _FLIP + 1
_ERASE = _MIX + 6
_NUMBERS = _ERASE + NUMBERS_OF_ERASING
