"""Worker processes for stages that keep Python busy, such as decoding many small images.

Threads share one interpreter lock. A stage that needs it for every sample takes it away from the thread that feeds the GPU:
with sixteen threads decoding JPEG, a training step took half as long again although batches lay ready. Processes are made
early, by forking, and each is driven by whichever loader thread has work; large results come back through memory that both
sides see, so that nothing is pickled but a few numbers.
"""

import ctypes
import mmap
import multiprocessing as mp
import queue
import signal
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from stoker.errors import MachineError

R = TypeVar("R")
PR_SET_PDEATHSIG = 1  # of prctl: a signal when the parent ends
JOIN_S = 5.0

# A task in a process: (argument, room for its result) -> (result, bytes used of the room).
Task = Callable[[Any, memoryview], tuple[R, int]]


class Processes(Generic[R]):
    """`count` processes, each with `num_bytes` of memory shared with us. Forked here: make it before threads and CUDA."""

    def __init__(self, task: Task[R], count: int, num_bytes: int) -> None:
        self._free: queue.SimpleQueue[_Process[R]] = queue.SimpleQueue()
        self._all: list[_Process[R]] = []
        for _ in range(count):
            process = _Process(task, num_bytes, [one.ours for one in self._all])
            self._all.append(process)
            self._free.put(process)

    def run(self, argument: Any, take: Callable[[R, memoryview], Any]) -> Any:
        """Runs the task in a free process; `take` gets its result and must copy what it wants of the shared memory."""
        process = self._free.get()
        try:
            result, used = process.call(argument)
            return take(result, process.room[:used])
        finally:
            self._free.put(process)

    def close(self) -> None:
        for process in self._all:
            process.close()


class _Process(Generic[R]):
    def __init__(self, task: Task[R], num_bytes: int, others: list[Connection]) -> None:
        # Anonymous and shared: only the pages that are written take memory.
        self.room = memoryview(mmap.mmap(-1, num_bytes))
        self.ours, theirs = mp.Pipe()
        context = mp.get_context("fork")
        self._process = context.Process(
            target=_serve, args=(task, theirs, self.room, [*others, self.ours]), daemon=True
        )
        with warnings.catch_warnings():
            # Python warns of forking beside threads. Ours take no locks that others may hold: they read, decode, copy.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def call(self, argument: Any) -> tuple[R, int]:
        try:
            self.ours.send(argument)
            worked, answer = self.ours.recv()
        except (EOFError, OSError) as error:
            code = self._process.exitcode
            raise MachineError(f"A process that prepares batches ended by itself (exit code {code}).") from error
        if not worked:
            raise answer
        found: tuple[R, int] = answer
        return found

    def close(self) -> None:
        self.ours.close()
        self._process.join(JOIN_S)


def _serve(task: Task[Any], pipe: Connection, room: memoryview, inherited: list[Connection]) -> None:
    """The life of a process: answers until nobody asks any more."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for connection in inherited:  # as long as we hold the other ends, nobody would see the parent close them
        connection.close()
    while True:
        try:
            argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, task(argument, room))
        except Exception as error:
            answer = (False, error)  # type: ignore[assignment]
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return
