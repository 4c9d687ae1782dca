"""A run is a folder: `runs/<recipe>-<time>[-name]/` with config.yaml, events.jsonl, environment.json, log.txt and
checkpoints/. `list_runs` reads them back for `stoker runs`, without torch.
"""

import json
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from stoker.errors import UserError
from stoker.files import write_bytes, write_json
from stoker.runs.environment import describe_environment
from stoker.runs.events import read_events


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


def create_run(root: Path, recipe: str, name: str | None, config_text: str, fixed: Path | None = None) -> RunFolder:
    """A new folder, `fixed` or named by the time; a second run in the same second gets a number behind its name."""
    if name is not None and not re.fullmatch(r"[A-Za-z0-9._-]+", name):
        raise UserError(f"run.name is {name!r}; use letters, digits, dots, dashes and underscores only.")
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


def open_run(path: Path) -> RunFolder:
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
    folders = [RunFolder(path) for path in root.iterdir() if (path / "config.yaml").is_file()]
    summaries = [summarise(run) for run in folders]
    return sorted(summaries, key=lambda summary: summary.age_s)


def summarise(run: RunFolder) -> RunSummary:
    events = list(read_events(run.events))
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    metric = evaluations[-1].get("metric") if evaluations else None
    values = [value for event in evaluations if isinstance(value := event.get(metric or ""), float | int)]
    best = min(values) if evaluations and evaluations[-1].get("goal") == "min" else max(values, default=None)
    rates = [event["samples_per_s"] for event in steps[-10:]]
    return RunSummary(
        name=run.path.name,
        state=_state(run, events),
        step=steps[-1]["step"] if steps else 0,
        metric=metric,
        best=best,
        samples_per_s=sum(rates) / len(rates) if rates else None,
        age_s=time.time() - run.config.stat().st_mtime,
    )


def _state(run: RunFolder, events: list[dict[str, Any]]) -> str:
    last = next((event for event in reversed(events) if event["event"] in ("start", "end")), None)
    if last is not None and last["event"] == "end":
        return str(last["state"])
    return "running" if _is_alive(run) else "killed"


def _is_alive(run: RunFolder) -> bool:
    """Whether the process that wrote the environment still runs; a recycled process id has another start time."""
    try:
        written = json.loads(run.environment.read_text())
        if written["host"] != platform.node():
            return time.time() - run.events.stat().st_mtime < 600
        return bool(abs(psutil.Process(written["pid"]).create_time() - written["started"]) < 1.0)
    except (OSError, ValueError, KeyError, psutil.Error):
        return False
