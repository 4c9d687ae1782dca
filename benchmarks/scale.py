"""Does a table of 132 million samples cost more than one of a million? Opening, first plan, resume, memory."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from measure import emit, line

from stoker.data.order import ExactOrder
from stoker.data.plan import Plan, Position
from stoker.data.samples import new_table, open_table, split_by_shard

FIGURES = ("open", "first plan", "resume", "resident memory", "of that mapped memory")
FILE = 200_000  # events of a file, as in the competition


def build(folder: Path, num_samples: int) -> None:
    """A table like the real one: 200,000 events a file, sizes with a long tail; no pulses are needed."""
    shards = [f"train/batch_{number + 1}.parquet" for number in range(-(-num_samples // FILE))]
    labels = {"azimuth": np.float32, "zenith": np.float32}
    rng = np.random.default_rng(0)
    with new_table(folder, num_samples, labels, shards, "benchmark") as writer:
        for shard, start in enumerate(range(0, num_samples, FILE)):
            size = min(FILE, num_samples - start)
            count = np.minimum(40 + 40 * rng.pareto(1.5, size), 150_000).astype(np.int32)
            first = np.cumsum(count, dtype=np.int64) - count
            angles = rng.random((2, size), np.float32)
            rows = {"shard": np.full(size, shard, np.int32), "first": first, "count": count}
            writer.append({**rows, "id": np.arange(start, start + size), "azimuth": angles[0], "zenith": angles[1]})


def measure(folder: Path) -> None:
    """In a process of its own, so that its memory is its own."""
    process = psutil.Process()
    before, begin = process.memory_info(), time.perf_counter()
    table = open_table(folder)
    assert table is not None
    split = split_by_shard(table, 0.05, folder.parent / "splits")
    opened = time.perf_counter()
    size = len(split.training)
    plan = Plan(table, split.training, lambda seed, epoch: ExactOrder(size, seed, epoch), 1024)
    step = next(plan.steps(Position(0)))
    plan.deal(step, 8)
    planned = time.perf_counter()
    position = Position(0, 3, int(np.random.default_rng(1).integers(size)))
    plan.deal(next(plan.steps(position)), 8)
    resumed = time.perf_counter()
    # Pages of the mapped table count as resident too, 64 kB around each place that was looked at, but the system takes
    # them back whenever it needs memory; what the process holds for itself is the rest.
    after = process.memory_info()
    mapped = after.shared - before.shared
    print(opened - begin, planned - opened, resumed - planned, (after.rss - before.rss) / 1e6, mapped / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_000_000, 10_000_000, 131_953_924])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure)
        return
    for num_samples in options.samples:
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "table"
            begin = time.perf_counter()
            build(table, num_samples)
            built_s = time.perf_counter() - begin
            command = [sys.executable, __file__, "--measure", str(table)]
            runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
        figures = np.array([[float(word) for word in run.split()] for run in runs])
        for name, values in zip(FIGURES, figures.T, strict=True):
            unit = "MB" if "memory" in name else "s"
            emit(line(f"scale, {name}", values.tolist(), unit, samples=num_samples, build_s=round(built_s, 1)))


if __name__ == "__main__":
    main()
