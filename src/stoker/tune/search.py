"""The search: one knob after the other, each value a trial, within a budget of time.

What changes what is learnt is never taken by itself: losses must agree before a setting of the step is kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker import console
from stoker.tune.space import Choice, Knob, plain
from stoker.tune.trial import Answer, Ask, Leg, tried

GAIN = 0.03  # of the rate, from which another value is worth having
AGREE, ERRORS = 0.01, 3.0  # losses differ by at most this share, or so many standard errors of their difference
LEAST_S = 10.0  # that a trial gets, however little is left
SHARE = 0.5  # of the time that is left, which one trial may take: the others are still to come
LONGER = 1.5  # times the shortest trial so far: what the next is expected to take


@dataclass(frozen=True)
class Decision:
    """What was tried of one knob, and what came of it."""

    knob: str
    before: Any
    chosen: Any
    tried: list[tuple[Any, str]]  # value, and its rate or why it has none
    why: str
    whole: bool = True  # all values were tried

    def as_json(self) -> dict[str, Any]:
        tried = [[plain(value), said] for value, said in self.tried]
        return {**vars(self), "before": str(self.before), "chosen": str(self.chosen), "tried": tried}

    def lines(self) -> list[str]:
        values = ", ".join(f"{value}: {said}" for value, said in self.tried)
        change = f"{self.before} -> {self.chosen}" if self.chosen != self.before else f"{self.chosen} stays"
        return [f"{self.knob}: {change}. {self.why}", f"    {values}"]


class OutOfTime(Exception):
    """The budget does not allow another trial."""


@dataclass
class Search:
    target: str
    overrides: list[str]
    seconds: float  # of each measurement
    budget_s: float
    trusted: bool = False
    run: Callable[[Ask], Answer] = tried
    best: dict[str, Any] = field(default_factory=dict)  # settings that were taken
    decisions: list[Decision] = field(default_factory=list)
    num_trials: int = 0
    began: float = field(default_factory=lambda: time.monotonic())
    reserved_s: float = 0.0  # of the budget, for the proof at the end
    _known: dict[tuple[Leg, tuple[tuple[str, str], ...]], Answer] = field(default_factory=dict)
    _shortest_s: float = 0.0

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    @property
    def left_s(self) -> float:
        """Of the budget, without what the proof will take."""
        return self.budget_s - self.reserved_s - self.spent_s

    def trial(
        self, knobs: dict[str, Any], leg: Leg, *, anew: bool = False, called: str = "", seconds: float | None = None
    ) -> Answer:
        """Of the settings so far and some others; not again what was tried, unless asked to.

        `seconds`: of the measurement, where it is not that of all others.
        """
        settings = {**self.best, **knobs}
        key = leg, tuple(sorted((name, repr(value)) for name, value in settings.items()))
        if key in self._known and not anew:
            return self._known[key]
        if self.num_trials and LONGER * self._shortest_s > self.left_s:
            raise OutOfTime
        begin = time.monotonic()
        # A trial is another process: of values that may be anything it is told the number.
        given = {name: value.number if isinstance(value, Choice) else value for name, value in settings.items()}
        left = self.left_s if leg == "rates" or not self.num_trials else SHARE * self.left_s
        left = max(LEAST_S, left)
        ask = Ask(self.target, self.overrides, given, leg, seconds or self.seconds, self.trusted, left)
        answer = self.run(ask)
        self.num_trials += 1
        took = time.monotonic() - begin
        self._shortest_s = min(self._shortest_s or took, took)
        shown = f"{answer.rate:,.0f} samples/s" if answer.ok and answer.rate else answer.error or "done"
        words = " ".join(f"{name}={value}" for name, value in knobs.items()) or called or "as it is"
        console.say(f"trial {self.num_trials}, {leg}: {words}: {shown} ({self.spent_s:.0f} of {self.budget_s:.0f} s)")
        self._known[key] = answer
        return answer

    def choose(self, knob: Knob, now: Any, leg: Leg) -> None:
        """The best value of a knob, if it is surely better than the one of now and changes no loss."""
        base = self.trial({}, leg)
        if not base.ok:
            return
        seen: list[tuple[Any, str]] = [(now, f"{base.rate:,.0f}/s")]
        best, rate, why, whole = now, base.rate, "nothing else was faster", False
        unseen = (
            "" if base.losses or knob.stage != "step" else "; without a loss nobody can say whether it learns the same"
        )
        try:
            for value in _from(knob.values, now):
                answer = self.trial({knob.name: value}, leg)
                same = not answer.ok or knob.stage != "step" or agree(base.losses, answer.losses)
                seen.append((value, said_of(answer) if same else f"{answer.rate:,.0f}/s, other losses"))
                if answer.ok and same and answer.rate > rate * (1 + GAIN):
                    best, rate = value, answer.rate
                    why = f"{answer.rate / base.rate:.2f} times the rate{unseen}"
            whole = True
        except OutOfTime:
            why += "; the budget ended here"
            raise
        finally:
            if best != now:
                self.best[knob.name] = best
            self.decisions.append(Decision(knob.name, now, best, seen, why, whole))


def _from(values: tuple[Any, ...], now: Any) -> list[Any]:
    """All but the one of now, the nearest first, where they have an order."""
    if now in values:
        place = values.index(now)
        return [values[i] for i in sorted(range(len(values)), key=lambda i: abs(i - place)) if i != place]
    return list(values)


def said_of(answer: Answer) -> str:
    if answer.ok:
        return f"{answer.rate:,.0f}/s"
    return "out of memory" if answer.out_of_memory else f"not possible ({(answer.error or '')[:60]})"


def agree(base: list[float], other: list[float]) -> bool:
    """Losses of the same steps: equal but for rounding. Without losses nobody can say otherwise."""
    if not base or len(base) != len(other):
        return not base
    difference = np.array(other) - np.array(base)
    if not np.isfinite(difference).all():
        return False
    error = difference.std(ddof=1) / np.sqrt(len(difference)) if len(difference) > 1 else 0.0
    away = abs(float(difference.mean()))
    return bool(away <= AGREE * max(abs(float(np.mean(base))), 1e-12) or away <= ERRORS * error)


@dataclass(frozen=True)
class Line:
    """a + b x, through a few points."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, points: list[tuple[float, float]]) -> "Line":
        x, y = np.array(points, np.float64).T
        slope, fixed = np.polyfit(x, y, 1) if len(points) > 1 else (0.0, y[0])
        return cls(float(fixed), float(slope))

    def at(self, x: float) -> float:
        return self.fixed + self.slope * x
