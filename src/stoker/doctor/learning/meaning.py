"""Samples of a batch as numbers that a quick classifier can be taught with: do validation labels mean what training's do?"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.data.agreement import Agreement, Group, agreement, enough
from stoker.data.batch import tensors_in
from stoker.doctor.learning.labels import labels_of

SIDE = 8  # fields of a thumbnail
MOST_COLUMNS, MOST_CLASSES = 1024, 1000
EACH = 5  # samples of a class, at least
MOST_SEEN, MOST_SAMPLES = 24_000, 6000  # that are looked at, and that a group is made of


def agreement_of(training: Sequence[Any], validation: Iterable[Any], most: int) -> Agreement | None:
    """None: no classes, or too few samples of them to tell."""
    known, other = _group(training), _group(islice(validation, most))
    if known is None or other is None:
        return None
    halves = [_Samples(known.features[part::2], known.labels[part::2]) for part in (0, 1)]
    classes = _in_all([*halves, other])
    if len(classes) < 2 or len(classes) > MOST_CLASSES:
        return None
    learn, judge, asked = (_balanced(one, classes) for one in (*halves, other))
    if not enough(len(classes), len(learn.labels), len(judge.labels), len(asked.labels)):
        return None
    return agreement(learn, judge, asked, len(classes)).named(classes.tolist())


@dataclass(frozen=True)
class _Samples:
    features: Tensor
    labels: Tensor


def _in_all(groups: Sequence[_Samples]) -> Tensor:
    """Classes of which every group has a few."""
    often = []
    for group in groups:
        kinds, counts = torch.unique(group.labels, return_counts=True)
        often.append(set(kinds[counts >= EACH].tolist()))
    return torch.tensor(sorted(set.intersection(*often)), dtype=torch.long)


def _balanced(group: _Samples, classes: Tensor) -> Group:
    """As many samples of each class: else a rare one would be guessed by nobody, and look like another."""
    places = [torch.nonzero(group.labels == one)[:, 0] for one in classes]
    each = min(min(map(len, places)), max(EACH, MOST_SAMPLES // len(classes)))
    rows = torch.cat([one[:each] for one in places])
    labels = torch.searchsorted(classes, group.labels[rows])
    return Group(group.features[rows].double().numpy(), labels.numpy())


def _group(batches: Iterable[Any]) -> _Samples | None:
    features: list[Tensor] = []
    labels: list[Tensor] = []
    seen = 0
    for batch in batches:
        found, label = _features(batch), labels_of(batch)
        if found is None or label is None or label.ndim != 1 or label.is_floating_point() or len(found) != len(label):
            return None
        features.append(found)
        labels.append(label.detach().cpu().long())
        seen += len(label)
        if seen >= MOST_SEEN:
            break
    if not features or len({one.shape[1] for one in features}) != 1:
        return None
    values = torch.cat(features)
    return _Samples(values, torch.cat(labels)) if bool(torch.isfinite(values).all()) else None


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
    return values.flatten(1)[:, :MOST_COLUMNS].clone()  # a view would keep the whole batch
