"""Samples of a batch as numbers that a quick classifier can be taught with: do validation labels mean what training's do?"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.data.agreement import Agreement, Group, agreement, enough
from stoker.data.batch import tensors_in
from stoker.doctor.learning.labels import labels_of

SIDE = 8  # fields of a thumbnail
MOST_COLUMNS, MOST_CLASSES = 1024, 1000


def agreement_of(training: Sequence[Any], validation: Iterable[Any], most: int) -> Agreement | None:
    """None: no classes, or too few samples to tell."""
    known, other = _group(training), _group(list(islice(validation, most)))
    if known is None or other is None:
        return None
    num_classes = int(max(known.labels.max(), other.labels.max())) + 1
    learn, judge = (Group(known.features[part::2], known.labels[part::2]) for part in (0, 1))
    sizes = len(learn.labels), len(judge.labels), len(other.labels)
    if num_classes < 2 or num_classes > MOST_CLASSES or not enough(num_classes, *sizes):
        return None
    return agreement(learn, judge, other, num_classes)


def _group(batches: Sequence[Any]) -> Group | None:
    labels = [labels_of(batch) for batch in batches]
    features = [_features(batch) for batch in batches]
    if not batches or any(one is None for one in features):
        return None
    if any(one is None or one.ndim != 1 or one.is_floating_point() or one.is_complex() for one in labels):
        return None
    joined = torch.cat([one.detach().cpu().long() for one in labels if one is not None])
    values = torch.cat([one for one in features if one is not None]).double().numpy()
    if len(joined) != len(values) or int(joined.min()) < 0 or not np.isfinite(values).all():
        return None
    return Group(values, joined.numpy())


def _features(batch: Any) -> Tensor | None:
    """(samples, columns): of images a thumbnail and its contrast, of all else its numbers."""
    tensors = [one for one in tensors_in(batch) if one.is_floating_point() and one.ndim >= 2]
    if hasattr(batch, "batches") or not tensors:
        return None
    values = max(tensors, key=lambda one: one.nbytes).detach().float().cpu()
    if values.ndim == 4 and min(values.shape[-2:]) >= SIDE:
        mean = F.adaptive_avg_pool2d(values, SIDE)
        contrast = (F.adaptive_avg_pool2d(values**2, SIDE) - mean**2).clamp_min(0).sqrt()
        values = torch.cat([mean, contrast], 1)
    return values.flatten(1)[:, :MOST_COLUMNS]
