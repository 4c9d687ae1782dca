"""What all rules share: the list they stand in, and how a prediction is made."""

from collections.abc import Callable

from stoker.doctor.finding import Finding
from stoker.doctor.measured import Measured

NOISE = 0.03  # of a step, below which no bar means anything

Rule = Callable[[Measured], Finding | None]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Puts a function into the list: it is asked at every diagnosis."""

    def keep(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return keep


def predicted(found: Measured, after_s: float, spread: float = 0.1) -> tuple[float, float, float]:
    """Factor of the rate where a step takes `after_s`, with the run's own spread and the model's."""
    assert found.run is not None
    low, high = found.run.interval()
    after_s = max(after_s, 1e-9)
    return found.run.mean / after_s, (1 - spread) * low / after_s, (1 + spread) * high / after_s


def ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
