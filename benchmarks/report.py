"""How long does the page of a long run take, and how much memory and disk?

`stoker report RUN` as a user types it, in a process of its own, for a run of a million event lines: half of them steps, half
what the loader wrote, with norms of 100 parameters now and then.

    python benchmarks/report.py [--lines 1000000] [--repeats 3]
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure import emit, line

STEP = {"epoch": 0, "consumed": 9, "samples_crc32": 9, "lr": 1e-3, "grad_norm": 1.5, "bad": 0, "samples_per_s": 1e5,
        "wait_share": 0.01, "host_bytes": 10**9, "cpu_share": 0.4, "copy_s": 0.001, "rank_ms": [7.0]}  # fmt: skip
STAGE = {"busy_s": 0.01, "p50_ms": 1.0, "p99_ms": 2.0, "bytes": 1e6, "count": 4.0}
LOADER = {"seconds": 0.07, "wait_s": 0.001, "wait_p50_ms": 0.1, "wait_p99_ms": 0.9, "ready": 3.5,
          "stages": {"read": STAGE, "thin": STAGE, "collate": STAGE}}  # fmt: skip


def write_run(folder: Path, count: int) -> None:
    (folder / "config.yaml").write_text("recipe: icecube:demo\n")
    dice = random.Random(0)
    with (folder / "events.jsonl").open("w") as file:

        def write(kind: str, **fields: object) -> None:
            file.write(json.dumps({"event": kind, "version": 2, "time": 1.7e9, **fields}) + "\n")

        write(
            "start",
            data={"path": "x"},
            parameters=1,
            steps=count // 2,
            device="cpu",
            precision="fp32",
            know_nothing=2.0,
        )
        for step in range(1, count // 2):
            took = [round(dice.uniform(5, 9), 3) for _ in range(10)]
            write("step", step=step, loss=dice.gauss(1, 0.1), step_ms=took, **STEP)
            write("loader", step=step, **LOADER)
            if step % 1000 == 0:
                norms = {f"layers.{number}.weight": dice.random() for number in range(100)}
                write("norms", step=step, gradient=norms, update_ratio=norms)
                write(
                    "evaluation", step=step, metric="error", goal="min", score=1.0, metrics={"error": 1.0}, seconds=1.0
                )
        write("end", state="finished")


def build(folder: Path) -> tuple[float, float]:
    """Seconds, and megabytes of memory at most."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "stoker", "report", str(folder)], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0
    return time.perf_counter() - begin, used.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_run(folder, words.lines)
        found = [build(folder) for _ in range(words.repeats)]
        size = (folder / "report.html").stat().st_size
        read = (folder / "events.jsonl").stat().st_size
    about = {"lines": words.lines, "events_bytes": read, "page_bytes": size}
    emit(line("report.seconds", [one for one, _ in found], "s", **about))
    emit(line("report.memory", [one for _, one in found], "MB", **about))


if __name__ == "__main__":
    main()
