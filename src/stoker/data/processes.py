"""Worker processes for stages that keep Python busy, such as decoding many small images.

Threads share one interpreter lock. A stage that needs it for every sample takes it away from the thread that feeds the
GPU: beside sixteen threads that decoded JPEG a training step took half as long again although batches lay ready.
Processes are made early, by forking, and each is driven by whichever loader thread has work; large results come back
through memory that both sides see, so that nothing is pickled but a few numbers.
"""

import atexit
import ctypes
import mmap
import multiprocessing as mp
import os
import queue
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from stoker.errors import MachineError

R = TypeVar("R")
T = TypeVar("T")
PR_SET_PDEATHSIG = 1  # of prctl: a signal when the parent ends
JOIN_S = 5.0
NICE = 10  # they give way to the thread that feeds the GPU, and work as fast where a core is free
_OURS: set[Connection] = set()  # the parent's ends of all pipes

# Work of a process: (argument, room for its result) -> (result, bytes used of the room).
Work = Callable[[Any, memoryview], tuple[R, int]]


class Processes(Generic[R]):
    """`count` processes, each with `num_bytes` of memory shared with us. Forked here: make it before threads and CUDA.

    A helper does the same work in the calling thread, with other means such as a GPU: one thread at a time is let in, and
    only when no process is free. So the work is shared at the rates at which the two get it done.
    """

    def __init__(self, work: Work[R], count: int, num_bytes: int, helper: "Helper[R] | None" = None) -> None:
        self._free: queue.SimpleQueue[_Process[R]] = queue.SimpleQueue()
        self._helper = helper
        self._all: list[_Process[R]] = []
        for _ in range(count):
            process = _Process(work, num_bytes)
            self._all.append(process)
            self._free.put(process)
        # Before multiprocessing's own handler, which would send a signal that they ignore, and wait.
        atexit.register(self.close)

    def run(self, arguments: Sequence[Any], take: Callable[[R, memoryview], T], *, helped: bool = False) -> list[T]:
        """Does the work for each argument, in as many processes as are free, and gives the answers in order.

        `take` gets a result, and must copy what it wants of the shared memory. Safe to call from many threads: whoever waits
        for a process either has answers of its own to collect first, or holds none.
        """
        answers: list[T] = []
        asked: deque[_Process[R] | Helper[R]] = deque()
        coming = iter(arguments)
        left = len(arguments)
        try:
            while left or asked:
                process = self._another(block=not asked, helped=helped) if left else None
                if process is not None:
                    asked.append(process)
                    process.ask(next(coming))
                    left -= 1
                    continue
                result, used = asked[0].answer()
                answers.append(take(result, asked[0].room[:used]))
                self._give_back(asked.popleft())
        finally:
            for process in asked:  # after an error: nobody else must find our answers in the pipe
                process.forget()
                self._give_back(process)
        return answers

    def _another(self, *, block: bool, helped: bool) -> "_Process[R] | Helper[R] | None":
        with suppress(queue.Empty):
            return self._free.get_nowait()
        helper = self._helper if helped else None
        if helper is not None and helper.is_ready() and helper.lock.acquire(blocking=False):
            return helper
        return self._free.get() if block else None

    def _give_back(self, process: "_Process[R] | Helper[R]") -> None:
        if isinstance(process, Helper):
            process.lock.release()
        else:
            self._free.put(process)

    def close(self) -> None:
        for process in self._all:
            process.close()


class _Process(Generic[R]):
    def __init__(self, work: Work[R], num_bytes: int) -> None:
        # Anonymous and shared: only the pages that are written take memory.
        self.room = memoryview(mmap.mmap(-1, num_bytes))
        self.ours, theirs = mp.Pipe()
        self._asked = False
        _OURS.add(self.ours)
        context = mp.get_context("fork")
        self._process = context.Process(target=_serve, args=(work, theirs, self.room), daemon=True)
        with warnings.catch_warnings():
            # Python warns of forking beside threads. Ours take no locks that others may hold: they read, decode, copy.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def ask(self, argument: Any) -> None:
        try:
            self.ours.send(argument)
            self._asked = True
        except OSError as error:
            raise self._ended() from error

    def answer(self) -> tuple[R, int]:
        try:
            worked, answer = self.ours.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        finally:
            self._asked = False
        if not worked:
            raise answer
        found: tuple[R, int] = answer
        return found

    def forget(self) -> None:
        """Waits for an answer that nobody wants any more."""
        if self._asked:
            with suppress(Exception):
                self.answer()

    def _ended(self) -> MachineError:
        self._process.join(1.0)
        return MachineError(f"A process that prepares batches ended by itself (exit code {self._process.exitcode}).")

    def close(self) -> None:
        self.ours.close()
        _OURS.discard(self.ours)
        self._process.join(JOIN_S)


class Helper(Generic[R]):
    """Answers as a process does, in the thread that asks, as long as it is ready to."""

    room = memoryview(b"")

    def __init__(self, work: Callable[[Any], R], is_ready: Callable[[], bool]) -> None:
        self._work, self.is_ready, self.lock = work, is_ready, threading.Lock()
        self._answer: R | None = None

    def ask(self, argument: Any) -> None:
        self._answer = self._work(argument)

    def answer(self) -> tuple[R, int]:
        answer, self._answer = self._answer, None
        return answer, 0  # type: ignore[return-value]

    def forget(self) -> None:
        self._answer = None


def die_with_parent() -> None:
    """The kernel ends this process when the one that started it ends, however that does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(work: Work[Any], pipe: Connection, room: memoryview) -> None:
    """The life of a process: answers until nobody asks any more."""
    die_with_parent()
    os.nice(NICE)
    # Signals to stop reach the whole group; the parent still needs a batch or two before it saves, and decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for connection in _OURS:  # forked with us; as long as we hold them, nobody would see the parent close them
        connection.close()
    while True:
        try:
            argument = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (True, work(argument, room))
        except Exception as error:
            answer = (False, error)  # type: ignore[assignment]
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return
