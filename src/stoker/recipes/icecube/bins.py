"""Medians of errors along a quantity, with how many events they are of and how sure they are."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BINS = 24
LEAST = 100  # events of a bin: the median of fewer jumps from noise alone
SURE = 1.96  # standard deviations: 95 %

Numbers = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Binned:
    """Of bins that hold equally many events."""

    middle: list[float]  # median of the quantity
    median: list[float]
    low: list[float]  # 95 % of the median lie between
    high: list[float]
    count: list[int]


def binned(error: Numbers, quantity: Numbers) -> Binned:
    order = np.argsort(quantity, kind="stable")
    found = Binned([], [], [], [], [])
    for part in np.array_split(order, max(1, min(MOST_BINS, len(order) // LEAST))):
        if not len(part):
            continue
        low, median, high = median_between(error[part])
        found.middle.append(float(np.median(quantity[part])))
        found.median.append(median)
        found.low.append(low)
        found.high.append(high)
        found.count.append(len(part))
    return found


def median_between(values: Numbers) -> tuple[float, float, float]:
    """The median, and between which of the values it lies in 95 % of all samples: no shape is assumed."""
    ordered, count = np.sort(values), len(values)
    half = SURE * np.sqrt(count) / 2
    low, high = int(np.floor(count / 2 - half)), int(np.ceil(count / 2 + half))
    return float(ordered[max(0, low)]), float(np.median(ordered)), float(ordered[min(count - 1, high)])
