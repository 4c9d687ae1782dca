"""Anybody's Parquet files as samples: packed once into the cache, then read at random places at full speed.

A row is a sample, whose list columns are ragged and have one length a row; or, with `sample`, neighbouring rows with the
same value in that column are a sample, and a table of samples (`labels`) may say more about each of them. Columns of plain
numbers become labels.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from stoker import console
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.loader import LoaderConfig
from stoker.data.locations import Location, identity, is_folder, list_folder, named, stat
from stoker.data.own import Samples
from stoker.data.pack import Packing, ShardContent, pack
from stoker.data.parquet import as_array, named_if_damaged, open_parquet
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, offsets_of
from stoker.data.samples import SampleTable, check_column_name, new_table, open_table
from stoker.data.store import PackedStore, is_store, open_store
from stoker.errors import UserError

VERSION = 1  # of what is made of the files


def from_parquet(
    path: Location | str,
    columns: Sequence[str] | None = None,
    *,
    sample: str | None = None,
    labels: Location | str | None = None,
) -> Samples:
    """The samples of a Parquet file, or of all files of a folder in the order of their names; all columns of numbers, or
    those that are named. `labels` is a Parquet file with a row for each value of the column `sample`."""
    root = named(path)
    if labels is not None and sample is None:
        raise UserError("labels= is a table of samples, and sample= must name the column that both have.")
    listed = None if labels is None or sample is None else _Listed.read(named(labels), sample)
    files = _files(root)
    chosen = [columns] if isinstance(columns, str) else None if columns is None else list(dict.fromkeys(columns))
    layout = _layout(root / files[0] if is_folder(root) else root, chosen, sample)
    # With the place: files elsewhere may have the same names, sizes and times.
    digest = hashlib.sha256(f"{VERSION} {layout} {identity(root)}".encode())
    if listed is not None:
        layout = listed.joined(layout)
        digest.update(listed.fingerprint.encode())
    for name in files:
        found = stat(root / name if is_folder(root) else root)
        assert found is not None, "listed a moment ago"
        digest.update(f"{name} {found.size} {found.written}\n".encode())
    folder = cache_folder() / "packed" / f"parquet-{digest.hexdigest()[:16]}"
    with cache_lock(folder, f"Another process packs {root}: waiting for it."):
        store = (
            open_store(folder) if is_store(folder) else _pack(root, files, layout, listed, folder, digest.hexdigest())
        )
    return _store_samples(store, list(layout.labels))


def _store_samples(store: PackedStore, labels: Sequence[str]) -> Samples:
    """A packed store: ragged columns as flat tensors with one `offsets`, and label columns of its table."""

    def read(micro: MicroBatch) -> dict[str, torch.Tensor]:
        found = store.gather(micro)
        batch = {name: torch.from_numpy(column) for name, column in found.columns.items()}
        batch |= {name: torch.from_numpy(np.asarray(store.table.columns[name][found.rows])) for name in labels}
        return {**batch, "offsets": torch.from_numpy(found.offsets), "rows": torch.from_numpy(found.rows)}

    width = sum(column.dtype.itemsize for column in store.columns.values())
    return Samples(store.table, read, store.files_of, bytes_per_cost=3.0 * width + 16)


@dataclass(frozen=True)
class _Layout:
    """Types of the columns: `ragged` have many values a sample, `labels` one."""

    ragged: dict[str, str]
    labels: dict[str, str]
    sample: str | None  # column whose neighbouring equal values are a sample; None: a row is one
    joined: tuple[str, ...] = ()  # of labels, those of another table


@dataclass(frozen=True)
class _Listed:
    """A table with a row a sample, beside the files."""

    path: Location
    sample: str
    ids: Indices  # rising
    columns: dict[str, Array]

    @classmethod
    def read(cls, path: Location, sample: str) -> "_Listed":
        file = open_parquet(path, [sample])
        if len(set(file.schema_arrow.names)) != len(file.schema_arrow.names):
            raise UserError(f"{path} has several columns of one name.")
        kinds = {name: _numbers(file.schema_arrow.field(name).type) for name in file.schema_arrow.names}
        usable = {name: kind for name, (is_list, kind) in kinds.items() if kind and not is_list and name != sample}
        if left := sorted(kinds.keys() - usable.keys() - {sample}):
            console.say(f"{path}: {', '.join(left)} are no plain numbers and are left out.")
        with named_if_damaged(path):
            table = file.read(columns=[sample, *usable], use_threads=False)
        ids = as_array([table.column(sample)], np.int64, sample, path)
        order = np.argsort(ids, kind="stable")
        if (np.diff(ids[order]) == 0).any():
            twice = ids[order][:-1][np.diff(ids[order]) == 0][0]
            raise UserError(f"{path} lists {sample} {twice} more than once.")
        found = {name: as_array([table.column(name)], kind, name, path)[order] for name, kind in usable.items()}
        return cls(path, sample, ids[order], found)

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.ids.tobytes())
        for name, column in self.columns.items():
            digest.update(f"{name} {column.dtype}".encode() + column.tobytes())
        return digest.hexdigest()

    def joined(self, layout: _Layout) -> _Layout:
        both = sorted(self.columns.keys() & {*layout.ragged, *layout.labels})
        if both:
            raise UserError(f"The files and {self.path} both have the column {both[0]}: name the columns you want.")
        for name in self.columns:
            _check_label_name(name, self.path)
        kinds = {name: column.dtype.str for name, column in self.columns.items()}
        return _Layout(layout.ragged, {**layout.labels, **kinds}, layout.sample, tuple(self.columns))

    def of(self, ids: Array) -> dict[str, Array]:
        at = np.searchsorted(self.ids, ids)
        if not len(ids):
            return {name: column[:0] for name, column in self.columns.items()}
        if not len(self.ids):
            raise UserError(f"{self.path} lists no samples.")
        missing = np.flatnonzero(self.ids[np.minimum(at, len(self.ids) - 1)] != ids)
        if missing.size:
            raise UserError(
                f"{self.path} does not list {self.sample} {ids[missing[0]]} ({missing.size:,} such samples)."
            )
        return {name: column[at] for name, column in self.columns.items()}


def _files(root: Location) -> list[str]:
    if not is_folder(root):
        if stat(root) is None:
            raise UserError(f"There is no file and no folder {root}.")
        return [root.name]
    names = [
        name for name, found in list_folder(root).items() if name.lower().endswith(".parquet") and not found.is_folder
    ]
    if not names:
        raise UserError(f"{root} holds no .parquet files.")
    return names


def _layout(first: Location, columns: Sequence[str] | None, sample: str | None) -> _Layout:
    if columns is not None and not columns:
        raise UserError("from_parquet was given an empty list of columns: name some, or none for all of them.")
    schema = open_parquet(first, [*(columns or ()), *([sample] if sample else [])]).schema_arrow
    if len(set(schema.names)) != len(schema.names):
        raise UserError(f"{first} has several columns of one name.")
    ragged: dict[str, str] = {}
    labels: dict[str, str] = {}
    for name in dict.fromkeys([*(columns or schema.names), *([sample] if sample else [])]):
        kind = schema.field(name).type
        is_list, dtype = _numbers(kind)
        if dtype is None:
            if columns is not None or name == sample:
                raise UserError(f"The column {name} of {first} holds {kind}; numbers, or lists of them, can be used.")
            console.say(f"{first}: the column {name} holds {kind} and is left out.")
            continue
        if is_list and sample is not None:
            raise UserError(
                f"The column {name} of {first} is a list, and with sample={sample!r} each row is one value."
            )
        if name == sample:
            if not pa.types.is_integer(kind):
                raise UserError(
                    f"The column {name} of {first} holds {kind}; what tells samples apart must be whole numbers."
                )
            labels[name] = "<i8"
        elif is_list or sample is not None:
            ragged[name] = dtype
        else:
            labels[name] = dtype
    if not ragged:
        raise UserError(
            f"{first} has no column of lists: name the column whose equal values are a sample "
            f"(stoker.from_parquet({str(first)!r}, sample='id')), or read plain columns into stoker.from_arrays(...)."
        )
    for name in (*ragged, *labels):
        if name != "id" or name != sample:
            _check_label_name(name, first)
    return _Layout(ragged, labels, sample)


def _check_label_name(name: str, path: Location) -> None:
    if name in ("rows", "offsets", "shard", "first", "count", "id"):
        raise UserError(f"The column {name} of {path} has a name that batches use themselves: rename it.")
    check_column_name(name)


@dataclass(frozen=True)
class _File:
    counts: Indices
    labels: dict[str, Array]
    ragged: dict[str, Array]


def _read(path: Location, layout: _Layout, *, values: bool) -> _File:
    """One file; without `values` only what tells samples apart."""
    own = {name: kind for name, kind in layout.labels.items() if name not in layout.joined}
    names = [*own, *layout.ragged]
    file = open_parquet(path, names)
    _check_same(file.schema_arrow, layout, path)
    with named_if_damaged(path):
        table = file.read(columns=names, use_threads=False)
    labels = {name: as_array([table.column(name)], kind, name, path) for name, kind in own.items()}
    if layout.sample is not None:
        ids = labels[layout.sample]
        begins = np.flatnonzero(np.append(True, ids[1:] != ids[:-1])) if len(ids) else np.zeros(0, np.int64)
        counts = np.diff(np.append(begins, len(ids)))
        if len(np.unique(ids[begins])) != len(begins):
            raise UserError(f"{path}: rows of one {layout.sample} do not stand together. Sort the file by it.")
        found = {name: as_array([table.column(name)], kind, name, path) for name, kind in layout.ragged.items()}
        return _File(counts, {layout.sample: ids[begins]}, found if values else {})
    lists = {name: table.column(name).combine_chunks() for name in layout.ragged}
    lengths = {name: _lengths(column, name, path) for name, column in lists.items()}
    first = next(iter(lengths))
    for name, counts in lengths.items():
        if (counts != lengths[first]).any():
            row = int(np.flatnonzero(counts != lengths[first])[0])
            raise UserError(
                f"{path}: in row {row} the list {name} has {counts[row]} values and {first} has {lengths[first][row]}."
            )
    flat = {
        name: as_array([pa.chunked_array([lists[name].flatten()])], kind, name, path)
        for name, kind in (layout.ragged if values else {}).items()
    }
    return _File(lengths[first], labels, flat)


def _check_same(schema: Any, layout: _Layout, path: Location) -> None:
    """A file whose columns have other types than those of the first would be rounded, or read as something else."""
    for name, wanted in {**layout.ragged, **layout.labels}.items():
        if name in layout.joined:
            continue
        kind = schema.field(name).type
        is_list, dtype = _numbers(kind)
        fits = pa.types.is_integer(kind) if name == layout.sample else dtype == wanted
        if not fits or is_list != (name in layout.ragged and layout.sample is None):
            raise UserError(f"{path}: the column {name} holds {kind}, which is not what the first file has ({wanted}).")


def _numbers(kind: Any) -> tuple[bool, str | None]:
    """Whether a column holds lists, and the type of its numbers; None: it holds something else."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    value = kind.value_type if is_list else kind
    usable = pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)
    return is_list, np.dtype(value.to_pandas_dtype()).str if usable else None


def _lengths(column: Any, name: str, path: Location) -> Indices:
    if column.null_count:
        raise UserError(f"{path}: the column {name} has {column.null_count:,} empty values where each must be a list.")
    lengths: Indices = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def _pack(
    root: Location, files: list[str], layout: _Layout, listed: _Listed | None, folder: Any, fingerprint: str
) -> PackedStore:
    paths = [root / name if is_folder(root) else root for name in files]
    console.say(f"Packing {root} into {folder}, once.")
    kinds = {name: np.dtype(kind) for name, kind in layout.labels.items()}
    scanned = list(_scanned(paths, layout))
    size = sum(len(one.counts) for one in scanned)
    if not size:
        raise UserError(f"{root} holds no samples.")
    listing = folder.with_name(f"{folder.name}.table")
    if layout.sample is not None:
        ids = np.concatenate([one.labels[layout.sample] for one in scanned])
        values, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise UserError(
                f"{root}: rows of {layout.sample} {values[counts > 1][0]} are in several files. A sample lies in one file."
            )
    with new_table(listing, size, kinds, files, fingerprint) as writer:
        number = 0
        for shard, one in enumerate(scanned):
            count = len(one.counts)
            places = {"shard": np.full(count, shard), "first": offsets_of(one.counts)[:-1], "count": one.counts}
            more = {} if listed is None else listed.of(one.labels[listed.sample])
            writer.append({**places, "id": np.arange(number, number + count), **one.labels, **more})
            number += count
    table = open_table(listing)
    assert table is not None, "just written"

    def read_shard(shard: int, rows: Indices) -> ShardContent:
        return ShardContent(_read(paths[shard], layout, values=True).ragged)

    return _packed(folder, table, layout, read_shard)


def _packed(folder: Any, table: SampleTable, layout: _Layout, read_shard: Any) -> PackedStore:
    threads = LoaderConfig().num_threads
    store = pack(folder, Packing(table, dict(layout.ragged), read_shard, extra={"recipe": "parquet"}), threads=threads)
    assert store is not None, "one process packs all of it"
    return store


def _scanned(paths: list[Location], layout: _Layout) -> Iterator[_File]:
    with console.progress("look at files", len(paths), "files") as bar:
        for path in paths:
            yield _read(path, layout, values=False)
            bar.advance()
