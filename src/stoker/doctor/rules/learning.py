"""Rules of learning: what keeps a loss from falling, or makes it lie. A share says how serious it is, and no more."""

import functools
import math
import statistics
from collections.abc import Callable, Sequence

from stoker.doctor.finding import Finding
from stoker.doctor.finite import cure_of
from stoker.doctor.learning.arms import SURE
from stoker.doctor.learning.facts import Feature, Learning
from stoker.doctor.measured import Measured
from stoker.doctor.rules.base import rule

SERIOUS, BAD, ODD = 0.9, 0.15, 0.06  # critical, warning, notice
RAW_MEAN, RAW_SPREAD, RAW_LARGEST = 3.0, 10.0, 100.0
SKEWED = 5.0
LEAKED = 0.999  # correlation of an input with the target
DEAD = 0.4  # of a layer
VANISHED = 3e-3  # of the relative gradient, first layers over last ones
SLOW = 0.02  # of what the best rate gains in as many steps: a short trial flatters high rates, so this is little
FAST = 0.2  # the same at a rate above the best one
UNMIXED = 4.0  # times what chance makes batches differ
RARE = 100  # times that one class is as frequent as another
SAME, ALIKE = 0.999, 0.8  # cosines of gradients: of the same batch, and of batches with other draws of dropout
SUMMED = 0.75  # of the number of batches
TINY = 1e-5  # of a gradient relative to its weights
CLIPPED = 0.1  # of a gradient that clipping leaves
SPREAD = 0.05  # of the size of answers, by which they must differ
MOST_NAMES = 10  # of samples, as evidence; JSON has all
LEARNT = 0.5  # of its loss that is left of one batch that was learnt

Lesson = Callable[[Learning], Finding | None]


def lesson(name: str) -> Callable[[Lesson], Lesson]:
    """A rule that looks at learning alone."""

    def keep(function: Lesson) -> Lesson:
        @rule(name)
        @functools.wraps(function)
        def asked(found: Measured) -> Finding | None:
            return None if found.learning is None else function(found.learning)

        return function

    return keep


def _finding(name: str, share: float, sentence: str, change: str, evidence: Sequence[str] = ()) -> Finding:
    return Finding(name, share, sentence, change, tuple(evidence), of="learning")


def _told(feature: Feature) -> str:
    return (
        f"column {feature.number}: mean {feature.mean:.4g}, spread {feature.spread:.4g}, up to {feature.largest:.4g}, "
        f"skew {feature.skew:.1f}"
    )


@lesson("inputs-not-finite")
def inputs_not_finite(found: Learning) -> Finding | None:
    bad = [one for one in found.features if one.bad_share > 0]
    if not bad or not found.bad_batches:
        return None
    evidence = [f"column {one.number}: {one.bad_share:.2%} of its values" for one in bad[:5]]
    sentence = (
        f"{len(bad)} of {len(found.features)} columns that reach {found.features_of} hold NaN or infinite values."
    )
    change = "find out where they come from; torch.nan_to_num(inputs) hides them"
    return _finding("inputs-not-finite", SERIOUS, sentence, change, evidence)


@lesson("not-finite")
def not_finite(found: Learning) -> Finding | None:
    bad = found.not_finite
    if bad is None or found.bad_batches:
        return None
    what = "gradient" if bad.backward else "loss"
    places = ", ".join(map(str, bad.samples[:8])) + (" ..." if len(bad.samples) > 8 else "")
    where = f"sample {places} of its {bad.of}" if bad.samples else "it as a whole"
    sentence = f"The {what} of batch {bad.batch} is not finite before anything was learnt: {where}."
    evidence = [
        *([f"first operation: {bad.operation}{' in the backward pass' if bad.backward else ''}"] * bool(bad.operation)),
        *([bad.line] if bad.line else []),
    ]
    return _finding("not-finite", SERIOUS, sentence, cure_of(bad.operation), evidence)


@lesson("inputs-ids")
def inputs_ids(found: Learning) -> Finding | None:
    """Whole numbers of many kinds that spread far: a number that somebody gave to a thing, and not a measure of it."""
    ids = [one for one in found.features if _is_id(one)]
    if not ids:
        return None
    sentence = f"Columns that reach {found.features_of} look like identifiers used as numbers: one 7 is not near an 8."
    change = "nn.Embedding(number of them, width), or a table of what is known of each (such as places)"
    return _finding("inputs-ids", SERIOUS, sentence, change, [_told(one) for one in ids[:5]])


def _is_id(feature: Feature) -> bool:
    return feature.whole and feature.spread > RAW_SPREAD and abs(feature.skew) < 1


@lesson("inputs-raw")
def inputs_raw(found: Learning) -> Finding | None:
    raw = [
        one
        for one in found.features
        if not _is_id(one) and (abs(one.mean) > RAW_MEAN or one.spread > RAW_SPREAD or one.largest > RAW_LARGEST)
    ]
    if not raw:
        return None
    sentence = f"{len(raw)} of {len(found.features)} columns that reach {found.features_of} are raw numbers."
    worst = sorted(raw, key=lambda one: -one.largest)[:5]
    return _finding("inputs-raw", SERIOUS, sentence, _normaliser(found.features), [_told(one) for one in worst])


def _normaliser(features: Sequence[Feature]) -> str:
    """A line of code; skewed columns get a logarithm first."""
    if len(features) > 32:
        return "inputs = (inputs - inputs_mean) / inputs_spread, both measured once over the training set"
    skewed = [one.number for one in features if one.skew > SKEWED and one.mean > 0]
    logarithm = f"inputs[..., {skewed}] = inputs[..., {skewed}].log1p() (then measure again); " if skewed else ""
    mean = ", ".join(f"{one.mean:.4g}" for one in features)
    spread = ", ".join(f"{max(one.spread, 1e-6):.4g}" for one in features)
    return f"{logarithm}inputs = (inputs - torch.tensor([{mean}])) / torch.tensor([{spread}])"


@lesson("inputs-constant")
def inputs_constant(found: Learning) -> Finding | None:
    constant = [one.number for one in found.features if one.constant]
    if not constant:
        return None
    sentence = f"{len(constant)} of {len(found.features)} columns never change: {constant[:8]}."
    return _finding("inputs-constant", ODD, sentence, "leave them out, or find out why")


@lesson("target-leaked")
def target_leaked(found: Learning) -> Finding | None:
    leaked = [one for one in found.features if abs(one.with_target) > LEAKED]
    if not leaked:
        return None
    columns = ", ".join(f"{one.number} ({one.with_target:+.4f})" for one in leaked[:5])
    sentence = f"The target itself is among the inputs: correlation of column {columns}."
    return _finding("target-leaked", SERIOUS, sentence, "leave the column out: nothing else needs to be learnt")


@lesson("labels-range")
def labels_range(found: Learning) -> Finding | None:
    if found.label_error is None:
        return None
    change = "as many outputs as there are classes, numbered from 0; one map of classes for training and validation"
    return _finding(
        "labels-range", SERIOUS, "Labels lie outside of what the model can answer.", change, [found.label_error]
    )


@lesson("labels-constant")
def labels_constant(found: Learning) -> Finding | None:
    if not found.constant_labels:
        return None
    sentence = f"All {found.seen or 'the'} labels are the same: there is nothing to learn."
    return _finding(
        "labels-constant", SERIOUS, sentence, "look at how labels are read, and in which order samples come"
    )


@lesson("labels-rare")
def labels_rare(found: Learning) -> Finding | None:
    counts = found.label_counts
    total = sum(counts.values())
    if len(counts) < 2 or len(counts) > 64 or max(counts.values()) < RARE * min(counts.values()):
        return None
    most = max(counts, key=lambda one: counts[one])
    share = counts[most] / total
    sentence = f"Class {most} has {share:.1%} of the samples: always answering it is right that often."
    change = "weigh classes in the loss or draw rare ones more often, and judge by a metric that counts classes alike"
    evidence = [f"{one}: {count:,} of {total:,}" for one, count in sorted(counts.items(), key=lambda pair: pair[1])[:3]]
    return _finding("labels-rare", BAD, sentence, change, evidence)


@lesson("order")
def order(found: Learning) -> Finding | None:
    if found.order is None or found.order < UNMIXED:
        return None
    sentence = f"Batches differ {found.order:.0f} times as much as chance would make them: samples are not shuffled."
    return _finding(
        "order", SERIOUS, sentence, "shuffle=True, or an exact shuffle over all files (stoker.from_parquet)"
    )


@lesson("broken")
def broken(found: Learning) -> Finding | None:
    bad = [] if found.contents is None else found.contents.broken
    if not bad:
        return None
    sentence = f"{len(bad):,} samples cannot be read as a whole."
    change = "fetch them again; --data.broken says what training does with images that cannot be decoded at all"
    return _finding("broken", BAD, sentence, change, [f"{name}: {why}" for name, why in bad[:MOST_NAMES]])


def _pairs(pairs: Sequence[tuple[str, str]], words: str) -> list[str]:
    return [f"{one} {words} {other}" for one, other in pairs[:MOST_NAMES]]


@lesson("duplicates")
def duplicates(found: Learning) -> Finding | None:
    if found.contents is not None and len(found.contents.twice) >= max(3, 0.01 * found.contents.seen):
        told = found.contents
        sentence = f"{len(told.twice):,} of {told.seen:,} training samples have the content of another one."
        change = "leave them out; look for files that are there twice under other names"
        return _finding("duplicates", BAD, sentence, change, _pairs(told.twice, "is"))
    if found.seen == 0 or found.twice < max(3, 0.01 * found.seen):
        return None
    sentence = f"{found.twice:,} of {found.seen:,} samples of the first epoch had been there before."
    return _finding(
        "duplicates", BAD, sentence, "look for files that are listed twice, and for a sampler with replacement"
    )


@lesson("validation-seen")
def validation_seen(found: Learning) -> Finding | None:
    if found.contents is not None and (found.contents.in_validation or found.contents.alike):
        told = found.contents
        same, alike = len(told.in_validation), len(told.alike)
        sentence = f"{same:,} validation samples are training samples" + (
            f", and {alike:,} look like one: the score says less than it seems." if alike else ": the score says less."
        )
        evidence = [*_pairs(told.in_validation, "is"), *_pairs(told.alike, "looks like")]
        share = SERIOUS if same else BAD
        return _finding("validation-seen", share, sentence, "leave them out of one of the two", evidence)
    if not found.in_validation:
        return None
    sentence = f"{found.in_validation:,} validation samples are among the training samples: the score says nothing."
    return _finding("validation-seen", SERIOUS, sentence, "split by file or by group, before anything else")


@lesson("labels-differ")
def labels_differ(found: Learning) -> Finding | None:
    told = found.agreement
    if told is None or not told.is_sure:
        return None
    evidence = [
        f"a quick classifier is right on {told.held:.1%} of other training samples and on {told.seen:.1%} of the validation "
        f"samples (chance is {told.chance:.1%})",
        *(f"validation class {one} looks like {like}" for one, like in told.looks_like[:5]),
        *(f"classes {one} and {other} stand in each other's place" for one, other in told.swapped[:5]),
    ]
    sentence = "Validation labels do not mean what training labels mean: " + (
        "they are other classes altogether." if told.differs else "some classes are swapped."
    )
    change = "one map of classes for both; look at the order in which folders or files are numbered"
    return _finding("labels-differ", SERIOUS, sentence, change, evidence)


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
    return _finding("not-updated", SERIOUS, sentence, change, evidence)


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
        return _finding(
            "accumulation", SERIOUS, sentence, "zero_grad() after optimizer.step(), not after every batch", evidence
        )
    if mean > ALIKE and size > SUMMED * batches:
        sentence = (
            f"Accumulation adds the gradients of {batches} batches up: the step is that of {batches} times the rate."
        )
        return _finding("accumulation", BAD, sentence, f"(loss / {batches}).backward()", evidence)
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
    return _finding(
        "clipped", BAD, sentence, change, [f"clipped to {norms[0]:.3g} in {len(made)} of {len(made)} steps"]
    )


@lesson("frozen")
def frozen(found: Learning) -> Finding | None:
    names = [one.name for one in found.layers if one.frozen]
    if not names:
        return None
    sentence = f"{len(names)} of {len(found.layers)} layers do not learn: requires_grad is False."
    return _finding("frozen", BAD, sentence, f"requires_grad_(True) of {', '.join(names[:5])}, if that is not meant")


@lesson("no-gradient")
def no_gradient(found: Learning) -> Finding | None:
    names = [one.name for one in found.layers if not one.frozen and not one.gradient]
    if not names:
        return None
    sentence = f"No gradient reaches {len(names)} of {len(found.layers)} layers: {', '.join(names[:5])}."
    change = (
        "look for .detach(), .item(), torch.no_grad(), argmax or rounding between them and the loss, or unused layers"
    )
    return _finding("no-gradient", SERIOUS, sentence, change)


@lesson("dead")
def dead(found: Learning) -> Finding | None:
    gone = [one for one in found.layers if one.dead_share > DEAD]
    if not gone:
        return None
    worst = max(gone, key=lambda one: one.dead_share)
    sentence = f"{worst.dead_share:.0%} of what reaches {worst.name} is zero for every sample: its units are dead."
    change = "GELU instead of ReLU, smaller weights at the start, a lower rate"
    evidence = [f"{one.name}: {one.dead_share:.0%}" for one in gone[:5]]
    return _finding("dead", SERIOUS, sentence, change, evidence)


@lesson("vanishing")
def vanishing(found: Learning) -> Finding | None:
    sizes = [one.gradient for one in found.layers if one.gradient]
    if len(sizes) < 4:
        return None
    third = len(sizes) // 3 or 1
    first, last = (math.exp(sum(map(math.log, part)) / len(part)) for part in (sizes[:third], sizes[-third:]))
    if first > VANISHED * last:
        return None
    sentence = f"Gradients of the first layers are {last / first:.2g} times as small as those of the last ones."
    change = "residual connections, normalisation, ReLU or GELU instead of tanh or sigmoid, weights scaled for them"
    evidence = [f"{one.name}: {one.gradient:.2g} of its weights" for one in (*found.layers[:2], *found.layers[-2:])]
    return _finding("vanishing", SERIOUS, sentence, change, evidence)


@lesson("rate-high")
def rate_high(found: Learning) -> Finding | None:
    best, present = found.best, found.present
    if best is None or present is None or present.rate <= best.rate or present.gain > FAST * best.gain:
        return None
    assert found.rate is not None
    sentence = f"The rate {found.rate:.2g} is {found.rate / best.rate:.0f} times the best one that was tried."
    return _finding("rate-high", SERIOUS, sentence, _better_rate(found), _rates(found))


@lesson("rate-low")
def rate_low(found: Learning) -> Finding | None:
    best, present = found.best, found.present
    if best is None or present is None or present.rate >= best.rate or present.gain > SLOW * best.gain:
        return None
    if found.updates is not None and found.updates.warms_up:  # it is not the rate that the run will have
        return None
    assert found.rate is not None
    sentence = f"The rate {found.rate:.2g} is {best.rate / found.rate:.0f} times below the best one that was tried."
    return _finding("rate-low", SERIOUS, sentence, _better_rate(found), _rates(found))


def _better_rate(found: Learning) -> str:
    assert found.best is not None
    return f"a rate of {found.best.rate / 2:.2g}, half of the best one of a short trial"


def _rates(found: Learning) -> list[str]:
    return ["  ".join(row) for row in found.row_of_rates()]


@lesson("nothing-learnt")
def nothing_learnt(found: Learning) -> Finding | None:
    """With its own labels the model gains no more than with those of other samples, and cannot learn one batch either."""
    if found.with_others_labels is None or found.one_batch is None or found.constant_labels or found.not_finite:
        return None
    gain, error = found.with_others_labels
    before, after, steps = found.one_batch
    if gain > SURE * error or _learns_one(found):
        return None
    evidence = [
        f"gain with its own labels beyond those of other samples: {gain:.3g} +- {error:.2g}",
        f"one batch, learnt for {steps} steps: from {before:.4g} to {after:.4g}",
        *([f"answers differ by {found.answers:.2%} of their size"] if found.answers is not None else []),
        *_rates(found),
    ]
    sentence = "The model learns nothing, not even one batch by heart: labels of other samples would do as well."
    change = "look at inputs and labels first (do they belong together?), then at the loss and the head"
    return _finding("nothing-learnt", SERIOUS, sentence, change, evidence)


def _learns_one(found: Learning) -> bool:
    """Half of the loss of one batch can be learnt by heart; or its samples get different answers, given the time."""
    assert found.one_batch is not None
    before, after, _ = found.one_batch
    return after < before - LEARNT * abs(before) or (found.answers is not None and found.answers > SPREAD)


@lesson("labels-unrelated")
def labels_unrelated(found: Learning) -> Finding | None:
    """One batch can be learnt by heart, and nothing of it helps with the next one."""
    if found.with_others_labels is None or found.one_batch is None or found.constant_labels:
        return None
    gain, error = found.with_others_labels
    if gain > SURE * error or not _learns_one(found):
        return None
    sentence = "Labels of other samples teach as much as a sample's own: no decision about rates can be made."
    change = "see whether labels belong to their samples; a hard task may need more batches than this look took"
    evidence = [f"gain beyond labels of other samples: {gain:.3g} +- {error:.2g}", *_rates(found)]
    return _finding("labels-unrelated", ODD, sentence, change, evidence)
