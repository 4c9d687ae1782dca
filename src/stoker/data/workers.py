"""A small pool of daemon threads: a read that never returns must not keep the process from ending.

`concurrent.futures` joins its threads when the interpreter exits, so one stuck read would hang it for ever.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

R = TypeVar("R")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
RELEASE_EVERY_S = 20.0  # between handing back memory that malloc keeps
JOIN_S = 5.0  # how long closing waits for work that is under way


@cache
def keep_freed_memory() -> None:
    """Tells malloc to reuse large blocks instead of handing them back to the system after every batch.

    Memory fresh from the system is cleared and mapped page by page at its first use, which costs a loader more than the
    copying it does there. Other C libraries than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_ARENA_MAX, 1)  # arenas of other threads give memory back all the same


def release_freed_memory(*, at_once: bool = True) -> None:
    """Hands back what malloc keeps: after a large batch that may be several times what is in use.

    Not `at_once`: only where that was not done for a while. What is used again must be mapped again, which takes a tenth
    of an epoch of half a second.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and (at_once or time.monotonic() - _Last.release > RELEASE_EVERY_S):
        trim(0)
        _Last.release = time.monotonic()


class _Last:
    release = 0.0  # when memory was handed back, by whichever thread


class Job(Generic[R]):
    """A piece of work, and later its result or its error."""

    def __init__(self, work: Callable[[], R]) -> None:
        self._work, self._ready = work, threading.Event()
        self._result: R | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()

    def done(self) -> bool:
        return self._ready.is_set()

    def result(self, timeout_s: float) -> R:
        """The result, once: asking a second time gives nothing."""
        if not self._ready.wait(timeout_s):
            raise TimeoutError
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None  # handed over: memory that nobody counts must not be kept
        return result  # type: ignore[return-value]


class Workers:
    """Threads that work on jobs in the order they were submitted, until the block ends."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._loop, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]

    def __enter__(self) -> Self:
        keep_freed_memory()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Work that waits is dropped, work under way is finished, and no thread is left, unless it is stuck."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(JOIN_S)
        release_freed_memory(at_once=False)  # free places among what is in use add up from one epoch to the next

    def submit(self, function: Callable[..., R], *arguments: Any) -> Job[R]:
        job = Job(lambda: function(*arguments))
        self._jobs.put(job)
        return job

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closing:
            job.run()
            del job  # until the next one comes, this thread would keep its result alive
