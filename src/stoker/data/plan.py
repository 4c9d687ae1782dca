"""The plan: which samples form which step, and which micro-batches of it each rank takes.

A step is a stretch of the epoch's order, cut by number of samples or by a budget of cost; it is the same for any number
of ranks, threads or look-ahead. Only then is it dealt: into as many micro-batches as memory asks for, the same number for
every rank, balanced by cost. The state is {seed, epoch, position}, position being the samples of the epoch consumed so
far, so resuming is arithmetic, also with another number of ranks.

Every sample comes exactly once an epoch. The last step of an epoch is short, neither padded nor dropped; if it has fewer
samples than there are ranks, some micro-batches are empty.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.data.order import Order, rising
from stoker.data.ragged import Indices
from stoker.data.samples import SampleTable, Subset


@dataclass(frozen=True)
class Position:
    """Where a run stands: `consumed` samples of an epoch are behind it."""

    seed: int
    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class MicroBatch:
    """What is read at once: samples, and the epoch that they are read for."""

    rows: Indices
    seed: int = 0
    epoch: int = 0
    cost: int = 0
    copies: Indices | None = None  # which copy of its sample each row is, where samples come several times a step
    partners: Indices | None = None  # the place of each row's partner, where samples come in pairs; alone: its own

    def only(self, rows: Indices) -> "MicroBatch":
        """Some samples of it, where they have neither copies nor partners."""
        return self if rows is self.rows else MicroBatch(rows, self.seed, self.epoch)


@dataclass
class Step:
    """One optimizer step on its way: planned, made by the loader, copied to the device, computed."""

    rows: Indices  # of the sample table, over all ranks, in the order of the epoch
    before: Position
    after: Position  # where the run stands once the step is done
    micro_batches: Sequence[MicroBatch] = ()  # this rank's share of it
    batches: tuple[Any, ...] = ()  # one for each of them: on the host, then on the device
    wait_s: float = 0.0  # how long the consumer waited for them
    copy_s: Callable[[], float] = lambda: 0.0  # how long copying them took, once they are there

    def without_batches(self) -> "Step":
        """What was planned of it."""
        return Step(self.rows, self.before, self.after, self.micro_batches)

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    @property
    def cost(self) -> int:
        return sum(micro.cost for micro in self.micro_batches)


@dataclass(frozen=True)
class Plan:
    table: SampleTable
    subset: Subset
    order: Callable[[int, int], Order]  # (seed, epoch) -> order of the subset
    batch_size: int | None  # samples a step, or
    batch_cost: int | None = None  # cost a step
    micro_cost: int | None = None  # most cost in a micro-batch; None: one micro-batch a rank
    sample_cost: int | None = None  # a sample that costs more is thinned to this
    repeated: bool = False  # the order names samples several times
    paired: bool = False  # each sample has a partner, and both are in one micro-batch

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_cost is None):
            raise ValueError("a step is cut by batch_size or by batch_cost: exactly one of them must be given")
        if self.paired and self.micro_cost is not None:
            raise ValueError("samples that come in pairs are not cut by micro_cost: a pair may cost more than that")

    def __len__(self) -> int:
        return len(self.subset)

    def steps_per_epoch(self) -> int:
        """Exact for steps by number; for steps by cost an estimate from the mean cost."""
        if self.batch_size is not None:
            return -(-len(self) // self.batch_size)
        assert self.batch_cost is not None
        return max(1, round(len(self) * self.mean_cost() / self.batch_cost))

    def steps(
        self, position: Position, num_epochs: int | None = None, *, rank: int = 0, num_ranks: int = 1
    ) -> Iterator[Step]:
        """The steps from `position` on, through the end of epoch `num_epochs` - 1, or for ever, with a rank's share."""
        while num_epochs is None or position.epoch < num_epochs:
            order = _InStretches(self.order(position.seed, position.epoch), len(self))
            while position.consumed < len(self):
                rows = self._next_rows(order, position.consumed)
                after = Position(position.seed, position.epoch, position.consumed + len(rows))
                step = Step(rows, position, after)
                step.micro_batches = self.deal(step, num_ranks)[rank]
                yield step
                position = after
            position = Position(position.seed, position.epoch + 1, 0)

    def costs(self, rows: Indices) -> Indices:
        """Cost of each sample, after thinning."""
        costs = self.table.cost(rows)
        return costs if self.sample_cost is None else np.minimum(costs, self.sample_cost)

    def deal(self, step: Step, num_ranks: int) -> list[list[MicroBatch]]:
        """The step's micro-batches for each rank, the same number for all."""
        costs = self.costs(step.rows)
        pair = _pairs(len(costs)) if self.paired else np.arange(len(costs))
        if self.paired:  # they stay together
            costs = np.bincount(pair, costs)
        each = 1
        if self.micro_cost is not None:
            each = max(1, -(-int(costs.sum()) // (num_ranks * self.micro_cost)))
        while True:
            # A sample without a partner comes last: a rank then has as many samples in every step.
            alone = self.paired and len(pair) % 2 == 1
            bins = _balanced(np.append(costs[:-1], 0) if alone else costs, num_ranks * each)
            spent = np.bincount(bins, costs, minlength=num_ranks * each)
            if self.micro_cost is None or num_ranks * each >= len(costs) or spent.max() <= self.micro_cost:
                break
            each += 1
        bins = bins[pair]
        dealt = []
        for number, cost in enumerate(spent):
            mine = np.flatnonzero(bins == number)
            # In the order of storage: the same sum of gradients, and reads that only go forward.
            mine = mine[rising(step.rows[mine])]
            copies = occurrences(step.rows)[mine] if self.repeated else None
            partners = _partners(pair[mine]) if self.paired else None
            dealt.append(MicroBatch(step.rows[mine], step.before.seed, step.before.epoch, int(cost), copies, partners))
        return [dealt[rank::num_ranks] for rank in range(num_ranks)]

    def _next_rows(self, order: Order, start: int) -> Indices:
        if self.batch_size is not None:
            return self.subset.rows(order.take(start, min(start + self.batch_size, len(self))))
        assert self.batch_cost is not None
        length = 2 + int(1.25 * self.batch_cost / max(1.0, self.mean_cost()))
        while True:
            rows = self.subset.rows(order.take(start, min(start + length, len(self))))
            spent = np.cumsum(self.costs(rows))
            if spent[-1] > self.batch_cost or start + len(rows) == len(self):
                return rows[: max(1, int(np.searchsorted(spent, self.batch_cost, side="right")))]
            length *= 2

    def mean_cost(self) -> float:
        """From a fixed sample of the subset: reading every cost would touch the whole table."""
        size = min(len(self), 4096)
        return float(self.costs(self.subset.rows(np.linspace(0, len(self) - 1, size).astype(np.int64))).mean())


def occurrences(rows: Indices) -> Indices:
    """How often each row came before in the list."""
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    counted = np.empty(len(rows), np.int64)
    counted[order] = np.arange(len(rows)) - np.searchsorted(ordered, ordered)
    return counted


def _pairs(count: int) -> Indices:
    """The pair of each sample: the first half of a step with the second, because copies of a sample stand side by side."""
    half, pair = count // 2, np.arange(count)
    pair[half : 2 * half] = np.arange(half)
    pair[2 * half :] = half  # one may be left alone
    return pair


def _partners(pair: Indices) -> Indices:
    """The place of the other sample of each pair; one that is alone gets its own."""
    order = np.argsort(pair, kind="stable")
    ordered = pair[order]
    same = ordered[1:] == ordered[:-1]
    partner = np.arange(len(pair))
    partner[order[:-1][same]], partner[order[1:][same]] = order[1:][same], order[:-1][same]
    return partner


class _InStretches:
    """An order asked for many positions at once, because a few cost nearly as much as thousands."""

    def __init__(self, order: Order, num_samples: int, size: int = 1 << 15) -> None:
        self._order, self._num_samples, self._size = order, num_samples, size
        self._start, self._held = 0, np.zeros(0, np.int64)

    def take(self, start: int, stop: int) -> Indices:
        if not (self._start <= start and stop <= self._start + len(self._held)):
            end = min(max(stop, start + self._size), self._num_samples)
            self._start, self._held = start, self._order.take(start, end)
        return self._held[start - self._start : stop - self._start]


def _balanced(costs: Indices, num_bins: int) -> Indices:
    """Bin of each sample: the costliest first, dealt forth and back."""
    if num_bins == 1:
        return np.zeros(len(costs), np.int64)
    turn = np.arange(len(costs)) % (2 * num_bins)
    bins = np.empty(len(costs), np.int64)
    bins[np.argsort(-costs, kind="stable")] = np.minimum(turn, 2 * num_bins - 1 - turn)
    return bins
