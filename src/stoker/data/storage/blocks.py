"""Blocks of a file: which of them hold some ranges of bytes."""

import mmap

import numpy as np

from stoker.data.ragged import Indices
from stoker.errors import UserError
from stoker.runs.environment import environment_number

BLOCK = 4 << 20  # bytes: long enough for a distant server, short enough for a small cache


def block_bytes() -> int:
    """$STOKER_BLOCK_BYTES, or the usual size."""
    size = environment_number("STOKER_BLOCK_BYTES", BLOCK)
    if size < mmap.PAGESIZE or size % mmap.PAGESIZE:
        raise UserError(f"STOKER_BLOCK_BYTES is {size}, and should be a multiple of {mmap.PAGESIZE}.")
    return size


def touched(first: Indices, end: Indices, block: int) -> Indices:
    """Numbers of the blocks that ranges of bytes lie in, each once."""
    some = end > first
    low, high = first[some] // block, (end[some] - 1) // block
    if (high - low > 1).any():
        longest = int((high - low).max())
        return np.unique(np.concatenate([np.minimum(low + step, high) for step in range(longest + 1)]))
    return np.unique(np.concatenate([low, high]))
