"""IceCube as a recipe: its configuration, presets, data and task."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from stoker import console
from stoker.data.cache import cache_folder
from stoker.data.loader import LoaderConfig
from stoker.data.ragged import Indices
from stoker.data.samples import describe, split_by_shard
from stoker.recipe import Recipe, RunConfig, RunData
from stoker.recipes.icecube import events
from stoker.recipes.icecube.batch import EventBatch, collate
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.simulate import simulate
from stoker.recipes.icecube.task import DirectionTask
from stoker.settings import AlsoCalled, config
from stoker.train.loop import TrainConfig


@config
class IceCubeData:
    path: Annotated[Path, AlsoCalled("dir", "data_dir", "root")] | None = None  # Kaggle layout; None: simulate events
    simulate_events: Annotated[int, Field(ge=10)] = 60_000  # when there is no path
    simulate_files: Annotated[int, Field(ge=2)] = 12
    validation: Annotated[float, Field(gt=0, lt=1)] | tuple[int, ...] = 0.05  # share of the files, or their numbers


def demo() -> RunConfig:
    """Minutes on two CPU cores, with events simulated on the spot."""
    return RunConfig(
        recipe="icecube",
        data=IceCubeData(),
        model=TwoStageConfig(width=64, heads=4, pulse_layers=1, dom_layers=2, expansion=2.0),
        loader=LoaderConfig(batch_size=128),
        train=TrainConfig(epochs=1, lr=1e-3, warmup_steps=50),
    )


def seed() -> RunConfig:
    """The size of the model that the seed project trained: width 128, four and four layers, 1.6 M parameters."""
    return RunConfig(
        recipe="icecube",
        data=IceCubeData(simulate_events=1_000_000, simulate_files=20),
        model=TwoStageConfig(),
        loader=LoaderConfig(batch_size=1024),
        train=TrainConfig(epochs=1, lr=5e-4, warmup_steps=200),
    )


def open_data(run: RunConfig) -> RunData:
    root = data_root(run)
    table = events.open_events(root)
    source = events.open_pulses(root, table)
    training, validation, held = split_by_shard(table, run.data.validation)

    def make_batch(rows: Indices) -> EventBatch:
        labels = {name: np.asarray(table.columns[name][rows]) for name in events.LABELS}
        return collate(source.gather(rows), labels, rows)

    description: dict[str, Any] = {
        "path": str(root),
        "training": describe(table, training),
        "validation": describe(table, validation) | {"files": held},
    }
    return RunData(training, validation, make_batch, description)


def build_task(run: RunConfig) -> DirectionTask:
    return DirectionTask(run.model, events.open_geometry(data_root(run)))


def result_table(metrics: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Model, line fit and guessing side by side, on the same validation events."""
    rows: list[tuple[str, ...]] = [("angular error on validation events (rad)", "mean", "median")]
    for label, mean, median in (
        ("model", "mean_error_rad", "median_error_rad"),
        ("line fit", "line_fit_mean_rad", "line_fit_median_rad"),
        ("guessing", "guess_mean_rad", "guess_median_rad"),
    ):
        rows.append((label, f"{metrics[mean]:.3f}", f"{metrics[median]:.3f}"))
    return rows


def data_root(run: RunConfig) -> Path:
    """The user's directory, or simulated events in the cache, made on first use."""
    if run.data.path is not None:
        return Path(run.data.path)
    return _simulated(run.data.simulate_events, run.data.simulate_files, run.run.seed)


@cache
def _simulated(num_events: int, num_files: int, seed: int) -> Path:
    folder = cache_folder() / "simulated" / f"icecube-{num_events}-{num_files}-{seed}"
    if not (folder / "train_meta.parquet").exists():
        console.say(f"No data.path was given: simulating {num_events:,} events into {folder}.")
        simulate(folder, num_events=num_events, num_files=num_files, seed=seed, force=True)
    return folder


RECIPE = Recipe(
    name="icecube",
    presets={"demo": demo, "seed": seed},
    open_data=open_data,
    build_task=build_task,
    result_table=result_table,
)
