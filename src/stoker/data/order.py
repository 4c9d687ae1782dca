"""The order of an epoch: position -> index of the sample, a pure function of (seed, epoch), from any position on.

ExactOrder is a random permutation of N samples in O(1) memory: a six-round Feistel network permutes the numbers below
the next even power of two; numbers beyond N walk on until they fall inside. Any position can be asked for at once and in
both directions, so resuming is arithmetic. Four rounds, as other loaders use, leave neighbours visibly correlated.

WindowOrder is for storage that is slow at random places: blocks that are read at once (row groups) are permuted, then
every sample is delayed by a random distance below `window`. Only about two windows of samples are live at any time.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from stoker.data.ragged import Indices

ROUNDS = 6
Words = npt.NDArray[np.uint64]


class Order(Protocol):
    def take(self, start: int, stop: int) -> Indices:
        """The samples at the positions start .. stop of the epoch."""


class StorageOrder:
    """Samples as they are stored: for validation and for sets that were shuffled when they were packed."""

    def take(self, start: int, stop: int) -> Indices:
        return np.arange(start, stop, dtype=np.int64)


class RepeatedOrder:
    """Each sample of another order several times in a row: repeated augmentation. An epoch stays as long as it was."""

    def __init__(self, order: Order, repeats: int) -> None:
        self._order, self._repeats = order, repeats

    def take(self, start: int, stop: int) -> Indices:
        first = start // self._repeats
        once = self._order.take(first, -(-stop // self._repeats))
        return once[np.arange(start, stop) // self._repeats - first]


class ExactOrder:
    """A random permutation of 0 .. num_samples - 1."""

    def __init__(self, num_samples: int, seed: int, epoch: int) -> None:
        if num_samples < 1:
            raise ValueError(f"an order needs at least one sample, not {num_samples}")
        self.num_samples = num_samples
        self._half = np.uint64(max(1, ((num_samples - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        # Hashed together, so that (seed 0, epoch 1) and (seed 1, epoch 0) differ.
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(ROUNDS, np.uint64)

    def __len__(self) -> int:
        return self.num_samples

    def take(self, start: int, stop: int) -> Indices:
        return self.forward(np.arange(start, stop, dtype=np.int64))

    def forward(self, positions: Indices) -> Indices:
        return self._walk(positions, self._encrypt)

    def inverse(self, indices: Indices) -> Indices:
        """Where in the epoch a sample comes."""
        return self._walk(indices, self._decrypt)

    def _walk(self, numbers: Indices, step: Callable[[Words], Words]) -> Indices:
        values = step(np.asarray(numbers).astype(np.uint64))
        outside = np.flatnonzero(values >= self.num_samples)
        while outside.size:
            values[outside] = step(values[outside])
            outside = outside[values[outside] >= self.num_samples]
        return values.astype(np.int64)

    def _encrypt(self, values: Words) -> Words:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half) | right

    def _decrypt(self, values: Words) -> Words:
        left, right = values >> self._half, values & self._mask
        for key in self._keys[::-1]:
            left, right = right ^ (_mix(left ^ key) & self._mask), left
        return (left << self._half) | right


class WindowOrder:
    """Permuted blocks, then each sample moved back by a random distance below `window`.

    Sample i of the sequence of permuted blocks gets the key i + d(i), 0 <= d(i) < window, and the samples come in the
    order of their keys. Keys of one chunk [k window, (k + 1) window) belong to samples of two windows only, so a chunk is
    found by sorting those, without looking at the rest of the epoch.
    """

    def __init__(self, block_starts: Indices, num_samples: int, window: int, seed: int, epoch: int) -> None:
        if num_samples < 1 or window < 1:
            raise ValueError(f"a window order needs samples and a window, not {num_samples} and {window}")
        self.num_samples, self.window = num_samples, window
        starts, sizes = block_starts, np.diff(block_starts, append=num_samples)
        blocks = ExactOrder(len(starts), seed, epoch).take(0, len(starts))
        self._starts = starts[blocks]  # of the permuted blocks
        self._offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes[blocks])])
        self._block_starts = starts
        self._place = np.empty(len(starts), np.int64)  # of each block among the permuted ones
        self._place[blocks] = np.arange(len(starts))
        self._key = np.random.SeedSequence((seed, epoch, 1)).generate_state(1, np.uint64)[0]
        self._chunks: OrderedDict[int, tuple[int, Indices]] = OrderedDict()

    def __len__(self) -> int:
        return self.num_samples

    def take(self, start: int, stop: int) -> Indices:
        parts = []
        number = max(0, start // self.window)  # a chunk begins at most one window before its keys
        while start < stop:
            begin, samples = self._chunk(number)
            if start < begin + len(samples):
                part = samples[start - begin : stop - begin]
                parts.append(part)
                start += len(part)
            number += 1
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @property
    def block_starts(self) -> Indices:
        """First sample of each block, in the order in which blocks are first needed."""
        return self._starts

    def sort_keys(self, samples: Indices) -> Indices:
        """Numbers, all different, that rise in the order in which samples come."""
        block = np.searchsorted(self._block_starts, samples, side="right") - 1
        sequence = self._offsets[self._place[block]] + (samples - self._block_starts[block])
        return np.asarray(((sequence + self._delay(sequence)) << 32) | sequence)

    def _chunk(self, number: int) -> tuple[int, Indices]:
        """Position at which a chunk begins, and its samples in order; the latest few are remembered."""
        if number not in self._chunks:
            low = max(0, (number - 1) * self.window)
            sequence = np.arange(low, min(self.num_samples, (number + 1) * self.window))
            keys = sequence + self._delay(sequence)
            early = keys < number * self.window
            begin = low + int(early.sum())
            mine = ~early & (keys < (number + 1) * self.window)
            sequence, keys = sequence[mine], keys[mine]
            self._chunks[number] = begin, self._samples(sequence)[rising(keys)]
            while len(self._chunks) > 3:
                self._chunks.popitem(last=False)
        return self._chunks[number]

    def _delay(self, sequence: Indices) -> Indices:
        return (_mix(sequence.astype(np.uint64) ^ self._key) % np.uint64(self.window)).astype(np.int64)

    def _samples(self, sequence: Indices) -> Indices:
        block = np.searchsorted(self._offsets, sequence, side="right") - 1
        return np.asarray(self._starts[block] + (sequence - self._offsets[block]))


def rising(keys: Indices) -> Indices:
    """The stable order in which whole numbers rise: those that carry their own place are sorted several times quicker."""
    bits = max(1, (len(keys) - 1).bit_length())
    if not len(keys) or keys.min() < 0 or int(keys.max()) >> (63 - bits):
        return np.argsort(keys, kind="stable")
    return np.sort((keys.astype(np.int64, copy=False) << bits) | np.arange(len(keys))) & ((1 << bits) - 1)


def hashed(values: Words) -> Words:
    """A random number below 2^64 for each value."""
    return _mix(values + np.uint64(0x9E3779B97F4A7C15))


def _mix(values: Words) -> Words:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
