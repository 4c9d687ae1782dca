"""What can be seen of the data in a few dozen batches: their order, samples that come twice, classes, constant labels."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stoker.data.batch import tensors_in
from stoker.doctor.learning.facts import Learning
from stoker.doctor.learning.labels import labels_of

MOST_BATCHES = 64
FEW = 10  # classes that are stored as numbers


def look_at_samples(found: Learning, batches: Sequence[Any], validation: Iterable[Any] | None) -> None:
    labels = [one.detach().cpu() for one in map(labels_of, batches) if one is not None]
    if labels:
        _look_at_labels(found, labels)
    seen = [one for batch in batches for one in _hashes(batch)]
    found.seen, found.twice = len(seen), len(seen) - len(set(seen))
    if validation is not None:
        known, judged = set(seen), [one for batch in islice(validation, MOST_BATCHES) for one in _hashes(batch)]
        found.in_validation = sum(one in known for one in judged)


def _look_at_labels(found: Learning, labels: Sequence[Tensor]) -> None:
    every = torch.cat([one.reshape(len(one), -1)[:, 0] for one in labels])
    found.constant_labels = bool((every == every[0]).all())
    is_class = not every.is_floating_point() or _are_classes(every)
    if is_class:
        found.label_counts = dict(sorted(Counter(every.long().tolist()).items()))
    if len(labels) >= 4 and not found.constant_labels:
        found.order = _order_of_classes(labels, every) if is_class else _order_of_numbers(labels, every)


def _are_classes(labels: Tensor) -> bool:
    """A few whole numbers, such as 0.0 and 1.0."""
    return bool((labels == labels.round()).all()) and len(torch.unique(labels)) <= FEW


def _order_of_classes(labels: Sequence[Tensor], every: Tensor) -> float:
    """Chi-squared of the classes of each batch over what chance gives: 1 where samples are mixed."""
    kinds, total = torch.unique(every, return_counts=True)
    if len(kinds) > 64 or len(kinds) < 2:
        return 1.0
    share = total.double() / total.sum()
    found = []
    for one in labels:
        counts = (one.reshape(len(one), -1)[:, :1] == kinds).sum(0).double()
        expected = share * counts.sum()
        often = expected >= 1  # of the others a single one would say too much
        if often.sum() >= 2:
            found.append(float(((counts - expected) ** 2 / expected)[often].sum() / (often.sum() - 1)))
    return sum(found) / len(found) if found else 1.0


def _order_of_numbers(labels: Sequence[Tensor], every: Tensor) -> float:
    """Variance of the means of batches over what chance gives."""
    size = min(len(one) for one in labels)
    means = torch.stack([one[:size].reshape(size, -1)[:, 0].double().mean() for one in labels])
    return float(means.var() * size / every.double().var())


def _hashes(batch: Any) -> list[str]:
    """Of each sample, by its largest tensor; none where samples are not its rows."""
    if hasattr(batch, "batches"):
        return []
    tensors = [one for one in tensors_in(batch) if one.ndim >= 2]
    if not tensors:
        return []
    rows = max(tensors, key=lambda one: one.nbytes).detach().cpu().contiguous()
    flat = rows.reshape(len(rows), -1).float().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=12).hexdigest() for row in flat]
