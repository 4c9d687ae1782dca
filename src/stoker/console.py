"""What a person sees while something runs: a bar with rate and time left in a terminal, plain lines when piped.

Everything goes to standard error, so that standard output stays free for results and `--json`.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LINE_EVERY_S = 5.0


class Progress(Protocol):
    """Moves a bar forward."""

    def advance(self, amount: int = 1) -> None: ...


_copies: list[Path] = []
_quiet = False
_work_done = 0


def be_quiet(quiet: bool = True) -> None:
    """Of several processes only the first speaks."""
    global _quiet
    _quiet = quiet


def work_done() -> int:
    """All that any bar has advanced in this process: a number that rises as long as work gets done."""
    return _work_done


def _count(amount: int) -> None:
    global _work_done
    _work_done += amount


def say(text: str) -> None:
    """One line for the person, and for the log of the run that is going on."""
    if _quiet:
        return
    with suppress(BrokenPipeError):  # whoever read it has gone; the work and its log go on
        print(text, file=sys.stderr, flush=True)
    for path in _copies:
        with path.open("a") as file:
            file.write(text + "\n")


@contextmanager
def copy_to(path: Path) -> Iterator[None]:
    """What is said inside the block is appended to the file too."""
    _copies.append(path)
    try:
        yield
    finally:
        _copies.remove(path)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Progress]:
    """A bar for `total` units of work; `unit` is the plural that the rate is counted in."""
    if sys.stderr.isatty() and not _quiet:
        with _rich_columns(unit) as bar:
            yield _Bar(bar, bar.add_task(what, total=total))
    else:
        lines = _Lines(what, total, unit)
        yield lines
        lines.finish()


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as aligned text, the first one as a heading; numbers stand right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if column and _is_numeric(rows, column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if number == 0:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _is_numeric(rows: Sequence[tuple[str, ...]], column: int) -> bool:
    return all(row[column][:1].isdigit() or row[column][:1] in "-+" for row in rows[1:])


def seconds_as_text(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def _rich_columns(unit: str) -> "RichProgress":
    # rich is imported only where a bar is drawn: `stoker --help` must stay quick.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Task as BarTask
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: BarTask) -> Text:
            return Text(f"{task.speed:,.0f} {unit}/s" if task.speed else "", style="cyan")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )


class _Bar:
    def __init__(self, bar: "RichProgress", task: "TaskID") -> None:
        self._bar, self._task = bar, task

    def advance(self, amount: int = 1) -> None:
        _count(amount)
        self._bar.advance(self._task, amount)


class _Lines:
    def __init__(self, what: str, total: int, unit: str) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._done, self._begin = 0, time.monotonic()
        self._last = self._begin

    def advance(self, amount: int = 1) -> None:
        _count(amount)
        self._done += amount
        now = time.monotonic()
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            rate = self._done / (now - self._begin)
            left = seconds_as_text(max(self._total - self._done, 0) / max(rate, 1e-9))
            say(f"{self._what}: {self._done:,} of {self._total:,} {self._unit}, {rate:,.0f}/s, {left} left")

    def finish(self) -> None:
        spent = max(time.monotonic() - self._begin, 1e-9)
        if spent >= LINE_EVERY_S:
            say(f"{self._what}: {self._done:,} {self._unit} in {seconds_as_text(spent)} ({self._done / spent:,.0f}/s)")
