"""The order of an epoch: an exact random permutation of N samples in O(1) memory, a pure function of (seed, epoch).

A six-round Feistel network permutes the numbers below the next even power of two; numbers beyond N walk on until they
fall inside. Any position can be asked for at once and in both directions, so resuming is arithmetic. Four rounds, as
other loaders use, leave neighbours visibly correlated.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from stoker.data.ragged import Indices

ROUNDS = 6
Words = npt.NDArray[np.uint64]


class ExactOrder:
    """Position in the epoch -> index of the sample, for 0 <= position < num_samples."""

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
        """The samples at the positions start .. stop."""
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


def _mix(values: Words) -> Words:
    """The finaliser of splitmix64: every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
