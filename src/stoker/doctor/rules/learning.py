"""Rules of learning: what keeps a loss from falling, or makes it lie."""

import math
import statistics
from dataclasses import replace

from stoker.doctor.finding import Finding
from stoker.doctor.learning.arms import SURE, is_learnt
from stoker.doctor.learning.facts import Learning
from stoker.doctor.rules.base import BAD, ODD, SERIOUS, lesson, of_learning

DEAD, SILENT = 0.4, 0.99  # of a layer: too much, and all of it
VANISHED = 3e-3  # of the relative gradient, first layers over last ones
SLOW = 0.02  # of what the best rate gains in as many steps: a short trial flatters high rates, so this is little
FAST = 0.2  # the same at a rate above the best one
EXPLODED = 10.0  # times that a loss rises by what it could fall
SAME, ALIKE = 0.999, 0.8  # cosines of gradients: of the same batch, and of batches with other draws of dropout
SUMMED = 0.75  # of the number of batches
SCALED = 1000.0  # times: a loss is scaled for float16, and the optimizer takes that back
TINY = 1e-5  # of a gradient relative to its weights
CLIPPED = 0.1  # of a gradient that clipping leaves


@lesson("not-updated")
def not_updated(found: Learning) -> Finding | None:
    if found.updates is None:
        return None
    # A gradient too small to be added to a weight is none that was left out.
    with_gradient = {one.name for one in found.layers if one.gradient and one.gradient > TINY and not one.frozen}
    names = [name for name in found.updates.unchanged if name in with_gradient]
    if not names:
        return None
    sentence = f"{len(names)} of {len(found.layers)} layers get gradients, and the step never changes them."
    change = "give the optimizer the parameters of this very model, made and replaced before it, and a rate above zero"
    evidence = [", ".join(names[:8]), *([f"the rate is {found.rate:.2g}"] if found.rate is not None else [])]
    return of_learning("not-updated", SERIOUS, sentence, change, evidence)


@lesson("accumulation")
def accumulation(found: Learning) -> Finding | None:
    several = [] if found.updates is None else [one for one in found.updates.made if one.batches > 1]
    if len(several) < 2:
        return None
    batches = round(statistics.median(one.batches for one in several))
    size, last, mean = (
        statistics.median(getattr(one, name) for one in several) for name in ("size", "with_last", "with_mean")
    )
    evidence = [
        f"{batches} batches a step; the gradient used is {size:.2f} times their mean, with a cosine of {mean:.2f} to it and "
        f"of {last:.2f} to that of the last batch alone"
    ]
    if last > SAME and mean < last - 1e-3:
        sentence = f"Gradients of {batches} batches are to be accumulated, and only the last one counts."
        return of_learning(
            "accumulation", SERIOUS, sentence, "zero_grad() after optimizer.step(), not after every batch", evidence
        )
    if mean > ALIKE and SUMMED * batches < size < SCALED:
        sentence = (
            f"Accumulation adds the gradients of {batches} batches up: the step is that of {batches} times the rate."
        )
        return of_learning("accumulation", BAD, sentence, f"(loss / {batches}).backward()", evidence)
    return None


@lesson("clipped")
def clipped(found: Learning) -> Finding | None:
    """Always to the same length, and far below what it was: then clipping is a normalisation, and the rate means another."""
    made = [] if found.updates is None else [one for one in found.updates.made if one.batches and one.with_mean > ALIKE]
    if len(made) < 3:
        return None
    norms = [one.norm for one in made]
    size = statistics.median(one.size for one in made)
    if size > CLIPPED or max(norms) > 1.05 * min(norms):
        return None
    sentence = f"Every gradient is clipped, to {size:.1%} of its length: the rate only sets the length of a step."
    change = f"clip at what few steps reach (here the median norm is {norms[0] / size:.3g}), and a rate to match"
    return of_learning(
        "clipped", BAD, sentence, change, [f"clipped to {norms[0]:.3g} in {len(made)} of {len(made)} steps"]
    )


@lesson("mixed-labels")
def mixed_labels(found: Learning) -> Finding | None:
    if found.mixed is None or found.mixed.both_count:
        return None
    sentence = (
        f"Samples are mixed ({found.mixed.share:.0%} of one, the rest of another), and only one of the labels counts."
    )
    change = "loss = share * criterion(answers, labels) + (1 - share) * criterion(answers, labels[order])"
    evidence = ["the label of the other sample was changed, and no gradient of the mixed one did"]
    return of_learning("mixed-labels", SERIOUS, sentence, change, evidence)


@lesson("average-unused")
def average_unused(found: Learning) -> Finding | None:
    if found.average not in ("unused", "unchanged"):
        return None
    if found.average == "unchanged":
        sentence = "Steps leave the averaged weights as they were."
        change = "average.update_parameters(model) after every step, unless it happens elsewhere"
        return of_learning("average-unused", BAD, sentence, change)
    sentence = "Averaged weights are kept, and judging never uses them."
    return of_learning("average-unused", BAD, sentence, "evaluate and save the averaged model, not the other one")


@lesson("rate-restored")
def rate_restored(found: Learning) -> Finding | None:
    if found.restored is None:
        return None
    made, present = found.restored
    sentence = f"The optimizer was made with a rate of {made:.3g}, and goes on with {present:.3g} from a checkpoint."
    change = "if the new rate is meant: after load_state_dict set 'lr' and 'initial_lr', and make the schedule anew"
    return of_learning("rate-restored", BAD, sentence, change)


@lesson("frozen")
def frozen(found: Learning) -> Finding | None:
    names = [one.name for one in found.layers if one.frozen]
    if not names:
        return None
    sentence = f"{len(names)} of {len(found.layers)} layers do not learn: requires_grad is False."
    return of_learning("frozen", BAD, sentence, f"requires_grad_(True) of {', '.join(names[:5])}, if that is not meant")


@lesson("no-gradient")
def no_gradient(found: Learning) -> Finding | None:
    names = [one.name for one in found.layers if not one.frozen and not one.gradient]
    if not names or any(one.dead_share > SILENT for one in found.layers):  # then that is why
        return None
    sentence = f"No gradient reaches {len(names)} of {len(found.layers)} layers: {', '.join(names[:5])}."
    change = (
        "look for .detach(), .item(), torch.no_grad(), argmax or rounding between them and the loss, or unused layers"
    )
    return of_learning("no-gradient", SERIOUS, sentence, change)


@lesson("dead")
def dead(found: Learning) -> Finding | None:
    # Of the first layer these are inputs, such as pixels that are always blank.
    gone = [one for one in found.layers if one.dead_share > DEAD and one.name != found.features_of]
    if not gone:
        return None
    worst = max(gone, key=lambda one: one.dead_share)
    sentence = f"{worst.dead_share:.0%} of what reaches {worst.name} is zero for every sample: its units are dead."
    change = "GELU instead of ReLU, smaller weights at the start, a lower rate"
    evidence = [f"{one.name}: {one.dead_share:.0%}" for one in gone[:5]]
    return of_learning("dead", SERIOUS, sentence, change, evidence)


@lesson("vanishing")
def vanishing(found: Learning) -> Finding | None:
    sizes = [one.gradient for one in found.layers if one.gradient]
    if len(sizes) < 4 or found.skipped:  # weights of zero at the start look like it
        return None
    third = len(sizes) // 3 or 1
    first, last = (math.exp(sum(map(math.log, part)) / len(part)) for part in (sizes[:third], sizes[-third:]))
    if first > VANISHED * last:
        return None
    sentence = f"Gradients of the first layers are {last / first:.2g} times as small as those of the last ones."
    change = "residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, weights scaled for them"
    evidence = [f"{one.name}: {one.gradient:.2g} of its weights" for one in (*found.layers[:2], *found.layers[-2:])]
    return of_learning("vanishing", SERIOUS, sentence, change, evidence)


@lesson("rate-high")
def rate_high(found: Learning) -> Finding | None:
    best, present = found.best, found.present
    if best is None or present is None or present.rate <= best.rate or present.gain > FAST * best.gain:
        return None
    if not _learns_of_inputs(found) and not present.is_bad and present.gain > -best.gain * EXPLODED:
        return None  # of labels that nothing is learnt from the quickest way to their mean is the best rate
    assert found.rate is not None
    sentence = f"The rate {found.rate:.2g} is {found.rate / best.rate:.0f} times the best one that was tried."
    return _with_rate(of_learning("rate-high", SERIOUS, sentence, _better_rate(found), _rates(found)), found)


@lesson("rate-low")
def rate_low(found: Learning) -> Finding | None:
    best, present = found.best, found.present
    if best is None or present is None or present.rate >= best.rate or present.gain > SLOW * best.gain:
        return None
    if found.updates is not None and found.updates.warms_up:  # it is not the rate that the run will have
        return None
    assert found.rate is not None
    below = f"{best.rate / found.rate:.0f} times below" if found.rate > 0 else "below"
    sentence = f"The rate {found.rate:.2g} is {below} the best one that was tried."
    return _with_rate(of_learning("rate-low", SERIOUS, sentence, _better_rate(found), _rates(found)), found)


def _learns_of_inputs(found: Learning) -> bool:
    """More than with the labels of other samples."""
    if found.with_others_labels is None:
        return True
    gain, error = found.with_others_labels
    return gain > SURE * error


def _better_rate(found: Learning) -> str:
    assert found.best is not None
    return f"a rate of {found.best.rate / 2:.2g}, half of the best one of a short trial"


def _with_rate(finding: Finding, found: Learning) -> Finding:
    """The key of a recipe that sets it."""
    if found.configured is None or not found.rate or found.best is None:
        return finding
    return replace(finding, keys={"train.lr": f"{found.configured * found.best.rate / 2 / found.rate:.2g}"})


def _rates(found: Learning) -> list[str]:
    return ["  ".join(row) for row in found.row_of_rates()]


@lesson("nothing-learnt")
def nothing_learnt(found: Learning) -> Finding | None:
    """With its own labels the model gains no more than with those of other samples, and cannot learn one batch either."""
    if found.with_others_labels is None or found.one_batch is None or found.constant_labels or found.not_finite:
        return None
    gain, error = found.with_others_labels
    before, after, steps = found.one_batch
    if _learns_of_inputs(found) or _learns_one(found):
        return None
    evidence = [
        f"gain with its own labels beyond those of other samples: {gain:.3g} +- {error:.2g}",
        f"one batch, learnt for {steps} steps: from {before:.4g} to {after:.4g}",
        *([f"answers differ by {found.answers:.2%} of their size"] if found.answers is not None else []),
        *_rates(found),
    ]
    sentence = "The model learns nothing, not even one batch by heart: labels of other samples would do as well."
    change = "look at inputs and labels first (do they belong together?), then at the loss and the head"
    return of_learning("nothing-learnt", SERIOUS, sentence, change, evidence)


def _learns_one(found: Learning) -> bool:
    assert found.one_batch is not None
    before, after, _ = found.one_batch
    return is_learnt(before, after, found.answers)


@lesson("labels-unrelated")
def labels_unrelated(found: Learning) -> Finding | None:
    """One batch can be learnt by heart, and nothing of it helps with the next one."""
    if found.with_others_labels is None or found.one_batch is None or found.constant_labels:
        return None
    gain, error = found.with_others_labels
    if _learns_of_inputs(found) or not _learns_one(found):
        return None
    sentence = "Labels of other samples teach as much as a sample's own: no decision about rates can be made."
    change = "see whether labels belong to their samples; a hard task may need more batches than this look took"
    evidence = [f"gain beyond labels of other samples: {gain:.3g} +- {error:.2g}", *_rates(found)]
    return of_learning("labels-unrelated", ODD, sentence, change, evidence)
