"""What all rules share: the list they stand in, and how a prediction is made."""

import functools
from collections.abc import Callable, Sequence

from stoker.doctor.finding import Finding
from stoker.doctor.learning.facts import Learning
from stoker.doctor.measured import Measured

SERIOUS, BAD, ODD = 0.9, 0.15, 0.06  # critical, warning, notice: of what is no matter of time
NOISE = 0.03  # of a step, below which no bar means anything

Rule = Callable[[Measured], Finding | None]
RULES: dict[str, Rule] = {}

Lesson = Callable[[Learning], Finding | None]


def rule(name: str) -> Callable[[Rule], Rule]:
    """Puts a function into the list: it is asked at every diagnosis."""

    def keep(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return keep


def lesson(name: str) -> Callable[[Lesson], Lesson]:
    """A rule that looks at learning alone."""

    def keep(function: Lesson) -> Lesson:
        @rule(name)
        @functools.wraps(function)
        def asked(found: Measured) -> Finding | None:
            return None if found.learning is None else function(found.learning)

        return function

    return keep


def of_learning(name: str, share: float, sentence: str, change: str, evidence: Sequence[str] = ()) -> Finding:
    return Finding(name, share, sentence, change, tuple(evidence), of="learning")


def predicted(found: Measured, after_s: float, spread: float = 0.1) -> tuple[float, float, float]:
    """Factor of the rate where a step takes `after_s`, with the run's own spread and the model's."""
    assert found.run is not None
    low, high = found.run.interval()
    after_s = max(after_s, 1e-9)
    return found.run.mean / after_s, (1 - spread) * low / after_s, (1 + spread) * high / after_s


def ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
