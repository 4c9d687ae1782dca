"""Columns of a long run as few points as a screen can show, with every extreme among them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

MOST = 2400  # numbers of one chart's column

Numbers = npt.NDArray[np.float64]


def in_order(step: Numbers) -> npt.NDArray[np.int64]:
    """Places whose step nobody wrote again: a resumed run repeats what came after its checkpoint; its last word counts."""
    if not len(step):
        return np.zeros(0, np.int64)
    later = np.append(np.minimum.accumulate(step[::-1])[::-1][1:], np.inf)
    return np.flatnonzero(step < later)


def thinned(columns: Sequence[Numbers], most: int = MOST) -> npt.NDArray[np.int64]:
    """Places to keep: of every stretch the smallest and the largest of each column, and the first that is no number."""
    length = len(columns[0])
    if length <= most:
        return np.arange(length)
    num_parts = max(1, most // (2 * len(columns)))
    edges = np.linspace(0, length, num_parts + 1).astype(np.int64)
    kept = [0, length - 1]
    for column in columns:
        finite = np.isfinite(column)
        low, high = np.where(finite, column, np.inf), np.where(finite, column, -np.inf)
        for first, last in pairwise(edges.tolist()):
            if first < last:
                kept += [first + int(low[first:last].argmin()), first + int(high[first:last].argmax())]
                if not finite[first:last].all():
                    kept.append(first + int((~finite[first:last]).argmax()))
    return np.unique(np.array(kept, np.int64))


def chart(
    name: str, x: Numbers, columns: Mapping[str, Numbers], most: int = MOST, **about: Any
) -> dict[str, Any] | None:
    """A chart for the page; columns without any number are left out, and a chart without columns is none."""
    known = {label: values for label, values in columns.items() if np.isfinite(values).any()}
    if not known:
        return None
    places = thinned(list(known.values()), most)
    series = [{"name": label, "y": short(values[places])} for label, values in known.items()]
    return {"id": name, "x": short(x[places], 12), "series": series, "of": len(x), **about}


def short(values: Numbers, digits: int = 6) -> list[float | None]:
    """For JSON, which has neither NaN nor infinity."""
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
