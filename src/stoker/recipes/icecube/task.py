"""Direction reconstruction as a task: the angle is the loss and the metric, the line fit stands beside it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from stoker.recipes.icecube.baselines import GUESS_RAD, line_fit
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.geometry import Geometry
from stoker.recipes.icecube.losses import angle_between
from stoker.recipes.icecube.model import TwoStageConfig, TwoStageModel


class DirectionTask:
    metric = "mean_error_rad"
    goal = "min"
    know_nothing_loss = GUESS_RAD

    def __init__(self, config: TwoStageConfig, geometry: Geometry) -> None:
        self.model: nn.Module = TwoStageModel(config, geometry)
        self._sensor_xyz = torch.from_numpy(geometry.xyz)

    def predict(self, batch: EventBatch) -> Tensor:
        return self.model(batch)  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: EventBatch) -> Tensor:
        return angle_between(prediction, batch.direction)

    def scores(self, prediction: Tensor, batch: EventBatch) -> dict[str, Tensor]:
        fitted = line_fit(batch, self._sensor_xyz.to(batch.time.device))
        return {
            "error_rad": angle_between(prediction, batch.direction),
            "line_fit_rad": angle_between(fitted, batch.direction),
        }

    def summarise(self, scores: Mapping[str, npt.NDArray[np.floating[Any]]]) -> dict[str, float]:
        return {
            "mean_error_rad": float(np.mean(scores["error_rad"])),
            "median_error_rad": float(np.median(scores["error_rad"])),
            "line_fit_mean_rad": float(np.mean(scores["line_fit_rad"])),
            "line_fit_median_rad": float(np.median(scores["line_fit_rad"])),
            "guess_mean_rad": GUESS_RAD,
            "guess_median_rad": GUESS_RAD,
        }
