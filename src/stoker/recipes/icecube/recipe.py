"""IceCube as a recipe: its configuration, presets, data and task."""

from collections.abc import Mapping

from stoker.data.loader import LoaderConfig
from stoker.recipe import Recipe, RunConfig
from stoker.recipes.icecube import events
from stoker.recipes.icecube.data import IceCubeData, data_root, open_data
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.task import DirectionTask
from stoker.train.config import TrainConfig


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


RECIPE = Recipe(
    name="icecube",
    presets={"demo": demo, "seed": seed},
    open_data=open_data,
    build_task=build_task,
    packing=lambda root, shuffled, threads: events.packing(root, events.open_events(root), shuffled, threads),
    result_table=result_table,
)
