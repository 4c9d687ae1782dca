"""Other people's data through the adapters: a torch Dataset beside DataLoader, ragged Parquet beside the IceCube recipe.

The dataset decodes a small JPEG and turns it into a tensor in Python, as most do. Both sides get the same dataset, batch
size and number of workers; rates and the memory of all processes are medians over rounds that alternate.
"""

import argparse
import io
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from measure import emit, line
from PIL import Image

import stoker
from stoker import console
from stoker.data.loader import LoaderConfig, loader_of
from stoker.data.plan import Position
from stoker.recipe import RunConfig
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.simulate import simulate
from stoker.recipes.icecube.table import open_events

SIZE, BATCH, SIDE = 2000, 64, 96


class Pictures(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        dice = np.random.default_rng(0)
        self._files = []
        for _ in range(50):
            sink = io.BytesIO()
            Image.fromarray(dice.integers(0, 255, (SIDE, SIDE, 3), np.uint8)).save(sink, "JPEG")
            self._files.append(sink.getvalue())

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Any:
        pixels = np.array(Image.open(io.BytesIO(self._files[number % 50])), np.float32)
        return torch.from_numpy(pixels / 255).permute(2, 0, 1), number


def memory() -> int:
    """Of this process and its children, pages that they share counted once."""
    here = psutil.Process()
    return sum(one.memory_full_info().pss for one in (here, *here.children(recursive=True)))


def rate(loader: Any) -> tuple[float, int]:
    """Samples a second from the first batch on, and the most memory beside it."""
    seen, begin, most = 0, 0.0, 0
    for number, (images, _) in enumerate(loader):
        if not begin:
            begin = time.perf_counter()
            continue
        seen += len(images)
        if number % 8 == 0:
            most = max(most, memory())
    return seen / (time.perf_counter() - begin), most


def datasets(rounds: int) -> None:
    pictures = Pictures()
    before = memory()
    for workers in (0, 2):
        ours = stoker.from_dataset(pictures, processes=workers).loader(BATCH, threads=max(1, workers))
        theirs = torch.utils.data.DataLoader(pictures, BATCH, shuffle=True, num_workers=workers)
        found: dict[str, list[tuple[float, int]]] = {"stoker": [], "DataLoader": []}
        for _ in range(rounds):
            found["stoker"].append(rate(ours))
            found["DataLoader"].append(rate(theirs))
        for name, values in found.items():
            mebibytes = round(statistics.median(most for _, most in values) / 2**20 - before / 2**20)
            details = {"workers": workers, "batch_size": BATCH, "memory_mib": mebibytes}
            emit(line(f"own, a torch Dataset through {name}", [speed for speed, _ in values], "samples/s", **details))
        ratios = [a[0] / b[0] for a, b in zip(*found.values(), strict=True)]
        emit(line("own, stoker / DataLoader", ratios, "ratio", bar=1.0, workers=workers))


def ragged(root: Path, rounds: int) -> None:
    """The same events: as the IceCube recipe packs and reads them, and as lists in Parquet through five lines."""
    simulate(root / "set", num_events=20_000, num_files=2, seed=0)
    table = open_events(root / "set")
    (root / "lists").mkdir()
    for shard, name in enumerate(table.shards):
        pulses = pq.read_table(root / "set" / name)
        rows = np.flatnonzero(np.asarray(table.columns["shard"]) == shard)
        ends = np.append(table.columns["first"][rows], len(pulses)).astype(np.int32)
        columns = {
            column: pa.ListArray.from_arrays(ends, pulses.column(column).combine_chunks().cast(kind))
            for column, kind in (("time", pa.int32()), ("charge", pa.float32()), ("sensor_id", pa.int16()))
        }
        labels = {column: np.asarray(table.columns[column])[rows] for column in ("azimuth", "zenith")}
        pq.write_table(pa.table({**columns, **labels}), root / "lists" / f"{shard}.parquet")
    config = LoaderConfig(batch_size=512, threads=2)
    settings = IceCubeData(path=root / "set", mode="packed", validation=0.5)
    run = RunConfig(recipe="icecube", data=settings, model=TwoStageConfig(), loader=config)
    recipe = loader_of(open_data(run, torch.device("cpu")), config, torch.device("cpu"), training=True)
    own = stoker.from_parquet(root / "lists").loader(512, threads=2)

    def timed(batches: Any) -> float:
        seen, begin = 0, time.perf_counter()
        for count in batches:
            seen += count
        return seen / (time.perf_counter() - begin)

    found: dict[str, list[float]] = {"five lines": [], "recipe": []}
    for number in range(rounds + 1):
        ours = timed(len(batch["rows"]) for batch in own)
        theirs = timed(step.num_samples for step in recipe.steps(Position(0, 3 * number), 3 * number + 3))
        if number:  # the first warms caches
            found["five lines"].append(ours)
            found["recipe"].append(theirs)
    for name, values in found.items():
        emit(line(f"own, ragged events, {name}", values, "events/s", batch_size=512, threads=2))
    ratios = [a / b for a, b in zip(*found.values(), strict=True)]
    emit(line("own, five lines / recipe", ratios, "ratio", bar=0.8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console.be_quiet()
    datasets(options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        ragged(Path(folder), options.rounds)


if __name__ == "__main__":
    os.environ.setdefault("STOKER_CACHE", tempfile.mkdtemp())
    main()
