"""What TraceML (traceml-ai, installed by hand: it is no dependency) says of the planted loops, beside what the doctor says.

    python benchmarks/rivals.py --traceml PATH_OF_ITS_COMMAND [--only NAME ...]

Every loop runs under `traceml run` for some seconds, instrumented as its manual asks of a plain loop. One JSON line a case.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import emit, line
from torch.utils.data import IterableDataset

PLANTED = Path(__file__).parents[1] / "tests" / "faults"
SECONDS, LEAST, MOST = 5.0, 30, 2000
# Which of its verdicts name the right leg for which of our rules. It has no others.
LEGS = {
    "INPUT-BOUND": {
        "workers-zero", "workers-few", "workers-many", "fetch-latency", "fetch-bandwidth", "cold-storage", "shuffle",
        "collate", "preparation", "loader", "epoch-gap", "prefetch-memory",
    },
    "RESIDUAL-HEAVY": {"logging", "checkpoint"},
    "COMPUTE-BOUND": {"host", "optimizer", "recompile", "padding", "precision", "batch", "attention", None},
    "BALANCED": {None},
    "NO CLEAR PERFORMANCE BOTTLENECK": {None},
}  # fmt: skip


class Stream(IterableDataset[Any]):
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loop(name: str) -> None:
    """One case, in the process that TraceML watches."""
    sys.path.insert(0, str(PLANTED))
    import torch
    import traceml_ai as traceml
    from planted.table import CASES

    torch.set_num_threads(1)
    case = next(case for case in CASES if case.name == name)
    traceml.init(mode="auto")
    probe = case.make(True)
    loader = probe.loader
    if not isinstance(loader, torch.utils.data.DataLoader):  # without one it measures nothing
        batches = Stream(loader) if not isinstance(loader, list) else loader
        loader = torch.utils.data.DataLoader(batches, batch_size=None)
    begin, done = time.perf_counter(), 0
    while done < MOST and (done < LEAST or time.perf_counter() - begin < SECONDS):
        for batch in loader:
            with traceml.trace_step(probe.model):
                probe.step(batch)
            done += 1
            if done >= LEAST and time.perf_counter() - begin > SECONDS:
                break


def verdict_of(command: str, name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as logs:
        words = [command, "run", __file__, "--logs-dir", logs, "--run-name", "one", "--args", "--case", name]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=logs, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        summary = Path(logs) / "one" / "final_summary.txt"
        if not summary.exists():
            return {"verdict": None, "trouble": (done.stderr or done.stdout).strip()[-300:]}
        found = {}
        for line in summary.read_text().splitlines():
            words_of = line.strip(" |").strip()
            for key in ("Verdict", "Why", "Next"):
                if words_of.startswith(f"{key}:"):
                    found.setdefault(key.lower(), words_of.removeprefix(f"{key}:").strip())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traceml", default="traceml", help="its command")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--case", help="a single case, in this process")
    options = parser.parse_args()
    if options.case:
        loop(options.case)
        return
    sys.path.insert(0, str(PLANTED))
    from planted.table import CASES

    results = []
    for case in CASES:
        if case.gpu or (options.only and case.name not in options.only):
            continue
        found = verdict_of(options.traceml, case.name)
        name = (found.get("verdict") or "").split("(")[0].strip()
        found["right_leg"] = case.rule in LEGS.get(name, set())
        results.append({"case": case.name, "expected": case.rule, **found})
        print(json.dumps(results[-1]), flush=True)
        print(f"{case.name:28} {case.rule or 'healthy':16} {found.get('verdict')}", file=sys.stderr)
    right = sum(one["right_leg"] for one in results)
    unknown = sum("INSUFFICIENT" in (one.get("verdict") or "INSUFFICIENT") for one in results)
    emit(line("TraceML: the right leg", [right], "cases", of=len(results), not_measured=unknown, cases=results))


if __name__ == "__main__":
    main()
