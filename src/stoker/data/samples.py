"""The sample table: all that is known of each sample without reading it, as memory-mapped columns.

Each sample is a range of rows of a shard: (shard, first, count), with an id, and label columns of the recipe's choice.
The table is made once, beside a fingerprint of its source, and opens in O(1) time and memory for any number of samples.
"""

import hashlib
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from stoker.data.locations import Location, is_file, open_local, read
from stoker.data.order import hashed
from stoker.data.ragged import Array, Indices, offsets_of
from stoker.errors import UserError
from stoker.files import new_folder, write_bytes, write_json

MANIFEST = "samples.json"
VERSION = 3  # of the folder's format; a table of another version is made again
BLOCK = 1 << 22  # rows looked at together where a whole column must be read
PLACE_COLUMNS = {"shard": np.int32, "first": np.int64, "count": np.int32, "id": np.int64}


@dataclass(frozen=True)
class SampleTable:
    shards: tuple[str, ...]  # paths, relative to the data set
    columns: Mapping[str, Array]  # shard, first, count, id, and the labels
    fingerprint: str
    shard_starts: Indices | None  # row at which each shard begins, and the number of rows; None: shards are mixed
    unreadable: Mapping[int, str] = field(default_factory=dict)  # shards that could not be opened, and why
    blocks: Indices | None = None  # rows at which the parts begin that storage reads at once; None: unknown

    def __len__(self) -> int:
        return len(self.columns["id"])

    def cost(self, rows: Indices) -> Indices:
        return self.columns["count"][rows].astype(np.int64)


def check_column_name(name: str) -> None:
    """A column is a file: its name must not lead anywhere else, nor be that of another file of a table."""
    if not re.fullmatch(r"\w[\w .:-]*", name) or name == "blocks":
        raise UserError(f"{name!r} cannot be the name of a column: use letters, digits, dashes, dots and underscores.")


class TableWriter:
    """Fills the columns of a table chunk by chunk."""

    def __init__(self, folder: Path, num_samples: int, num_shards: int, labels: Mapping[str, npt.DTypeLike]) -> None:
        types = PLACE_COLUMNS | dict(labels)
        for name in types:
            check_column_name(name)
        self.columns = {
            name: open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.dtype(kind), shape=(num_samples,))
            for name, kind in types.items()
        }
        self.blocks: Indices | None = None
        self.unreadable: dict[int, str] = {}
        self._per_shard = np.zeros(num_shards, np.int64)
        self.filled, self._last_shard, self._in_shard_order = 0, 0, True

    def append(self, chunk: Mapping[str, Array]) -> None:
        size = len(chunk["id"])
        if not size:
            return
        for name, column in self.columns.items():
            column[self.filled : self.filled + size] = chunk[name]
        self.filled += size
        shards = np.append(self._last_shard, chunk["shard"])
        self._in_shard_order &= bool((shards[1:] >= shards[:-1]).all())
        self._last_shard = int(shards[-1])
        self._per_shard += np.bincount(chunk["shard"], minlength=len(self._per_shard))

    def sort(self, order: Indices) -> None:
        """Puts all rows into the order of storage, which this is."""
        for column in self.columns.values():
            column[:] = column[order]
        self._in_shard_order = True

    @property
    def shard_starts(self) -> Indices | None:
        return offsets_of(self._per_shard) if self._in_shard_order else None


@contextmanager
def new_table(
    folder: Path, num_samples: int, labels: Mapping[str, npt.DTypeLike], shards: Sequence[str], fingerprint: str
) -> Iterator[TableWriter]:
    """Writes a table that appears in `folder` only when the block ends without an error."""
    with new_folder(folder, force=True, marker=MANIFEST) as partial:
        writer = TableWriter(partial, num_samples, len(shards), labels)
        yield writer
        for column in writer.columns.values():
            column.flush()
        if writer.blocks is not None:
            np.save(partial / "blocks.npy", writer.blocks)
        write_json(
            partial / MANIFEST,
            {
                "version": VERSION,
                "columns": list(writer.columns),
                "shards": list(shards),
                "fingerprint": fingerprint,
                "shard_starts": None if writer.shard_starts is None else writer.shard_starts.tolist(),
                "unreadable": list(writer.unreadable.items()),
            },
        )


def open_table(folder: Location) -> SampleTable | None:
    """The table in `folder`, or None where there is none."""
    try:
        manifest = json.loads(read(folder / MANIFEST))
        if manifest.get("version") != VERSION:
            return None
        columns = {name: np.load(open_local(folder / f"{name}.npy"), mmap_mode="r") for name in manifest["columns"]}
        blocks = np.load(open_local(folder / "blocks.npy")) if is_file(folder / "blocks.npy") else None
        starts = manifest["shard_starts"]
        table = SampleTable(
            shards=tuple(map(str, manifest["shards"])),
            columns=columns,
            fingerprint=str(manifest["fingerprint"]),
            shard_starts=None if starts is None else np.array(starts, np.int64),
            unreadable={int(shard): str(reason) for shard, reason in manifest["unreadable"]},
            blocks=blocks,
        )
    except (
        UserError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        RecursionError,
        OverflowError,
    ):
        return None
    return table if _is_consistent(table) else None


def _is_consistent(table: SampleTable) -> bool:
    """What can be seen without reading a column: kinds and lengths, and borders that rise from 0 to the last row."""
    columns, size = table.columns, len(table.columns["id"]) if "id" in table.columns else -1
    if not all(name in columns and columns[name].dtype == kind for name, kind in PLACE_COLUMNS.items()):
        return False
    if any(column.shape != (size,) for column in columns.values()):
        return False
    for borders, end in ((table.shard_starts, size), (table.blocks, None)):
        if borders is None:
            continue
        if borders.ndim != 1 or borders.dtype != np.int64 or not len(borders) or borders[0] != 0:
            return False
        if (np.diff(borders) < 0).any() or borders[-1] > size or (end is not None and borders[-1] != end):
            return False
    return table.shard_starts is None or len(table.shard_starts) == len(table.shards) + 1


class Subset(Protocol):
    """Some rows of a table, in their order."""

    def __len__(self) -> int: ...

    def rows(self, positions: Indices) -> Indices:
        """Row of the table at each position of the subset."""

    def positions(self, rows: Indices) -> Indices:
        """Position of the first row of the subset that is not before each of these rows."""


@dataclass(frozen=True)
class RangeSubset:
    """Ranges of rows: a split by files costs no memory."""

    starts: Indices  # (ranges,) first row of each range
    offsets: Indices  # (ranges + 1,) position in the subset at which each range starts

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def rows(self, positions: Indices) -> Indices:
        if len(self.starts) == 1:  # nearly always, and asked for in every step
            return np.asarray(self.starts[0] + positions)
        which = np.searchsorted(self.offsets, positions, side="right") - 1
        return np.asarray(self.starts[which] + (positions - self.offsets[which]))

    def positions(self, rows: Indices) -> Indices:
        which = np.searchsorted(self.starts, rows, side="right") - 1
        inside = self.offsets[which] + (rows - self.starts[which])
        return np.where(which < 0, 0, np.minimum(inside, self.offsets[which + 1]))


@dataclass(frozen=True)
class ListSubset:
    """Rows one by one, in rising order, from a memory-mapped file."""

    listed: Array

    def __len__(self) -> int:
        return len(self.listed)

    def rows(self, positions: Indices) -> Indices:
        return np.asarray(self.listed[positions]).astype(np.int64)

    def positions(self, rows: Indices) -> Indices:
        return np.searchsorted(self.listed, rows)


@dataclass(frozen=True)
class Split:
    training: Subset
    validation: Subset
    description: dict[str, Any]  # goes into the run


def split_by_shard(
    table: SampleTable, validation: float | Sequence[int], folder: Path, left_out: Collection[int] = ()
) -> Split:
    """Whole shards on either side; shards that are `left_out` are on neither.

    A share takes the last shards: at least one, and never all. A list names them by their number, counted from 1.
    """
    num_shards = len(table.shards)
    usable = [shard for shard in range(num_shards) if shard not in left_out]
    if isinstance(validation, float | int):
        held = usable[len(usable) - max(1, round(len(usable) * validation)) :]
    else:
        held = sorted({number - 1 for number in validation} - set(left_out))
    if any(not 0 <= shard < num_shards for shard in held) or not 0 < len(held) < len(usable):
        raise UserError(
            f"data.validation is {validation}, and the data set has {len(usable)} usable file(s), numbered from 1: some, "
            f"but not all of them must be held out. To hold out single events instead, use --data.split hash."
        )
    side = np.zeros(num_shards, np.int8)
    side[held], side[list(left_out)] = 1, 2
    description = {"by": "files", "validation": [table.shards[shard] for shard in held]}
    starts = table.shard_starts
    if starts is None:
        return _listed_split(table, folder, description, lambda ids, shards: side[shards])
    training, held_out = (_ranges(starts[:-1][side == number], starts[1:][side == number]) for number in (0, 1))
    return Split(training, held_out, description)


def split_by_hash(table: SampleTable, validation: float, folder: Path, left_out: Collection[int] = ()) -> Split:
    """Single samples on either side, told by a hash of their id."""
    limit = np.uint64(validation * 2**64)
    away = np.zeros(len(table.shards), bool)
    away[list(left_out)] = True
    description = {"by": "hash of the id", "validation": validation, "left_out": sorted(left_out)}
    split = _listed_split(
        table, folder, description, lambda ids, shards: np.where(away[shards], 2, hashed(ids.astype(np.uint64)) < limit)
    )
    if not len(split.training) or not len(split.validation):
        raise UserError(
            f"data.validation {validation} leaves {len(split.training)} samples to train on and "
            f"{len(split.validation)} to validate on."
        )
    return split


def _listed_split(
    table: SampleTable, folder: Path, description: dict[str, Any], side: Callable[[Array, Array], Array]
) -> Split:
    """Lists of rows in files below `folder`, made once: `side(ids, shards)` is 0 for training and 1 for validation."""
    name = hashlib.sha256(f"{table.fingerprint} {len(table)} {description}".encode()).hexdigest()[:16]
    paths = [folder / f"{name}-{part}.npy" for part in ("training", "validation")]
    if not all(path.exists() for path in paths):
        parts: tuple[list[Array], list[Array]] = ([], [])
        for start in range(0, len(table), BLOCK):
            ids, shards = (np.asarray(table.columns[key][start : start + BLOCK]) for key in ("id", "shard"))
            sides = side(ids, shards)
            for number, part in enumerate(parts):
                part.append((np.flatnonzero(sides == number) + start).astype(np.int32))
        folder.mkdir(parents=True, exist_ok=True)
        for path, part in zip(paths, parts, strict=True):
            content = io.BytesIO()
            np.save(content, np.concatenate(part))
            write_bytes(path, content.getvalue())
    training, held_out = (ListSubset(np.load(path, mmap_mode="r")) for path in paths)
    return Split(training, held_out, description)


def shard_rows(table: SampleTable, shard: int) -> Indices:
    """Rows of the table that belong to a shard."""
    if table.shard_starts is None:
        return np.flatnonzero(table.columns["shard"] == shard)
    return np.arange(table.shard_starts[shard], table.shard_starts[shard + 1])


def whole(table: SampleTable) -> Subset:
    return _ranges(np.zeros(1, np.int64), np.array([len(table)], np.int64))


def block_positions(table: SampleTable, subset: Subset) -> Indices:
    """Where the blocks of storage begin, as positions in a subset; empty blocks are left out."""
    blocks = table.blocks if table.blocks is not None else np.zeros(1, np.int64)
    starts = np.unique(np.append(subset.positions(blocks), 0))
    return starts[starts < len(subset)]


def _ranges(starts: Indices, stops: Indices) -> RangeSubset:
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    return RangeSubset(starts, offsets)
