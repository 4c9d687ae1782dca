"""A run is a folder: `runs/<recipe>-<time>[-name]/` with config.yaml, events.jsonl, environment.json, log.txt and
checkpoints/. `list_runs` reads them back for `stoker runs`, without torch.
"""

import fcntl
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from stoker.errors import UserError
from stoker.files import write_bytes, write_json
from stoker.runs.environment import describe_environment
from stoker.runs.events import read_events
from stoker.runs.schema import End, Evaluation, Event, Start, Step


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def facts(self) -> Path:
        """What the run keeps of its data: all that its task is built from, besides the configuration."""
        return self.path / "facts.json"

    @property
    def module(self) -> Path:
        """Where the module of a recipe of one's own lies."""
        return self.path / "recipe.json"


@dataclass(frozen=True)
class RunSummary:
    """One line of `stoker runs`."""

    name: str
    state: str  # running, finished, stopped, failed, or killed: no end was written and the process is gone
    step: int
    metric: str | None
    best: float | None
    samples_per_s: float | None
    age_s: float


def check_new_run(root: Path, name: str | None) -> None:
    """Whether a run could be made there: asked before hours of work are spent on its data."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise UserError(f"run.name is {name!r}; use letters, digits, dots, dashes and underscores only.")
    existing = root.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UserError(f"run.folder is {root}, and {existing} is a file. Name a folder: --run.folder DIR.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"run.folder is {root}, and nothing can be written to {existing}. Name another: --run.folder DIR."
        )


def create_run(root: Path, recipe: str, name: str | None, config_text: str, fixed: Path | None = None) -> RunFolder:
    """A new folder, `fixed` or named by the time; a second run in the same second gets a number behind its name."""
    check_new_run(root, name)
    words = [re.sub(r"[^A-Za-z0-9._-]+", "-", recipe), time.strftime("%Y%m%d-%H%M%S"), *([name] if name else [])]
    base = "-".join(words)
    for attempt in range(1, 1000):
        run = RunFolder(fixed or root / (base if attempt == 1 else f"{base}-{attempt}"))
        try:
            run.path.mkdir(parents=True, exist_ok=fixed is not None)
        except FileExistsError:
            continue
        run.checkpoints.mkdir(exist_ok=True)
        record_environment(run)
        write_bytes(run.config, config_text.encode())  # last: a folder with a config is a run
        return run
    raise UserError(f"No free name for a run like {base} under {root}.")


def record_environment(run: RunFolder) -> None:
    """Written anew by every process that takes the run on; the earlier ones stay in the events."""
    write_json(run.environment, describe_environment())


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """One process at a time trains a run; the lock dies with it, however it ends."""
    try:
        file = (run.path / "lock").open("a+")
    except OSError as error:
        raise UserError(f"Nothing can be written to the run {run.path} ({error.strerror}).") from error
    with file:
        try:
            # Of the process and not of the open file: processes that it forks do not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise UserError(
                f"{run.path} is being trained by another process ({file.read().strip() or 'unknown'}). Stop that one first."
            ) from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def open_run(path: Path) -> RunFolder:
    if not path.is_dir() and (Path("runs") / path).is_dir():  # by its name, as `stoker runs` prints it
        path = Path("runs") / path
    run = RunFolder(path)
    if not path.is_dir():
        raise UserError(f"There is no run folder {path}. `stoker runs` lists the runs.")
    if not run.config.is_file():
        raise UserError(f"{path} is no run folder: it holds no config.yaml. `stoker runs` lists the runs.")
    return run


def list_runs(root: Path) -> list[RunSummary]:
    """All runs below `root`, the newest first."""
    if not root.is_dir():
        return []
    summaries = [summary for path in root.iterdir() if (summary := _summary_of(RunFolder(path))) is not None]
    return sorted(summaries, key=lambda summary: summary.age_s)


def _summary_of(run: RunFolder) -> RunSummary | None:
    """None: it is no run. One that may not be read must not hide the others."""
    try:
        return summarise(run) if run.config.is_file() else None
    except OSError:
        return RunSummary(run.path.name, "unreadable", 0, None, None, None, 0.0)


def summarise(run: RunFolder) -> RunSummary:
    """From its events. A run of another version or with damaged events shows what can be read of it."""
    events = list(read_events(run.events, Start, Step, Evaluation, End))
    steps = [event for event in events if isinstance(event, Step)]
    evaluations = [event for event in events if isinstance(event, Evaluation)]
    # The score is of the weights that the run is judged by, averaged ones where there are any.
    scores = [event.score for event in evaluations if math.isfinite(event.score)]
    better = min if evaluations and evaluations[-1].goal == "min" else max
    rates = [event.samples_per_s for event in steps[-10:] if math.isfinite(event.samples_per_s)]
    return RunSummary(
        name=run.path.name,
        state=_state(run, events),
        step=steps[-1].step if steps else 0,
        metric=evaluations[-1].metric if evaluations else None,
        best=better(scores, default=None),
        samples_per_s=sum(rates) / len(rates) if rates else None,
        age_s=time.time() - run.config.stat().st_mtime,
    )


def _state(run: RunFolder, events: Sequence[Event]) -> str:
    last = next((event for event in reversed(events) if isinstance(event, Start | End)), None)
    return state_of(run, last.state if isinstance(last, End) else None)


def state_of(run: RunFolder, ended: str | None) -> str:
    """`ended`: what the last process that took it on wrote at its end, if it did."""
    if ended is not None:
        return ended
    return "running" if _is_alive(run) else "killed"


def _is_alive(run: RunFolder) -> bool:
    """Whether the process that wrote the environment still runs; a recycled process id has another start time."""
    try:
        written = json.loads(run.environment.read_text())
        if written["host"] != platform.node():
            return time.time() - run.events.stat().st_mtime < 600
        return bool(abs(psutil.Process(written["pid"]).create_time() - written["started"]) < 1.0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, psutil.Error):
        return False
