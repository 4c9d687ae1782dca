"""Parquet shards read directly in a window order: every row group is decoded once an epoch.

A decoded row group keeps its samples in the order in which the epoch delivers them, so what a batch takes from it is one
slice, and a batch is a few slices joined. Requests that do not follow the order (validation, ranks that take every other
sample) fall back to reading at any place.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.bad_samples import BadShard
from stoker.data.cache import ByteCache
from stoker.data.locations import Location, remote_file
from stoker.data.order import WindowOrder
from stoker.data.parquet import ParquetSource, as_array, group_bytes, groups_held, named_if_damaged, open_parquet
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, Ragged, offsets_of, range_indices
from stoker.data.samples import SampleTable, Subset
from stoker.data.storage.urls import Url
from stoker.errors import UserError

READ_AHEAD = 4  # blocks


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
class _Epoch:
    """What an epoch will ask for."""

    key: tuple[int, int]  # seed and number: blocks are laid out for one epoch, and of no use to another
    order: WindowOrder
    blocks: Indices  # in the order in which they are first needed
    place: Mapping[int, int]  # of each block in that order
    delivered: set[int] = field(default_factory=set)  # blocks that will not be asked for again


class WindowSource:
    """Gathers samples of a subset in the order of its epochs; micro-batches say which epoch they are of."""

    def __init__(
        self,
        root: Location,
        table: SampleTable,
        columns: Mapping[str, npt.DTypeLike],
        cache_bytes: int,
        subset: Subset,
        order: Callable[[int, int], WindowOrder],
    ) -> None:
        self._table, self._types = table, {name: np.dtype(kind) for name, kind in columns.items()}
        self._paths = [root / shard for shard in table.shards]
        self._subset, self._order = subset, order
        # What falls back is rare or small (validation); it gets an eighth.
        self._anywhere = ParquetSource(root, table, columns, cache_bytes // 8)
        self._cache: ByteCache[tuple[tuple[int, int], int], _Block] = ByteCache(cache_bytes - cache_bytes // 8)
        self._epochs: dict[tuple[int, int], _Epoch] = {}
        self._bad: set[int] = set()  # shards that could not be read
        self._lock = threading.Lock()

    def gather(self, micro: MicroBatch) -> Ragged:
        """These samples, in an order of our own."""
        positions, inside = self._positions(micro.rows)
        if self._table.blocks is None or not len(positions) or not inside.all():
            return self._anywhere.gather(micro)
        epoch = self._epoch(micro)
        keys = epoch.order.sort_keys(positions)
        lowest, highest = int(keys.min()), int(keys.max())
        numbers = np.unique(np.searchsorted(self._table.blocks, micro.rows, side="right") - 1).tolist()
        blocks = self._blocks(numbers, epoch)
        parts = [
            (block, bisect_left(block.keys, lowest), bisect_right(block.keys, highest)) for block in blocks.values()
        ]
        if sum(end - begin for _, begin, end in parts) != len(micro.rows):  # others take part of this stretch
            return self._anywhere.gather(micro)
        joined = _join(parts, list(self._types))
        self._drop_delivered(blocks, parts, epoch)
        self._read_ahead(numbers, epoch)
        return joined

    def files_of(self, rows: Indices) -> str:
        return self._anywhere.files_of(rows)

    def places(self, rows: Indices) -> list[tuple[Any, Indices]]:
        """Blocks of remote files that hold what is decoded for these samples; none: they are local."""
        if self._table.blocks is None or not isinstance(self._paths[0], Url):
            return []
        found: dict[int, list[Indices]] = {}
        for number in np.unique(np.searchsorted(self._table.blocks, rows, side="right") - 1).tolist():
            shard = self._shard_of(number)
            if shard not in self._bad:
                with suppress(BadShard):  # left to the batch that needs it, which names its samples
                    found.setdefault(shard, []).append(self._blocks_of(number, shard))
        return [(remote_file(self._paths[shard]), np.unique(np.concatenate(all_))) for shard, all_ in found.items()]

    def missing(self, micro: MicroBatch) -> list[tuple[Any, Indices]]:
        """The same, but for what is decoded already."""
        if self._table.blocks is None or not len(micro.rows):
            return []
        numbers = np.searchsorted(self._table.blocks, micro.rows, side="right") - 1
        key = micro.seed, micro.epoch
        decoded = [number for number in np.unique(numbers).tolist() if self._cache.has((key, number))]
        return self.places(micro.rows[~np.isin(numbers, decoded)])

    def _blocks_of(self, number: int, shard: int) -> Indices:
        """Of the remote file, for one block of row groups."""
        blocks, columns = self._table.blocks, self._table.columns
        assert blocks is not None
        stop = int(blocks[number + 1]) if number + 1 < len(blocks) else len(self._table)
        starts, metadata = self._anywhere.group_starts(shard), self._anywhere.metadata(shard)
        first, last = int(columns["first"][blocks[number]]), int(columns["first"][stop - 1])
        end = last + int(columns["count"][stop - 1])
        low = int(np.searchsorted(starts, first, side="right")) - 1
        high = max(int(np.searchsorted(starts, last, side="right")), int(np.searchsorted(starts, end, side="left"))) - 1
        begin, end = group_bytes(metadata, low)[0], group_bytes(metadata, high)[1]
        return np.array(remote_file(self._paths[shard]).blocks_of(begin, end - begin), np.int64)

    def _positions(self, rows: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Where in the subset these rows are, and which of them are in it at all."""
        subset = self._subset
        positions = subset.positions(rows)
        inside = (positions < len(subset)) & (subset.rows(np.minimum(positions, len(subset) - 1)) == rows)
        return positions, inside

    def _epoch(self, micro: MicroBatch) -> _Epoch:
        """Of the micro-batch. Two are remembered: the last batches of one are made beside the first ones of the next."""
        key = micro.seed, micro.epoch
        with self._lock:
            if key not in self._epochs:
                assert self._table.blocks is not None
                order = self._order(*key)
                starts = self._subset.rows(order.block_starts)
                blocks = np.searchsorted(self._table.blocks, starts, side="right") - 1
                place = {int(block): number for number, block in enumerate(blocks)}
                self._epochs[key] = _Epoch(key, order, blocks, place)
                while len(self._epochs) > 2:
                    del self._epochs[next(iter(self._epochs))]
                self._cache.drop_where(lambda held: held[0] not in self._epochs)
            return self._epochs[key]

    def _blocks(self, numbers: list[int], epoch: _Epoch) -> dict[int, _Block]:
        """The blocks, some of them decoded here; what other threads are decoding is left to them and waited for last."""
        found: dict[int, _Block] = {}
        for number in numbers:
            block = self._cache.get_unless_busy(*self._cache_entry(number, epoch))
            if block is not None:
                found[number] = block
        return {number: found.get(number) or self._cache.get(*self._cache_entry(number, epoch)) for number in numbers}

    def _read_ahead(self, numbers: list[int], epoch: _Epoch) -> None:
        """Decodes the block that comes next, so that no batch has to wait for it.

        A bad one is left to the batch that needs it: that one names its samples, and can do without them.
        """
        newest = max(epoch.place[number] for number in numbers)
        for number in epoch.blocks[newest + 1 : newest + 1 + READ_AHEAD].tolist():
            if number in epoch.delivered or self._shard_of(number) in self._bad:
                continue
            if self._cache.has(key := (epoch.key, number)):
                continue
            if not self._cache.is_busy(key):
                with suppress(BadShard):
                    self._cache.get_unless_busy(*self._cache_entry(number, epoch))
                return

    def _shard_of(self, block: int) -> int:
        assert self._table.blocks is not None
        return int(self._table.columns["shard"][self._table.blocks[block]])

    def _drop_delivered(self, blocks: dict[int, _Block], parts: list[tuple[_Block, int, int]], epoch: _Epoch) -> None:
        """Every sample comes once: a block whose samples are all delivered is not needed again."""
        for number, (block, begin, end) in zip(blocks, parts, strict=True):
            with self._lock:
                block.delivered += end - begin
            if block.delivered == len(block.rows):
                epoch.delivered.add(number)
                self._cache.drop((epoch.key, number))

    def _cache_entry(
        self, number: int, epoch: _Epoch
    ) -> tuple[tuple[tuple[int, int], int], Callable[[], _Block], Callable[[_Block], int]]:
        return (epoch.key, number), lambda: self._decode(number, epoch.order), lambda block: block.num_bytes

    def _decode(self, number: int, order: WindowOrder) -> _Block:
        """Reads the row groups of a block, and the little of the next one that its last sample reaches into."""
        blocks = self._table.blocks
        assert blocks is not None
        stop = int(blocks[number + 1]) if number + 1 < len(blocks) else len(self._table)
        rows = np.arange(int(blocks[number]), stop)
        first = np.asarray(self._table.columns["first"][rows])
        count = np.asarray(self._table.columns["count"][rows]).astype(np.int64)
        shard = int(self._table.columns["shard"][rows[0]])
        raw, origin = self._read(shard, int(first[0]), int(first[-1] + count[-1]), int(first[-1]))
        positions, inside = self._positions(rows)
        rows, first, count = rows[inside], first[inside], count[inside]
        keys = order.sort_keys(positions[inside])
        sorting = np.argsort(keys)
        take, offsets = range_indices(first[sorting] - origin, count[sorting])
        columns = {name: raw[name].take(take, mode="clip") for name in self._types}
        return _Block(keys[sorting].tolist(), rows[sorting], count[sorting], offsets.tolist(), columns)

    def _read(self, shard: int, begin: int, end: int, last_first: int) -> tuple[dict[str, Array], int]:
        """Columns of the row groups in which samples begin, from row `begin` to `last_first`, and of more up to `end`."""
        starts, names, path = self._anywhere.group_starts(shard), list(self._types), self._paths[shard]
        low, high = (int(np.searchsorted(starts, row, side="right")) - 1 for row in (begin, last_first))
        try:
            last = max(high, int(np.searchsorted(starts, end, side="left")) - 1)
            metadata = self._anywhere.metadata(shard)
            with named_if_damaged(path), groups_held(path, metadata, low, last):
                file = open_parquet(path, names, metadata)
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


def _join(parts: list[tuple[_Block, int, int]], names: list[str]) -> Ragged:
    slices = [(block, block.starts[begin], block.starts[end]) for block, begin, end in parts]
    columns = {name: np.concatenate([block.columns[name][low:high] for block, low, high in slices]) for name in names}
    counts = np.concatenate([block.counts[begin:end] for block, begin, end in parts])
    rows = np.concatenate([block.rows[begin:end] for block, begin, end in parts])
    return Ragged(columns, offsets_of(counts), rows)
