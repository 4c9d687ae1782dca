"""A run, put together: what is trained, on what, with what, where. `launch.build` makes it, the engine drives it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from stoker.data.loader import Loader
from stoker.data.source import RunData
from stoker.train.config import TrainConfig
from stoker.train.optim import MakeOptimizer, build_optimizer
from stoker.train.parallel import Ranks
from stoker.train.schedule import LrAt, lr_at
from stoker.train.task import Task


@dataclass(frozen=True)
class Run:
    task: Task
    training: Loader
    validation: Loader
    data: RunData
    device: torch.device
    config: TrainConfig
    settings: dict[str, Any]  # the resolved configuration, kept in every checkpoint
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    make_optimizer: MakeOptimizer = build_optimizer
    lr_at: LrAt = lr_at
