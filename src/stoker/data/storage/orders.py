"""Which order an epoch has where samples lie elsewhere.

An exact order asks for pieces from everywhere at once. So the first epoch, and every epoch of a set that the cache cannot
hold, goes through the blocks of storage in a random order and mixes samples in a window; later epochs of a set that fits are
exact.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from stoker import console
from stoker.data.cache import budget_bytes
from stoker.data.loader import LoaderConfig
from stoker.data.order import ExactOrder, Order, WindowOrder
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices
from stoker.data.samples import SampleTable, Subset, block_positions
from stoker.data.source import Ahead
from stoker.data.stages import Stage
from stoker.errors import UserError

Choice = Literal["exact", "window", "window-first"]
AT_LEAST = 64 << 20  # bytes beside the windows: tables, and what is being fetched
FILLED = 0.9  # of the budget that one set may take: tables, the book and other runs need some
WINDOWS = 3  # that the cache must hold: one being read, one before it that is not let go yet, and what is fetched ahead


def choose_order(asked: str, num_bytes: int, *, in_blocks: bool) -> Choice:
    """For a set of so many bytes elsewhere; `in_blocks`: many samples share a piece."""
    fits = num_bytes <= FILLED * budget_bytes()
    if asked in ("exact", "window-first") and in_blocks and not fits:
        raise UserError(
            f"loader.order is {asked}, which needs all {num_bytes / 1e6:,.0f} MB in the cache, and that may take "
            f"{budget_bytes() / 1e6:,.0f} MB. STOKER_CACHE_BYTES={int(num_bytes / FILLED) + 1} would do; or "
            f"loader.order window."
        )
    if asked != "auto":
        return asked  # type: ignore[return-value]
    if not in_blocks:
        return "exact"
    return "window-first" if fits else "window"


def check_budget(table: SampleTable, subset: Subset, num_bytes: int, loader: LoaderConfig) -> None:
    """A cache that cannot hold the window would fetch the same pieces again and again."""
    share = min(1.0, loader.window / max(1, len(subset)))
    needed = int(WINDOWS * share * num_bytes * len(subset) / max(1, len(table))) + AT_LEAST
    needed = min(needed, int(num_bytes / FILLED) + AT_LEAST)
    if needed > budget_bytes():
        raise UserError(
            f"The cache may take {budget_bytes() / 1e6:,.0f} MB, and a window of {loader.window:,} samples needs about "
            f"{needed / 1e6:,.0f} MB. STOKER_CACHE_BYTES={needed} would do; or lower loader.window."
        )


def remote_order(
    choice: Choice, table: SampleTable, subset: Subset, loader: LoaderConfig, name: str
) -> Callable[[int, int], Order]:
    blocks, window = block_positions(table, subset), loader.window

    def order(seed: int, epoch: int) -> Order:
        if choice == "exact" or (choice == "window-first" and epoch > 0):
            return ExactOrder(len(subset), seed, epoch)
        return WindowOrder(blocks, len(subset), window, seed, epoch)

    if choice != "exact":
        why = "" if loader.order != "auto" else "the cache cannot hold all of it, so "
        what = "the first epoch goes" if choice == "window-first" else f"{why}epochs go"
        console.say(
            f"{name}: {what} through {len(blocks):,} blocks at random, mixed in a window of {window:,} samples."
        )
    return order


def fetched_ahead(places: Any, *, kept_for: int | None, rows_of: Any = None, rest: Any = None) -> Ahead:
    """What goes through the plan before the loader does."""
    from stoker.data.storage.ahead import Fetching

    return Fetching(places, budget_bytes(), kept_for=kept_for, rows_of=rows_of, rest=rest)


def fetch_stage(places: Callable[[MicroBatch], Sequence[tuple[Any, Indices]]]) -> Stage:
    """Waits until a micro-batch is here: what reading waits for is not what reading costs."""

    def fetch(micro: MicroBatch) -> MicroBatch:
        found = places(micro)
        for file, numbers in found:
            file.want(numbers)
        for file, numbers in found:
            with file.held(numbers):
                pass
        return micro

    return Stage("fetch", fetch)


def block_rows(shard: Array, first: Indices, block: int) -> Indices:
    """Rows at which a new block of a shard begins."""
    number = first // block
    new = (np.diff(shard) != 0) | (np.diff(number) != 0)
    return np.concatenate([[0], np.flatnonzero(new) + 1]).astype(np.int64)
