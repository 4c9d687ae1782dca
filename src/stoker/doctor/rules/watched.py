"""Rules of what a watched model answers, in anybody's loop."""

import functools
import math
from collections.abc import Callable

from stoker.doctor.answers import Answers
from stoker.doctor.finding import Finding
from stoker.doctor.measured import Measured
from stoker.doctor.rules.base import BAD, SERIOUS, of_learning, rule

CONSTANT = 1e-3  # of the spread of targets, or of the size of answers, by which they differ
BASELINE = 0.98  # of the loss of who knows nothing
SURE = 3.0  # errors
UNRELATED = 0.15  # correlation that is none
OFTEN = 20  # samples of a class, to know how frequent it is
IN_A_ROW = 3  # looks
GROWN = 1e3  # times that gradients grow
LEAST_NORMS = 4

Watched = Callable[[Answers], Finding | None]


def watched(name: str) -> Callable[[Watched], Watched]:
    """A rule that needs a watched model."""

    def keep(function: Watched) -> Watched:
        @rule(name)
        @functools.wraps(function)
        def asked(found: Measured) -> Finding | None:
            return None if found.answers is None else function(found.answers)

        return function

    return keep


@watched("answers-not-finite")
def answers_not_finite(found: Answers) -> Finding | None:
    """A gradient may overflow now and then where its scale is being found; answers may not."""
    if not (any(one.bad == "answers" for one in found.looks) or all(one.bad for one in found.looks[-IN_A_ROW:])):
        return None
    bad = next(one for one in found.looks if one.bad)
    before = [one.step for one in found.looks if one.step < bad.step]
    since = f"still finite at step {before[-1]:,}" if before else "it was never seen finite"
    change = "a lower rate, clipping; `stoker doctor module:probe` with a loss names the sample and the operation"
    sentence = f"{bad.bad.capitalize()} are not finite at step {bad.step:,}."
    return of_learning("answers-not-finite", SERIOUS, sentence, change, [since])


@watched("gradient-none")
def gradient_none(found: Answers) -> Finding | None:
    if not found.is_enough or any(one.pushed or one.bad for one in found.looks):
        return None
    sentence = "No gradient comes back to what the model answers: nothing is learnt."
    return of_learning("gradient-none", SERIOUS, sentence, "look for .detach(), no_grad() or a loss that is constant")


@watched("collapsed")
def collapsed(found: Answers) -> Finding | None:
    spread = found.mean("spread")
    if not found.is_enough or spread is None or spread > CONSTANT:
        return None
    sentence = f"The model gives every sample the same answer: they differ by {spread:.2g} of what they should."
    change = "a lower rate from the start; look at inputs (raw numbers?) and for dead units"
    return of_learning("collapsed", SERIOUS, sentence, change, [f"over the last {len(found.late)} looks"])


@watched("at-baseline")
def at_baseline(found: Answers) -> Finding | None:
    """Answers are no better than what is known without looking at any input."""
    right, loss, values = found.mean("right"), found.mean("loss"), found.values
    if not found.is_enough or right is None or not values:
        return None
    steps = found.looks[-1].step
    change = "`stoker doctor module:probe` with a loss looks at inputs, labels, layers and rates"
    if loss is None:
        if abs(right) + SURE / math.sqrt(values) > UNRELATED:
            return None
        sentence = f"After {steps:,} steps answers have nothing to do with their targets: a correlation of {right:.3f}."
        return of_learning("at-baseline", SERIOUS, sentence, change, [f"over {values:,} values"])
    total, most = sum(found.counts.values()), max(found.counts.values())
    # Of few samples many classes were never seen: then knowing nothing is taken for all classes alike.
    shares = [count / total for count in found.counts.values()]
    nothing = -sum(one * math.log(one) for one in shares) if total > OFTEN * found.classes else math.log(found.classes)
    usual = most / total
    if loss < BASELINE * nothing or right > usual + SURE * math.sqrt(usual * (1 - usual) / values):
        return None
    sentence = f"After {steps:,} steps {right:.1%} of the answers are right: always the same class gives {usual:.1%}."
    evidence = [f"cross entropy {loss:.4g}, of who knows nothing {nothing:.4g}"]
    return of_learning("at-baseline", SERIOUS, sentence, change, evidence)


@watched("gradients-grow")
def gradients_grow(found: Answers) -> Finding | None:
    norms = [one.norm for one in found.looks if one.norm and math.isfinite(one.norm)]
    if len(norms) < LEAST_NORMS or min(norms[-2:]) < GROWN * sorted(norms[: len(norms) // 2])[len(norms) // 4]:
        return None
    sentence = f"Gradients have grown from {norms[0]:.3g} to {norms[-1]:.3g}."
    change = "a lower rate, a longer warm-up, clipping by norm"
    return of_learning("gradients-grow", BAD, sentence, change)
