"""Arrays in memory as samples: a row a sample, or a list of arrays for samples of different lengths."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stoker.data.own import Samples, memory_table
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, offsets_of, range_indices
from stoker.errors import UserError


def from_arrays(**columns: Any) -> Samples:
    """Arrays of one length, a row a sample; a list of arrays is a ragged column: one flat tensor and `NAME_offsets`."""
    if not columns:
        raise UserError("stoker.from_arrays needs at least one column: stoker.from_arrays(x=x, y=y).")
    parts = {name: _column(name, values) for name, values in columns.items()}
    ours = {"rows", *(f"{name}_offsets" for name, part in parts.items() if isinstance(part, _RaggedColumn))}
    if taken := ours & parts.keys():
        raise UserError(f"The column {min(taken)} has a name that batches use themselves: rename it.")
    sizes = {name: len(part) for name, part in parts.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"The columns have different numbers of samples: {sizes}.")
    size = next(iter(sizes.values()))
    costs = sum((part.counts for part in parts.values() if isinstance(part, _RaggedColumn)), np.zeros(size, np.int64))
    digest = zlib.crc32(repr(list(parts)).encode())
    for part in parts.values():
        digest = zlib.crc32(np.ascontiguousarray(part.content).tobytes(), digest)

    def read(micro: MicroBatch) -> dict[str, torch.Tensor]:
        batch = {"rows": torch.from_numpy(micro.rows)}
        for name, part in parts.items():
            batch |= part.take(name, micro.rows)
        return batch

    table = memory_table(size, np.maximum(costs, 1), f"arrays {digest:08x} {size}")
    return Samples(table, read, lambda rows: "arrays in memory")


@dataclass(frozen=True)
class _DenseColumn:
    content: Array

    def __len__(self) -> int:
        return len(self.content)

    def take(self, name: str, rows: Indices) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(self.content[rows])}


@dataclass(frozen=True)
class _RaggedColumn:
    content: Array
    first: Indices
    counts: Indices

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, name: str, rows: Indices) -> dict[str, torch.Tensor]:
        indices, offsets = range_indices(self.first[rows], self.counts[rows])
        return {name: torch.from_numpy(self.content[indices]), f"{name}_offsets": torch.from_numpy(offsets)}


def _column(name: str, values: Any) -> _DenseColumn | _RaggedColumn:
    if isinstance(values, list | tuple):
        pieces = [_array(name, piece) for piece in values]
        if len({piece.ndim for piece in pieces}) > 1 or len({piece.shape[1:] for piece in pieces}) > 1:
            raise UserError(f"The samples of the column {name} have different shapes: only their lengths may differ.")
        if pieces and pieces[0].ndim == 0:
            return _DenseColumn(np.stack(pieces))
        counts = np.array([len(piece) for piece in pieces], np.int64)
        filled = [piece for piece in pieces if len(piece)]  # an empty list has no type of its own
        content = np.concatenate(filled or pieces) if pieces else np.zeros(0)
        return _RaggedColumn(content, offsets_of(counts)[:-1], counts)
    array = _array(name, values)
    if array.ndim == 0:
        raise UserError(f"The column {name} must be an array of numbers, one row a sample, and not one number.")
    return _DenseColumn(array)


def _array(name: str, values: Any) -> Array:
    """Numbers of a type that torch has, in the order of bytes of this machine."""
    if np.ma.isMaskedArray(values):
        raise UserError(f"The column {name} is a masked array, and a batch has no place for what is masked: fill it.")
    try:
        array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"The column {name} is no array of numbers: {error}.") from error
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise UserError(f"The column {name} must hold numbers that torch has a type for, not {array.dtype}.")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
