"""How fast do images come, and does a GPU that trains ResNet-50 notice that they are JPEG?

Decoding alone: class folders, packed shards and shrunk packed shards, beside torchvision's ImageFolder and DataLoader with
as many workers as there are cores. On a GPU also whole training steps: from packed shards, and on batches that lie ready.
"""

import argparse
import multiprocessing
import os
import statistics
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torchvision
from end_to_end import Kept, rates
from measure import emit, line

from stoker import console
from stoker.data import checksums
from stoker.data.device import feed
from stoker.data.pack import PackRequest
from stoker.data.plan import Position
from stoker.data.samples import new_table, open_table
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.recipes.imagenet import crops, decode
from stoker.recipes.imagenet.chance import uniforms
from stoker.recipes.imagenet.config import PackOptions
from stoker.recipes.imagenet.draw import draw_set
from stoker.recipes.imagenet.gpu_decode import GpuDecoder
from stoker.recipes.imagenet.pack import pack
from stoker.recipes.imagenet.recipe import RECIPE
from stoker.recipes.imagenet.sources import LABELS, MANIFEST
from stoker.train.parallel import Ranks
from stoker.train.run import Run

FEW = 4  # processes of a machine with few cores a GPU
PACKED = {
    "original": PackOptions(),
    "short side 288": PackOptions(short_side=288, quality=90),
    "short side 256, decoded": PackOptions(short_side=256, decoded=True),
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_folders(sample: Path | None, root: Path, times: int) -> None:
    """Class folders with every image of the sample `times` times, as links; drawn images where there is no sample."""
    if sample is None:
        draw_set(root, per_class=20 * times, held_out=2, seed=0)
        return
    with tarfile.open(sample) as tar:
        tar.extractall(root.parent / "sample", filter="data")
    paths = sorted(path for path in (root.parent / "sample").rglob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
    for path in paths:
        for part, count in (("train", times), ("val", 1)):
            folder = root / part / path.stem
            folder.mkdir(parents=True)
            for number in range(count):
                os.link(path, folder / f"{number}.jpg")


def make_packed(folders: Path, out: Path, options: PackOptions, times: int) -> None:
    """Packs every image once and lists it `times` times: the same work for the loader, without the copies on disk."""
    options = replace(options, max_per_class=1)
    pack(PackRequest(folders, out, options=options))
    table = open_table(out / "samples")
    assert table is not None
    columns = {name: np.array(column) for name, column in table.columns.items()}
    training = np.flatnonzero(columns["part"] == 0)
    rows = np.concatenate([np.tile(training, times), np.flatnonzero(columns["part"] == 1)])
    listed = {name: column[rows] for name, column in columns.items()} | {"id": np.arange(len(rows))}
    with new_table(out / "samples", len(rows), LABELS, table.shards, f"{table.fingerprint} x {times}") as writer:
        writer.append(listed)
    manifest = checksums.read_manifest(out / MANIFEST)
    checksums.write_manifest(out / MANIFEST, manifest | {"files": checksums.checksums(out, list(manifest["files"]), 2)})


def run_of(path: Path, device: str, *words: str) -> Run:
    always = [
        "--data.path",
        str(path),
        "--data.check_labels",
        "false",
        "--run.device",
        device,
        "--train.log_every",
        "10",
    ]
    always += ["--train.norms_every", "null", "--train.baseline_after", "null"]
    return build_run(RECIPE, resolve_target("imagenet:baseline", [*always, *words]).config, Ranks())


def ours(path: Path, num_images: int, *words: str) -> float:
    """Images/s of the loader alone: read, decode, crop, collate."""
    run = run_of(path, "cpu", "--loader.batch_size", "64", *words)
    steps = run.training.steps(Position(0), 10**6)
    next(steps)
    seen, begin = 0, time.perf_counter()
    for step in steps:
        seen += step.num_samples
        if seen >= num_images:
            break
    steps.close()  # type: ignore[attr-defined]
    return seen / (time.perf_counter() - begin)


def theirs(folders: Path, num_images: int, workers: int) -> float:
    """The way of the manuals: PIL, random-resized crop, flip, tensor, normalise, in worker processes."""
    from torchvision import transforms

    steps = [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    transform = transforms.Compose([*steps, transforms.Normalize(MEAN, STD)])
    images = torchvision.datasets.ImageFolder(folders / "train", transform)
    loader = torch.utils.data.DataLoader(images, 64, shuffle=True, num_workers=workers)
    seen, begin = 0, 0.0
    for batch, _ in loader:
        if not begin:  # from the first batch on: starting the workers is not counted
            begin = time.perf_counter()
            continue
        seen += len(batch)
        if seen >= num_images:
            break
    return seen / (time.perf_counter() - begin)


def loading(folders: Path, packed: dict[str, Path], num_images: int, repeats: int) -> None:
    cores = len(os.sched_getaffinity(0))
    ways: dict[str, Any] = {"torchvision ImageFolder + DataLoader": lambda: theirs(folders, num_images, cores)}
    ways["stoker, class folders"] = lambda: ours(folders, num_images)
    for name, path in packed.items():
        ways[f"stoker, packed {name}"] = lambda path=path: ours(path, num_images)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    base = statistics.median(found["torchvision ImageFolder + DataLoader"])
    for name, values in found.items():
        emit(
            line(f"images, {name}", values, "images/s", ratio_to_torchvision=round(statistics.median(values) / base, 3))
        )


def fewer_rows(folders: Path, repeats: int) -> None:
    """Crops of JPEG files, with the rows below them left out and not: turn by turn, one thread."""
    contents = [path.read_bytes() for path in sorted((folders / "val").rglob("*.jpg"))]
    numbers = uniforms(0, 0, np.arange(len(contents)), crops.NUMBERS)
    boxes = []
    for content, own in zip(contents, numbers, strict=True):
        height, width = decode.size_of(content)
        boxes.append((crops.random_resized_crop(height, width, own, (0.08, 1.0), (3 / 4, 4 / 3)), height, width))

    def seconds() -> float:
        begin = time.perf_counter()
        for content, (box, height, width) in zip(contents, boxes, strict=True):
            decode.decode_crop(content, box, height, width, 224)
        return time.perf_counter() - begin

    ratios, upper_rows = [], decode._upper_rows
    for _ in range(5 * repeats):
        fewer = seconds()
        decode._upper_rows = lambda *_: None  # type: ignore[assignment]
        ratios.append(seconds() / fewer)
        decode._upper_rows = upper_rows
    emit(line("images, decoding to the last row / to the last row of the crop", ratios, "ratio", images=len(contents)))


def interpreter(path: Path, repeats: int) -> None:
    """How much slower does the thread that feeds the GPU run its Python while images are decoded beside it?"""

    def work(count: int = 600) -> float:
        begin, one = time.perf_counter(), torch.ones(4)
        for _ in range(count):
            one = one + 1
            one.view(2, 2)
        return time.perf_counter() - begin

    alone = min(work() for _ in range(20))
    cores = len(os.sched_getaffinity(0))
    for processes in (0, cores):
        slower, seen = [], 0
        run = run_of(path, "cpu", "--loader.batch_size", "64", "--data.size", "48", "--data.processes", str(processes))
        steps = run.training.steps(Position(0), 10**6)
        next(steps)
        begin = time.perf_counter()
        for _ in range(10 * repeats):
            slower.append(work() / alone)
            seen += next(steps).num_samples
        rate = seen / (time.perf_counter() - begin)
        steps.close()  # type: ignore[attr-defined]
        details = {"processes": processes, "threads": cores, "images_per_s": round(rate)}
        emit(line("images, Python of the main thread beside decoding", slower, "times as slow", **details))


def training(packed: dict[str, Path], steps: int) -> None:
    """Whole steps of ResNet-50 at 224 pixels in bf16: resident batches, then fed from each set with the same model."""
    console.be_quiet()
    cores = len(os.sched_getaffinity(0))
    ways = [(name, cores, "false") for name in packed]
    ways += [("original", FEW, "false"), ("original", FEW, "true"), ("original", cores, "true")]
    ways += [(name, FEW, "false") for name in packed if name != "original"]
    # All at once, before memory fills: pages that a forked process shares are copied when somebody writes to them.
    made = []
    for name, processes, on_gpu in ways:
        words = ("--data.processes", str(processes), "--data.decode_on_gpu", on_gpu)
        made.append(run_of(packed[name], "cuda", "--train.epochs", "1000", *words))
    run = made[0]
    kept = []
    for step in feed(run.training.steps(Position(0), 10**6), run.device):
        kept.append(step)
        if len(kept) == 20:
            break
    ready, _ = rates(run, Kept(run.training.plan, kept), steps)
    emit(line("images, training on resident batches", ready, "images/s", batch_size=256))
    kept.clear()
    decoded = count_gpu_images()
    for (name, processes, on_gpu), own in zip(ways, made, strict=True):
        fed = replace(own, task=run.task)
        psutil.cpu_percent()
        before = len(decoded)
        values, wait = rates(fed, fed.training, steps)
        whole = statistics.harmonic_mean(values)  # all images over all the time: intervals have as many steps each
        details = {
            "of_resident": round(whole / statistics.harmonic_mean(ready), 4),
            "whole": round(whole, 1),
            "cpu_percent": psutil.cpu_percent(),
            "wait_share": round(wait, 4),
            "processes": processes,
            "decode_on_gpu": on_gpu == "true",
            "decoded_there": sum(decoded[before:]),
            "loader": fed.training.times.read(),
        }
        emit(line(f"images, training from packed {name}", values, "images/s", **details))


def count_gpu_images() -> list[int]:
    """Images of each part that is decoded on the GPU from now on."""
    found, decode = [], GpuDecoder.decode

    def counting(self: GpuDecoder, contents: list[bytes]) -> Any:
        images = decode(self, contents)
        found.append(len(images or ()))
        return images

    GpuDecoder.decode = counting  # type: ignore[method-assign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=Path, help="a tar of JPEG files; default: drawn images")
    parser.add_argument("--times", type=int, default=200, help="how often each image of the sample is used")
    parser.add_argument("--images", type=int, default=2000, help="images of a measurement of loading")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each way, on a GPU")
    options = parser.parse_args()
    console.be_quiet()
    with tempfile.TemporaryDirectory() as scratch:
        folders = Path(scratch) / "folders"
        make_folders(options.sample, folders, options.times)
        packed = {name: Path(scratch) / name.replace(" ", "-") for name in PACKED}
        for name, how in PACKED.items():
            make_packed(folders, packed[name], how, options.times)
        if torch.cuda.is_available():
            # In a process of its own: what loading alone leaves in memory would be copied at every fork.
            apart = multiprocessing.get_context("spawn").Process(target=training, args=(packed, options.steps))
            apart.start()
            apart.join()
            if apart.exitcode:
                raise SystemExit("training failed")
        loading(folders, packed, options.images, options.repeats)
        fewer_rows(folders, options.repeats)
        draw_set(Path(scratch) / "small", per_class=100, held_out=2, seed=0)
        interpreter(Path(scratch) / "small", options.repeats)


if __name__ == "__main__":
    os.environ.setdefault("STOKER_CACHE", tempfile.mkdtemp())
    main()
