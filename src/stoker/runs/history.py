"""The events of a run in columns, read in one pass: a million lines in seconds, in a few bytes for each."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.runs.schema import upgraded

STEP = ("step", "time", "epoch", "lr", "loss", "grad_norm", "bad", "samples_per_s", "wait_share", "host_bytes",
        "cpu_share", "device_bytes", "device_busy", "copy_s", "loss_scale")  # fmt: skip
LOADER = ("step", "seconds", "wait_s", "wait_p99_ms", "ready")
MOST_NORMS = 400  # moments for which the norms of every parameter are kept; neighbours are joined, the larger stays
MOST_MARKS = 2000  # of one kind; every other is dropped beyond that, and all are counted
MARKS = (
    "start",
    "bad_step",
    "spike",
    "stuck",
    "checkpoint",
    "not_saved",
    "compilation",
    "left_out",
    "out_of_patience",
    "end",
)

Columns = dict[str, "array[float]"]


@dataclass
class Norms:
    """Of each parameter, at moments of the run."""

    steps: list[int] = field(default_factory=list)
    gradient: list[dict[str, float]] = field(default_factory=list)
    update_ratio: list[dict[str, float]] = field(default_factory=list)
    together: int = 1  # moments that were joined into one

    def add(self, step: int, gradient: Mapping[str, Any], update_ratio: Mapping[str, Any], number: int) -> None:
        found = [{name: _number(value) for name, value in one.items()} for one in (gradient, update_ratio)]
        if number % self.together and self.steps:
            for kept, new in zip((self.gradient[-1], self.update_ratio[-1]), found, strict=True):
                _join(kept, new)
            return
        self.steps.append(step)
        self.gradient.append(found[0])
        self.update_ratio.append(found[1])
        if len(self.steps) >= 2 * MOST_NORMS:
            self._halve()

    def _halve(self) -> None:
        for column in (self.gradient, self.update_ratio):
            for first, second in zip(column[::2], column[1::2], strict=False):
                _join(first, second)
            del column[1::2]
        del self.steps[1::2]
        self.together *= 2


@dataclass
class History:
    """What a run wrote. Numbers that are missing or no numbers are NaN."""

    steps: Columns = field(default_factory=lambda: {name: array("d") for name in (*STEP, "step_s")})
    loader: Columns = field(default_factory=lambda: {name: array("d") for name in LOADER})
    stages: dict[str, "array[float]"] = field(default_factory=dict)  # busy seconds of each, beside `loader`
    norms: Norms = field(default_factory=Norms)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    marks: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in MARKS})
    counts: dict[str, int] = field(default_factory=dict)  # of events, by kind
    seconds: dict[str, float] = field(default_factory=dict)  # that events say they took, by kind
    best: dict[str, Any] | None = None  # evaluation
    ended: str | None = None  # how, as the last process wrote; None: it has not
    shuffle: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    torn: int = 0  # lines that are no events

    @property
    def num_steps(self) -> int:
        return int(max(self.steps["step"], default=0))


def read_history(path: Path) -> History:
    """All events of a run; what is none, such as a line that a kill tore, is counted and passed over."""
    found = History()
    for line in _lines(path):
        found.lines += 1
        try:
            event = upgraded(json.loads(line))
            kind = event["event"]
            _take(found, kind, event)
            found.counts[kind] = found.counts.get(kind, 0) + 1
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
            found.torn += 1
    return found


def _lines(path: Path) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def _take(found: History, kind: str, event: dict[str, Any]) -> None:
    if kind == "step":
        took = event.get("step_ms") or ()
        spent = sum(map(float, took)) / 1e3  # before anything is kept: a line that cannot be read leaves no half of it
        for name in STEP:
            value = event.get(name)
            found.steps[name].append(value if type(value) is float else _number(value))
        found.steps["step_s"].append(spent)
    elif kind == "loader":
        stages = {name: _number(one["busy_s"]) for name, one in event["stages"].items()}
        for name in LOADER:
            value = event.get(name)
            found.loader[name].append(value if type(value) is float else _number(value))
        for name, busy in stages.items():
            column = found.stages.setdefault(name, array("d"))
            column.extend([math.nan] * (len(found.loader["step"]) - 1 - len(column)))
            column.append(busy)
    elif kind == "norms":
        found.norms.add(int(event["step"]), event["gradient"], event["update_ratio"], found.counts.get(kind, 0))
    elif kind == "evaluation":
        _judge(found, event)
    elif kind == "finding":
        found.findings.append(event)
    elif kind == "shuffle":
        found.shuffle = event
    elif kind in found.marks:
        _add_seconds(found, kind, event)
        _append(found.marks[kind], event)
        if kind in ("start", "end"):
            found.ended = str(event["state"]) if kind == "end" else None


def _judge(found: History, event: dict[str, Any]) -> None:
    score = _number(event["score"])
    better = score < _number(found.best["score"]) if found.best and event["goal"] == "min" else True
    if found.best and event["goal"] != "min":
        better = score > _number(found.best["score"])
    if better and math.isfinite(score):
        found.best = event
    _add_seconds(found, "evaluation", event)
    _append(found.evaluations, event)


def _add_seconds(found: History, kind: str, event: Mapping[str, Any]) -> None:
    found.seconds[kind] = found.seconds.get(kind, 0.0) + _number(event.get("seconds", 0.0))


def _append(some: list[dict[str, Any]], event: dict[str, Any]) -> None:
    some.append(event)
    if len(some) > MOST_MARKS:
        del some[1:-1:2]


def _number(value: Any) -> float:
    """Words like "nan" stand for what JSON does not have."""
    if value is None:
        return math.nan
    return float(value)


def _join(kept: dict[str, float], new: Mapping[str, float]) -> None:
    for name, value in new.items():
        before = kept.get(name, -math.inf)
        kept[name] = before if math.isnan(before) or value <= before else value  # what is no number stays visible
