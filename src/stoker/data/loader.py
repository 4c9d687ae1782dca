"""The loader: an ordered window over threads. Steps of the plan go in, batches come out in the same order.

Reading and collating release the GIL, so threads share one cache and nothing is copied between processes. How many
threads work and how far they look ahead changes the speed, never the batches. Every stage counts what it does.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from pydantic import Field

from stoker.data.plan import MicroBatch, Plan, Position, StepPlan
from stoker.data.ragged import Indices, Ragged
from stoker.data.stages import Stage, StageTimes
from stoker.data.workers import Job, Workers
from stoker.errors import MachineError, UserError
from stoker.settings import AlsoCalled, config

B = TypeVar("B")


@config
class LoaderConfig:
    batch_size: Annotated[int, Field(ge=1), AlsoCalled("batch", "bs")] | None = 256  # samples a step, over all ranks
    batch_cost: Annotated[int, Field(ge=1), AlsoCalled("max_tokens")] | None = None  # cost a step instead (pulses)
    micro_cost: Annotated[int, Field(ge=1)] | None = None  # most cost read and computed at once; None: the whole step
    sample_cost: Annotated[int, Field(ge=1), AlsoCalled("max_pulses")] | None = (
        None  # longer samples are thinned to this
    )
    threads: Annotated[int, Field(ge=1), AlsoCalled("num_workers", "workers")] | None = (
        None  # None: one a core, at most 8
    )
    look_ahead: Annotated[int, Field(ge=1), AlsoCalled("prefetch", "prefetch_factor")] = 8  # micro-batches made ahead
    ram_bytes: Annotated[int, Field(ge=1 << 20)] = 4 << 30  # limit of batches, caches and decoding, not of mapped files
    stuck_after_s: Annotated[float, Field(gt=0)] = 300.0  # a batch not ready after this is an error that names the file
    bad_shards: Literal["stop", "quarantine"] = "stop"  # what an unreadable shard does
    window: Annotated[int, Field(ge=1)] = 65_536  # samples that a window shuffle mixes, where files are read directly

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_cost is None):
            raise ValueError("a step is cut by batch_size or by batch_cost: set one of them, and the other to null")
        if self.micro_cost is not None and (self.sample_cost is None or self.sample_cost > self.micro_cost):
            raise ValueError(
                f"micro_cost {self.micro_cost} cannot be kept while a single sample may cost more: set sample_cost to "
                f"{self.micro_cost} or less"
            )

    @property
    def num_threads(self) -> int:
        return self.threads or min(8, len(os.sched_getaffinity(0)))


class Source(Protocol):
    """Reads samples by their rows in the sample table."""

    def gather(self, rows: Indices) -> Ragged: ...

    def where(self, rows: Indices) -> str:
        """The files that hold these rows, for messages."""


@dataclass(frozen=True)
class Loaded(Generic[B]):
    """One step for this rank."""

    batches: tuple[B, ...]  # micro-batches
    rows: Indices  # of the whole step, over all ranks and micro-batches
    after: Position  # where the run stands once this step is done
    wait_s: float  # how long the consumer waited

    @property
    def num_samples(self) -> int:
        return len(self.rows)


class Loader(Generic[B]):
    """Iterating goes on from where the loader stands, through epoch `num_epochs` - 1."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[Stage],
        config: LoaderConfig,
        *,
        seed: int = 0,
        num_epochs: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        where: Callable[[Indices], str] | None = None,
        bytes_per_cost: float = 64.0,
        cache_bytes: int = 0,
    ) -> None:
        self.plan, self.times = plan, StageTimes([stage.name for stage in stages])
        self._stages, self._config, self._where = tuple(stages), config, where
        self._rank, self._num_ranks = rank, num_ranks
        self._num_epochs = num_epochs
        self._position = Position(seed)
        self._bytes_per_cost = bytes_per_cost
        self._room = config.ram_bytes - cache_bytes

    def state_dict(self) -> dict[str, int]:
        """Where the consumer stands; batches made ahead do not count."""
        return {"seed": self._position.seed, "epoch": self._position.epoch, "consumed": self._position.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = Position(**state)

    def __iter__(self) -> Iterator[Loaded[B]]:
        for loaded in self.batches(self._position, self._num_epochs):
            self._position = loaded.after
            yield loaded

    def batches(self, position: Position, num_epochs: int | None = None) -> Iterator[Loaded[B]]:
        """Steps from `position` on. Closing the iterator stops the threads."""
        ahead: deque[_Step] = deque()
        steps = self.plan.steps(position, num_epochs)
        with Workers(self._config.num_threads, "loader") as workers:
            budget = _Budget(self._room, self._config.look_ahead)
            coming = next(steps, None)
            while coming is not None or ahead:
                while coming is not None and (step := self._begin(coming, workers, budget, first=not ahead)):
                    ahead.append(step)
                    coming = next(steps, None)
                self.times.saw_ready(sum(job.done() for step in ahead for job in step.jobs))
                step = ahead.popleft()
                yield self._finish(step)
                budget.give_back(step.num_bytes, len(step.jobs))

    def _begin(self, step: StepPlan, workers: Workers, budget: "_Budget", *, first: bool) -> "_Step | None":
        """Starts the work on a step, if there is room for it; the first one must fit alone."""
        mine = self.plan.deal(step, self._num_ranks)[self._rank]
        num_bytes = int(sum(micro.cost for micro in mine) * self._bytes_per_cost)
        if first and num_bytes > self._room:
            raise UserError(
                f"One step needs about {num_bytes / 1e6:,.0f} MB for its batches, and loader.ram_bytes leaves "
                f"{self._room / 1e6:,.0f} MB. Raise it, or lower loader.batch_size, batch_cost or sample_cost."
            )
        if not budget.take(num_bytes, len(mine)):
            assert not first, "an empty window leaves the whole budget"
            return None
        jobs = [workers.submit(self._make, micro) for micro in mine]
        return _Step(step, mine, jobs, num_bytes)

    def _make(self, micro: MicroBatch) -> Any:
        """Runs in a thread: one micro-batch through all stages."""
        value: Any = micro
        for stage in self._stages:
            with self.times.busy(stage.name):
                value = stage.run(value)
            self.times.count_bytes(stage.name, value)
        return value

    def _finish(self, step: "_Step") -> Loaded[B]:
        begin = time.perf_counter()
        batches = [self._wait_for(job, micro) for job, micro in zip(step.jobs, step.micro_batches, strict=True)]
        wait_s = time.perf_counter() - begin
        self.times.waited(wait_s)
        return Loaded(tuple(batches), step.plan.rows, step.plan.after, wait_s)

    def _wait_for(self, job: "Job[Any]", micro: MicroBatch) -> Any:
        try:
            return job.result(self._config.stuck_after_s)
        except TimeoutError:
            raise MachineError(
                f"A batch was not ready after {self._config.stuck_after_s:.0f} s; the read may be stuck: "
                f"{self._describe(micro)}. Is the disk or the network still there? loader.stuck_after_s sets the limit."
            ) from None
        except (UserError, MachineError) as error:
            kind = MachineError if isinstance(error, MachineError) else UserError
            raise kind(f"{error} ({self._describe(micro)})") from error
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__} while loading {self._describe(micro)}: {error}") from error

    def _describe(self, micro: MicroBatch) -> str:
        ids = np.asarray(self.plan.table.columns["id"][micro.rows[:8]]).tolist()
        more = f" and {len(micro.rows) - 8} more" if len(micro.rows) > 8 else ""
        files = f" of {self._where(micro.rows)}" if self._where else ""
        return f"samples {', '.join(map(str, ids))}{more}{files}"


@dataclass(frozen=True)
class _Step:
    plan: StepPlan
    micro_batches: list[MicroBatch]
    jobs: "list[Job[Any]]"
    num_bytes: int


class _Budget:
    """Bytes and micro-batches that may be under way; both are reserved before any work begins."""

    def __init__(self, num_bytes: int, num_batches: int) -> None:
        self._bytes, self._batches = num_bytes, num_batches
        self._lock = threading.Lock()

    def take(self, num_bytes: int, num_batches: int) -> bool:
        with self._lock:
            if num_bytes > self._bytes or self._batches <= 0:
                return False
            self._bytes, self._batches = self._bytes - num_bytes, self._batches - num_batches
            return True

    def give_back(self, num_bytes: int, num_batches: int) -> None:
        with self._lock:
            self._bytes, self._batches = self._bytes + num_bytes, self._batches + num_batches
