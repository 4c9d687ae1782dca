"""Rules of what is learnt from: inputs that no model likes, labels that mean something else, samples in two places."""

from collections.abc import Sequence

from stoker.doctor.finding import Finding
from stoker.doctor.finite import cure_of
from stoker.doctor.learning.facts import Feature, Learning
from stoker.doctor.rules.base import BAD, ODD, SERIOUS, lesson, of_learning

RAW_MEAN, RAW_SPREAD, RAW_LARGEST = 3.0, 10.0, 100.0
SKEWED = 5.0
LEAKED = 0.999  # correlation of an input with the target
UNMIXED = 4.0  # times what chance makes batches differ
RARE = 100  # times that one class is as frequent as another
MOST_NAMES = 10  # of samples, as evidence; JSON has all


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
    return of_learning("inputs-not-finite", SERIOUS, sentence, change, evidence)


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
    return of_learning("not-finite", SERIOUS, sentence, cure_of(bad.operation), evidence)


@lesson("inputs-ids")
def inputs_ids(found: Learning) -> Finding | None:
    """Whole numbers of many kinds that spread far: a number that somebody gave to a thing, and not a measure of it."""
    ids = [one for one in found.features if _is_id(one)]
    if not ids:
        return None
    sentence = f"Columns that reach {found.features_of} look like identifiers used as numbers: one 7 is not near an 8."
    change = "nn.Embedding(number of them, width), or a table of what is known of each (such as places)"
    return of_learning("inputs-ids", SERIOUS, sentence, change, [_told(one) for one in ids[:5]])


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
    return of_learning("inputs-raw", SERIOUS, sentence, _normaliser(found.features), [_told(one) for one in worst])


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
    return of_learning("inputs-constant", ODD, sentence, "leave them out, or find out why")


@lesson("target-leaked")
def target_leaked(found: Learning) -> Finding | None:
    leaked = [one for one in found.features if abs(one.with_target) > LEAKED]
    if not leaked:
        return None
    columns = ", ".join(f"{one.number} ({one.with_target:+.4f})" for one in leaked[:5])
    sentence = f"The target itself is among the inputs: correlation of column {columns}."
    return of_learning("target-leaked", SERIOUS, sentence, "leave the column out: nothing else needs to be learnt")


@lesson("labels-range")
def labels_range(found: Learning) -> Finding | None:
    if found.label_error is None:
        return None
    change = "as many outputs as there are classes, numbered from 0; one map of classes for training and validation"
    return of_learning(
        "labels-range", SERIOUS, "Labels lie outside of what the model can answer.", change, [found.label_error]
    )


@lesson("labels-constant")
def labels_constant(found: Learning) -> Finding | None:
    if not found.constant_labels:
        return None
    sentence = f"All {found.seen or 'the'} labels are the same: there is nothing to learn."
    return of_learning(
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
    return of_learning("labels-rare", BAD, sentence, change, evidence)


@lesson("order")
def order(found: Learning) -> Finding | None:
    if found.order is None or found.order < UNMIXED:
        return None
    sentence = f"Batches differ {found.order:.0f} times as much as chance would make them: samples are not shuffled."
    return of_learning(
        "order", SERIOUS, sentence, "shuffle=True, or an exact shuffle over all files (stoker.from_parquet)"
    )


@lesson("broken")
def broken(found: Learning) -> Finding | None:
    bad = [] if found.contents is None else found.contents.broken
    if not bad:
        return None
    sentence = f"{len(bad):,} samples cannot be read as a whole."
    change = "fetch them again; --data.broken says what training does with images that cannot be decoded at all"
    return of_learning("broken", BAD, sentence, change, [f"{name}: {why}" for name, why in bad[:MOST_NAMES]])


def _pairs(pairs: Sequence[tuple[str, str]], words: str) -> list[str]:
    return [f"{one} {words} {other}" for one, other in pairs[:MOST_NAMES]]


@lesson("duplicates")
def duplicates(found: Learning) -> Finding | None:
    if found.contents is not None and len(found.contents.twice) >= max(3, 0.01 * found.contents.seen):
        told = found.contents
        sentence = f"{len(told.twice):,} of {told.seen:,} training samples have the content of another one."
        change = "leave them out; look for files that are there twice under other names"
        return of_learning("duplicates", BAD, sentence, change, _pairs(told.twice, "is"))
    if found.seen == 0 or found.twice < max(3, 0.01 * found.seen):
        return None
    sentence = f"{found.twice:,} of {found.seen:,} samples of the first epoch had been there before."
    return of_learning(
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
        return of_learning("validation-seen", share, sentence, "leave them out of one of the two", evidence)
    if not found.in_validation:
        return None
    sentence = f"{found.in_validation:,} validation samples are among the training samples: the score says nothing."
    return of_learning("validation-seen", SERIOUS, sentence, "split by file or by group, before anything else")


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
    return of_learning("labels-differ", SERIOUS, sentence, change, evidence)
