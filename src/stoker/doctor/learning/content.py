"""Samples of a recipe as they are stored: the same one twice, in validation too, nearly the same, not to be read."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from stoker import console
from stoker.data.ragged import Indices
from stoker.data.samples import Subset
from stoker.data.source import Content, RunData

MOST = 60_000  # samples of each of the two groups
AT_ONCE = 512
ALIKE = 0.03  # of the bits of two pictures, at most, that differ where they are one
BLOCK = 256  # pictures that are compared with all others at once


@dataclass
class Contents:
    seen: int = 0  # training samples
    of: int = 0  # that there are
    twice: list[tuple[str, str]] = field(default_factory=list)  # names of training samples with the same content
    in_validation: list[tuple[str, str]] = field(default_factory=list)  # name there, name in training
    alike: list[tuple[str, str]] = field(default_factory=list)  # the same, nearly
    broken: list[tuple[str, str]] = field(default_factory=list)  # name, why


@dataclass(frozen=True)
class _Group:
    rows: Indices
    found: list[Content]


def contents_of(data: RunData, seconds: float) -> Contents:
    """Of both groups, as many as the time allows, drawn over all of them."""
    training, validation = (_read(data, one, seconds / 2) for one in (data.training, data.validation))
    told = Contents(len(training.rows), len(data.training))
    first: dict[bytes, int] = {}
    for row, one in zip(training.rows.tolist(), training.found, strict=True):
        if one.key and first.setdefault(one.key, row) != row:
            told.twice.append((_name(data, first[one.key]), _name(data, row)))
    same = set()
    for row, one in zip(validation.rows.tolist(), validation.found, strict=True):
        if one.key in first:
            told.in_validation.append((_name(data, row), _name(data, first[one.key])))
            same.add(row)
    for row, other in _alike(training, validation):
        if row not in same:
            told.alike.append((_name(data, row), _name(data, other)))
    for group in (training, validation):
        for row, one in zip(group.rows.tolist(), group.found, strict=True):
            if one.trouble:
                told.broken.append((_name(data, row), one.trouble))
    return told


def _read(data: RunData, subset: Subset, seconds: float) -> _Group:
    assert data.contents is not None
    size = min(len(subset), MOST)
    positions = np.random.default_rng(0).permutation(len(subset))[:size]
    rows, begin = subset.rows(positions), time.perf_counter()
    found: list[Content] = []
    with console.progress("look at samples", size, "samples") as bar:
        for start in range(0, size, AT_ONCE):
            some = np.sort(rows[start : start + AT_ONCE])  # as they are stored
            rows[start : start + AT_ONCE] = some
            found += data.contents(some)
            bar.advance(len(some))
            if time.perf_counter() - begin > seconds:
                break
    return _Group(rows[: len(found)], found)


def _alike(training: _Group, validation: _Group) -> Iterator[tuple[int, int]]:
    """Validation samples that look like one of training, and that one."""
    known, known_rows = _bits(training)
    asked, asked_rows = _bits(validation)
    if not len(known) or not len(asked):
        return
    most = ALIKE * 8 * known.dtype.itemsize * known.shape[1]
    for start in range(0, len(asked), BLOCK):
        block = asked[start : start + BLOCK]
        differ = np.zeros((len(block), len(known)), np.int16)
        for column in range(known.shape[1]):
            differ += np.bitwise_count(block[:, column, None] ^ known[None, :, column])
        nearest = differ.argmin(1)
        for number in np.flatnonzero(differ[np.arange(len(block)), nearest] <= most).tolist():
            yield int(asked_rows[start + number]), int(known_rows[nearest[number]])


def _bits(group: _Group) -> tuple["np.ndarray[tuple[int, int], np.dtype[np.uint64]]", Indices]:
    """(samples, words) of those that have any, and their rows."""
    pairs = [(one.likeness, row) for one, row in zip(group.found, group.rows.tolist(), strict=True) if one.likeness]
    if not pairs:
        return np.zeros((0, 1), np.uint64), np.zeros(0, np.int64)
    size = len(pairs[0][0]) // 8 * 8
    words = np.frombuffer(b"".join(likeness[:size] for likeness, _ in pairs), np.uint64).reshape(len(pairs), -1)
    return words, np.array([row for _, row in pairs])


def _name(data: RunData, row: int) -> str:
    """Of an image its file; of a sample of a larger file its id as well."""
    file, size = data.files_of(np.array([row])), len(data.table)
    return file if len(data.table.shards) == size else f"{data.table.columns['id'][row]} of {file}"
