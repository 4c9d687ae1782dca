"""Answers for single images or folders of them, and the model as one file for other programs."""

import csv
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from stoker import console
from stoker.data.locations import Location, is_file, is_folder, named, read, stat, walk
from stoker.errors import MachineError, UserError
from stoker.files import write_bytes
from stoker.recipe import Trained
from stoker.recipes.imagenet.batch import HostImages, ImageBatch
from stoker.recipes.imagenet.config import ImageNetData
from stoker.recipes.imagenet.crops import centre_crop
from stoker.recipes.imagenet.decode import Broken, decode_crop, size_of
from stoker.recipes.imagenet.resize import MEAN, STD
from stoker.recipes.imagenet.sources import MANIFEST
from stoker.recipes.imagenet.subset import choose
from stoker.recipes.imagenet.tars import ENDINGS
from stoker.train import parallel
from stoker.train.onnx_file import check_out, onnx_file
from stoker.train.precision import autocast
from stoker.train.predict import Parts, predict_in_parts, remove, tables

BATCH = 64
PART_IMAGES = 4096
BEST = 5  # classes of an image that are told
SHOWN = 10  # images whose answers are printed
CHECKED = 16  # images that an export is compared on


def predict(model: Trained, out: Path | None) -> Mapping[str, Any]:
    """The five likeliest classes of each image, printed, and as CSV where a file is asked for."""
    source = model.config.data.path
    if source is None:
        raise UserError("What should be predicted? Name an image or a folder: `stoker predict RUN image.jpg`.")
    if out is not None and out.suffix != ".csv":
        raise UserError(f"--out {out} should end in .csv.")
    if out is not None and out.exists():
        raise UserError(f"{out} exists, and nothing is overwritten: remove it, or name another --out.")
    paths = find_images(named(source))

    def answer(first: int, stop: int, advance: Callable[[int], None]) -> pa.Table:
        return _classes_of(model, paths[first:stop], advance)

    with ExitStack() as stack:
        if out is None and model.ranks.is_first:
            stack.enter_context(temporary := tempfile.TemporaryDirectory())
        folder = out.with_name(out.name + ".parts") if out else Path(temporary.name) if model.ranks.is_first else None
        parts = Parts(parallel.from_first(folder), len(paths), PART_IMAGES, "images")
        identity = {"images": _digest(paths), "seen": str(model.config.data), "precision": model.precision}
        told = predict_in_parts(parts, model.task.model, identity, model.ranks, answer)
        rows = [row for table in tables(parts) for row in table.to_pylist()] if model.ranks.is_first else []
        parallel.gather(None)
        if out is not None and model.ranks.is_first:
            _write_csv(rows, list(_schema(model).names), out)
            remove(parts)
    result: dict[str, Any] = {"images": len(rows), "broken": len(paths) - len(rows), **told}
    if out is not None:
        return {**result, "path": str(out)}
    return {**result, **{row.pop("image"): _in_words(row) for row in rows[:SHOWN]}}


def _digest(paths: list[Location]) -> str:
    """Changes when an image is written again, or another takes its name."""
    words = (f"{path} {stat(path)}" for path in paths)
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _schema(model: Trained) -> pa.Schema:
    places = range(1, min(BEST, len(model.task.classes)) + 1)
    answers = [
        field for place in places for field in ((f"class_{place}", pa.string()), (f"chance_{place}", pa.float64()))
    ]
    return pa.schema([("image", pa.string()), *answers])


def _classes_of(model: Trained, paths: list[Location], advance: Callable[[int], None]) -> pa.Table:
    """A row for each image that can be decoded."""
    schema, names = _schema(model), model.task.classes.names
    best = (len(schema) - 1) // 2
    rows: list[list[Any]] = []
    for first in range(0, len(paths), BATCH):
        batch = paths[first : first + BATCH]
        images, kept = load(map(_read, batch), model.config.data, [])
        if kept:
            with autocast(model.precision, model.device):
                chances = model.task.model(images.to(model.device)).float().softmax(1)
            values, labels = (tensor.cpu().tolist() for tensor in chances.topk(best, dim=1))
            for name, chance, label in zip(kept, values, labels, strict=True):
                pairs = zip(label, chance, strict=True)
                rows.append([name, *(word for one, value in pairs for word in (names[one], round(value, 4)))])
        advance(len(batch))
    return pa.table([list(column) for column in zip(*rows, strict=True)] or [[] for _ in schema], schema=schema)


def _write_csv(rows: list[dict[str, Any]], heading: list[str], out: Path) -> None:
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(heading)
    for row in rows:
        writer.writerow([f"{value:.4f}" if isinstance(value, float) else value for value in row.values()])
    write_bytes(out, sink.getvalue().encode())


def _in_words(answers: Mapping[str, Any]) -> str:
    values = list(answers.values())
    return ", ".join(f"{name} {chance:.1%}" for name, chance in zip(values[::2], values[1::2], strict=True))


def find_images(source: Location) -> list[Location]:
    if is_file(source):
        return [source]
    if not is_folder(source):
        raise UserError(f"There is no image and no folder {source}.")
    if is_file(source / MANIFEST):
        raise UserError(
            f"{source} is a packed set, and predictions are made of image files and folders of them. `stoker evaluate` "
            f"judges the validation images of a run."
        )
    found = [source / name for name, _ in walk(source) if name.lower().endswith(ENDINGS)]
    if not found:
        raise UserError(f"{source} holds no images (looked for {', '.join(ENDINGS)}).")
    return sorted(found)


def _read(path: Location) -> tuple[str, bytes]:
    try:
        return str(path), read(path)
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error}.") from error


def load(files: Iterable[tuple[str, bytes]], config: ImageNetData, broken: list[str]) -> tuple[Tensor, list[str]]:
    """Images as validation sees them; those that cannot be decoded are named and left out."""
    size = config.validation_size or config.size
    parts, kept = [], []
    for name, content in files:
        try:
            height, width = size_of(content)
            parts.append(decode_crop(content, centre_crop(height, width, config.validation_crop), height, width, size))
            kept.append(name)
        except Broken as error:
            broken.append(name)
            console.say(f"BROKEN IMAGE, left out: {name}: {error}")
    lengths = [part.size for part in parts]
    flat = np.concatenate([part.ravel() for part in parts]) if parts else np.zeros(0, np.uint8)
    host = HostImages(
        pixels=(torch.from_numpy(flat),),
        offsets=torch.tensor([0, *np.cumsum(lengths)[:-1]] if parts else [], dtype=torch.int64),
        shapes=torch.tensor([part.shape[:2] for part in parts], dtype=torch.int32).view(-1, 2),
        flips=torch.zeros(len(parts), dtype=torch.uint8),
        labels=torch.zeros(len(parts), dtype=torch.int64),
        rows=torch.zeros(len(parts), dtype=torch.int64),
        size=size,
        augment=None,
        mixing=None,
        erasing=None,
    )
    return host.to(torch.device("cpu")).images, kept


def as_batch(samples: Any, config: ImageNetData) -> ImageBatch:
    """Paths, or the bytes of image files, as validation sees them; one that cannot be decoded is an error."""
    several = samples if isinstance(samples, list | tuple) else [samples]
    files = [(f"image {n}", one) if isinstance(one, bytes) else _read(Path(one)) for n, one in enumerate(several)]
    broken: list[str] = []
    images, _ = load(files, config, broken)
    if broken:
        raise UserError(f"{len(broken)} of {len(files)} images cannot be decoded: {', '.join(broken[:3])}.")
    rows = torch.arange(len(images))
    return ImageBatch(images, torch.zeros_like(rows), torch.zeros_like(rows), torch.ones(len(rows)), rows)


def export(model: Trained, out: Path, samples: Path | None) -> Mapping[str, Any]:
    """ONNX with a free batch size, and its answers on real images compared with PyTorch's."""
    check_out(out)
    files = map(_read, find_images(samples)[:CHECKED]) if samples else _own_samples(model)
    images, kept = load(files, model.config.data, [])
    if not kept:
        raise UserError("None of the images to check with can be decoded. Name others: --data DIR.")
    network = model.task.model.cpu().float().eval()
    # Exported with two images: a size of one would be taken for a constant.
    example = {"images": images[:1].repeat(2, 1, 1, 1).contiguous()}
    free, about = ({0: torch.export.Dim("batch", min=1)},), _about(model)
    with onnx_file(network, example, free, "logits", about, out) as session:
        theirs = session.run(None, {"images": images.contiguous().numpy()})[0]
        with torch.inference_mode():
            ours = network(images.contiguous()).numpy()
        largest = float(np.abs(ours - theirs).max())
        if not largest <= 1e-3 * max(1.0, float(np.abs(ours).max())) or (ours.argmax(1) != theirs.argmax(1)).any():
            raise UserError(
                f"The exported model does not give PyTorch's answers: logits differ by up to {largest:.2g}."
            )
    size = model.config.data.validation_size or model.config.data.size
    return {
        "path": str(out),
        "input": f"images (batch, 3, {size}, {size})",
        "inside": sorted(about),
        "checked_on": len(kept),
        "largest_difference": largest,
    }


def _about(model: Trained) -> dict[str, str]:
    """What somebody needs to know who has nothing but the file: how to prepare an image, and what an answer means."""
    config = model.config.data
    return {
        "classes": json.dumps(list(model.task.classes.names)),
        "mean": json.dumps(list(MEAN)),
        "std": json.dumps(list(STD)),
        "size": str(config.validation_size or config.size),
        "crop": str(config.validation_crop),
        "input": "RGB / 255, minus mean, over std; the shorter side shrunk so that `crop` of it is `size`, from the middle",
        "weights": "averaged" if model.averaged else "raw",
    }


def _own_samples(model: Trained) -> Iterator[tuple[str, bytes]]:
    """Some validation images of the run, in whatever layout they lie."""
    chosen = choose(model.config)
    for row in chosen.validation[:CHECKED].tolist():
        yield chosen.images.reader.name(row), chosen.images.reader.read(row)
