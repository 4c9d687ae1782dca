"""How long from the command to the first finished step, cold and warm, and where do the seconds go?

A process of its own each time: cold with empty compiler caches, then warm with what that one left. Data lie ready (the first
process of all makes them, and is not counted).

    python benchmarks/start.py [--targets icecube:seed ...] [--repeats 2] [-- --data.path DIR --train.compile true]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from measure import emit, line

TARGETS = ("icecube:seed", "icecube:flat-5m", "imagenet:baseline")
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# Of the compiler's own clock, whose parts overlap: what its seconds are spent on.
PARTS = {
    "tracing": "bytecode_tracing",
    "autograd": "aot_joint_graph_passes",
    "generating": "GraphLowering.compile_to_fn",
    "waiting for kernels": "async_compile.wait",
    "autotuning": "CachingAutotuner.benchmark_all_configs",
}


def inside(target: str, words: list[str], folder: Path) -> dict[str, float]:
    """In the measured process: seconds since the command was given, as each part was done."""
    begin = float(os.environ["STOKER_BEGAN"])
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.time() - begin - sum(marks.values())

    import torch

    from stoker.launch.build import build_run
    from stoker.launch.targets import resolve_target
    from stoker.runs.events import EventLog
    from stoker.train.engine import Engine
    from stoker.train.loop import train
    from stoker.train.parallel import Ranks
    from stoker.train.precision import same_sums

    mark("imports")
    found = resolve_target(target, [*words, "--train.steps", "1", "--train.log_every", "1"])
    run = build_run(found.recipe, found.config, Ranks())
    mark("opening data and building the model")
    sums = ExitStack()
    sums.enter_context(same_sums(run.device, exact=run.config.deterministic))
    engine = Engine(run, folder, EventLog(folder / "events.jsonl"))
    engine.rehearse()
    engine.evaluate = dict  # type: ignore[method-assign]  # one step, and not the judgement after it
    engine.save = lambda evaluation_due=False: None  # type: ignore[method-assign]
    mark("engine and rehearsal")
    train(engine)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    mark("first step")
    sums.close()
    times = torch._dynamo.utils.compilation_time_metrics
    return marks | {f"of it, {name}": sum(times.get(key, ())) for name, key in PARTS.items() if key in times}


def measured(target: str, words: list[str], caches: Path) -> dict[str, float]:
    places = {name: str(caches / folder) for name, folder in CACHES.items()}
    command = [sys.executable, __file__, "--inside", target, "--", *words]
    environment = {**os.environ, **places, "STOKER_BEGAN": str(time.time())}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(target: str, words: list[str], repeats: int) -> None:
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as first:
        measured(target, words, Path(first))  # makes the data, and the file cache of the machine
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as caches:
            for name in found:
                found[name].append(measured(target, words, Path(caches)))
    for name, runs in found.items():
        whole = [sum(seconds for part, seconds in one.items() if not part.startswith("of it")) for one in runs]
        parts = {part: round(sum(one.get(part, 0.0) for one in runs) / len(runs), 3) for part in runs[0]}
        emit(line(f"start.{name}", whole, "s", target=target, parts=parts, words=words))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--inside")
    parser.add_argument("words", nargs="*", default=[])
    words: Any = parser.parse_args()
    if words.inside:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(inside(words.inside, words.words, Path(folder))))
        return
    for target in words.targets:
        measure(target, words.words, words.repeats)


if __name__ == "__main__":
    main()
