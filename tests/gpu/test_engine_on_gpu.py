"""A whole step on the GPU: nobody waits, and bf16, fp16 and fp32 all learn."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.data.plan import Plan, Position, Step
from stoker.recipe import RunConfig
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.train.config import TrainConfig
from stoker.train.schedule import lr_at

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


def make_parts(events_dir: Path, folder: Path, **options: Any) -> tuple[Any, list[Step]]:
    from engine import ReadyLoader, make_batches, make_engine

    device = torch.device("cuda")
    data_config = IceCubeData(path=events_dir, validation=(4,))
    data = open_data(RunConfig(recipe="icecube", data=data_config, model=TwoStageConfig()), device)
    plan = Plan(data.table, data.training, data.order, 64)
    batches = make_batches(data, 64, 6, device)
    config = TrainConfig(norms_every=None, **options)
    engine = make_engine(config, 64, ReadyLoader(plan, batches), data, folder, device)
    steps = [Step(np.arange(64), Position(0), Position(0), batches=(batch,)) for batch in batches]
    return engine, steps


@pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_step_never_waits_for_the_device(events_dir: Path, tmp_path: Path, compiled: bool) -> None:
    engine, steps = make_parts(events_dir, tmp_path, compile=compiled, ema=0.99)
    for step in steps[:3]:
        engine.stepper.update(engine.compute(step, False), 1e-3)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for step in steps:
            result = engine.compute(step, False)
            engine.stepper.update(result, lr_at(engine.config, engine.step, 100))
            engine.meter.add(step, result)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(engine.meter.read().loss)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_precision_learns(events_dir: Path, tmp_path: Path, precision: str) -> None:
    engine, steps = make_parts(events_dir, tmp_path, precision=precision, lr=3e-3)
    losses = []
    for number in range(120):
        result = engine.compute(steps[number % 2], False)
        engine.stepper.update(result, 3e-3)
        losses.append(result.loss.item())
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.1
