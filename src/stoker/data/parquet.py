"""Samples read directly from Parquet shards, where a sample is a range of rows.

Whole row groups are decoded, in the thread that needs them, and kept in a cache of bounded size.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.ragged import Array, Indices, Ragged, offsets_of, range_indices
from stoker.data.samples import SampleTable
from stoker.errors import UserError


class ParquetSource:
    """Gathers rows of a table's samples from its Parquet shards."""

    def __init__(
        self, root: Path, table: SampleTable, columns: Mapping[str, npt.DTypeLike], cache_bytes: int = 2 << 30
    ) -> None:
        self._paths = [root / shard for shard in table.shards]
        self._table = table
        self._types = {name: np.dtype(kind) for name, kind in columns.items()}
        self._starts: dict[int, Indices] = {}
        self._cache = _GroupCache(cache_bytes)

    def gather(self, rows: Indices) -> Ragged:
        """The rows of these samples, in the order asked for."""
        places = self._table.columns
        shard, first, count = places["shard"][rows], places["first"][rows], places["count"][rows]
        offsets = offsets_of(count)
        columns = {name: np.empty(offsets[-1], kind) for name, kind in self._types.items()}
        for number in np.unique(shard):
            mine = np.flatnonzero(shard == number)
            self._fill(columns, offsets, int(number), mine, first[mine], count[mine])
        return Ragged(columns, offsets)

    def _fill(
        self,
        columns: Mapping[str, Array],
        offsets: Indices,
        shard: int,
        samples: Indices,
        first: Indices,
        count: Indices,
    ) -> None:
        """Copies the samples of one shard, row group by row group; a sample may lie across two of them."""
        starts = self._group_starts(shard)
        begin_group = np.searchsorted(starts, first, side="right") - 1
        end_group = np.searchsorted(starts, first + count - 1, side="right") - 1
        for group in range(int(begin_group.min()), int(end_group.max()) + 1):
            inside = np.flatnonzero((begin_group <= group) & (end_group >= group))
            if not inside.size:
                continue
            low = np.maximum(first[inside], starts[group])
            high = np.minimum(first[inside] + count[inside], starts[group + 1])
            take, _ = range_indices(low - starts[group], high - low)
            put, _ = range_indices(offsets[samples[inside]] + low - first[inside], high - low)
            decoded = self._cache.get((shard, group), self._paths[shard], list(self._types))
            for name, column in columns.items():
                column[put] = decoded[name][take]

    def _group_starts(self, shard: int) -> Indices:
        """Row at which each row group of a shard starts, and the number of rows at the end."""
        if shard not in self._starts:
            metadata = open_parquet(self._paths[shard]).metadata
            sizes = np.array([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], np.int64)
            self._starts[shard] = offsets_of(sizes)
        return self._starts[shard]


def open_parquet(path: Path, columns: Sequence[str] = ()) -> pq.ParquetFile:
    """Opens a Parquet file that has these columns, or says what is wrong with it."""
    try:
        file = pq.ParquetFile(path, memory_map=True)
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path} is not a complete Parquet file ({error}). It may have been cut short while it was "
            f"copied: fetch it again."
        ) from error
    missing = [name for name in columns if name not in file.schema_arrow.names]
    if missing:
        raise UserError(
            f"{path} lacks the column(s) {', '.join(missing)}; it has {', '.join(file.schema_arrow.names)}."
        )
    return file


class _GroupCache:
    """Decoded row groups, the least recently used dropped first. One thread decodes a group, others wait for it."""

    def __init__(self, num_bytes: int) -> None:
        self._limit, self._held = num_bytes, 0
        self._groups: OrderedDict[tuple[int, int], dict[str, Array]] = OrderedDict()
        self._busy: dict[tuple[int, int], threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int], path: Path, names: list[str]) -> dict[str, Array]:
        with self._lock:
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                if key in self._groups:
                    self._groups.move_to_end(key)
                    return self._groups[key]
            group = _decode(path, key[1], names)
            with self._lock:
                self._groups[key] = group
                self._held += _size(group)
                while self._held > self._limit and len(self._groups) > 1:
                    self._held -= _size(self._groups.popitem(last=False)[1])
            return group


def _decode(path: Path, group: int, names: list[str]) -> dict[str, Array]:
    try:
        table = open_parquet(path, names).read_row_group(group, columns=names, use_threads=False)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"Row group {group} of {path} cannot be read ({error}). Fetch the file again.") from error
    return {name: table.column(name).to_numpy() for name in names}


def _size(group: Mapping[str, Array]) -> int:
    return sum(column.nbytes for column in group.values())
