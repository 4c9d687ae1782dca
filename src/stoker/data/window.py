"""Parquet shards read directly in a window order: every row group is decoded once an epoch.

A decoded row group keeps its samples in the order in which the epoch delivers them, so what a batch takes from it is one
slice, and a batch is a few slices joined. Requests that do not follow the order (validation, ranks that take every other
sample) fall back to reading at any place.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.cache import ByteCache
from stoker.data.parquet import ParquetSource, as_array, named_if_damaged, open_parquet
from stoker.data.quarantine import BadShard
from stoker.data.ragged import Array, Indices, Ragged, offsets_of, range_indices
from stoker.data.samples import SampleTable
from stoker.errors import UserError

READ_AHEAD = 4  # blocks
SortKeys = Callable[[Indices], Indices | None]


@dataclass
class _Block:
    """The samples that begin in one block of row groups, in the order of delivery."""

    keys: list[int]  # rising; a list, because bisection in it is several times quicker than in an array
    rows: Indices
    counts: Indices
    starts: list[int]  # where the rows of each sample begin, and the number of rows
    columns: Mapping[str, Array]
    delivered: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values()) + 80 * len(self.keys)


@dataclass(frozen=True)
class _EpochOrder:
    """What an epoch will ask for."""

    sort_keys: SortKeys
    blocks: Indices  # in the order in which they are first needed
    place: Mapping[int, int]  # of each block in that order
    turn: int  # counts epochs: blocks laid out for an earlier one are of no use


class WindowSource:
    """Gathers samples in whatever order is quickest; `follow` tells it what is coming."""

    def __init__(self, root: Path, table: SampleTable, columns: Mapping[str, npt.DTypeLike], cache_bytes: int) -> None:
        self._table, self._types = table, {name: np.dtype(kind) for name, kind in columns.items()}
        self._paths = [root / shard for shard in table.shards]
        # What falls back is rare or small (validation); it gets an eighth.
        self._anywhere = ParquetSource(root, table, columns, cache_bytes // 8)
        self._cache: ByteCache[tuple[int, int], _Block] = ByteCache(cache_bytes - cache_bytes // 8)
        self._epoch: _EpochOrder | None = None
        self._bad: set[int] = set()  # shards that could not be read
        self._lock = threading.Lock()

    def follow(self, sort_keys: SortKeys, blocks: Indices) -> None:
        """From now on samples come in the order of these keys, which are None for rows that are not part of it, and
        blocks in this order."""
        place = {int(block): number for number, block in enumerate(blocks)}
        self._epoch = _EpochOrder(sort_keys, blocks, place, self._epoch.turn + 1 if self._epoch else 0)

    def gather(self, rows: Indices) -> tuple[Ragged, Indices]:
        """These samples in an order of our own, and that order."""
        epoch = self._epoch
        keys = epoch.sort_keys(rows) if epoch is not None and len(rows) else None
        if epoch is None or keys is None or self._table.blocks is None:
            return self._anywhere.gather(rows), rows
        lowest, highest = int(keys.min()), int(keys.max())
        numbers = np.unique(np.searchsorted(self._table.blocks, rows, side="right") - 1).tolist()
        blocks = self._blocks(numbers, epoch)
        parts = [
            (block, bisect_left(block.keys, lowest), bisect_right(block.keys, highest)) for block in blocks.values()
        ]
        if sum(end - begin for _, begin, end in parts) != len(rows):  # others take part of this stretch
            return self._anywhere.gather(rows), rows
        joined = _join(parts, list(self._types))
        self._drop_delivered(blocks, parts, epoch)
        self._read_ahead(numbers, epoch)
        return joined

    def where(self, rows: Indices) -> str:
        return self._anywhere.where(rows)

    def _blocks(self, numbers: list[int], epoch: "_EpochOrder") -> dict[int, "_Block"]:
        """The blocks, some of them decoded here; what other threads are decoding is left to them and waited for last."""
        found: dict[int, _Block] = {}
        for number in numbers:
            block = self._cache.get_unless_busy(*self._cache_entry(number, epoch))
            if block is not None:
                found[number] = block
        return {number: found.get(number) or self._cache.get(*self._cache_entry(number, epoch)) for number in numbers}

    def _read_ahead(self, numbers: list[int], epoch: "_EpochOrder") -> None:
        """Decodes the block that comes next, so that no batch has to wait for it.

        A bad one is left to the batch that needs it: that one names its samples, and can do without them.
        """
        newest = max(epoch.place[number] for number in numbers)
        for number in epoch.blocks[newest + 1 : newest + 1 + READ_AHEAD].tolist():
            if self._shard_of(number) in self._bad or self._cache.has(key := (epoch.turn, number)):
                continue
            if not self._cache.is_busy(key):
                with suppress(BadShard):
                    self._cache.get_unless_busy(*self._cache_entry(number, epoch))
                return

    def _shard_of(self, block: int) -> int:
        assert self._table.blocks is not None
        return int(self._table.columns["shard"][self._table.blocks[block]])

    def _drop_delivered(
        self, blocks: "dict[int, _Block]", parts: "list[tuple[_Block, int, int]]", epoch: "_EpochOrder"
    ) -> None:
        """Every sample comes once: a block whose samples are all delivered is not needed again."""
        for number, (block, begin, end) in zip(blocks, parts, strict=True):
            with self._lock:
                block.delivered += end - begin
            if block.delivered == len(block.rows):
                self._cache.drop((epoch.turn, number))

    def _cache_entry(
        self, number: int, epoch: "_EpochOrder"
    ) -> tuple[tuple[int, int], Callable[[], "_Block"], Callable[["_Block"], int]]:
        return (epoch.turn, number), lambda: self._decode(number, epoch.sort_keys), lambda block: block.num_bytes

    def _decode(self, number: int, sort_keys: SortKeys) -> _Block:
        """Reads the row groups of a block, and the little of the next one that its last sample reaches into."""
        blocks = self._table.blocks
        assert blocks is not None
        stop = int(blocks[number + 1]) if number + 1 < len(blocks) else len(self._table)
        rows = np.arange(int(blocks[number]), stop)
        first = np.asarray(self._table.columns["first"][rows])
        count = np.asarray(self._table.columns["count"][rows]).astype(np.int64)
        shard = int(self._table.columns["shard"][rows[0]])
        raw, origin = self._read(shard, int(first[0]), int(first[-1] + count[-1]), int(first[-1]))
        keys = sort_keys(rows)
        assert keys is not None, "a block lies wholly inside the subset that is followed"
        order = np.argsort(keys)
        take, offsets = range_indices(first[order] - origin, count[order])
        columns = {name: raw[name].take(take, mode="clip") for name in self._types}
        return _Block(keys[order].tolist(), rows[order], count[order], offsets.tolist(), columns)

    def _read(self, shard: int, begin: int, end: int, last_first: int) -> tuple[dict[str, Array], int]:
        """Columns of the row groups in which samples begin, from row `begin` to `last_first`, and of more up to `end`."""
        starts, names, path = self._anywhere.group_starts(shard), list(self._types), self._paths[shard]
        low, high = (int(np.searchsorted(starts, row, side="right")) - 1 for row in (begin, last_first))
        try:
            with named_if_damaged(path):
                file = open_parquet(path, names, self._anywhere.metadata(shard))
                parts = [file.read_row_groups(list(range(low, high + 1)), columns=names, use_threads=False)]
                parts += _first_rows(file, high + 1, end - int(starts[high + 1]), names)
                raw = {
                    name: as_array([part.column(name) for part in parts], kind, name, path)
                    for name, kind in self._types.items()
                }
        except UserError as error:
            self._bad.add(shard)
            raise BadShard(shard, str(error)) from error
        return raw, int(starts[low])


def _first_rows(file: pq.ParquetFile, group: int, num_rows: int, names: list[str]) -> list[pa.Table]:
    """At least so many rows from the start of a row group on, decoding little more than them."""
    parts: list[pa.Table] = []
    if num_rows > 0:
        groups = list(range(group, file.num_row_groups))
        for batch in file.iter_batches(min(num_rows, 65_536), row_groups=groups, columns=names, use_threads=False):
            parts.append(pa.Table.from_batches([batch]))
            num_rows -= batch.num_rows
            if num_rows <= 0:
                break
    return parts


def _join(parts: list[tuple[_Block, int, int]], names: list[str]) -> tuple[Ragged, Indices]:
    slices = [(block, block.starts[begin], block.starts[end]) for block, begin, end in parts]
    columns = {name: np.concatenate([block.columns[name][low:high] for block, low, high in slices]) for name in names}
    counts = np.concatenate([block.counts[begin:end] for block, begin, end in parts])
    rows = np.concatenate([block.rows[begin:end] for block, begin, end in parts])
    return Ragged(columns, offsets_of(counts)), rows
