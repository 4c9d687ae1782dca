"""Samples of a recipe as they are stored: the same one twice, in validation too, nearly the same, not to be read."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker import console
from stoker.data.ragged import Indices
from stoker.data.samples import Subset
from stoker.data.source import Content, RunData

MOST = 60_000  # samples of each of the two groups
AT_ONCE = 512
ALIKE = 0.03  # of the bits of two pictures, at most, that differ where they are one
LEAST_BITS = 96  # that must tell something of either of two pictures
BLOCK = 64  # pictures that are compared with all others at once


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
    # Stretches of neighbours, all over the set: files are read in pieces.
    starts = np.random.default_rng(0).permutation(-(-len(subset) // AT_ONCE))[: -(-size // AT_ONCE)] * AT_ONCE
    rows: list[Indices] = []
    found: list[Content] = []
    begin = time.perf_counter()
    with console.progress("look at samples", size, "samples") as bar:
        for start in starts.tolist():
            some = np.sort(subset.rows(np.arange(start, min(start + AT_ONCE, len(subset)))))
            rows.append(some)
            found += data.contents(some)
            bar.advance(len(some))
            if time.perf_counter() - begin > seconds:
                break
    return _Group(np.concatenate([np.zeros(0, np.int64), *rows]), found)


def _alike(training: _Group, validation: _Group) -> Iterator[tuple[int, int]]:
    """Validation samples that look like one of training, and that one."""
    known, asked = _bits(training), _bits(validation)
    if known is None or asked is None:
        return
    for start in range(0, len(asked.rows), BLOCK):
        bits, told = asked.bits[start : start + BLOCK], asked.told[start : start + BLOCK]
        differ, of = (np.zeros((len(bits), len(known.rows)), np.int16) for _ in range(2))
        for word in range(bits.shape[1]):
            either = told[:, word, None] | known.told[None, :, word]
            differ += np.bitwise_count((bits[:, word, None] ^ known.bits[None, :, word]) & either)
            of += np.bitwise_count(either)
        share = np.where(of >= LEAST_BITS, differ / np.maximum(of, 1), 1.0)
        nearest = share.argmin(1)
        for number in np.flatnonzero(share[np.arange(len(bits)), nearest] <= ALIKE).tolist():
            yield int(asked.rows[start + number]), int(known.rows[nearest[number]])


@dataclass(frozen=True)
class _Bits:
    rows: Indices
    bits: "np.ndarray[Any, np.dtype[np.uint64]]"  # (samples, words)
    told: "np.ndarray[Any, np.dtype[np.uint64]]"  # of them, those that are not chance


def _bits(group: _Group) -> _Bits | None:
    pairs = [(one.likeness, row) for one, row in zip(group.found, group.rows.tolist(), strict=True) if one.likeness]
    if not pairs:
        return None
    words = np.frombuffer(b"".join(likeness for likeness, _ in pairs), np.uint64).reshape(len(pairs), 2, -1)
    return _Bits(np.array([row for _, row in pairs]), words[:, 0], words[:, 1])


def _name(data: RunData, row: int) -> str:
    """Of an image its file; of a sample of a larger file its id as well."""
    file, size = data.files_of(np.array([row])), len(data.table)
    return file if len(data.table.shards) == size else f"{data.table.columns['id'][row]} of {file}"
