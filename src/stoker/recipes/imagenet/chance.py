"""Random numbers that belong to a sample: the same for any number of threads or ranks, and after any restart."""

# B samples, K numbers of each
import numpy as np
import numpy.typing as npt

from stoker.data.order import hashed
from stoker.data.ragged import Indices

Floats = npt.NDArray[np.float64]


def uniforms(seed: int, epoch: int, ids: Indices, count: int, repeat: Indices | None = None) -> Floats:
    """(B, count) numbers in [0, 1), a pure function of (seed, epoch, id, repeat)."""
    with np.errstate(over="ignore"):
        key = hashed(hashed(np.array([seed], np.uint64)) + np.uint64(epoch))
        of_sample = hashed(key + hashed(ids.astype(np.uint64)))
        if repeat is not None:
            of_sample = hashed(of_sample + repeat.astype(np.uint64))
        numbers = hashed(of_sample[:, None] + hashed(np.arange(count, dtype=np.uint64)))
    return (numbers >> np.uint64(11)).astype(np.float64) / 2.0**53
