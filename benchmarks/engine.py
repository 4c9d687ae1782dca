"""What does the engine cost over a bare loop, and does it stay quiet: no waiting, no recompilation?

First with a model so small that nothing but the loop costs anything, beside Lightning where it is installed (`--tiny`: this
alone). Then on real batches:

The same ragged model on the same batches, which lie on the device already: (a) a hand-written loop (autocast, fused AdamW,
clipping) and (b) the whole engine (guards, meter, events, schedule, console). Then 1,000 steps of ever new ragged batches
under torch.compile, counting the graphs compiled after warm-up.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from measure import emit, line
from torch import Tensor, nn

from stoker import console
from stoker.data.bad_samples import BadSamples
from stoker.data.plan import MicroBatch, Plan, Position, Step
from stoker.data.stages import StageTimes
from stoker.launch.targets import resolve_target
from stoker.recipes.icecube.attention import Segments, repeat, segment_mean
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.data import open_data
from stoker.recipes.icecube.geometry import standard_geometry
from stoker.recipes.icecube.losses import angle_between
from stoker.runs.events import EventLog
from stoker.train.config import TrainConfig
from stoker.train.engine import Engine
from stoker.train.loop import train
from stoker.train.precision import autocast, resolve_precision
from stoker.train.randomness import seed_all
from stoker.train.run import Run


class PulseNet(nn.Module):
    """A network on pulses, averaged over events: ragged, and free of anything that makes the host wait."""

    sensors: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("sensors", torch.from_numpy(standard_geometry().xyz) / 500, persistent=False)
        layers: list[nn.Module] = [nn.Linear(6, width)]
        for _ in range(4):
            layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, 3)

    def forward(self, batch: EventBatch) -> Tensor:
        place = repeat(self.sensors[batch.sensor], batch.dom_offsets, len(batch.time))
        time_ns, charge = (batch.time - 1e4) / 3e3, batch.charge.clamp_min(1e-3).log10()
        pulses = torch.cat([torch.stack([time_ns, charge, batch.auxiliary], -1), place], -1)
        segments = Segments.of(batch.dom_offsets[batch.event_offsets], len(batch.time))
        return nn.functional.normalize(self.head(segment_mean(self.body(pulses).float(), segments)), dim=-1, eps=1e-6)


class PulseTask:
    metric, goal, know_nothing_loss = "error", "min", np.pi / 2

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = PulseNet(width)

    def predict(self, batch: EventBatch) -> Tensor:
        return self.model(batch)  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: EventBatch) -> Tensor:
        return angle_between(prediction, batch.direction)

    def scores(self, prediction: Tensor, batch: EventBatch) -> dict[str, Tensor]:
        return {"error": self.losses(prediction, batch)}

    def summarise(self, scores: Any) -> dict[str, float]:
        return {"error": float(np.mean(scores["error"]))}


class Ready:
    """A batch that is on the device already."""

    def __init__(self, batch: EventBatch) -> None:
        self._batch = batch

    def to(self, device: torch.device) -> EventBatch:
        return self._batch


class ReadyLoader:
    """Stands in for the loader: gives the same batches over and over."""

    def __init__(self, plan: Plan, batches: list[EventBatch]) -> None:
        self.plan, self.times, self._batches = plan, StageTimes([]), batches

    def read_times(self) -> dict[str, Any]:
        return self.times.read()

    def steps(self, position: Position, num_epochs: int | None = None) -> Iterator[Step]:
        for number in range(10**9):
            batch = self._batches[number % len(self._batches)]
            yield Step(batch.rows_on_host, position, position, batches=(Ready(batch),))  # type: ignore[attr-defined]


class TinyTask:
    """Two small layers: a step is all calls."""

    metric, goal, know_nothing_loss = "error", "min", 1.0

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def predict(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["x"])  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (prediction - batch["y"]).square().mean(1)

    def scores(self, prediction: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"error": self.losses(prediction, batch)}

    def summarise(self, scores: Any) -> dict[str, float]:
        return {"error": float(np.mean(scores["error"]))}


def tiny_batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(32, 8, generator=draw), "y": torch.randn(32, 1, generator=draw), "rows": torch.arange(32)}
        for _ in range(8)
    ]


class TinyLoader:
    """The same batches over and over, of a set without an end."""

    def __init__(self, batches: list[dict[str, Tensor]]) -> None:
        self.plan, self.times, self._batches = _Endless(), StageTimes([]), batches

    def read_times(self) -> dict[str, Any]:
        return self.times.read()

    def steps(self, position: Position, num_epochs: int | None = None) -> Iterator[Step]:
        rows = np.arange(32)
        for number in range(10**9):
            yield Step(rows, position, position, batches=(self._batches[number % len(self._batches)],))


class _Endless:
    batch_size, table = 32, None

    def __len__(self) -> int:
        return 10**12

    def steps_per_epoch(self) -> int:
        return 10**9


def tiny_bare(steps: int) -> float:
    task, batches = TinyTask(), tiny_batches()
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    def work() -> None:
        for number in range(steps):
            batch = batches[number % len(batches)]
            optimizer.zero_grad(set_to_none=True)
            task.losses(task.predict(batch), batch).mean().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
            optimizer.step()

    return timed(work, steps, torch.device("cpu")) * 1e3


def tiny_engine(steps: int) -> float:
    config = TrainConfig(
        steps=10**9, epochs=10**6, baseline_after=None, norms_every=None, log_every=50, precision="fp32"
    )
    loader, data = TinyLoader(tiny_batches()), SimpleNamespace(bad_samples=BadSamples())
    device = torch.device("cpu")
    seed_all(0)  # as every run begins
    with tempfile.TemporaryDirectory() as folder:
        run = Run(TinyTask(), loader, loader, data, device, config, settings={})  # type: ignore[arg-type]
        engine = Engine(run, Path(folder), EventLog(Path(folder) / "events.jsonl"))
        engine.evaluate = lambda: {}  # type: ignore[method-assign]
        engine.save = lambda **_: None  # type: ignore[method-assign]

        def work() -> None:
            engine.step, engine.limit, engine.total = 0, steps, steps
            train(engine)

        return timed(work, steps, device) * 1e3


def tiny_lightning(steps: int) -> float | None:
    """None: it is not installed."""
    try:
        import lightning
    except ImportError:
        return None
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.task = TinyTask()
            self.net = self.task.model

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            return self.task.losses(self.task.predict(batch), batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.net.parameters(), lr=1e-3, weight_decay=0.01, fused=True)

    batches = tiny_batches()

    def fit(steps: int) -> None:
        trainer = lightning.Trainer(
            max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, log_every_n_steps=50,
        )  # fmt: skip
        endless = (batches[number % len(batches)] for number in range(10**9))
        trainer.fit(Module(), endless)

    # What starting costs is not what a step costs: a long fit less a short one.
    long, short = (timed(lambda count=count: fit(count), 1, torch.device("cpu")) for count in (steps, steps // 4))  # type: ignore[misc]
    return 1e3 * (long - short) / (steps - steps // 4)


def measure_tiny(repeats: int, steps: int = 1000) -> None:
    torch.set_num_threads(1)
    found = [(tiny_bare(steps), tiny_engine(steps), tiny_lightning(steps)) for _ in range(repeats)]
    details = {"steps": steps, "device": "cpu"}
    emit(line("tiny model, bare loop", [bare for bare, _, _ in found], "us/step", **details))
    emit(
        line(
            "tiny model, engine over the bare loop",
            [ours - bare for bare, ours, _ in found],
            "us/step",
            bar=120,
            **details,
        )
    )
    theirs = [lightning - bare for bare, _, lightning in found if lightning is not None]
    if theirs:
        emit(line("tiny model, Lightning over the bare loop", theirs, "us/step", **details))


def make_batches(data: Any, size: int, count: int, device: torch.device) -> list[EventBatch]:
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        rows = np.sort(generator.choice(len(data.table), size, replace=False))
        value: Any = MicroBatch(rows, 0, 0)
        for stage in data.stages:
            value = stage.run(value)
        batch = value.to(device)
        object.__setattr__(batch, "rows_on_host", rows)
        batches.append(batch)
    return batches


def bare_loop(config: TrainConfig, width: int, batches: list[EventBatch], steps: int, device: torch.device) -> float:
    task = PulseTask(width)
    precision = resolve_precision(config.precision, device)
    model = task.model.to(device).train()
    if config.compile:
        model.compile(dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.01, fused=True)

    def step(batch: EventBatch) -> None:
        with autocast(precision, device):
            loss = task.losses(task.predict(batch), batch).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return timed(lambda: [step(batches[number % len(batches)]) for number in range(steps)], steps, device)


def timed(work: Any, steps: int, device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()  # warm-up, compilation
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return (time.perf_counter() - begin) / steps * 1e3


def make_engine(config: TrainConfig, width: int, loader: Any, data: Any, folder: Path, device: torch.device) -> Engine:
    run = Run(PulseTask(width), loader, loader, data, device, config, settings={})
    engine = Engine(run, folder, EventLog(folder / "events.jsonl"))
    engine.evaluate = lambda: {}  # type: ignore[method-assign]
    engine.save = lambda **_: None  # type: ignore[method-assign]
    return engine


def engine_loop(config: TrainConfig, width: int, loader: Any, data: Any, steps: int, device: torch.device) -> float:
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(config, width, loader, data, Path(folder), device)

        def work() -> None:
            engine.step, engine.limit, engine.total = 0, steps, steps
            train(engine)

        return timed(work, steps, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="default: 200 on a GPU, 10 on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="only the model that costs nothing")
    options = parser.parse_args()
    console.be_quiet()
    measure_tiny(options.repeats)
    if options.tiny:
        return
    device, on_gpu = torch.device(options.device), options.device == "cuda"
    steps, size, width = options.steps or (200 if on_gpu else 10), 4096 if on_gpu else 128, 256 if on_gpu else 64
    words = ["--data.simulate_events", "40000" if on_gpu else "2000", "--run.device", options.device]
    run = resolve_target("icecube", words).config
    data = open_data(run, device)
    batches = make_batches(data, size, 10, device)
    plan = Plan(data.table, data.training, data.order, size)
    loader = ReadyLoader(plan, batches)
    details = {"batch_size": size, "width": width, "device": options.device}
    for compile_model in (False, True) if on_gpu else (False,):
        config = TrainConfig(steps=10**6, epochs=10**6, compile=compile_model, baseline_after=None, norms_every=None)
        pairs = [
            (
                bare_loop(config, width, batches, steps, device),
                engine_loop(config, width, loader, data, steps, device),
            )
            for _ in range(options.repeats)
        ]
        details["compile"] = compile_model
        emit(line("engine, bare loop", [bare for bare, _ in pairs], "ms/step", **details))
        emit(line("engine, whole engine", [ours for _, ours in pairs], "ms/step", **details))
        overhead = [100 * (ours / bare - 1) for bare, ours in pairs]
        emit(line("engine, overhead", overhead, "%", bar=2.0, **details))
    if on_gpu:
        count_recompiles(data, plan, width, device, details)


def count_recompiles(data: Any, plan: Plan, width: int, device: torch.device, details: dict[str, Any]) -> None:
    """1,000 steps of batches that all differ in their numbers of events, DOMs and pulses."""
    generator = np.random.default_rng(1)

    class Changing(ReadyLoader):
        def steps(self, position: Position, num_epochs: int | None = None) -> Iterator[Step]:
            while True:
                (batch,) = make_batches(data, int(generator.integers(300, 900)), 1, device)
                yield Step(batch.rows_on_host, position, position, batches=(Ready(batch),))  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(steps=1000, epochs=10**6, compile=True, baseline_after=None, norms_every=None)
        engine = make_engine(config, width, Changing(plan, []), data, Path(folder), device)
        engine.limit = engine.total = 1000
        train(engine)
    emit(
        line("engine, recompiles in 1,000 ragged steps after warm-up", [float(engine.recompiles)], "graphs", **details)
    )


if __name__ == "__main__":
    os.environ.setdefault("STOKER_CACHE", tempfile.mkdtemp())
    main()
