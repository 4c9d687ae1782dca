"""How fast are shuffled batches made, against the seed's way, torch's DataLoader, and what the storage allows?

One run, one table: (a) one event at a time with a whole-file cache of one; (b) torch DataLoader with worker processes over
the same, all files cached; (c) direct Parquet, window shuffle; (d) packed, exact shuffle; (e) ceilings: pyarrow reading the
same columns and doing nothing, and a sequential scan of the packed store through the same gather and collate.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from measure import emit, line

from stoker import console
from stoker.data.loader import Loader, LoaderConfig
from stoker.data.order import StorageOrder
from stoker.data.plan import Plan, Position
from stoker.data.quality import shuffle_quality
from stoker.data.source import RunData
from stoker.recipe import RunConfig
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.events import PULSE_COLUMNS
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.simulate import simulate

BATCH = 1024  # events


class SeedDataset(torch.utils.data.Dataset[Any]):
    """The seed project's data set in its plainest form: an event at a time, some whole files kept."""

    def __init__(self, root: Path, num_files_kept: int) -> None:
        self._root, self._kept = root, num_files_kept
        meta = pq.read_table(root / "train_meta.parquet")
        names = ("batch_id", "first_pulse_index", "last_pulse_index", "azimuth", "zenith")
        self._meta = {name: meta.column(name).to_numpy() for name in names}
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._meta["batch_id"])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = int(self._meta["batch_id"][index])
        if batch not in self._files:
            while len(self._files) >= self._kept:
                self._files.pop(next(iter(self._files)))
            self._files[batch] = pq.read_table(
                self._root / "train" / f"batch_{batch}.parquet", columns=list(PULSE_COLUMNS)
            )
        first, last = int(self._meta["first_pulse_index"][index]), int(self._meta["last_pulse_index"][index])
        event = self._files[batch].slice(first, last - first + 1)
        values = np.stack([event.column(name).to_numpy().astype(np.float32) for name in PULSE_COLUMNS], axis=1)
        target = torch.tensor([self._meta["azimuth"][index], self._meta["zenith"][index]])
        return torch.from_numpy(values), target


def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = torch.tensor([len(values) for values, _ in samples])
    return torch.cat([values for values, _ in samples]), lengths, torch.stack([target for _, target in samples])


def seed_rate(root: Path, num_events: int) -> float:
    data = SeedDataset(root, num_files_kept=1)
    order = np.random.default_rng(0).permutation(len(data))[:num_events]
    begin = time.perf_counter()
    collate([data[int(index)] for index in order])
    return num_events / (time.perf_counter() - begin)


def torch_rate(root: Path, num_events: int, num_workers: int, batch_size: int) -> float:
    data = SeedDataset(root, num_files_kept=10_000)
    for index in np.unique(data._meta["batch_id"], return_index=True)[1]:
        data[int(index)]  # every file is in memory before the workers start
    chosen = torch.utils.data.Subset(data, np.random.default_rng(0).permutation(len(data))[:num_events].tolist())
    loader = torch.utils.data.DataLoader(chosen, batch_size, shuffle=True, num_workers=num_workers, collate_fn=collate)
    batches = iter(loader)
    next(batches)  # starting the workers is not counted
    seen, begin = 0, time.perf_counter()
    for _, lengths, _ in batches:
        seen += len(lengths)
    return seen / (time.perf_counter() - begin)


def pyarrow_rate(root: Path, num_events: int, num_threads: int) -> float:
    """Row groups decoded and dropped."""
    jobs: SimpleQueue[tuple[Path, int]] = SimpleQueue()
    for path in sorted((root / "train").glob("*.parquet")):
        for group in range(pq.ParquetFile(path).num_row_groups):
            jobs.put((path, group))

    def work() -> None:
        while True:
            try:
                path, group = jobs.get_nowait()
            except Empty:
                return
            pq.ParquetFile(path, memory_map=True).read_row_group(group, columns=list(PULSE_COLUMNS), use_threads=False)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return num_events / (time.perf_counter() - begin)


@dataclass(frozen=True)
class Ours:
    data: RunData
    config: LoaderConfig
    sequential: bool = False

    def steps(self) -> Iterator[Any]:
        order = (lambda seed, epoch: StorageOrder()) if self.sequential else self.data.order
        plan = Plan(self.data.table, self.data.training, order, self.config.batch_size)
        loader = Loader(
            plan,
            self.data.stages,
            self.config,
            bytes_per_cost=self.data.bytes_per_cost,
            cache_bytes=self.data.cache_bytes,
        )
        return loader.steps(Position(0), num_epochs=1)

    def rate(self) -> float:
        seen, begin = 0, time.perf_counter()
        for step in self.steps():
            seen += step.num_samples
        return seen / (time.perf_counter() - begin)


def ours(root: Path, mode: Any, num_threads: int, *, sequential: bool = False, batch_size: int = BATCH) -> Ours:
    config = LoaderConfig(batch_size=batch_size, threads=num_threads)
    run = RunConfig(recipe="icecube", data=IceCubeData(path=root, mode=mode), model=TwoStageConfig(), loader=config)
    return Ours(open_data(run, torch.device("cpu")), config, sequential)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="a directory in the Kaggle layout; default: simulate one")
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument(
        "--direct", action="store_true", help="only (c) and its ceiling: epochs that follow one another"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = options.data or Path(folder) / "set"
        if not options.data:
            simulate(root, num_events=options.events, num_files=10, seed=0)
        num_events = pq.read_metadata(root / "train_meta.parquet").num_rows
        (measure_direct if options.direct else measure)(root, num_events, options.repeats, options.batch_size)


def measure_direct(root: Path, num_events: int, repeats: int, batch_size: int) -> None:
    """Ratios of neighbours, in a process that does nothing else and keeps the memory that it has freed."""
    rates, ratios = [], []
    for repeat in range(repeats + 2):
        rate, ceiling = ours(root, "direct", 2, batch_size=batch_size).rate(), pyarrow_rate(root, num_events, 2)
        if repeat > 1:  # the first two take memory from the system
            rates.append(rate)
            ratios.append(rate / ceiling)
    details = {"events": num_events, "batch_size": batch_size}
    emit(line("loader, direct Parquet, window shuffle, 2 threads, epoch after epoch", rates, "events/s", **details))
    emit(line("loader, direct Parquet / pyarrow alone, epoch after epoch", ratios, "ratio", bar=0.6, **details))


def measure(root: Path, num_events: int, repeats: int, batch_size: int) -> None:
    opened = partial(ours, root, batch_size=batch_size)
    packed, direct = opened("packed", 2), opened("direct", 2)
    methods: dict[str, Callable[[], float]] = {
        "a: one event at a time, cache of one file": lambda: seed_rate(root, 64),
        "b: torch DataLoader, 2 workers, files cached": lambda: torch_rate(root, 20_000, 2, batch_size),
        "c: direct Parquet, window shuffle, 2 threads": lambda: opened("direct", 2).rate(),
        "d: packed, exact shuffle, 1 thread": opened("packed", 1).rate,
        "d: packed, exact shuffle, 2 threads": packed.rate,
        "e: pyarrow alone, 2 threads": lambda: pyarrow_rate(root, num_events, 2),
        "e: packed, sequential, 2 threads": opened("packed", 2, sequential=True).rate,
    }
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name, method in methods.items():
            if name[0] in "ab" and repeat > 1:
                continue
            rate = method()
            if repeat:  # the first round warms caches
                rates[name].append(rate)
    for name, values in rates.items():
        emit(line(f"loader, {name}", values, "events/s", events=num_events, batch_size=batch_size))
    table(rates)
    for name, one in (("exact", packed), ("window", direct)):
        rows = one.data.training.rows
        first, second = (rows(one.data.order(0, epoch).take(0, len(one.data.training))) for epoch in (0, 1))
        quality = shuffle_quality(first, one.data.table.columns["shard"], batch_size, second)
        emit(
            {
                "name": f"shuffle quality, {name} order",
                **asdict(quality),
                "events": num_events,
                "batch_size": batch_size,
            }
        )
        console.say(f"shuffle quality, {name} order: {quality.line()}")


def table(rates: dict[str, list[float]]) -> None:
    a, b, c, d1, d2, e_arrow, e_packed = (float(np.median(values)) for values in rates.values())
    rows = [("bar", "needed", "measured")]
    for name, needed, value in (
        ("d / a", 1000, d2 / a),
        ("d / b", 5, d2 / b),
        ("d / its ceiling", 0.5, d2 / e_packed),
        ("c / its ceiling", 0.6, c / e_arrow),
        ("d on 2 threads / d on 1", 1.6, d2 / d1),
    ):
        rows.append((name, f"{needed:g}", f"{value:,.2f}"))
    console.say(console.table([("method", "events/s"), *((name, f"{np.median(v):,.0f}") for name, v in rates.items())]))
    console.say(console.table(rows))


if __name__ == "__main__":
    main()
