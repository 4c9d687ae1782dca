"""`for batch in stoker.watch(loader):` in anybody's loop: two looks at the clock a step, and a verdict at the end."""

import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import psutil
from torch import nn

from stoker.doctor.answers import watch_of
from stoker.doctor.finding import Finding
from stoker.doctor.loaders import describe
from stoker.doctor.looks import growth
from stoker.doctor.measured import Leg, Measured
from stoker.doctor.rules import diagnose, verdict

LEAST_STEPS = 20  # to speak of a cause
MEMORY_EVERY = 16  # steps
KEPT = 1 << 16  # steps that are remembered


class Watch:
    """Wraps a loader; everything else of it is its own. `findings()` at any time, and on SIGUSR2 they are printed."""

    def __init__(self, loader: Iterable[Any], model: nn.Module | None = None, *, say: bool = True) -> None:
        self._loader, self._say = loader, say
        self._model = None if model is None else watch_of(model)
        self._steps: list[tuple[float, float]] = []  # waiting for a batch, and the step on it
        self._gaps: list[float] = []
        self._memory: list[int] = []
        self._samples, self._process = 0, psutil.Process()
        _LIVE.add(self)
        if threading.current_thread() is threading.main_thread():
            with suppress(ValueError, OSError):
                if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:  # else it is somebody else's, or ours already
                    signal.signal(signal.SIGUSR2, _tell_all)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        clock = time.perf_counter
        asked, first, got = clock(), True, 0.0
        try:
            for batch in self._loader:
                got = clock()
                if first:
                    if len(self._steps) < KEPT:
                        self._gaps.append(got - asked)
                    self._samples = self._samples or _size(batch)
                if self._model is not None:
                    self._model.before()
                    got = clock()
                yield batch
                now = clock()
                self._note(0.0 if first else got - asked, now - got)
                if self._model is not None:
                    self._model.after(batch)
                first, asked, got = False, clock(), 0.0
        finally:  # a loop that was left, or that knows the number of its batches, does not ask for one more
            ends = sys is None or sys.is_finalizing()  # the interpreter, and our own names are gone already
            if got and not ends:
                self._note(0.0 if first else got - asked, clock() - got)
                if self._model is not None:
                    self._model.after(batch)
            if self._say and not ends:
                self._tell()

    def _note(self, wait: float, step: float) -> None:
        if len(self._steps) < KEPT:
            self._steps.append((wait, step))  # at once: a signal may ask in between
            if len(self._steps) % MEMORY_EVERY == 0:
                self._memory.append(self._process.memory_info().rss)

    def measured(self) -> Measured:
        found = Measured(name="watch", loader=describe(self._loader, {}))
        if not self._steps:
            found.troubles.append("the loop has not made a step yet")
            return found
        waits, steps = zip(*list(self._steps), strict=True)
        count = len(steps)
        found.answers = None if self._model is None else self._model.answers()
        gaps = self._gaps[1:]  # the first epoch begins with everything else that begins
        found.run = Leg(tuple(wait + step for wait, step in zip(waits, steps, strict=True)))
        found.gap_s = sum(gaps) / count
        found.wait_s = sum(waits) / count
        found.resident = Leg(steps)
        found.epoch_steps = count // max(1, len(self._gaps))
        found.samples, found.free_bytes = float(self._samples), psutil.virtual_memory().available
        found.grown_bytes = growth([MEMORY_EVERY * one for one in range(len(self._memory))], self._memory)
        if found.gap_s:
            found.run = Leg(tuple(one + found.gap_s for one in found.run.seconds))
        return found

    def findings(self) -> list[Finding]:
        return self._findings(self.measured())

    def _findings(self, found: Measured) -> list[Finding]:
        return diagnose(found) if len(self._steps) >= LEAST_STEPS else []

    def _tell(self) -> None:
        """Whatever goes wrong with it, the loop goes on: nobody may listen any more."""
        with suppress(Exception):
            self._print()

    def _print(self) -> None:
        found = self.measured()
        if found.run is None:
            return
        findings = self._findings(found)
        head = f"stoker.watch: {len(self._steps):,} steps of {1e3 * found.run.mean:.2f} ms, "
        head += f"{found.wait_s / found.run.mean:.0%} waiting for batches. {verdict(found, findings)}"
        lines = [head, *(line for one in findings for line in one.lines(found.rate))]
        print("\n".join(lines), file=sys.stderr, flush=True)


_LIVE: "WeakSet[Watch]" = WeakSet()


_telling = threading.Lock()


def _tell_all(number: int, frame: Any) -> None:
    if not _telling.acquire(blocking=False):  # asked again while it answers
        return
    try:
        for one in list(_LIVE):
            one._tell()
    finally:
        _telling.release()


def watch(loader: Iterable[Any], model: nn.Module | None = None, *, say: bool = True) -> Watch:
    """The same batches, and at the end of the loop what they cost and what could be gained.

    With the model also whether its answers are finite, differ, and are better than those of who knows nothing: every 64th
    step is looked at.
    """
    return Watch(loader, model, say=say)


def _size(batch: Any) -> int:
    from stoker.data.batch import tensors_in

    first = next((tensor for tensor in tensors_in(batch) if tensor.ndim), None)
    return 1 if first is None else len(first)
