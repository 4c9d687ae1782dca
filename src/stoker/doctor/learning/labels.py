"""Which tensor of a batch holds the labels, and the same batch with the labels of other samples."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stoker.data.batch import leaves, map_leaves

NAMES = ("labels", "label", "targets", "target", "y", "direction")


def labels_of(batch: Any) -> Tensor | None:
    """By its name, or the last of a tuple; None: nobody can tell."""
    place = _place(batch)
    return None if place is None else _parts(batch)[place]


def with_others_labels(batch: Any, seed: int) -> Any:
    """The same batch with its labels in another order; None where they are not known."""
    if hasattr(batch, "batches"):  # a step of ours
        changed = [with_others_labels(one, seed) for one in batch.batches]
        if any(one is None for one in changed):
            return None
        other = copy.copy(batch)
        other.batches = tuple(changed)
        return other
    place = _place(batch)
    if place is None:
        return None
    labels = _parts(batch)[place]
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(labels.device)
    return map_leaves(batch, lambda leaf: leaf[order] if leaf is labels else leaf)


def _parts(batch: Any) -> dict[str, Tensor]:
    if hasattr(batch, "batches"):
        batch = batch.batches[0]
    return {name: leaf for name, leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}


def _place(batch: Any) -> str | None:
    parts = _parts(batch)
    for name in NAMES:
        found = [key for key in parts if key.split(".")[-1] == name]
        if found:
            return found[0]
    is_plain = isinstance(batch, list | tuple) and len(batch) >= 2 and not dataclasses.is_dataclass(batch)
    if is_plain and not isinstance(batch, Mapping) and isinstance(batch[-1], Tensor) and batch[-1].ndim:
        return str(len(batch) - 1)
    return None
