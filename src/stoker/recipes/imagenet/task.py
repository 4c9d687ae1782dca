"""Classification of images as a task."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.recipes.imagenet.batch import ImageBatch
from stoker.recipes.imagenet.classes import ClassMap
from stoker.recipes.imagenet.model import ImageModelConfig, build_model

BCE_THRESHOLD = 0.2  # classes with more than this of a mixed label count as there


class ClassificationTask:
    metric = "top1"
    goal = "max"
    fixed_shapes = True  # the smaller last batch goes through uncompiled

    def __init__(self, config: ImageModelConfig, classes: ClassMap, size: int | None = None) -> None:
        self.model = build_model(config, len(classes), size)
        self.classes = classes
        self._config = config
        self._usual: int | None = None  # images of a training batch on this rank
        share = 1 / len(classes)
        self.know_nothing_loss = math.log(len(classes))
        if config.loss == "bce":
            self.know_nothing_loss = -share * math.log(share) - (1 - share) * math.log(1 - share)

    def predict(self, batch: ImageBatch) -> Tensor:
        if self._usual is None and self.model.training:
            self._usual = batch.num_samples
        if batch.num_samples != self._usual:
            return self.model.forward(batch.images)  # type: ignore[no-any-return]
        return self.model(batch.images)  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: ImageBatch) -> Tensor:
        """Against both labels where two images were mixed."""
        logits = prediction.float()
        if self._config.loss == "bce":
            target = F.one_hot(batch.labels, logits.shape[1]) * batch.weight[:, None]
            target = target + F.one_hot(batch.partner, logits.shape[1]) * (1 - batch.weight[:, None])
            target = (target > BCE_THRESHOLD).float()
            return F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
        smoothing = self._config.label_smoothing if self.model.training else 0.0
        own = F.cross_entropy(logits, batch.labels, reduction="none", label_smoothing=smoothing)
        other = F.cross_entropy(logits, batch.partner, reduction="none", label_smoothing=smoothing)
        return torch.lerp(other, own, batch.weight)

    def scores(self, prediction: Tensor, batch: ImageBatch) -> dict[str, Tensor]:
        logits = prediction.float()
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        right = best == batch.labels[:, None]
        return {
            "loss": F.cross_entropy(logits, batch.labels, reduction="none"),
            "top1": right[:, :1].any(1).float(),
            "top5": right.any(1).float(),
            "label": batch.labels.float(),
            "guess": best[:, 0].float(),
        }

    def summarise(self, scores: Mapping[str, npt.NDArray[np.floating[Any]]]) -> dict[str, float]:
        label = scores["label"].astype(int)
        count = np.bincount(label)
        by_class = np.bincount(label, scores["top1"])[count > 0] / count[count > 0]
        return {
            "top1": float(np.mean(scores["top1"])),
            "top5": float(np.mean(scores["top5"])),
            "validation_loss": float(np.mean(scores["loss"])),
            "worst_class_top1": float(by_class.min()),
            "chance_top1": 1 / len(self.classes),
        }
