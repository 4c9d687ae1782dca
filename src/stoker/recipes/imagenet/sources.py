"""Where images lie: class folders, tar shards in the WebDataset layout, or packed shards. All give the same table.

A sample is a range of bytes of a shard. Of a class folder the shard is the folder and the range a whole file, found by
its number in the folder's list of names.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from stoker import console
from stoker.data import checksums
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.locations import (
    Location,
    identity,
    is_file,
    is_folder,
    list_folder,
    listed_once,
    new_remote_file,
    open_local,
    read,
    remote_file,
    walk,
)
from stoker.data.ragged import Array, Indices
from stoker.data.samples import SampleTable, new_table, open_table
from stoker.data.storage.blocks import touched
from stoker.data.storage.urls import Found, Url
from stoker.errors import UserError
from stoker.recipes.imagenet.classes import ClassMap, class_map, listed
from stoker.recipes.imagenet.flat import flat_folder, flat_labels
from stoker.recipes.imagenet.tars import ENDINGS, indexed_tar

TRAINING, VALIDATION = ("train", "training"), ("val", "validation", "valid", "test")
LABELS = {"label": np.int32, "part": np.int8}  # part 0: training, 1: validation
MANIFEST = "images.json"  # of a packed set
VERSION = 2
SHOWN_PROBLEMS = 5
TARS_AT_ONCE = 8  # that are indexed, where they lie elsewhere
NOT_READ = (".tif", ".tiff", ".gif", ".heic", ".jp2", ".avif")  # images that are left out, and named


class Reader(Protocol):
    """The bytes of a sample, and what to call it."""

    def read(self, row: int) -> bytes: ...

    def name(self, row: int) -> str: ...

    def places(self, rows: Indices) -> list[tuple[Any, Indices]]:
        """Blocks of remote files that hold these samples; none: they are local."""


@dataclass(frozen=True)
class Images:
    """A set of images: what is known of each, how to read it, and its classes."""

    table: SampleTable
    reader: Reader
    classes: ClassMap
    has_validation: bool
    decoded: bool = False  # what is read are pixels


@dataclass(frozen=True)
class _Found:
    """One image of a listing."""

    shard: int
    first: int
    count: int
    label: str
    part: int
    name: str


def open_images(root: Location, *, keep_damaged: bool = False) -> Images:
    """`keep_damaged`: a tar that is damaged gives what can be found in it, instead of an error."""
    with listed_once(root):
        return _open_images(root, keep_damaged=keep_damaged)


def _open_images(root: Location, *, keep_damaged: bool) -> Images:
    if not is_folder(root):
        raise UserError(f"The data directory {root} does not exist.")
    if is_file(root / MANIFEST):
        return _open_packed(root)
    if _tars(root):
        return _open_tars(root, keep_damaged=keep_damaged)
    return _open_folders(root)


def _open_folders(root: Location) -> Images:
    """`train/CLASS/image.jpg` and `val/CLASS/image.jpg`, or class folders alone."""
    parts = {0: _first_existing(root, TRAINING) or root, 1: _first_existing(root, VALIDATION)}
    counts: dict[int, dict[str, int]] = {0: {}, 1: {}}
    shards: list[str] = []
    names: list[list[str]] = []
    tags: list[list[str]] = []
    found: list[_Found] = []
    strange: list[str] = []
    flat = None if parts[1] is None else flat_folder(parts[1])
    for part, folder in parts.items():
        if folder is None or (part == 1 and flat is not None):
            continue
        for label in (name for name, one in list_folder(folder).items() if one.is_folder and _is_shown(name)):
            if folder / label == parts[1]:
                continue
            listed_files = list(_files(folder / label))
            strange += [f"{folder / label / name}" for name, _, _ in listed_files if name.lower().endswith(NOT_READ)]
            entries = sorted(one for one in listed_files if not one[0].lower().endswith(NOT_READ))
            counts[part][label] = len(entries)
            for number, (name, size, _) in enumerate(entries):
                found.append(_Found(len(shards), number, size, label, part, name))
            shards.append(label if folder == root else f"{folder.name}/{label}")
            names.append([name for name, _, _ in entries])
            tags.append([tag for _, _, tag in entries])
    if flat is not None:
        listed_files = sorted(one for one in _files(flat) if not one[0].lower().endswith(NOT_READ))
        labels = flat_labels(root, flat, [name for name, _, _ in listed_files])
        for number, (name, size, _) in enumerate(listed_files):
            counts[1][labels[name]] = counts[1].get(labels[name], 0) + 1
            found.append(_Found(len(shards), number, size, labels[name], 1, name))
        shards.append(flat.name if flat.parent == root else f"{flat.parent.name}/{flat.name}")
        names.append([name for name, _, _ in listed_files])
        tags.append([tag for _, _, tag in listed_files])
    if not counts[0]:
        raise UserError(
            f"{root} holds no images: expected train/CLASS/image.jpg and val/CLASS/image.jpg, tar shards, or the output of "
            f"`stoker pack imagenet`."
        )
    if strange:
        some = ", ".join(strange[:SHOWN_PROBLEMS])
        console.say(
            f"{len(strange):,} files are left out, whose format is not read ({', '.join(ENDINGS)} are): {some}."
        )
    classes = class_map(counts[0], str(parts[0]))
    if parts[1] is not None:
        classes.check(counts[1], str(parts[1]))
    table = _table(root, "folders", shards, found, classes)
    return Images(table, FolderReader(root, table, names, tags), classes, parts[1] is not None)


def _is_shown(name: str) -> bool:
    """Neither hidden nor a program's own, such as .ipynb_checkpoints and __MACOSX."""
    return not name.startswith((".", "__"))


def _files(folder: Location) -> Iterator[tuple[str, int, str]]:
    """Names, sizes and versions of all images below a class folder, however deep, also of those that cannot be read."""
    for name, found in walk(folder):
        if name.lower().endswith((*ENDINGS, *NOT_READ)):
            if not found.is_plain:
                raise UserError(f"{folder / name} is no plain file, and an image is needed there.")
            yield name, found.size, found.tag


def _tars(root: Location) -> list[str]:
    """Names of tar files in a folder and in the folders of it, in their order."""
    found = []
    for name, one in list_folder(root).items():
        found += [f"{name}/{inner}" for inner in list_folder(root / name)] if one.is_folder else [name]
    return sorted(name for name in found if name.endswith(".tar"))


def _open_tars(root: Location, *, keep_damaged: bool) -> Images:
    shards = _tars(root)
    found: list[_Found] = []
    problems: list[str] = []
    with (
        console.progress("index tar shards", len(shards), "files") as bar,
        ThreadPoolExecutor(TARS_AT_ONCE if isinstance(root, Url) else 1, "tars") as pool,
    ):
        indexed = pool.map(indexed_tar, [root / name for name in shards])
        for shard, (name, (listed_images, wrong)) in enumerate(zip(shards, indexed, strict=True)):
            part = int(_is_validation(name))
            found += [_Found(shard, one.first, one.count, one.label, part, one.name) for one in listed_images]
            problems += [f"{root / name}: {problem}" for problem in wrong]
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
    table = _table(root, "tars", shards, found, classes)
    return Images(table, RangeReader(root, table), classes, bool(counts[1]))


def _is_validation(name: str) -> bool:
    """By a whole word of the name: `val-000.tar` and `val/000.tar`, and not `latest-000.tar`."""
    words = set(re.findall("[a-z]+", name.lower()))
    return bool(words & set(VALIDATION)) and not words & set(TRAINING)


def read_manifest(root: Location) -> dict[str, Any]:
    """Of a packed set: format, classes, and what was asked of `stoker pack`."""
    try:
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


def _open_packed(root: Location) -> Images:
    manifest = read_manifest(root)
    classes = ClassMap(tuple(manifest["classes"]))
    missing = [name for name in manifest["files"] if name.endswith(".bin") and not is_file(root / name)]
    if missing:
        raise UserError(f"{root} lacks shards of its images: {listed(missing)}. Copy them there, or pack it again.")
    verification = checksums.Verification(root, manifest["files"])
    table = open_table(root / "samples")
    if table is None:
        raise UserError(f"{root} has no sample table; the packed set is not whole. Pack it again.")
    has_validation, decoded = bool(np.any(table.columns["part"] == 1)), bool(manifest["plan"].get("decoded"))
    return Images(table, RangeReader(root, table, verification), classes, has_validation, decoded)


class FolderReader:
    """One file a sample."""

    def __init__(self, root: Location, table: SampleTable, names: list[list[str]], tags: list[list[str]]) -> None:
        self._root, self._table, self._names, self._tags = root, table, names, tags
        self._files: WeakValueDictionary[int, Any] = WeakValueDictionary()  # one of a million is not remembered

    def read(self, row: int) -> bytes:
        if isinstance(self._root, Url):
            file = self._file(row)
            content: bytes = file.read(0, file.size)
            file.read_once()
            return content
        return read(self._location(row))

    def places(self, rows: Indices) -> list[tuple[Any, Indices]]:
        if not isinstance(self._root, Url):
            return []
        return [(file, np.arange(file.num_blocks)) for file in map(self._file, rows.tolist())]

    def _file(self, row: int) -> Any:
        file = self._files.get(row)
        if file is None:
            columns = self._table.columns
            tag = self._tags[int(columns["shard"][row])][int(columns["first"][row])]
            file = new_remote_file(self._location(row), Found("", int(columns["count"][row]), tag))
            file = self._files.setdefault(row, file)
        return file

    def name(self, row: int) -> str:
        return str(self._location(row))

    def _location(self, row: int) -> Location:
        shard = int(self._table.columns["shard"][row])
        return self._root / self._table.shards[shard] / self._names[shard][int(self._table.columns["first"][row])]


class RangeReader:
    """A range of bytes of a tar or of a packed shard, mapped into memory."""

    def __init__(self, root: Location, table: SampleTable, verification: checksums.Verification | None = None) -> None:
        self._root, self._table, self._verification = root, table, verification
        self._maps: dict[int, Array] = {}
        # All of them now: processes that are forked later find them.
        self._files = [remote_file(root / shard) for shard in table.shards] if isinstance(root, Url) else []
        ends = np.zeros(len(table.shards), np.int64)
        if self._files:
            columns = table.columns
            np.maximum.at(
                ends, np.asarray(columns["shard"]), np.asarray(columns["first"]) + np.asarray(columns["count"])
            )
        for file, end in zip(self._files, ends.tolist(), strict=False):
            if file.size < end:
                raise UserError(f"{file.url} has {file.size:,} bytes, and images reach to {end:,}: it is cut short.")

    def read(self, row: int) -> bytes:
        if self._verification is not None:
            self._verification.check()
        columns = self._table.columns
        shard, first, count = int(columns["shard"][row]), int(columns["first"][row]), int(columns["count"][row])
        if self._files:
            content: bytes = self._files[shard].read(first, count)
            return content
        mapped = self._maps.get(shard)
        if mapped is None:
            mapped = self._maps[shard] = np.memmap(open_local(self._root / self._table.shards[shard]), np.uint8, "r")
        return mapped[first : first + count].tobytes()

    def places(self, rows: Indices) -> list[tuple[Any, Indices]]:
        if not self._files:
            return []
        shard, first, count = (np.asarray(self._table.columns[name][rows]) for name in ("shard", "first", "count"))
        found = []
        for number in np.unique(shard).tolist():
            mine, file = shard == number, self._files[number]
            found.append((file, touched(first[mine], first[mine] + count[mine], file.block)))
        return found

    def rows_of(self, file: Any, numbers: Indices) -> Indices:
        """A sample in each block of a remote file."""
        shard, starts = self._files.index(file), self._table.shard_starts
        assert starts is not None, "a table of tars or of a packed set is in their order"
        first = self._table.columns["first"][starts[shard] : starts[shard + 1]]
        inside = np.minimum(np.searchsorted(first, numbers * file.block), max(0, len(first) - 1))
        return np.asarray(starts[shard] + inside)

    def name(self, row: int) -> str:
        columns = self._table.columns
        return f"{self._root / self._table.shards[int(columns['shard'][row])]} at byte {int(columns['first'][row])}"


def _table(root: Location, kind: str, shards: list[str], found: Sequence[_Found], classes: ClassMap) -> SampleTable:
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
    name = hashlib.sha256(identity(root).encode()).hexdigest()[:16]
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


def _first_existing(root: Location, names: Sequence[str]) -> Location | None:
    return next((root / name for name in names if is_folder(root / name)), None)
