"""Fetching ahead: the plan says which samples come next, so their pieces are asked for in that order, long before.

Pieces that no step has used for a while are let go, with the time at which the next epoch will ask for them where its order
is known: what is needed last is removed first.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stoker.data.order import Order, WindowOrder
from stoker.data.plan import Plan, Position, Step
from stoker.data.ragged import Indices
from stoker.data.storage.pieces import telemetry
from stoker.data.storage.remote import RemoteFile

BYTES_AHEAD = 256 << 20  # of the steps that are looked ahead, at most
STEPS_AHEAD = 256
RAMP = 4  # steps that are planned for one that goes out: the first is not kept waiting

Places = Callable[[Indices], Sequence[tuple[RemoteFile, Indices]]]  # rows of the table -> blocks that hold them
RowsOf = Callable[[RemoteFile, Indices], Indices]  # blocks -> a row of the table in each


class Fetching:
    """Goes through the planned steps before the loader does."""

    def __init__(
        self,
        places: Places,
        budget: int,
        *,
        kept_for: int | None = None,
        rows_of: RowsOf | None = None,
        rest: Callable[[], None] | None = None,
    ) -> None:
        """`kept_for`: samples for which a piece is kept without being used; None: as long as nobody needs the room.

        `rest` is called after an epoch, where all of a set is to be here.
        """
        self._made_of = places, budget, kept_for, rows_of, rest
        self._planned: dict[Position, list[tuple[RemoteFile, Indices]]] = {}  # of steps on their way, by where they end
        self._places, self._kept_for, self._rows_of = places, kept_for, rows_of
        self._most = min(BYTES_AHEAD, max(1, budget // 8))
        self._used: dict[tuple[RemoteFile, int], int] = {}  # samples that were done when a piece was last used
        self._done, self._begin = 0, time.monotonic()
        self._next: tuple[tuple[int, int], Order] | None = None  # the order of the next epoch

    def through(self, planned: Iterator[Step]) -> Iterator[Step]:
        """The same steps; what the next ones need is on its way when a step comes out."""
        coming: deque[tuple[Step, int]] = deque()  # with the bytes that were asked for it first
        ahead, ended = 0, False
        while True:
            for _ in range(RAMP):
                if ended or len(coming) >= STEPS_AHEAD or (coming and ahead >= self._most):
                    break
                step = next(planned, None)
                if step is None:
                    ended = True
                    break
                coming.append((step, self._ask(step)))
                ahead += coming[-1][1]
            if not coming:
                return
            step, asked = coming.popleft()
            ahead -= asked
            yield step

    def anew(self) -> "Fetching":
        """The same for another loader."""
        places, budget, kept_for, rows_of, rest = self._made_of
        return Fetching(places, budget, kept_for=kept_for, rows_of=rows_of, rest=rest)

    def closed(self) -> None:
        """No further step is asked for: what was fetched for them may go."""
        if self._kept_for is not None:
            planned = [(file, numbers) for places in self._planned.values() for file, numbers in places]
            for file, numbers in [*planned, *((file, np.array([number])) for file, number in self._used)]:
                file.done_with(numbers)
        self._planned.clear()
        self._used.clear()

    def finished(self, step: Step, plan: Plan) -> None:
        """A step was made: what nobody uses any more is let go."""
        self._done += step.num_samples
        if self._kept_for is None:
            self._planned.pop(step.after, None)
            rest = self._made_of[-1]
            if rest is not None and step.after.consumed >= len(plan):
                rest()
            return
        for file, numbers in self._planned.pop(step.after, ()):
            self._used.update(((file, int(number)), self._done) for number in numbers)
        idle = [key for key, last in self._used.items() if self._done - last >= self._kept_for]
        for file, number in idle:
            del self._used[file, number]
            file.done_with([number], self._next_use(file, number, step, plan))

    def telemetry(self) -> dict[str, float]:
        return telemetry() or {}

    def _ask(self, step: Step) -> int:
        self._planned[step.after] = list(self._places(_rows(step)))
        return sum(file.want(numbers) for file, numbers in self._planned[step.after])

    def _next_use(self, file: RemoteFile, number: int, step: Step, plan: Plan) -> float | None:
        """By the clock: when the next epoch will come to it, at the rate of this one so far."""
        if self._rows_of is None:
            return None
        key = step.before.seed, step.before.epoch + 1
        if self._next is None or self._next[0] != key:
            self._next = key, plan.order(*key)
        order = self._next[1]
        if not isinstance(order, WindowOrder):
            return None
        position = plan.subset.positions(self._rows_of(file, np.array([number])))
        place = int(order.sort_keys(np.minimum(position, len(plan) - 1))[0] >> 32)
        left = len(plan) - step.after.consumed + place
        return time.time() + left * (time.monotonic() - self._begin) / max(1, self._done)


def _rows(step: Step) -> Indices:
    return np.concatenate([micro.rows for micro in step.micro_batches]) if step.micro_batches else step.rows[:0]
