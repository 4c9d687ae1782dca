"""Checksums of ranges from those of their parts: bytes are looked at once, when they come."""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

POLYNOMIAL = 0xEDB88320  # of CRC-32, its lowest power first
BITS = 32

Matrix = tuple[int, ...]  # over two elements: a column each


class Expected:
    """What the pieces of a file should sum up to, compared with the blocks it comes in as soon as a piece is complete.

    Where blocks and pieces do not fit into one another nothing is compared.
    """

    def __init__(self, sums: Sequence[int], piece: int, size: int, block: int) -> None:
        self._sums, self._piece, self._size, self._block = sums, piece, size, block
        self._crcs = np.zeros(-(-size // block), np.int64)
        self._missing = np.ones(len(self._crcs), bool)

    def agrees(self, number: int, crc: int) -> bool:
        """A block came: is the piece that it belongs to what it should be, as far as is known?"""
        self._crcs[number], self._missing[number] = crc, False
        if len(self._sums) != -(-self._size // self._piece):
            return False
        if self._block >= self._size:
            return crc == joined((sum_, self._length(at, self._piece)) for at, sum_ in enumerate(self._sums))
        blocks = self.beside(number)
        if self._piece % self._block or self._missing[blocks.start : blocks.stop].any():
            return True
        found = joined((int(self._crcs[block]), self._length(block, self._block)) for block in blocks)
        return found == self._sums[number * self._block // self._piece]

    def beside(self, number: int) -> range:
        """Blocks of the same piece."""
        in_piece = max(1, self._piece // self._block)
        first = number // in_piece * in_piece
        return range(first, min(first + in_piece, len(self._crcs)))

    def _length(self, number: int, size: int) -> int:
        return min(size, self._size - number * size)


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of ranges one after the other, of their checksums and lengths."""
    whole = 0
    for crc, length in parts:
        whole = _times(_zeros(length), whole) ^ crc
    return whole


@lru_cache(maxsize=64)
def _zeros(length: int) -> Matrix:
    """What so many zero bytes do to a checksum."""
    one_bit = (POLYNOMIAL, *(1 << bit for bit in range(BITS - 1)))
    power = _squared(_squared(_squared(one_bit)))  # a byte
    found: Matrix = tuple(1 << bit for bit in range(BITS))
    while length:
        if length & 1:
            found = tuple(_times(power, column) for column in found)
        power, length = _squared(power), length >> 1
    return found


def _squared(matrix: Matrix) -> Matrix:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: Sequence[int], vector: int) -> int:
    found = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            found ^= column
        vector >>= 1
    return found
