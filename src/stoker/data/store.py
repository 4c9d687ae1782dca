"""The packed store: every column of all samples in one flat file, memory-mapped, so that a batch is one gather.

A store is a folder with store.json (columns, checksums), columns/NAME.bin, and a sample table whose `first` counts rows
of the whole store. `stoker.data.pack` writes it.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.data.checksums import Verification, read_manifest
from stoker.data.locations import Location, is_file, open_local, remote_file, stat
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, Ragged, range_indices
from stoker.data.samples import SampleTable, open_table
from stoker.data.storage.blocks import block_bytes
from stoker.data.storage.urls import Url
from stoker.errors import UserError

MANIFEST = "store.json"
COLUMNS = "columns"  # folder of them
VERSION = 2


@dataclass(frozen=True)
class PackedStore:
    path: Location
    table: SampleTable
    columns: Mapping[str, Array]  # memory-mapped
    manifest: Mapping[str, Any]
    verification: Verification
    elsewhere: Any = None  # a `MappedColumns`, where the store is not on a disk of this machine

    @property
    def num_elements(self) -> int:
        return int(self.manifest["num_rows"])

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def gather(self, micro: MicroBatch) -> Ragged:
        """These samples, in the order asked for."""
        rows = micro.rows
        first, count = (np.asarray(self.table.columns[name][rows]) for name in ("first", "count"))
        if not self.verification.done:
            self._check_bounds(first, count)
        indices, offsets = range_indices(first, count)
        with nullcontext() if self.elsewhere is None else self.elsewhere.held(first, count):
            return self._taken(indices, offsets, rows)

    def _taken(self, indices: Indices, offsets: Indices, rows: Indices) -> Ragged:
        # Every index lies inside: as it was packed, or as was just seen. Take need not look at each of them.
        columns = {name: column.take(indices, mode="clip") for name, column in self.columns.items()}
        return Ragged(columns, offsets, rows)

    def places(self, rows: Indices) -> "list[tuple[Any, Indices]]":
        """Blocks of remote files that hold these samples; none: everything is here."""
        if self.elsewhere is None or self.elsewhere.is_whole:
            return []
        first, count = (np.asarray(self.table.columns[name][rows]) for name in ("first", "count"))
        found: list[tuple[Any, Indices]] = self.elsewhere.places(first, count)
        return found

    def want_rest(self) -> None:
        """Begins to fetch what no training sample needed: validation will."""
        if self.elsewhere is not None:
            self.elsewhere.want_all()

    def rows_of(self, file: Any, numbers: Indices) -> Indices:
        """A sample in each block of a remote file."""
        found: Indices = self.elsewhere.rows_of(file, numbers, self.table.columns["first"])
        return found

    def block_rows(self) -> Indices:
        """Samples at which the blocks of the widest column begin: what lies between two of them is fetched at once."""
        widest = max(column.dtype.itemsize for column in self.columns.values())
        starts = np.searchsorted(
            self.table.columns["first"], np.arange(0, max(1, self.num_elements), block_bytes() // widest)
        )
        return np.unique(np.append(starts[starts < len(self.table)], 0)).astype(np.int64)

    def keep(self) -> None:
        """Everything, as long as this process lives."""
        if self.elsewhere is not None:
            self.elsewhere.keep()

    def _check_bounds(self, first: Array, count: Array) -> None:
        """Until all checksums were compared the table may be damaged."""
        self.verification.check()
        if len(first) and (first.min() < 0 or count.min() < 0 or (first + count).max() > self.num_elements):
            raise UserError(f"{self.path} is damaged: its table points beyond the end of its columns. Pack it again.")

    def files_of(self, rows: Indices) -> str:
        return f"{self.path} (packed from {', '.join(_shard_names(self.table, rows))})"


def is_store(path: Location) -> bool:
    return is_file(path / MANIFEST)


def open_store(path: Location) -> PackedStore:
    """Opens a store; a file that is missing or has another size than it should is an error."""
    try:
        manifest = read_manifest(path / MANIFEST)
        version = manifest["version"]
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is not a packed store: its {MANIFEST} cannot be read ({error}). Pack it again."
        ) from error
    if version != VERSION:
        raise UserError(
            f"{path} was packed in format {version}, and this version reads format {VERSION}: pack it again."
        )
    # Before anything is mapped: a file that is too short would end the process.
    verification = Verification(path, manifest["files"])
    table = open_table(path / "table")
    if table is None or len(table) != manifest["num_samples"]:
        raise UserError(f"The sample table in {path / 'table'} is missing or damaged: pack it again.")
    columns = {name: _map_column(path, name, kind, manifest["num_rows"]) for name, kind in manifest["columns"].items()}
    elsewhere = _elsewhere(path, columns) if isinstance(path, Url) else None
    return PackedStore(path, table, columns, manifest, verification, elsewhere)


def _elsewhere(path: Url, columns: Mapping[str, Array]) -> Any:
    from stoker.data.storage.mapped import MappedColumns  # needs a client library

    filled = {name: column for name, column in columns.items() if len(column)}
    if not filled:
        return None
    files = {name: remote_file(column_path(path, name)) for name in filled}
    sizes = {name: column.dtype.itemsize for name, column in filled.items()}
    return MappedColumns(files, sizes, len(next(iter(filled.values()))))


def column_path(path: Location, name: str) -> Location:
    return path / COLUMNS / f"{name}.bin"


def _map_column(path: Location, name: str, kind: str, num_elements: int) -> Array:
    file, needed = column_path(path, name), np.dtype(kind).itemsize * num_elements
    found = stat(file)
    size = None if found is None else found.size
    if size != needed:
        raise UserError(
            f"{file} {'is missing' if size is None else f'has {size:,} bytes'}, and should have {needed:,}: the store is "
            f"damaged. Pack it again."
        )
    if not num_elements:
        return np.zeros(0, kind)  # there is nothing to map
    if isinstance(file, Url):
        mapped: Array = remote_file(file).array.view(kind)
        return mapped
    # A plain array over the map: a memmap object would cost time in every operation on it.
    return np.asarray(np.memmap(open_local(file), dtype=kind, mode="r", shape=(num_elements,)))


def _shard_names(table: SampleTable, rows: Indices, most: int = 3) -> list[str]:
    numbers = np.unique(table.columns["shard"][rows])
    names = [table.shards[number] for number in numbers[:most]]
    return names + ([f"{len(numbers) - most} more"] if len(numbers) > most else [])
