"""Which lines of code the main thread spends its time in: a timer looks at it every few milliseconds.

A look is worth the time since the one before, so that a call that takes long weighs what it takes, however rarely Python
gets to look. Looking slows Python down and sleep not at all; so what lines for logging, saving or the optimizer take is
timed once more, line by line, when they are known.
"""

import functools
import linecache
import random
import re
import signal
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

EVERY_S = 0.002
# Places whose lines nobody can change: torch, other libraries, Python itself, and the doctor.
PACKAGE = Path(__file__).parents[1]
OTHERS = (
    sysconfig.get_paths()["stdlib"],
    "site-packages",
    "dist-packages",
    str(PACKAGE / "doctor"),
    str(PACKAGE / "cli"),
    str(PACKAGE / "__main__.py"),
    "<frozen",
    "<string>",
    "<eval_with_key",  # code that torch wrote
)
WRITES = re.compile(
    r"(?<![\w.])print\(|\.(write|flush|writerow|add_scalar|log_metrics|log_dict)\(|\b(logging|logger)\.|\blog\.\w+\(|"
    r"(?<!\btorch)(?<!\bmath)(?<!\bnp)(?<!\bnumpy)\.log\((?!\s*\))"  # no logarithm
)
GRADIENTS = re.compile(r"\.grad\b(?!\s*\()")  # of parameters, and not autograd.grad(...)
Place = tuple[str, int]  # file, line
SAVES = ("torch.save(", "save_file(", "pickle.dump(", "np.save(", "save_pretrained(", "save_checkpoint(")


@dataclass
class Lines:
    """Seconds by line of somebody's own code, and by what they are spent on."""

    seconds: dict[tuple[str, int, str], float] = field(default_factory=lambda: defaultdict(float))  # file, line, kind
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    places: dict[Place, str] = field(default_factory=dict)  # lines that make what they call one of those kinds
    timed: dict[str, float] = field(default_factory=dict)  # shares of kinds by the clock, where that was done
    total: float = 0.0

    def share(self, kind: str) -> float:
        if kind in self.timed:
            return self.timed[kind]
        return self.kinds.get(kind, 0.0) / self.total if self.total else 0.0

    def share_with_backward(self, places: Collection[Place]) -> float:
        """Of these lines, and of the same part of the backward pass, which has no lines of its own."""
        at, backward = 0.0, 0.0
        for (file, line, _), spent in self.seconds.items():
            if (file, line) in places:
                at += spent
            elif ".backward(" in linecache.getline(file, line):
                backward += spent
        return min(1.0, at / (self.total - backward)) if self.total > backward else 0.0

    def add(self, more: "Lines") -> None:
        for where, spent in more.seconds.items():
            self.seconds[where] += spent
        for kind, spent in more.kinds.items():
            self.kinds[kind] += spent
        self.places |= more.places
        self.total += more.total

    def top(self, count: int = 3, kind: str | None = None) -> list[str]:
        """`file:line  text  share`, the costliest first."""
        spent: dict[tuple[str, int], float] = defaultdict(float)
        for (file, line, what), seconds in self.seconds.items():
            if kind in (None, what):
                spent[file, line] += seconds
        ordered = sorted(spent.items(), key=lambda one: -one[1])[:count]
        return [
            f"{Path(file).name}:{line}  {linecache.getline(file, line).strip()[:80]}  ({seconds / self.total:.0%})"
            for (file, line), seconds in ordered
            if seconds / self.total >= 0.02
        ]


@contextmanager
def watched_lines() -> Iterator[Lines]:
    """Inside the block the main thread is looked at; elsewhere than in the main thread nothing is."""
    lines = Lines()
    last = time.perf_counter()
    dice = random.Random(0)
    # Never in step with the loop that is watched.
    delays = iter(lambda: dice.uniform(0.4, 1.6) * EVERY_S, None)

    over = False

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal last
        if over:  # it came late: to set the timer again would kill whoever has no handler for it
            return
        now = time.perf_counter()
        spent, last = now - last, now
        where, kind, named_by = _place(frame)
        signal.setitimer(signal.ITIMER_REAL, next(delays))
        lines.total += spent
        lines.kinds[kind] += spent
        if where is not None:
            lines.seconds[*where, kind] += spent
        if named_by is not None:
            lines.places[named_by] = kind

    # The signal may come while torch.compile runs what it has compiled: it would compile us as well, or refuse to.
    quiet = torch.compiler.disable(look)  # type: ignore[no-untyped-call]
    try:
        before: Any = signal.signal(signal.SIGALRM, quiet)
    except ValueError:  # not the main thread
        yield lines
        return
    signal.setitimer(signal.ITIMER_REAL, next(delays))
    try:
        yield lines
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def timed_lines(places: dict[Place, str]) -> Iterator[dict[str, float]]:
    """Seconds by kind of these lines with all that they call. Where somebody else traces, such as a debugger, nothing."""
    spent: dict[str, float] = defaultdict(float)
    files = {file for file, _ in places}
    inside: list[tuple[FrameType, str, float]] = []  # the line under way: one inside another is part of it

    def leave(frame: FrameType) -> None:
        if inside and inside[0][0] is frame:
            _, kind, begin = inside.pop()
            spent[kind] += time.perf_counter() - begin

    def of_line(frame: FrameType, event: str, _: Any) -> Any:
        leave(frame)
        kind = places.get((frame.f_code.co_filename, frame.f_lineno or 0)) if event == "line" else None
        if kind is not None and not inside:
            inside.append((frame, kind, time.perf_counter()))
        return of_line

    def of_call(frame: FrameType, event: str, _: Any) -> Any:
        return of_line if frame.f_code.co_filename in files else None

    if sys.gettrace() is not None:
        yield spent
        return
    sys.settrace(of_call)
    try:
        yield spent
    finally:
        sys.settrace(None)


def _place(frame: FrameType | None) -> tuple[Place | None, str, Place | None]:
    """The innermost line of somebody's own code, what it is there for, and the line of theirs that tells."""
    where, kind, named_by = None, "step", None
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno or 0
        if file.startswith(str(PACKAGE / "doctor")):
            break  # who drives the step is not part of it
        own = not _is_of_others(file)
        where = (file, line) if own and where is None else where
        if kind == "step":
            kind = _kind_of_text(file, line) if own else _kind_of_file(file)
        if kind != "step" and named_by is None and own and _kind_of_text(file, line) == kind:
            named_by = (file, line)
        frame = frame.f_back
    return where, kind, named_by


@functools.cache
def _is_of_others(file: str) -> bool:
    return any(place in file for place in OTHERS)


def own_place(frame: FrameType | None) -> tuple[str, int] | None:
    """The innermost line of somebody's own code."""
    return _place(frame)[0]


def _kind_of_file(file: str) -> str:
    if "torch/optim/" in file:
        return "optimizer"
    if "torch/serialization" in file or "safetensors" in file:
        return "checkpoint"
    return "logging" if "/logging/" in file or "tensorboard" in file or "wandb" in file else "step"


def _kind_of_text(file: str, line: int) -> str:
    text = linecache.getline(file, line)
    if any(word in text for word in SAVES):
        return "checkpoint"
    if WRITES.search(text):
        return "logging"
    if GRADIENTS.search(text) or "optimizer.step" in text:
        return "optimizer"
    return "step"
