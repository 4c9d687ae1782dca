"""The loader: an ordered window over a thread pool. Steps of the plan go in, batches come out in the same order.

Reading and collating release the GIL, so threads share one cache and nothing is copied between processes. How many
threads work and how far they look ahead changes the speed, never the batches.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Generic, Protocol, TypeVar

from pydantic import Field

from stoker.data.plan import Plan, Position, StepPlan
from stoker.data.ragged import Indices, Ragged
from stoker.settings import AlsoCalled, config

B = TypeVar("B")


@config
class LoaderConfig:
    batch_size: Annotated[int, Field(ge=1), AlsoCalled("batch", "bs")] = 256  # samples a step, over all ranks
    threads: Annotated[int, Field(ge=1), AlsoCalled("num_workers", "workers")] = 2  # that read and collate
    look_ahead: Annotated[int, Field(ge=1), AlsoCalled("prefetch", "prefetch_factor")] = 4  # batches made in advance


class Source(Protocol):
    """Reads samples by their rows in the sample table."""

    def gather(self, rows: Indices) -> Ragged: ...


@dataclass(frozen=True)
class Loaded(Generic[B]):
    batch: B
    after: Position  # where the run stands once this batch is used
    wait_s: float  # how long the consumer waited for it


class Loader(Generic[B]):
    def __init__(self, plan: Plan, make_batch: Callable[[Indices], B], config: LoaderConfig) -> None:
        self.plan = plan
        self._make_batch = make_batch
        self._config = config

    def batches(self, position: Position, num_epochs: int | None = None) -> Iterator[Loaded[B]]:
        """Batches from `position` on. Closing the iterator stops the threads."""
        steps = self.plan.steps(position, num_epochs)
        with ThreadPoolExecutor(self._config.threads, "loader") as pool:
            ahead: deque[tuple[StepPlan, Future[B]]] = deque()
            try:
                for step in steps:
                    ahead.append((step, pool.submit(self._make_batch, step.rows)))
                    if len(ahead) > self._config.look_ahead:
                        yield _finish(*ahead.popleft())
                while ahead:
                    yield _finish(*ahead.popleft())
            finally:
                for _, future in ahead:
                    future.cancel()


def _finish(step: StepPlan, future: Future[B]) -> Loaded[B]:
    begin = time.perf_counter()
    batch = future.result()
    return Loaded(batch, step.after, time.perf_counter() - begin)
