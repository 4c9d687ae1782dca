"""Do the labels of validation mean what those of training mean? A quick classifier tells before the first step.

Five days of the seed project went into validation images that lay in the wrong class folders: names, counts and files were
all in order. Thumbnails of some training images teach the classifier of `data.agreement`.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from stoker import console
from stoker.data.agreement import Floats, Group, agreement, enough
from stoker.data.ragged import Indices
from stoker.errors import UserError
from stoker.recipes.imagenet.classes import ClassMap, listed
from stoker.recipes.imagenet.content import field_means
from stoker.recipes.imagenet.decode import Broken, decode, size_of
from stoker.recipes.imagenet.sources import Images, Reader

MOST_IMAGES = 6000  # of each of the three groups
SIDE = 8  # fields of a thumbnail
EDGE_SIDE, FIELDS, TURNS = 32, 4, 8  # pixels that edges are looked for in, fields that they are counted in, directions


def check_labels(
    images: Images, classes: ClassMap, label: Indices, training: Indices, validation: Indices, threads: int
) -> None:
    """Refuses validation labels that a classifier of the training images cannot make sense of."""
    labels, num_classes = label[np.asarray(images.table.columns["label"])], len(classes)
    learn, judge = _two_groups(labels, training, num_classes)
    other = _some(labels, validation, num_classes)
    if not enough(num_classes, len(learn), len(judge), len(other)):
        console.say("labels: too few images to see whether those of training and validation mean the same")
        return
    groups, found = (learn, judge, other), []
    total = sum(map(len, groups))
    with ThreadPoolExecutor(threads, "probe") as pool, console.progress("check labels", total, "images") as bar:
        for rows in groups:
            features = []
            for values in pool.map(lambda row: _features(images.reader, row), rows.tolist()):
                features.append(values)
                bar.advance()
            found.append(Group(np.stack(features), labels[rows]))
    learnt_from, judged, asked = found
    told = agreement(learnt_from, judged, asked, num_classes)
    if told.differs:
        pairs = listed([f"{classes.names[one]} looks like {classes.names[like]}" for one, like in told.looks_like])
        by_folder = f"By their folders: {pairs}. " if told.looks_like else ""
        raise UserError(
            f"The labels of the validation images do not seem to mean what those of the training images mean: a quick "
            f"classifier is right on {told.held:.1%} of other training images and on {told.seen:.1%} of the validation "
            f"images (chance is {told.chance:.1%}). {by_folder}Are validation images in the wrong folders, or numbered in "
            f"another order? --data.check_labels false trains all the same."
        )
    if told.swapped:
        pairs = listed(
            [f"{classes.names[one]} and {classes.names[other]} look like each other" for one, other in told.swapped]
        )
        raise UserError(
            f"Some classes seem to be swapped between training and validation: to a quick classifier of training images, "
            f"in validation {pairs}, and among other training images they do not. Are their folders or numbers mixed up? "
            f"--data.check_labels false trains all the same."
        )
    console.say(
        f"labels: a quick classifier is right on {told.held:.1%} in training, {told.seen:.1%} in validation (chance "
        f"{told.chance:.1%})"
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
    mean = field_means(pixels, SIDE)
    contrast = np.sqrt(np.maximum(field_means(pixels**2, SIDE) - mean**2, 0))
    return np.concatenate([mean.ravel(), contrast.ravel(), _edges(field_means(pixels, EDGE_SIDE).mean(2))])


def _edges(grey: Floats) -> Floats:
    """How strong edges of each direction are in 4 x 4 fields, relative to all of them: light and colour do not matter."""
    down, across = np.gradient(grey)
    strength = np.hypot(down, across)
    turn = ((np.arctan2(down, across) % np.pi) / np.pi * TURNS).astype(int) % TURNS
    field = np.arange(EDGE_SIDE) * FIELDS // EDGE_SIDE
    place = (field[:, None] * FIELDS + field) * TURNS + turn
    found = np.bincount(place.ravel(), strength.ravel(), minlength=FIELDS * FIELDS * TURNS)
    return np.sqrt(found / max(float(found.sum()), 1e-9))
