"""What can be seen of the data in a few dozen batches: their order, samples that come twice, classes, constant labels."""

import hashlib
import math
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
LEAST_BITS = 20  # below which samples are the same by chance
MOST_COLUMNS = 64  # that are looked at for that


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
    labels = _varying(labels)
    every = torch.cat(list(labels))
    found.constant_labels = bool((every == every[0]).all())
    is_class = not every.is_floating_point() or _are_classes(every)
    if is_class:
        found.label_counts = dict(sorted(Counter(every.long().tolist()).items()))
    if len(labels) >= 4 and not found.constant_labels:
        found.order = _order_of_classes(labels, every) if is_class else _order_of_numbers(labels, every)


def _varying(labels: Sequence[Tensor]) -> list[Tensor]:
    """One number a sample: the first of its numbers that is not the same for all, of a map of pixels for example."""
    flat = [one.reshape(len(one), -1) for one in labels]
    if len({one.shape[1] for one in flat}) == 1:
        first = flat[0][0]
        differs = torch.stack([(one != first).any(0) for one in flat]).any(0)
        column = int(differs.int().argmax())
        return [one[:, column] for one in flat]
    return [one[:, 0] for one in flat]


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
        counts = (one[:, None] == kinds).sum(0).double()
        expected = share * counts.sum()
        often = expected >= 1  # of the others a single one would say too much
        if often.sum() >= 2:
            found.append(float(((counts - expected) ** 2 / expected)[often].sum() / (often.sum() - 1)))
    return sum(found) / len(found) if found else 1.0


def _order_of_numbers(labels: Sequence[Tensor], every: Tensor) -> float:
    """Variance of the means of batches over what chance gives."""
    size = min(len(one) for one in labels)
    means = torch.stack([one[:size].double().mean() for one in labels])
    return float(means.var() * size / every.double().var())


def _hashes(batch: Any) -> list[str]:
    """Of each sample, by all that it holds but its labels; none where samples are not rows, or where few kinds can be."""
    if hasattr(batch, "batches"):
        return []
    labels = labels_of(batch)
    tensors = [one for one in tensors_in(batch) if one.ndim >= 2 and one is not labels]
    count = len(tensors[0]) if tensors else 0
    if not tensors or any(len(one) != count for one in tensors):
        return []
    flat = [one.detach().cpu().reshape(count, -1).float() for one in tensors]
    if sum(map(_bits, flat)) < LEAST_BITS:
        return []
    found = [hashlib.blake2b(digest_size=12) for _ in range(count)]
    for one in flat:
        for digest, row in zip(found, one.contiguous().numpy(), strict=True):
            digest.update(row.tobytes())
    return [digest.hexdigest() for digest in found]


def _bits(rows: Tensor) -> float:
    """How much can tell two samples apart, at most: of some columns, by how many values each has here."""
    some = rows[:, :: max(1, rows.shape[1] // MOST_COLUMNS)]
    return sum(math.log2(len(torch.unique(column))) for column in some.T)
