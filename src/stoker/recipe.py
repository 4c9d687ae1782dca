"""What a recipe is: a configuration with presets, data, and a task. Built-in recipes and a user's own look the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from stoker.data.loader import LoaderConfig
from stoker.data.ragged import Indices
from stoker.data.samples import Subset
from stoker.settings import AlsoCalled, config
from stoker.train.loop import TrainConfig
from stoker.train.task import Task


@config
class RunSettings:
    name: str | None = None  # goes behind recipe and time in the folder's name
    folder: Annotated[Path, AlsoCalled("output_dir", "out_dir")] = Path("runs")  # where run folders are made
    seed: Annotated[int, Field(ge=0)] = 0  # of the order of samples and of the first weights
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes a GPU when there is one


@config
class RunConfig:
    """Everything a run depends on. `data` and `model` are the recipe's own types."""

    recipe: str  # name of a built-in recipe, or module:attribute
    run: RunSettings = RunSettings()
    data: Any
    model: Any
    loader: LoaderConfig = LoaderConfig()
    train: TrainConfig = TrainConfig()


@dataclass(frozen=True)
class RunData:
    """Samples to train on and samples never trained on, and how rows of the sample table become a batch."""

    training: Subset
    validation: Subset
    make_batch: Callable[[Indices], Any]
    description: Mapping[str, Any]  # goes into the events


@dataclass(frozen=True)
class Recipe:
    name: str
    presets: Mapping[str, Callable[[], RunConfig]]  # the first one is used when none is named
    open_data: Callable[[RunConfig], RunData]
    build_task: Callable[[RunConfig], Task]
    result_table: Callable[[Mapping[str, float]], list[tuple[str, ...]]]  # heading, then rows, for people
