"""What a recipe is: a configuration with presets, data, and a task. Built-in recipes and a user's own look the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from stoker.data.loader import LoaderConfig
from stoker.data.locations import DataPath
from stoker.data.pack import PackRequest
from stoker.data.source import RunData
from stoker.settings import AlsoCalled, config
from stoker.train.config import TrainConfig
from stoker.train.optim import MakeOptimizer
from stoker.train.parallel import Ranks
from stoker.train.run import Run
from stoker.train.schedule import LrAt
from stoker.train.task import Task
from stoker.train.trackers import LogConfig


@config
class RunSettings:
    name: str | None = None  # goes behind recipe and time in the folder's name
    folder: Annotated[DataPath, AlsoCalled("output_dir", "out_dir")] = Path("runs")  # where run folders are made
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of the order of samples and of the first weights
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes a GPU when there is one


@config
class RunConfig:
    """Everything a run depends on. `data` and `model` are the recipe's own types."""

    recipe: str = ""  # name of a built-in recipe, or module:attribute; filled in when it is looked up
    run: RunSettings = RunSettings()
    data: Any
    model: Any
    loader: LoaderConfig = LoaderConfig()
    train: TrainConfig = TrainConfig()
    log: LogConfig = LogConfig()


@dataclass(frozen=True)
class Trained:
    """A task with the weights of a checkpoint, ready to be used."""

    config: RunConfig
    task: Any
    checkpoint: Path
    device: torch.device
    precision: str
    ranks: Ranks
    averaged: bool = False  # its weights are those of train.ema
    about: Mapping[str, str] = field(default_factory=dict)  # run, checkpoint, weights, data, fingerprint: for reports


@dataclass(frozen=True)
class Recipe:
    """Five things every recipe has; what follows them it may have."""

    name: str
    presets: Mapping[str, Callable[[], RunConfig]]  # the first one is used when none is named
    open_data: Callable[[RunConfig, torch.device], RunData]
    # From the configuration and the facts that `open_data` found and the run keeps: no data are opened for it.
    build_task: Callable[[RunConfig, Mapping[str, Any]], Task]
    # Metrics of each model that was judged, by its name, to a heading and rows for people.
    result_table: Callable[[Mapping[str, Mapping[str, float]]], list[tuple[str, ...]]]

    # Instead of train.optimizer and train.schedule: of a model and the configuration, of a step and of how many there are.
    optimizer: MakeOptimizer | None = None
    schedule: LrAt | None = None
    # Called with every event as it is written (docs/events.md); those of the first process only.
    listeners: Sequence[Callable[[Mapping[str, Any]], None]] = ()
    # Weights to begin a new run with, where they are not drawn; a run that goes on has its own.
    initialise: Callable[[RunConfig, Task], None] | None = None
    # An evaluation in depth, written into a folder.
    report: Callable[[Trained, Run, Path], Mapping[str, Any]] | None = None
    # Answers for a data set (data.path of the model's configuration), written to a file; returns what to tell.
    predict: Callable[[Trained, Path | None], Mapping[str, Any]] | None = None
    # Samples as a user has them to a batch on the host, for `stoker.load_run(...)(samples)`.
    prepare: Callable[[Trained, Any], Any] | None = None
    # The model as one file, with its check: (model, output, samples to check with).
    export: Callable[[Trained, Path, Path | None], Mapping[str, Any]] | None = None
    # Makes a packed copy of a data set; returns what to tell.
    pack: Callable[[PackRequest], Mapping[str, Any]] | None = None
    pack_options: type | None = None  # a dataclass of options of `stoker pack` that only this recipe has
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of presets: command, time, accuracy, departures
