"""The loader: an ordered window over threads. Steps of the plan go in, batches come out in the same order.

Reading and collating release the GIL, so threads share one cache and nothing is copied between processes. How many
threads work and how far they look ahead changes the speed, never the batches. Every stage counts what it does.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from stoker.data.batch import pin
from stoker.data.order import StorageOrder
from stoker.data.plan import MicroBatch, Plan, Position, Step
from stoker.data.ragged import Indices
from stoker.data.source import Ahead, RunData
from stoker.data.stages import Stage, StageTimes
from stoker.data.workers import Job, Workers
from stoker.errors import MachineError, UserError
from stoker.settings import AlsoCalled, config


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
    window: Annotated[int, Field(ge=1)] = 65_536  # samples that a window shuffle mixes, where files are read in parts
    order: Literal["auto", "exact", "window", "window-first"] = "auto"  # of an epoch; auto: what the storage asks for

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.batch_cost is None):
            raise ValueError("a step is cut by batch_size or by batch_cost: set one of them, and the other to null")
        if self.micro_cost is not None and self.sample_cost is not None and self.sample_cost > self.micro_cost:
            raise ValueError(
                f"micro_cost {self.micro_cost} cannot be kept while a single sample may cost {self.sample_cost}: set "
                f"sample_cost to {self.micro_cost} or less"
            )

    def with_effect(self) -> set[str]:
        """Keys that mean something beside the others, whatever those say of the usual order."""
        return {"loader.window"} if self.order in ("window", "window-first") else set()

    @property
    def num_threads(self) -> int:
        return self.threads or min(8, len(os.sched_getaffinity(0)))


class Loader:
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
        files_of: Callable[[Indices], str] | None = None,
        bytes_per_cost: float = 64.0,
        cache_bytes: int = 0,
        ahead: Ahead | None = None,
    ) -> None:
        self.plan, self.times = plan, StageTimes([stage.name for stage in stages])
        self._stages, self._config, self._files_of = tuple(stages), config, files_of
        self.rank, self.num_ranks = rank, num_ranks
        self._num_epochs = num_epochs
        self._position = Position(seed)
        self._bytes_per_cost = bytes_per_cost
        self._room = config.ram_bytes - cache_bytes
        self._ahead = ahead

    def read_times(self) -> dict[str, Any]:
        """What every stage did since the last reading, and where samples lie elsewhere the storage."""
        return {**self.times.read(), "storage": self._ahead.telemetry() if self._ahead is not None else {}}

    def state_dict(self) -> dict[str, int]:
        """Where the consumer stands; batches made ahead do not count."""
        return {"seed": self._position.seed, "epoch": self._position.epoch, "consumed": self._position.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = Position(**state)

    def __iter__(self) -> Iterator[Step]:
        for step in self.steps(self._position, self._num_epochs):
            self._position = step.after
            yield step

    def steps(self, position: Position, num_epochs: int | None = None) -> Iterator[Step]:
        """Steps from `position` on, with their batches. Closing the iterator stops the threads."""
        ahead: deque[tuple[Step, list[Job[Any]]]] = deque()
        planned = self.plan.steps(position, num_epochs, rank=self.rank, num_ranks=self.num_ranks)
        if self._ahead is not None:
            planned = self._ahead.through(planned)
        with ExitStack() as stack:
            if self._ahead is not None:
                stack.callback(self._ahead.closed)
            workers = stack.enter_context(Workers(self._config.num_threads, "loader"))
            budget = _Budget(self._room, self._config.look_ahead)
            coming = next(planned, None)
            while coming is not None or ahead:
                while coming is not None and self._has_room(coming, budget, first=not ahead):
                    ahead.append((coming, [workers.submit(self._make, micro) for micro in coming.micro_batches]))
                    self._read_ahead(workers, coming)
                    coming = next(planned, None)
                self.times.saw_ready(sum(job.done() for _, jobs in ahead for job in jobs))
                num_bytes, num_batches = self._num_bytes(ahead[0][0]), len(ahead[0][1])
                made = ahead[0][0].without_batches()
                yield self._finish(*ahead.popleft())  # no name keeps it: its memory is free when the consumer drops it
                budget.give_back(num_bytes, num_batches)
                if self._ahead is not None:
                    self._ahead.finished(made, self.plan)

    def batches_that_fit(self) -> int:
        """How many micro-batches of mean size the RAM budget holds: beyond that, look_ahead has no effect."""
        steps = max(1, self.plan.steps_per_epoch())
        cost = self.plan.mean_cost() * len(self.plan) / steps
        pieces = max(1.0, cost / self.plan.micro_cost) if self.plan.micro_cost else 1.0
        return int(self._room * pieces / max(1.0, cost * self._bytes_per_cost))

    def _num_bytes(self, step: Step) -> int:
        return int(step.cost * self._bytes_per_cost)

    def _has_room(self, step: Step, budget: "_Budget", *, first: bool) -> bool:
        """Whether work on a step may begin; the first one must fit alone."""
        num_bytes = self._num_bytes(step)
        if first and num_bytes > self._room:
            raise UserError(
                f"One step needs about {num_bytes / 1e6:,.0f} MB for its batches, and loader.ram_bytes leaves "
                f"{self._room / 1e6:,.0f} MB. Raise it, or lower loader.batch_size, batch_cost or sample_cost."
            )
        taken = budget.take(num_bytes, len(step.micro_batches))
        assert taken or not first, "an empty window leaves the whole budget"
        return taken

    def make(self, rows: Indices, seed: int = 0, epoch: int = 0) -> Any:
        """These samples as one batch, made here and now, with what is drawn for them in an epoch."""
        micro = MicroBatch(rows, seed, epoch, copies=np.zeros_like(rows), partners=np.arange(len(rows)))
        value: Any = micro
        with self._samples_named(micro):
            for stage in self._stages:
                value = stage.run(value)
        return value

    def _make(self, micro: MicroBatch) -> Any:
        """Runs in a thread: one micro-batch through all stages."""
        value: Any = micro
        for stage in self._stages:
            with self.times.busy(stage.name):
                value = stage.run(value)
            self.times.count_bytes(stage.name, value)
        return value

    def _read_ahead(self, workers: Workers, step: Step) -> None:
        """Nobody asks for the result: what goes wrong is found again by the batch that needs it."""

        def run(stage: Stage, micro: MicroBatch) -> None:
            assert stage.read_ahead is not None
            with self.times.busy_ahead(stage.name):
                stage.read_ahead(micro)

        for stage in self._stages:
            if stage.read_ahead is not None and step.micro_batches:
                workers.submit(run, stage, step.micro_batches[-1])

    def _finish(self, step: Step, jobs: "list[Job[Any]]") -> Step:
        begin = time.perf_counter()
        step.batches = tuple(self._wait_for(job, micro) for job, micro in zip(jobs, step.micro_batches, strict=True))
        step.wait_s = time.perf_counter() - begin
        self.times.waited(step.wait_s)
        return step

    def _wait_for(self, job: "Job[Any]", micro: MicroBatch) -> Any:
        with self._samples_named(micro):
            return job.result(self._config.stuck_after_s)

    @contextmanager
    def _samples_named(self, micro: MicroBatch) -> Iterator[None]:
        """Errors say which samples of which files were being loaded."""
        try:
            yield
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
        files = f" of {self._files_of(micro.rows)}" if self._files_of else ""
        return f"samples {', '.join(map(str, ids))}{more}{files}"


def loader_of(
    data: RunData, config: LoaderConfig, device: torch.device, *, training: bool, rank: int = 0, num_ranks: int = 1
) -> Loader:
    """Of the training samples in their order, or of the validation samples as they are stored."""
    stages = data.stages if training else data.validation_stages or data.stages
    plan = Plan(
        table=data.table,
        subset=data.training if training else data.validation,
        order=data.order if training else lambda seed, epoch: StorageOrder(),
        batch_size=config.batch_size,
        batch_cost=config.batch_cost,
        micro_cost=config.micro_cost,
        sample_cost=config.sample_cost,
        repeated=training and data.repeated,
        paired=training and data.paired,
    )
    return Loader(
        plan,
        [*stages, *([Stage("pin", pin)] if device.type == "cuda" else [])],
        config,
        rank=rank,
        num_ranks=num_ranks,
        files_of=data.files_of,
        bytes_per_cost=data.bytes_per_cost,
        cache_bytes=data.cache_bytes,
        ahead=None if data.ahead is None else data.ahead.anew(),
    )


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
