"""How fast does IceCube train, from shuffled packed shards to updated weights, and how far from its own ceiling?

For each preset: the whole engine fed by the loader, the same engine on the same batches lying ready on the device, memory,
and the share of the machine's measured matrix rate. Beside them the seed's way, re-created (seed_way.py).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import Ready
from measure import emit, line
from seed_way import events_per_s
from torch import nn

from stoker import console
from stoker.data.device import feed
from stoker.data.plan import Position, Step
from stoker.data.stages import StageTimes
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.recipes.icecube import events
from stoker.recipes.icecube.batch import unit_vectors
from stoker.recipes.icecube.recipe import RECIPE
from stoker.recipes.icecube.simulate import simulate
from stoker.recipes.icecube.table import open_events
from stoker.runs.events import EventLog
from stoker.train.engine import Engine
from stoker.train.loop import train
from stoker.train.parallel import Ranks
from stoker.train.precision import same_sums, vouch_for_products
from stoker.train.run import Run

WARM_UP = 20  # steps: compilation, caches


class Kept:
    """Stands in for the loader: steps that lie ready on the device."""

    def __init__(self, plan: Any, steps: list[Any]) -> None:
        self.plan, self.times, self._steps = plan, StageTimes([]), steps

    def read_times(self) -> dict[str, Any]:
        return self.times.read()

    def steps(self, position: Position, num_epochs: int | None = None) -> Iterator[Step]:
        while True:
            for step in self._steps:
                yield Step(step.rows, position, position, batches=tuple(map(Ready, step.batches)))


def rates(run: Run, loader: Any, steps: int) -> tuple[list[float], float]:
    """Samples/s of each interval of ten steps after the warm-up, and the share of time spent waiting for data."""
    with tempfile.TemporaryDirectory() as folder, same_sums(run.device, exact=run.config.deterministic):
        engine = Engine(replace(run, training=loader), Path(folder), EventLog(Path(folder) / "events.jsonl"))
        engine.evaluate = lambda: {}  # type: ignore[method-assign]
        engine.save = lambda **_: None  # type: ignore[method-assign]
        engine.limit = engine.total = WARM_UP + steps
        readings = []
        log_interval = engine.log_interval

        def keep(lr: float) -> None:
            reading = engine.meter.read()
            readings.append((engine.step, reading.samples_per_s, reading.wait_share))
            log_interval(lr)

        engine.log_interval = keep  # type: ignore[method-assign]
        train(engine)
    late = [reading for reading in readings if reading[0] > WARM_UP]
    return [rate for _, rate, _ in late], statistics.mean(share for _, _, share in late)


def measure_preset(preset: str, root: Path, peak: float, steps: int, overrides: list[str]) -> float:
    words = ["--data.path", str(root), "--data.mode", "packed", "--train.epochs", "1000000", "--train.log_every", "10"]
    words += ["--train.norms_every", "null", "--train.baseline_after", "null", *overrides]
    config = resolve_target(f"icecube:{preset}", words).config
    run = build_run(RECIPE, config, Ranks())
    on_gpu = run.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    fed, wait = rates(run, run.training, steps)
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    kept = []
    for number, step in enumerate(feed(run.training.steps(Position(0), 10**6), run.device)):
        if number >= WARM_UP:
            kept.append(step)
        if len(kept) == steps:
            break
    ready, _ = rates(run, Kept(run.training.plan, [*kept[-WARM_UP % steps :], *kept]), steps)
    pulses = statistics.mean(sum(len(batch.time) for batch in step.batches) for step in kept)
    seconds = config.loader.batch_size / statistics.median(ready)
    flops = linear_flops(run, kept[0]) / seconds / 1e12
    details = {
        "preset": preset,
        "parameters": sum(p.numel() for p in run.task.model.parameters()),
        "batch_size": config.loader.batch_size,
        "pulses_a_step": round(pulses),
        "peak_memory_gib": round(memory, 2),
        "wait_share": round(wait, 4),
        "linear_tflops": round(flops, 1),
        "share_of_matrix_peak": round(flops / peak, 4),
    }
    emit(line("end to end, shuffled packed shards", fed, "events/s", **details))
    emit(line("end to end, resident batches", ready, "events/s", **details))
    ratio = statistics.median(fed) / statistics.median(ready)
    emit(line("end to end / resident", [ratio], "ratio", bar=0.95, preset=preset))
    return statistics.median(fed)


def linear_flops(run: Run, step: Any) -> float:
    """Of the matrix products of the transformer's layers in one training step: forward, and twice that backward.

    A layer is one operator on a GPU: its linear layers are never called, so it is counted as a whole.
    """
    total = 0.0

    def count(layer: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
        nonlocal total
        weights = sum(one.weight.numel() for one in layer.modules() if isinstance(one, nn.Linear))
        total += 6 * len(inputs[0]) * weights

    model = run.task.model
    hooks = [layer.register_forward_hook(count) for layer in model.modules() if hasattr(layer, "widen")]
    model._compiled_call_impl = None  # hooks are not called in compiled models
    with torch.no_grad(), torch.autocast(run.device.type, torch.bfloat16):
        for batch in step.batches:
            model(batch)
    for hook in hooks:
        hook.remove()
    return total


def matrix_tflops(device: torch.device) -> float:
    """What one matrix product reaches here: the roof that shares are measured against."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        float((a @ b)[0, 0])
        times.append(time.perf_counter() - begin)
    return 2 * size**3 / statistics.median(times[5:]) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="*", default=["seed", "flat-5m", "deep"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--events", type=int, help="default: 1,000,000 on a GPU, 4,000 on a CPU")
    parser.add_argument("--steps", type=int, help="default: 100 on a GPU, 10 on a CPU")
    parser.add_argument("--seed-steps", type=int, default=3, help="steps of the seed's way; 0: leave it out")
    options, overrides = parser.parse_known_args()
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    num_events, steps = options.events or (1_000_000 if on_gpu else 4000), options.steps or (100 if on_gpu else 10)
    if not on_gpu:  # enough to see that everything runs
        overrides = ["--loader.batch_size", "32", "--train.compile", "false", *overrides]
    console.be_quiet()
    vouch_for_products(device)
    root = Path(os.environ["STOKER_CACHE"]) / f"end-to-end-{num_events}"
    if not root.exists():
        simulate(root, num_events=num_events, num_files=20, seed=0, device=options.device)
    peak = matrix_tflops(device)
    emit(line("bf16 matrix product", [peak], "TFLOP/s"))
    best = {preset: measure_preset(preset, root, peak, steps, overrides) for preset in options.presets}
    if options.seed_steps:
        table, geometry = open_events(root), events.open_geometry(root)
        source, chosen = events.open_pulses(root, table), np.arange(256 if on_gpu else 16)
        labels = [np.asarray(table.columns[name][chosen]) for name in ("azimuth", "zenith")]
        direction, xyz = torch.from_numpy(unit_vectors(*labels)), torch.from_numpy(geometry.xyz)
        rate = events_per_s(source, direction, xyz, chosen, options.seed_steps, device)
        emit(line("the seed's way", [rate], "events/s", steps=options.seed_steps))
        if "seed" in best:
            emit(line("seed preset / the seed's way", [best["seed"] / rate], "ratio"))


if __name__ == "__main__":
    os.environ.setdefault("STOKER_CACHE", tempfile.mkdtemp())
    main()
