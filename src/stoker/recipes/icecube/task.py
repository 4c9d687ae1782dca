"""Direction reconstruction as a task: models and losses to choose from, the angle as metric, the line fit beside it."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from stoker.recipes.icecube.baselines import GUESS_RAD, line_fit
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.deep import DeepConfig, DeepModel
from stoker.recipes.icecube.flat import FlatConfig, FlatModel
from stoker.recipes.icecube.geometry import Geometry
from stoker.recipes.icecube.inputs import Answers, DirectionConfig
from stoker.recipes.icecube.losses import LOG_SPHERE, angle_between, gaussian, region_angle, sigma_of, von_mises_fisher
from stoker.recipes.icecube.model import TwoStageConfig, TwoStageModel

KNOW_NOTHING = {"angle": GUESS_RAD, "vmf": LOG_SPHERE, "both": LOG_SPHERE + GUESS_RAD}
# Units in which energy and vertex are learnt, so that all that is learnt is of the order of one.
ENERGY_CENTRE, ENERGY_SCALE = 3.0, 1.0  # log10 of GeV
VERTEX_SCALE_M = 500.0
REGION = 0.68  # share of events that an uncertainty should cover


def build_model(config: DirectionConfig, geometry: Geometry) -> nn.Module:
    if isinstance(config, FlatConfig):
        return FlatModel(config, geometry)
    if isinstance(config, DeepConfig):
        return DeepModel(config, geometry)
    assert isinstance(config, TwoStageConfig)
    return TwoStageModel(config, geometry)


class DirectionTask:
    metric = "mean_error_rad"
    goal = "min"
    compiles_losses = True  # some fifty small operations, and as many backward

    def __init__(self, config: DirectionConfig, geometry: Geometry) -> None:
        self.model = build_model(config, geometry)
        self.answers = Answers.of(config)
        # Of energy and vertex: what the centre costs if they spread as their scale says; mostly they spread less.
        self.know_nothing_loss = KNOW_NOTHING[config.loss] + 0.5 * config.energy + 1.5 * config.vertex
        self._loss = config.loss
        self.has_kappa = config.loss != "angle"  # an angle says nothing about kappa, which then stays as it began
        self.sensor_xyz = torch.from_numpy(geometry.xyz)

    def use(self, geometry: Geometry) -> None:
        """Another detector."""
        self.model.inputs.use(geometry)  # type: ignore[operator, union-attr]
        self.sensor_xyz = torch.from_numpy(geometry.xyz)

    def predict(self, batch: EventBatch) -> Tensor:
        if not batch.time.is_cuda:
            return self.model(batch)  # type: ignore[no-any-return]
        return self.model(batch.rounded())[: batch.num_samples]  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: EventBatch) -> Tensor:
        loss = self._direction_loss(prediction, batch)
        for which, target in self._further(batch):
            loss = loss + gaussian(prediction[:, which][:, :-1], prediction[:, which][:, -1], target)
        return loss

    def _further(self, batch: EventBatch) -> list[tuple[slice, Tensor]]:
        """Columns of the answer beside their truth, in the units in which they are learnt."""
        found = []
        if self.answers.energy is not None:
            found.append((self.answers.energy, (_truth(batch)[:, :1] - ENERGY_CENTRE) / ENERGY_SCALE))
        if self.answers.vertex is not None:
            found.append((self.answers.vertex, _truth(batch)[:, 1:] / VERTEX_SCALE_M))
        return found

    def _direction_loss(self, prediction: Tensor, batch: EventBatch) -> Tensor:
        direction, kappa = prediction[:, :3], prediction[:, 3]
        if self._loss == "angle":
            return angle_between(direction, batch.direction)
        likelihood = von_mises_fisher(direction, kappa, batch.direction)
        return likelihood if self._loss == "vmf" else likelihood + angle_between(direction, batch.direction)

    def scores(self, prediction: Tensor, batch: EventBatch) -> dict[str, Tensor]:
        self.sensor_xyz = self.sensor_xyz.to(batch.time.device)
        fitted = line_fit(batch, self.sensor_xyz)
        error = angle_between(prediction[:, :3], batch.direction)
        scores = {
            "error_rad": error,
            "line_fit_rad": angle_between(fitted, batch.direction),
            "in_region": (error < region_angle(prediction[:, 3], REGION)).float(),
        }
        for name, values in self.further(prediction).items():
            if name in ("energy", "vertex"):
                truth = _truth(batch)[:, :1] if name == "energy" else _truth(batch)[:, 1:]
                scores |= {f"{name}_error": (values - truth).norm(dim=-1), f"{name}_true": truth}
        return scores

    def further(self, prediction: Tensor) -> dict[str, Tensor]:
        """What was learnt besides the direction: log10 of the energy / GeV, the vertex (m), and the spread of each."""
        found: dict[str, Tensor] = {}
        if (which := self.answers.energy) is not None:
            found["energy"] = prediction[:, which][:, :-1] * ENERGY_SCALE + ENERGY_CENTRE
            found["energy_sigma"] = sigma_of(prediction[:, which][:, -1:]) * ENERGY_SCALE
        if (which := self.answers.vertex) is not None:
            found["vertex"] = prediction[:, which][:, :-1] * VERTEX_SCALE_M
            found["vertex_sigma"] = sigma_of(prediction[:, which][:, -1:]) * VERTEX_SCALE_M
        return found

    def summarise(self, scores: Mapping[str, npt.NDArray[np.floating[Any]]]) -> dict[str, float]:
        metrics = {
            "mean_error_rad": float(np.mean(scores["error_rad"])),
            "median_error_rad": float(np.median(scores["error_rad"])),
            "line_fit_mean_rad": float(np.mean(scores["line_fit_rad"])),
            "line_fit_median_rad": float(np.median(scores["line_fit_rad"])),
            "guess_mean_rad": GUESS_RAD,
            "guess_median_rad": GUESS_RAD,
        }
        for name, unit in (("energy", "log10"), ("vertex", "m")):
            if f"{name}_error" in scores:
                true = scores[f"{name}_true"]
                metrics[f"{name}_error_{unit}"] = float(np.mean(scores[f"{name}_error"]))
                # The best that one answer for all events could do, knowing these very events.
                away = np.linalg.norm(true - np.median(true, axis=0), axis=-1)
                metrics[f"{name}_guess_{unit}"] = float(np.mean(away))
        if self.has_kappa:
            metrics["in_68_percent_region"] = float(np.mean(scores["in_region"]))
        return metrics


def _truth(batch: EventBatch) -> Tensor:
    assert batch.truth is not None, "the data were opened for a model that learns energy or vertex"
    return batch.truth


def azimuth_zenith(direction: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Angles (rad) of unit vectors (N, 3): azimuth in 0 .. 2 pi, zenith in 0 .. pi."""
    vectors = np.asarray(direction, np.float64)
    azimuth = np.arctan2(vectors[:, 1], vectors[:, 0]) % (2 * math.pi)
    return azimuth, np.arctan2(np.hypot(vectors[:, 0], vectors[:, 1]), vectors[:, 2])
