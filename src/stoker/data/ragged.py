"""Ragged arrays: flat columns and offsets, never padded. Sample i owns the elements offsets[i] .. offsets[i + 1]."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Ragged:
    """Some samples, one after the other, as columns of equal length."""

    columns: Mapping[str, Array]
    offsets: Indices  # (samples + 1,)
    rows: Indices  # (samples,) which samples these are: rows of the sample table

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values()) + self.offsets.nbytes


def offsets_of(counts: npt.NDArray[np.integer[Any]]) -> Indices:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def range_indices(first: npt.NDArray[np.integer[Any]], counts: npt.NDArray[np.integer[Any]]) -> tuple[Indices, Indices]:
    """Indices of the rows first[i] .. first[i] + counts[i] of every sample in turn, and their offsets."""
    offsets = offsets_of(counts)
    indices = np.repeat(first - offsets[:-1], counts)
    indices += count_up(int(offsets[-1]))
    return indices, offsets


def count_up(stop: int) -> Indices:
    """0 .. stop - 1, read only. Shared: filling fresh memory would cost more than the arithmetic it is used for."""
    global _numbers
    if stop > len(_numbers):
        _numbers = np.arange(max(stop, 2 * len(_numbers)))
        _numbers.flags.writeable = False
    return _numbers[:stop]


_numbers = np.arange(1 << 16)


def sample_of_element(offsets: Indices) -> Indices:
    """For each row the number of the sample it belongs to."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
