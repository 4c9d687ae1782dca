"""The plan: which samples form which step, and which of them each rank takes.

A step is a stretch of the epoch's order, the same for any number of ranks, threads or look-ahead; only then is it dealt
to the ranks. The state is {seed, epoch, position}, position being the samples of the epoch consumed so far, so resuming
is arithmetic. Every sample comes exactly once an epoch; the last step of an epoch is short, neither padded nor dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stoker.data.order import ExactOrder
from stoker.data.ragged import Indices
from stoker.data.samples import Subset


@dataclass(frozen=True)
class Position:
    """Where an epoch stands: `consumed` samples of it are behind us."""

    seed: int
    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class StepPlan:
    rows: Indices  # rows of the sample table, of the whole step
    after: Position  # where the run stands when the step is done


@dataclass(frozen=True)
class Plan:
    subset: Subset
    batch_size: int  # samples a step, over all ranks
    shuffle: bool = True

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.subset) // self.batch_size)

    def steps(self, position: Position, num_epochs: int | None = None) -> Iterator[StepPlan]:
        """The steps from `position` on, through the end of epoch `num_epochs` - 1, or for ever."""
        while num_epochs is None or position.epoch < num_epochs:
            order = ExactOrder(len(self.subset), position.seed, position.epoch) if self.shuffle else None
            while position.consumed < len(self.subset):
                step = self._step(order, position)
                position = step.after
                yield step
            position = Position(position.seed, position.epoch + 1, 0)

    def _step(self, order: ExactOrder | None, position: Position) -> StepPlan:
        stop = min(position.consumed + self.batch_size, len(self.subset))
        taken = order.take(position.consumed, stop) if order else np.arange(position.consumed, stop, dtype=np.int64)
        return StepPlan(self.subset.rows(taken), Position(position.seed, position.epoch, stop))
