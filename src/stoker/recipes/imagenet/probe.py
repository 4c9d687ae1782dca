"""Do the labels of validation mean what those of training mean? A quick classifier tells before the first step.

Five days of the seed project went into validation images that lay in the wrong class folders: names, counts and files were
all in order. Thumbnails of some training images teach a linear classifier; it must do about as well on validation images as
on other training images. Where it knows something of the one and nothing of the other, labels do not match.
"""

# N images, F features, K classes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from stoker import console
from stoker.data.ragged import Indices
from stoker.errors import UserError
from stoker.recipes.imagenet.classes import ClassMap, listed
from stoker.recipes.imagenet.decode import Broken, decode
from stoker.recipes.imagenet.sources import Images, Reader

MOST_IMAGES = 6000  # of each of the three groups
SIDE = 8  # pixels of a thumbnail
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
            for values in pool.map(lambda row: _thumbnail(images.reader, row), rows.tolist()):
                found.append(values)
                bar.advance()
            features.append(np.stack(found))
    weights = _fit(features[0], labels[learn], num_classes)
    known, unknown = (_guess(one, weights) for one in features[1:])
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


def _thumbnail(reader: Reader, row: int) -> Floats:
    """Mean colours of 8 x 8 fields and their contrast; zeros for an image that cannot be decoded."""
    try:
        pixels = decode(reader.read(row), SIDE, SIDE, fast=True).astype(np.float64) / 255
    except (Broken, OSError):
        return np.zeros(SIDE * SIDE * 6)
    rows = np.linspace(0, pixels.shape[0], SIDE + 1).astype(int)[:-1]
    cols = np.linspace(0, pixels.shape[1], SIDE + 1).astype(int)[:-1]

    def fields(values: Floats) -> Floats:
        summed = np.add.reduceat(np.add.reduceat(values, rows, 0), cols, 1)
        area = np.diff(np.append(rows, pixels.shape[0]))[:, None] * np.diff(np.append(cols, pixels.shape[1]))
        return np.asarray(summed / area[:, :, None])

    mean = fields(pixels)
    return np.concatenate([mean.ravel(), np.sqrt(np.maximum(fields(pixels**2) - mean**2, 0)).ravel()])


def _fit(features: Floats, labels: Indices, num_classes: int) -> tuple[Floats, Floats, Floats]:
    """A ridge regression onto the classes: mean and scale of the features, and weights (F + 1, K)."""
    mean, scale = features.mean(0), features.std(0) + 1e-6
    inputs = np.column_stack([(features - mean) / scale, np.ones(len(features))])
    targets = np.eye(num_classes)[labels]
    penalty = 0.1 * len(features) * np.eye(inputs.shape[1]) / np.sqrt(inputs.shape[1])
    return mean, scale, np.linalg.solve(inputs.T @ inputs + penalty, inputs.T @ targets)


def _guess(features: Floats, model: tuple[Floats, Floats, Floats]) -> Indices:
    mean, scale, weights = model
    inputs = np.column_stack([(features - mean) / scale, np.ones(len(features))])
    return np.asarray((inputs @ weights).argmax(1))


def _most_confused(guessed: Indices, labels: Indices, classes: ClassMap) -> str:
    """Validation classes that look like another class of training more than like their own."""
    table = np.zeros((len(classes), len(classes)))
    np.add.at(table, (labels, guessed), 1)
    looks = table.argmax(1)
    moved = [(int(true), int(like)) for true, like in enumerate(looks) if like != true and table[true, like] > 0]
    pairs = listed([f"{classes.names[true]} looks like {classes.names[like]}" for true, like in moved])
    return f"By their folders: {pairs}. " if moved else ""
