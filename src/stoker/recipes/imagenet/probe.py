"""Do the labels of validation mean what those of training mean? A quick classifier tells before the first step.

Five days of the seed project went into validation images that lay in the wrong class folders: names, counts and files were
all in order. Thumbnails of some training images teach a linear classifier; it must do about as well on validation images as
on other training images. Where it knows something of the one and nothing of the other, labels do not match; where some
classes only look like each other's in validation, they were swapped. A few images a class are too few to see the latter.
"""

# N images, F features, K classes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from stoker import console
from stoker.data.ragged import Indices
from stoker.errors import UserError
from stoker.recipes.imagenet.classes import ClassMap, listed
from stoker.recipes.imagenet.decode import Broken, decode, size_of
from stoker.recipes.imagenet.sources import Images, Reader

MOST_IMAGES = 6000  # of each of the three groups
SIDE = 8  # fields of a thumbnail
EDGE_SIDE, FIELDS, TURNS = 32, 4, 8  # pixels that edges are looked for in, fields that they are counted in, directions
SIGMA = 5.0  # how sure the verdict must be

Floats = npt.NDArray[np.float64]


def check_labels(
    images: Images, classes: ClassMap, label: Indices, training: Indices, validation: Indices, threads: int
) -> None:
    """Refuses validation labels that a classifier of the training images cannot make sense of."""
    labels, num_classes = label[np.asarray(images.table.columns["label"])], len(classes)
    learn, judge = _two_groups(labels, training, num_classes)
    other = _some(labels, validation, num_classes)
    if min(len(learn), len(judge), len(other)) < 5 * num_classes and len(learn) < 200:
        console.say("labels: too few images to see whether those of training and validation mean the same")
        return
    groups, features = (learn, judge, other), []
    total = sum(map(len, groups))
    with ThreadPoolExecutor(threads, "probe") as pool, console.progress("check labels", total, "images") as bar:
        for rows in groups:
            found = []
            for values in pool.map(lambda row: _features(images.reader, row), rows.tolist()):
                found.append(values)
                bar.advance()
            features.append(np.stack(found))
    weights = _fit(features[0], labels[learn], num_classes)
    known_scores, unknown_scores = (_scores(one, weights) for one in features[1:])
    known, unknown = known_scores.argmax(1), unknown_scores.argmax(1)
    held, seen = float(np.mean(known == labels[judge])), float(np.mean(unknown == labels[other]))
    chance = 1 / num_classes
    error_held = np.sqrt(max(held * (1 - held), chance) / len(judge))
    error_seen = np.sqrt(max(seen * (1 - seen), chance) / len(other))
    knows = held - chance > SIGMA * error_held
    differs = held - seen > SIGMA * np.hypot(error_held, error_seen) and seen < chance + 0.5 * (held - chance)
    if knows and differs:
        raise UserError(
            f"The labels of the validation images do not seem to mean what those of the training images mean: a quick "
            f"classifier is right on {held:.1%} of other training images and on {seen:.1%} of the validation images "
            f"(chance is {chance:.1%}). {_most_confused(unknown, labels[other], classes)}Are validation images in the "
            f"wrong folders, or numbered in another order? --data.check_labels false trains all the same."
        )
    if swapped := _swapped(known_scores, labels[judge], unknown_scores, labels[other]):
        pairs = listed(
            [f"{classes.names[one]} and {classes.names[other]} look like each other" for one, other in swapped]
        )
        raise UserError(
            f"Some classes seem to be swapped between training and validation: to a quick classifier of training images, "
            f"in validation {pairs}, and among other training images they do not. Are their folders or numbers mixed up? "
            f"--data.check_labels false trains all the same."
        )
    console.say(
        f"labels: a quick classifier is right on {held:.1%} in training, {seen:.1%} in validation (chance {chance:.1%})"
    )


def _some(labels: Indices, rows: Indices, num_classes: int, each_of: int = 1) -> Indices:
    """Up to MOST_IMAGES rows, as evenly over the classes as they allow."""
    most = max(2, each_of * MOST_IMAGES // num_classes)
    order = np.lexsort((np.random.default_rng(0).random(len(rows)), labels[rows]))
    ordered = labels[rows][order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return np.asarray(rows[order[place < most]])


def _two_groups(labels: Indices, rows: Indices, num_classes: int) -> tuple[Indices, Indices]:
    both = _some(labels, rows, num_classes, each_of=2)
    return both[::2], both[1::2]


def _features(reader: Reader, row: int) -> Floats:
    """Mean colours of 8 x 8 fields and their contrast, and which way edges run; zeros for an image that is broken."""
    try:
        content = reader.read(row)
        size_of(content)  # not too many pixels
        pixels = decode(content, EDGE_SIDE, EDGE_SIDE, fast=True).astype(np.float64) / 255
    except (Broken, OSError):
        return np.zeros(SIDE * SIDE * 6 + FIELDS * FIELDS * TURNS)
    mean = _means(pixels, SIDE)
    contrast = np.sqrt(np.maximum(_means(pixels**2, SIDE) - mean**2, 0))
    return np.concatenate([mean.ravel(), contrast.ravel(), _edges(_means(pixels, EDGE_SIDE).mean(2))])


def _means(values: Floats, side: int) -> Floats:
    """Over side x side fields of an image of any size; pixels are repeated where it is smaller."""
    tall, wide = values.shape[:2]
    if min(tall, wide) < side:
        values = values.repeat(-(-side // tall), 0).repeat(-(-side // wide), 1)
        tall, wide = values.shape[:2]
    rows, cols = (np.linspace(0, size, side + 1).astype(int) for size in (tall, wide))
    summed = np.add.reduceat(np.add.reduceat(values, rows[:-1], 0), cols[:-1], 1)
    return np.asarray(summed / (np.diff(rows)[:, None] * np.diff(cols))[:, :, None])


def _edges(grey: Floats) -> Floats:
    """How strong edges of each direction are in 4 x 4 fields, relative to all of them: light and colour do not matter."""
    down, across = np.gradient(grey)
    strength = np.hypot(down, across)
    turn = ((np.arctan2(down, across) % np.pi) / np.pi * TURNS).astype(int) % TURNS
    field = np.arange(EDGE_SIDE) * FIELDS // EDGE_SIDE
    place = (field[:, None] * FIELDS + field) * TURNS + turn
    found = np.bincount(place.ravel(), strength.ravel(), minlength=FIELDS * FIELDS * TURNS)
    return np.sqrt(found / max(float(found.sum()), 1e-9))


def _fit(features: Floats, labels: Indices, num_classes: int) -> tuple[Floats, Floats, Floats]:
    """A ridge regression onto the classes: mean and scale of the features, and weights (F + 1, K)."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    inputs = np.column_stack([(features - mean) / scale, np.ones(len(features))])
    targets = np.eye(num_classes)[labels]
    penalty = 0.1 * len(features) * np.eye(inputs.shape[1]) / np.sqrt(inputs.shape[1])
    return mean, scale, np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets)


def _scores(features: Floats, model: tuple[Floats, Floats, Floats]) -> Floats:
    """(N, K) how much each image looks like each class."""
    mean, scale, weights = model
    return np.asarray(np.column_stack([(features - mean) / scale, np.ones(len(features))]) @ weights)


def _swapped(held: Floats, held_labels: Indices, seen: Floats, seen_labels: Indices) -> list[tuple[int, int]]:
    """Pairs of classes whose validation images each look like the other, surely, and whose training images do not."""
    found = []
    centres = np.stack([seen[seen_labels == one].mean(0) if (seen_labels == one).any() else seen.mean(0)
                        for one in range(seen.shape[1])])  # fmt: skip
    own = centres.diagonal()
    apart = own[:, None] - centres - centres.T + own[None, :]  # negative where the two stand in each other's place
    for first, second in np.argwhere(np.triu(apart < 0, 1)).tolist():
        known = _sigmas_apart(held, held_labels, first, second)
        if known > SIGMA and _sigmas_apart(seen, seen_labels, first, second) < -SIGMA:
            found.append((first, second))
    return found


def _sigmas_apart(scores: Floats, labels: Indices, first: int, second: int) -> float:
    """How surely images of two classes differ in looking like the first rather than the second; negative: in reverse."""
    margin = scores[:, first] - scores[:, second]
    ours, theirs = margin[labels == first], margin[labels == second]
    if min(len(ours), len(theirs)) < 2:
        return 0.0
    error = np.sqrt(ours.var(ddof=1) / len(ours) + theirs.var(ddof=1) / len(theirs))
    return float((ours.mean() - theirs.mean()) / max(error, 1e-12))


def _most_confused(guessed: Indices, labels: Indices, classes: ClassMap) -> str:
    """Validation classes that look like another class of training more than like their own."""
    table = np.zeros((len(classes), len(classes)))
    np.add.at(table, (labels, guessed), 1)
    looks = table.argmax(1)
    moved = [(int(true), int(like)) for true, like in enumerate(looks) if like != true and table[true, like] > 0]
    pairs = listed([f"{classes.names[true]} looks like {classes.names[like]}" for true, like in moved])
    return f"By their folders: {pairs}. " if moved else ""
