"""How well an order is shuffled, in four figures that anyone can compute for any loader.

In goes the sequence of storage positions (rows of the sample table) as an epoch delivers them.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.data.ragged import Indices


@dataclass(frozen=True)
class ShuffleQuality:
    lag1: float  # correlation of neighbours in the sequence; 0 for a true shuffle
    lag1_error: float  # standard error of that correlation under a true shuffle
    shards_per_batch: float  # distinct shards in a batch, mean
    shards_expected: float  # the same for a true shuffle
    chi2_z: float  # position in the epoch against place in storage: standard deviations from independence
    displacement: float | None  # mean distance a sample moves between two epochs, in units of n / 3 (1 = true shuffle)

    def line(self) -> str:
        moved = f", moved between epochs {self.displacement:.2f}" if self.displacement is not None else ""
        return (
            f"lag-1 correlation {self.lag1:+.4f} (+-{self.lag1_error:.4f}), shards in a batch "
            f"{self.shards_per_batch:.1f} of {self.shards_expected:.1f} expected, chi-square {self.chi2_z:+.1f} sigma{moved}"
        )


def shuffle_quality(
    sequence: Indices, shard: npt.NDArray[np.integer], batch_size: int, next_sequence: Indices | None = None
) -> ShuffleQuality:
    """Judges `sequence` (a permutation of 0 .. n-1, or a long part of one); `shard[i]` is the shard of sample i."""
    n = len(sequence)
    lag1 = float(np.corrcoef(sequence[:-1], sequence[1:])[0, 1]) if n > 2 else 0.0
    seen, expected = _shards_per_batch(sequence, shard, batch_size)
    return ShuffleQuality(
        lag1=lag1,
        lag1_error=1 / math.sqrt(max(1, n - 1)),
        shards_per_batch=seen,
        shards_expected=expected,
        chi2_z=_chi2_z(sequence),
        displacement=None if next_sequence is None else _displacement(sequence, next_sequence),
    )


def _shards_per_batch(sequence: Indices, shard: npt.NDArray[np.integer], batch_size: int) -> tuple[float, float]:
    batches = [sequence[start : start + batch_size] for start in range(0, len(sequence) - batch_size + 1, batch_size)]
    batches = batches[:: max(1, len(batches) // 200)] or [sequence]
    seen = np.mean([len(np.unique(shard[batch])) for batch in batches])
    shares = np.bincount(shard[sequence]) / len(sequence)
    expected = np.sum(1 - (1 - shares) ** len(batches[0]))
    return float(seen), float(expected)


def _chi2_z(sequence: Indices, bins: int = 32) -> float:
    n = len(sequence)
    bins = max(2, min(bins, int(math.sqrt(n / 8))))
    position = np.arange(n) * bins // n
    place = (sequence - sequence.min()) * bins // (np.ptp(sequence) + 1)
    counts = np.bincount(position * bins + place, minlength=bins * bins).reshape(bins, bins).astype(float)
    expected = counts.sum(1, keepdims=True) * counts.sum(0, keepdims=True) / n
    chi2 = float(((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum())
    freedom = (bins - 1) ** 2
    return (chi2 - freedom) / math.sqrt(2 * freedom)


def _displacement(sequence: Indices, following: Indices) -> float:
    n = min(len(sequence), len(following))
    size = int(max(sequence.max(), following.max())) + 1
    before, after = np.full(size, -1), np.full(size, -1)
    before[sequence[:n]], after[following[:n]] = np.arange(n), np.arange(n)
    both = (before >= 0) & (after >= 0)
    return float(np.abs(before[both] - after[both]).mean() / (n / 3))
