"""The images and classes of a run: found or drawn, after subsets are taken and a share is held out."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from stoker import console
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.locations import Location, named
from stoker.data.order import hashed
from stoker.data.ragged import Indices
from stoker.data.samples import SampleTable
from stoker.data.storage.keeping import make_room
from stoker.errors import UserError
from stoker.recipe import RunConfig
from stoker.recipes.imagenet.broken import Policy
from stoker.recipes.imagenet.classes import ClassMap
from stoker.recipes.imagenet.draw import draw_set
from stoker.recipes.imagenet.sources import Images, open_images, rows_of

DRAWN_BYTES = 6000  # of a drawn image: 5,219 in a set of 250


@dataclass(frozen=True)
class Chosen:
    """Images and classes of a run, after subsets are taken."""

    images: Images
    classes: ClassMap
    label: Indices  # of each class of the whole set, its label in the run; -1: left out
    training: Indices  # rows
    validation: Indices


def data_root(run: RunConfig) -> Location:
    """The user's directory, or images drawn into the cache on first use."""
    config = run.data
    if config.path is not None:
        return named(config.path)
    return _drawn(config.draw_per_class, config.draw_held_out, run.run.seed)


@cache
def _drawn(per_class: int, held_out: int, seed: int) -> Path:
    folder = cache_folder() / "drawn" / f"images-{per_class}-{held_out}-{seed}"
    with cache_lock(folder, "Another process draws the same images: waiting for it."):
        if not folder.exists():
            count = 10 * (per_class + held_out)
            make_room(count * DRAWN_BYTES, f"{count:,} drawn images", "draw fewer: --data.draw_per_class.")
            console.say(f"No data.path was given: drawing {count:,} images into {folder}.")
            draw_set(folder, per_class, held_out, seed)
    return folder


@cache
def _opened(root: Location, broken: Policy) -> Images:
    return open_images(root, keep_damaged=broken == "skip")


def choose(run: RunConfig) -> Chosen:
    config = run.data
    return choose_images(
        _opened(data_root(run), config.broken),
        config.max_classes,
        config.max_per_class,
        config.subset_seed,
        config.validation,
    )


def choose_images(
    images: Images, max_classes: int | None, max_per_class: int | None, seed: int, validation: float
) -> Chosen:
    classes = images.classes.chosen(max_classes, seed)
    label = classes.labels(images.classes)
    table = images.table
    used = label[np.asarray(table.columns["label"])] >= 0
    training, held = (rows[used[rows]] for rows in (rows_of(table, 0), rows_of(table, 1)))
    if not images.has_validation:
        drawn = hashed(np.asarray(table.columns["id"])[training].astype(np.uint64)) < np.uint64(validation * 2**64)
        training, held = training[~drawn], training[drawn]
    if max_per_class is not None:
        training = _some_of_each(table, training, max_per_class, seed)
    if not len(training) or not len(held):
        raise UserError(
            f"There are {len(training)} images to train on and {len(held)} to validate on: both are needed."
        )
    return Chosen(images, classes, label, training, held)


def _some_of_each(table: SampleTable, rows: Indices, most: int, seed: int) -> Indices:
    """At most so many rows of each class, drawn by a hash of their id."""
    labels = np.asarray(table.columns["label"])[rows]
    chance = hashed(np.asarray(table.columns["id"])[rows].astype(np.uint64) ^ np.uint64(seed * 0x9E3779B9 % 2**63))
    order = np.lexsort((chance, labels))
    ordered = labels[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return np.sort(rows[order[place < most]])
