"""Thinning: a sample with more rows than the cap keeps a random part of them, the same one for any thread or rank.

Rows of the first priority are kept before others (for IceCube, pulses that are not auxiliary); inside a priority the
draw is keyed by (seed, epoch, sample, row). The rows that stay keep their order.
"""

import numpy as np
import numpy.typing as npt

from stoker.data.order import hashed
from stoker.data.ragged import Array, Indices, Ragged, offsets_of


def thin(
    ragged: Ragged,
    cap: int,
    sample_ids: Indices,
    seed: int,
    epoch: int,
    last: npt.NDArray[np.bool_] | None = None,
) -> Ragged:
    """At most `cap` rows of each sample; rows marked in `last` go only where there is room left."""
    keep = kept_elements(ragged.offsets, cap, sample_ids, seed, epoch, last)
    if keep is None:
        return ragged
    columns: dict[str, Array] = {name: column[keep] for name, column in ragged.columns.items()}
    return Ragged(columns, offsets_of(np.minimum(np.diff(ragged.offsets), cap)), ragged.rows)


def kept_elements(
    offsets: Indices, cap: int, sample_ids: Indices, seed: int, epoch: int, last: npt.NDArray[np.bool_] | None
) -> Indices | None:
    """Rows that stay, in order; None where all do, which is the usual case."""
    counts = np.diff(offsets)
    long = np.flatnonzero(counts > cap)
    if not long.size:
        return None
    keep = np.ones(offsets[-1], bool)
    start, size = offsets[long], counts[long]
    within = offsets_of(size)
    rows = np.repeat(start - within[:-1], size) + np.arange(within[-1])
    sample = np.repeat(np.arange(len(long)), size)
    key = np.random.SeedSequence((seed, epoch, 2)).generate_state(1, np.uint64)[0]
    draw = hashed(hashed(sample_ids[long].astype(np.uint64) ^ key)[sample] + (rows - start[sample]).astype(np.uint64))
    # One integer holds priority and draw: the top bit is set for rows that come last.
    rank = draw >> np.uint64(1)
    if last is not None:
        rank |= last[rows].astype(np.uint64) << np.uint64(63)
    order = np.lexsort((rank, sample))
    place = np.empty(len(rows), np.int64)
    place[order] = np.arange(len(rows)) - within[sample[order]]
    keep[rows[place >= cap]] = False
    return np.flatnonzero(keep)
