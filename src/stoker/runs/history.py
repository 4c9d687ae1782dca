"""The events of a run in columns, read in one pass: a million lines in seconds, in a few bytes for each."""

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from stoker.runs.events import adapter_of
from stoker.runs.schema import upgraded

STEP = ("step", "time", "epoch", "lr", "loss", "grad_norm", "bad", "samples_per_s", "wait_share", "host_bytes",
        "cpu_share", "device_bytes", "device_busy", "copy_s", "loss_scale", "step_s")  # fmt: skip
LOADER = ("step", "seconds", "wait_s", "wait_p99_ms", "ready")
MOST_NORMS = 400  # moments for which the norms of every parameter are kept; neighbours are joined, the larger stays
MOST_EVALUATIONS = 50_000  # likewise
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

RARE = (*MARKS, "evaluation", "finding", "shuffle")


class Table:
    """Rows of numbers, one after the other; a column is cut out when it is asked for."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names, self._values = names, array("d")

    def __len__(self) -> int:
        return len(self._values) // len(self._names)

    def __getitem__(self, name: str) -> "array[float]":
        return self._values[self._names.index(name) :: len(self._names)]

    def add(self, event: Mapping[str, Any]) -> None:
        """All of a row, or nothing of it."""
        row = [math.nan if value is None else value for value in map(event.get, self._names)]
        try:
            self._values.extend(array("d", row))
        except TypeError:  # a word, such as "nan"
            self._values.extend(array("d", map(_number, row)))


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

    def forget_after(self, step: int) -> None:
        kept = sum(one <= step for one in self.steps)
        for column in (self.steps, self.gradient, self.update_ratio):
            del column[kept:]

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

    steps: Table = field(default_factory=lambda: Table(STEP))
    loader: Table = field(default_factory=lambda: Table(LOADER))
    stages: dict[str, "array[float]"] = field(default_factory=dict)  # busy seconds of each, beside `loader`
    norms: Norms = field(default_factory=Norms)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    marks: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {kind: [] for kind in MARKS})
    counts: dict[str, int] = field(default_factory=dict)  # of events, by kind
    seconds: dict[str, float] = field(default_factory=dict)  # that events say they took, by kind
    ended: str | None = None  # how, as the last process wrote; None: it has not
    shuffle: dict[str, Any] = field(default_factory=dict)
    lines: int = 0
    torn: int = 0  # lines that are no events

    @property
    def num_steps(self) -> int:
        """The last that was written: a resumed run begins before the end of the one that was killed."""
        return int(self.steps["step"][-1]) if len(self.steps) else 0

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the best score."""
        known = [one for one in self.evaluations if math.isfinite(one["score"])]
        if not known:
            return None
        pick = min if known[-1]["goal"] == "min" else max
        return pick(known, key=lambda one: float(one["score"]))

    @property
    def wait_share(self) -> float:
        """Of all the time in steps."""
        stepped, waits = self.steps["step_s"], self.steps["wait_share"]
        known = [(spent, share) for spent, share in zip(stepped, waits, strict=True) if math.isfinite(share)]
        total = sum(spent for spent, _ in known)
        return sum(spent * share for spent, share in known) / total if total else 0.0


def read_history(path: Path) -> History:
    """All events of a run; what is none, such as a line that a kill tore, is counted and passed over."""
    found = History()
    for line in _lines(path):
        found.lines += 1
        try:
            event = upgraded(from_json(line, cache_strings="keys"))
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
        event["step"] = _whole(event["step"])
        event["step_s"] = sum(one for one in map(float, event.get("step_ms") or ()) if 0 <= one < math.inf) / 1e3
        found.steps.add(event)
    elif kind == "loader":
        stages = {name: _number(one["busy_s"]) for name, one in event["stages"].items()}
        event["step"] = _whole(event["step"])
        found.loader.add(event)
        for name, busy in stages.items():
            column = found.stages.setdefault(name, array("d"))
            if missing := len(found.loader) - 1 - len(column):
                column.extend([math.nan] * missing)
            column.append(busy)
    elif kind == "norms":
        found.norms.add(_whole(event["step"]), event["gradient"], event["update_ratio"], found.counts.get(kind, 0))
    elif kind in RARE:
        _take_rare(found, kind, vars(adapter_of(kind).validate_python(event)))


def _take_rare(found: History, kind: str, event: dict[str, Any]) -> None:
    """Fields have their types, and those that are missing their defaults."""
    if "step" in event:
        _whole(event["step"])
    if kind == "evaluation":
        _add_seconds(found, kind, event)
        _append(found.evaluations, event, MOST_EVALUATIONS)
    elif kind == "finding":
        found.findings.append(event)
    elif kind == "shuffle":
        found.shuffle = event
    else:
        _add_seconds(found, kind, event)
        _append(found.marks[kind], event, MOST_MARKS)
        if kind == "start":
            _begin(found, event)
        elif kind == "end":
            found.ended = event["state"]


def _begin(found: History, event: dict[str, Any]) -> None:
    """What came after the checkpoint that it goes on from was lost, and comes again."""
    found.ended = None
    if event["resumed_from"] is not None:
        step = step_of(event["resumed_from"])
        found.evaluations = [one for one in found.evaluations if one["step"] <= step]
        found.norms.forget_after(step)


def step_of(checkpoint: str) -> int:
    """By its name."""
    digits = "".join(one for one in checkpoint.rpartition("step-")[2] if one.isdigit())
    return int(digits[:15] or 0)


def _add_seconds(found: History, kind: str, event: Mapping[str, Any]) -> None:
    spent = event.get("seconds", 0.0)
    found.seconds[kind] = found.seconds.get(kind, 0.0) + (spent if 0 <= spent < math.inf else 0.0)


def _append(some: list[dict[str, Any]], event: dict[str, Any], most: int) -> None:
    some.append(event)
    if len(some) > most:
        del some[1:-1:2]


def _whole(value: Any) -> int:
    """A number of a step, as a chart can show it."""
    number = int(value)
    if abs(number) >= 1 << 53 or number != value:
        raise ValueError(f"{value} is no step")
    return number


def _number(value: Any) -> float:
    """Words like "nan" stand for what JSON does not have."""
    if value is None:
        return math.nan
    return float(value)


def _join(kept: dict[str, float], new: Mapping[str, float]) -> None:
    for name, value in new.items():
        before = kept.get(name, -math.inf)
        kept[name] = before if math.isnan(before) or value <= before else value  # what is no number stays visible
