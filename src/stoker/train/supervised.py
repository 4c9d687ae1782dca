"""The usual task in one call: a model, its inputs and targets in a batch, a loss, a score."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from stoker.errors import UserError

Pick = Callable[[Any], Any] | str | int


class Supervised:
    """`inputs` and `target` pick from a batch: a key, or a function of the batch.

    `loss(prediction, target)` gives a value a sample (reduction="none"), or more, whose mean is taken. `score`, likewise, is
    what the run is judged by, under the name `metric`; without one it is the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        inputs: Pick,
        target: Pick,
        score: Callable[[Tensor, Tensor], Tensor] | None = None,
        metric: str = "loss",
        goal: str = "min",
        know_nothing_loss: float = float("inf"),
    ) -> None:
        self.model, self.metric, self.goal, self.know_nothing_loss = model, metric, goal, know_nothing_loss
        self._loss, self._score = loss, score or loss
        self._inputs, self._target = inputs, target

    def predict(self, batch: Any) -> Tensor:
        prediction: Tensor = self.model(_picked(self._inputs, batch))
        return prediction

    def losses(self, prediction: Tensor, batch: Any) -> Tensor:
        target = _picked(self._target, batch)
        if prediction.ndim == target.ndim + 1 and prediction.shape[-1] == 1:
            raise UserError(
                f"The model answers with {tuple(prediction.shape)} and the target is {tuple(target.shape)}: each would be "
                f"compared with all. Let the model end with .squeeze(-1)."
            )
        return _per_sample(self._loss(prediction, target))

    def scores(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
        return {self.metric: _per_sample(self._score(prediction, _picked(self._target, batch)))}

    def summarise(self, scores: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(np.mean(values)) for name, values in scores.items()}


def metrics_table(models: Mapping[str, Mapping[str, float]]) -> list[tuple[str, ...]]:
    """A result table of any metrics: what a recipe uses that has no better one."""
    names = list(dict.fromkeys(name for metrics in models.values() for name in metrics))
    rows = [
        (label, *(f"{metrics[name]:.4g}" if name in metrics else "" for name in names))
        for label, metrics in models.items()
    ]
    return [("validation", *names), *rows]


def _picked(pick: Pick, batch: Any) -> Any:
    return pick(batch) if callable(pick) else batch[pick]


def _per_sample(values: Tensor) -> Tensor:
    if values.ndim == 0:
        raise UserError('A loss gave one number for the whole batch, and one a sample is needed: reduction="none".')
    return (values if values.ndim == 1 else values.flatten(1).mean(1)).float()
