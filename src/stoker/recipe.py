"""What a recipe is: a configuration with presets, data, and a task. Built-in recipes and a user's own look the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from stoker.data.loader import Loader, LoaderConfig
from stoker.data.order import Order
from stoker.data.pack import Packing
from stoker.data.quarantine import Quarantine
from stoker.data.ragged import Indices
from stoker.data.samples import SampleTable, Subset
from stoker.data.stages import Stage
from stoker.settings import AlsoCalled, config
from stoker.train.config import TrainConfig
from stoker.train.parallel import Ranks
from stoker.train.task import Task
from stoker.train.trackers import LogConfig


@config
class RunSettings:
    name: str | None = None  # goes behind recipe and time in the folder's name
    folder: Annotated[Path, AlsoCalled("output_dir", "out_dir")] = Path("runs")  # where run folders are made
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of the order of samples and of the first weights
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
    log: LogConfig = LogConfig()


@dataclass(frozen=True)
class RunData:
    """Samples to train on and samples never trained on, and how they become batches."""

    table: SampleTable
    training: Subset
    validation: Subset
    order: Callable[[Subset], Callable[[int, int], Order]]  # subset -> (seed, epoch) -> order of an epoch
    stages: Sequence[Stage]  # the first gets a MicroBatch, the last gives a batch
    where: Callable[[Indices], str]  # files of some rows, for messages
    quarantine: Quarantine
    description: Mapping[str, Any]  # goes into the events
    bytes_per_cost: float  # host memory that a unit of cost needs on its way
    cache_bytes: int = 0  # of the RAM budget that the source keeps for itself
    validation_stages: Sequence[Stage] | None = None  # where they differ from those of training
    repeated: bool = False  # the training order names samples several times
    paired: bool = False  # a training sample has a partner in its micro-batch
    keep: Mapping[str, Any] = field(default_factory=dict)  # name -> JSON that goes into the run's folder


@dataclass(frozen=True)
class PackRequest:
    """Words of `stoker pack`."""

    source: Path
    out: Path
    shuffled: int | None = None
    threads: int | None = None
    verify: bool = False
    short_side: int | None = None
    quality: int | None = None
    max_classes: int | None = None
    max_per_class: int | None = None
    broken: str | None = None
    only_present: bool = False
    rank: int = 0
    num_ranks: int = 1


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
    name: str
    presets: Mapping[str, Callable[[], RunConfig]]  # the first one is used when none is named
    open_data: Callable[[RunConfig, torch.device], RunData]
    build_task: Callable[[RunConfig], Task]
    # (what was asked for, threads) -> what to pack; None where `pack` does it
    packing: Callable[[PackRequest, int], Packing] | None
    # Metrics of each model that was judged, by its name, to a heading and rows for people.
    result_table: Callable[[Mapping[str, Mapping[str, float]]], list[tuple[str, ...]]]
    # An evaluation in depth, written into a folder: (model, data, loader of the validation samples, folder).
    report: Callable[[Trained, RunData, Loader[Any], Path], Mapping[str, Any]] | None = None
    # Answers for a data set (data.path of the model's configuration), written to a file; returns what to tell.
    predict: Callable[[Trained, Path | None], Mapping[str, Any]] | None = None
    # The task of a run from its folder alone, for uses that do not need its data; None: from the configuration.
    rebuild_task: Callable[[RunConfig, Path], Task] | None = None
    # The model as one file, with its check: (model, output, samples to check with).
    export: Callable[[Trained, Path, Path | None], Mapping[str, Any]] | None = None
    # Packs in its own way instead of `packing`: (what was asked for).
    pack: Callable[[PackRequest], Mapping[str, Any]] | None = None
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of presets: command, time, accuracy, departures
