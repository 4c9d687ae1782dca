"""The seam between the engine and a recipe: a task is a model, a loss, and metrics; batches are of its own type."""

# B samples of a batch
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from stoker.errors import UserError


class Task(Protocol):
    model: nn.Module
    metric: str  # the number a run is judged by, a key of what `summarise` returns
    goal: str  # "min" or "max"
    know_nothing_loss: float  # what a model scores that has learnt nothing

    def predict(self, batch: Any) -> Any:
        """The model's answer for a batch."""

    def losses(self, prediction: Any, batch: Any) -> Tensor:
        """(B,) one loss a sample: the engine weighs samples, so that batches of any size add up."""

    def scores(self, prediction: Any, batch: Any) -> dict[str, Tensor]:
        """(B,) tensors; concatenated over all validation samples before they are summarised."""

    def summarise(self, scores: Mapping[str, npt.NDArray[np.floating[Any]]]) -> dict[str, float]:
        """The metrics of a whole validation set."""


def check_task(task: Any, recipe: str) -> None:
    """Says what a task lacks, before anything is trained."""
    needed = ("model", "metric", "goal", "know_nothing_loss", "predict", "losses", "scores", "summarise")
    missing = [name for name in needed if not hasattr(task, name)]
    if missing:
        raise UserError(f"The task of the recipe {recipe} ({type(task).__name__}) lacks {', '.join(missing)}.")
    if task.goal not in ("min", "max"):
        raise UserError(f"The task of the recipe {recipe} has the goal {task.goal!r}: it must be min or max.")
    if not isinstance(task.model, nn.Module):
        raise UserError(
            f"The model of the recipe {recipe} is a {type(task.model).__name__}, and must be a torch module."
        )


def has_fixed_shapes(task: Task) -> bool:
    """Whether all batches but the last of an epoch have one shape: a task says so with `fixed_shapes = True`."""
    return bool(getattr(task, "fixed_shapes", False))
