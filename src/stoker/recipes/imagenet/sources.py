"""Where images lie: class folders, tar shards in the WebDataset layout, or packed shards. All give the same table.

A sample is a range of bytes of a shard. Of a class folder the shard is the folder and the range a whole file, found by
its number in the folder's list of names.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stoker import console
from stoker.data import checksums
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.ragged import Array, Indices
from stoker.data.samples import SampleTable, new_table, open_table
from stoker.errors import UserError
from stoker.files import check_regular
from stoker.recipes.imagenet.classes import ClassMap, class_map, listed
from stoker.recipes.imagenet.tars import ENDINGS, read_tar

TRAINING, VALIDATION = ("train", "training"), ("val", "validation", "valid", "test")
LABELS = {"label": np.int32, "part": np.int8}  # part 0: training, 1: validation
MANIFEST = "images.json"  # of a packed set
VERSION = 2
SHOWN_PROBLEMS = 5


class Reader(Protocol):
    """The bytes of a sample, and what to call it."""

    def read(self, row: int) -> bytes: ...

    def name(self, row: int) -> str: ...


@dataclass(frozen=True)
class Images:
    """A set of images: what is known of each, how to read it, and its classes."""

    table: SampleTable
    reader: Reader
    classes: ClassMap
    has_validation: bool


@dataclass(frozen=True)
class _Found:
    """One image of a listing."""

    shard: int
    first: int
    count: int
    label: str
    part: int
    name: str


def open_images(root: Path, *, keep_damaged: bool = False) -> Images:
    """`keep_damaged`: a tar that is damaged gives what can be found in it, instead of an error."""
    if not root.is_dir():
        raise UserError(f"The data directory {root} does not exist.")
    if (root / MANIFEST).is_file():
        return _open_packed(root)
    if any(root.glob("*.tar")) or any(root.glob("*/*.tar")):
        return _open_tars(root, keep_damaged=keep_damaged)
    return _open_folders(root)


def _open_folders(root: Path) -> Images:
    """`train/CLASS/image.jpg` and `val/CLASS/image.jpg`, or class folders alone."""
    parts = {0: _first_existing(root, TRAINING) or root, 1: _first_existing(root, VALIDATION)}
    counts: dict[int, dict[str, int]] = {0: {}, 1: {}}
    shards: list[str] = []
    names: list[list[str]] = []
    found: list[_Found] = []
    for part, folder in parts.items():
        if folder is None:
            continue
        for class_folder in sorted(path for path in folder.iterdir() if path.is_dir() and _is_shown(path)):
            if folder == root and class_folder == parts[1]:
                continue
            entries = sorted(_files(class_folder, class_folder))
            counts[part][class_folder.name] = len(entries)
            for number, (name, size) in enumerate(entries):
                found.append(_Found(len(shards), number, size, class_folder.name, part, name))
            shards.append(str(class_folder.relative_to(root)))
            names.append([name for name, _ in entries])
    if not counts[0]:
        raise UserError(
            f"{root} holds no images: expected train/CLASS/image.jpg and val/CLASS/image.jpg, tar shards, or the output of "
            f"`stoker pack imagenet`."
        )
    classes = class_map(counts[0], str(parts[0]))
    if parts[1] is not None:
        classes.check(counts[1], str(parts[1]))
    table = _table(root, "folders", shards, found, classes)
    return Images(table, FolderReader(root, table, names), classes, parts[1] is not None)


def _is_shown(path: Path | os.DirEntry[str]) -> bool:
    """Neither hidden nor a program's own, such as .ipynb_checkpoints and __MACOSX."""
    return not path.name.startswith((".", "__"))


def _files(folder: Path, top: Path) -> Iterator[tuple[str, int]]:
    """Names and sizes of all images below a class folder, however deep."""
    with os.scandir(folder) as entries:
        shown = list(filter(_is_shown, entries))
    for entry in shown:
        if entry.is_dir():
            yield from _files(Path(entry.path), top)
        elif entry.name.lower().endswith(ENDINGS):
            check_regular(Path(entry.path))
            yield str(Path(entry.path).relative_to(top)), entry.stat().st_size


def _open_tars(root: Path, *, keep_damaged: bool) -> Images:
    paths = sorted([*root.glob("*.tar"), *root.glob("*/*.tar")])
    found: list[_Found] = []
    problems: list[str] = []
    with console.progress("index tar shards", len(paths), "files") as bar:
        for shard, path in enumerate(paths):
            listed_images, wrong = read_tar(path)
            part = int(_is_validation(path.relative_to(root)))
            found += [_Found(shard, one.first, one.count, one.label, part, one.name) for one in listed_images]
            problems += [f"{path}: {problem}" for problem in wrong]
            bar.advance()
    if problems and not keep_damaged:
        raise UserError(
            f"{len(problems)} things are wrong with the tar files. {'; '.join(problems[:SHOWN_PROBLEMS])}. "
            f"`--data.broken skip` (`stoker pack`: --broken skip) uses what can be found in them all the same."
        )
    for problem in problems:
        console.say(f"DAMAGED TAR, used as far as it goes: {problem}")
    counts: dict[int, dict[str, int]] = {0: {}, 1: {}}
    for one in found:
        counts[one.part][one.label] = counts[one.part].get(one.label, 0) + 1
    if not counts[0]:
        raise UserError(f"The tar files in {root} hold no training images with a class.")
    if all(name.isdigit() for name in counts[0]):  # so that 10 comes after 9
        width = max(len(name) for part in counts.values() for name in part)
        counts = {part: {name.zfill(width): n for name, n in some.items()} for part, some in counts.items()}
        found = [_Found(**{**vars(one), "label": one.label.zfill(width)}) for one in found]
    classes = class_map(counts[0], str(root))
    if counts[1]:
        classes.check(counts[1], f"{root}, validation shards")
    table = _table(root, "tars", [str(path.relative_to(root)) for path in paths], found, classes)
    return Images(table, RangeReader(root, table), classes, bool(counts[1]))


def _is_validation(path: Path) -> bool:
    """By a whole word of the name: `val-000.tar` and `val/000.tar`, and not `latest-000.tar`."""
    words = set(re.findall("[a-z]+", str(path).lower()))
    return bool(words & set(VALIDATION)) and not words & set(TRAINING)


def read_manifest(root: Path) -> dict[str, Any]:
    """Of a packed set: format, classes, and what was asked of `stoker pack`."""
    try:
        check_regular(root / MANIFEST)
        manifest = checksums.read_manifest(root / MANIFEST)
        version = manifest["version"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{root / MANIFEST} cannot be read ({reason}). Pack the images again.") from error
    if version != VERSION:
        raise UserError(
            f"{root} was packed in format {version}, and this version reads format {VERSION}: pack it again."
        )
    return manifest


def _open_packed(root: Path) -> Images:
    manifest = read_manifest(root)
    classes = ClassMap(tuple(manifest["classes"]))
    missing = [name for name in manifest["files"] if name.endswith(".bin") and not (root / name).is_file()]
    if missing:
        raise UserError(f"{root} lacks shards of its images: {listed(missing)}. Copy them there, or pack it again.")
    verification = checksums.Verification(root, manifest["files"])
    table = open_table(root / "samples")
    if table is None:
        raise UserError(f"{root} has no sample table; the packed set is not whole. Pack it again.")
    return Images(table, RangeReader(root, table, verification), classes, bool(np.any(table.columns["part"] == 1)))


class FolderReader:
    """One file a sample."""

    def __init__(self, root: Path, table: SampleTable, names: list[list[str]]) -> None:
        self._root, self._table, self._names = root, table, names

    def read(self, row: int) -> bytes:
        return Path(self.name(row)).read_bytes()

    def name(self, row: int) -> str:
        shard = int(self._table.columns["shard"][row])
        return str(self._root / self._table.shards[shard] / self._names[shard][int(self._table.columns["first"][row])])


class RangeReader:
    """A range of bytes of a tar or of a packed shard, mapped into memory."""

    def __init__(self, root: Path, table: SampleTable, verification: checksums.Verification | None = None) -> None:
        self._root, self._table, self._verification = root, table, verification
        self._maps: dict[int, Array] = {}

    def read(self, row: int) -> bytes:
        if self._verification is not None:
            self._verification.check()
        columns = self._table.columns
        shard, first, count = int(columns["shard"][row]), int(columns["first"][row]), int(columns["count"][row])
        mapped = self._maps.get(shard)
        if mapped is None:
            mapped = self._maps[shard] = np.memmap(self._root / self._table.shards[shard], np.uint8, "r")
        return mapped[first : first + count].tobytes()

    def name(self, row: int) -> str:
        columns = self._table.columns
        return f"{self._root / self._table.shards[int(columns['shard'][row])]} at byte {int(columns['first'][row])}"


def _table(root: Path, kind: str, shards: list[str], found: Sequence[_Found], classes: ClassMap) -> SampleTable:
    """The sample table in the cache, made anew when anything in the listing changed."""
    digest = hashlib.sha256(f"{kind} {shards} {classes.names}".encode())
    columns: dict[str, Array] = {
        "shard": np.array([one.shard for one in found], np.int32),
        "first": np.array([one.first for one in found], np.int64),
        "count": np.array([one.count for one in found], np.int32),
        "id": _ids(shards, found),
        "label": np.searchsorted(np.array(classes.names), np.array([one.label for one in found])).astype(np.int32),
        "part": np.array([one.part for one in found], np.int8),
    }
    for column in columns.values():
        digest.update(column.tobytes())
    digest.update("\n".join(one.name for one in found).encode())
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    folder = cache_folder() / "tables" / f"images-{name}"
    with cache_lock(folder):
        table = open_table(folder)
        if table is None or table.fingerprint != digest.hexdigest():
            with new_table(folder, len(found), LABELS, shards, digest.hexdigest()) as writer:
                writer.append(columns)
            table = open_table(folder)
    assert table is not None, "a table that was just written can be opened"
    return table


def _ids(shards: list[str], found: Sequence[_Found]) -> Indices:
    """From names, so that an image keeps its number, and its side of a split, when others are added or removed."""
    digests = (hashlib.sha256(f"{shards[one.shard]}/{one.name}".encode()).digest()[:8] for one in found)
    return np.array([int.from_bytes(digest, "little") >> 1 for digest in digests], np.int64)


def rows_of(table: SampleTable, part: int) -> Indices:
    return np.flatnonzero(np.asarray(table.columns["part"]) == part)


def _first_existing(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)
