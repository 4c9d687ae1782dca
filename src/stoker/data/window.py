"""Parquet shards read directly in a window order: every row group is decoded once an epoch.

A decoded row group keeps its samples in the order in which the epoch delivers them, so what a batch takes from it is one
slice, and a batch is a few slices joined. A batch that leaves some of the stretch to others (ranks, pieces of a step) takes
its samples out of the slices. Samples that are not in the order (validation) are read at any place.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.bad_samples import BadShard
from stoker.data.cache import ByteCache
from stoker.data.locations import Location, remote_file
from stoker.data.order import WindowOrder, rising
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

    first: int  # row of the table at which the block begins
    places: Indices  # of each row of the table from there on: where it stands here, -1 if it does not
    rows: Indices
    counts: Indices
    starts: Indices  # where the rows of each sample begin, and the number of rows
    columns: Mapping[str, Array]
    delivered: npt.NDArray[np.bool_]  # of each sample

    @property
    def num_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values()) + 32 * len(self.rows)

    def places_of(self, rows: Indices) -> Indices:
        """Where these rows of the table stand here; -1 where they do not."""
        return self.places[rows - self.first]

    def slice(self, places: Indices) -> "_Part":
        """Samples that follow one another, in the order of delivery."""
        begin, end = int(places.min()), int(places.max()) + 1
        low, high = self.starts[begin], self.starts[end]
        columns = {name: column[low:high] for name, column in self.columns.items()}
        return _Part(columns, self.counts[begin:end], self.rows[begin:end])

    def chosen(self, places: Indices) -> "_Part":
        """Samples from anywhere in the block, in the order asked for."""
        columns = take_samples(self.columns, self.starts[:-1], self.counts, places)
        return _Part(columns, self.counts[places], self.rows[places])


class _Part(NamedTuple):
    """What a batch takes from a block."""

    columns: Mapping[str, Array]
    counts: Indices
    rows: Indices


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
        """These samples, in an order of our own: that of delivery, or where others take some of them that of storage."""
        rows = np.sort(micro.rows)
        if self._table.blocks is None or not self._is_of_the_order(rows):
            return self._anywhere.gather(micro)
        epoch = self._epoch(micro)
        block_of = np.searchsorted(self._table.blocks, rows, side="right") - 1
        borders = [0, *(np.flatnonzero(block_of[1:] != block_of[:-1]) + 1).tolist(), len(rows)]
        numbers = block_of[borders[:-1]].tolist()
        if not epoch.place.keys() >= set(numbers):
            return self._anywhere.gather(micro)
        blocks = self._blocks(numbers, epoch)
        places = [
            block.places_of(rows[begin:end])
            for block, (begin, end) in zip(blocks.values(), pairwise(borders), strict=True)
        ]
        if min(int(some.min()) for some in places) < 0:
            return self._anywhere.gather(micro)
        # Others may take part of this stretch; then samples are taken out one by one, in the order of storage.
        alone = all(int(some.max()) - int(some.min()) + 1 == len(some) for some in places) and (np.diff(rows) > 0).all()
        parts = [
            block.slice(some) if alone else block.chosen(some)
            for block, some in zip(blocks.values(), places, strict=True)
        ]
        joined = _join(parts, list(self._types))
        self._drop_delivered(blocks, places, epoch)
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

    def _is_of_the_order(self, rows: Indices) -> bool:
        """The ends tell a batch of other samples quickly; what is between them is looked up in the blocks."""
        return len(rows) > 0 and bool(self._positions(rows[[0, -1]])[1].all())

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

    def read_ahead(self, micro: MicroBatch) -> None:
        """Decodes a block that comes after those of a micro-batch, so that no batch has to wait for it.

        A bad one is left to the batch that needs it: that one names its samples, and can do without them.
        """
        if self._table.blocks is None or not self._is_of_the_order(micro.rows):
            return
        epoch = self._epoch(micro)
        found = np.unique(np.searchsorted(self._table.blocks, micro.rows, side="right") - 1)
        newest = max(epoch.place.get(number, -1) for number in found.tolist())
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

    def _drop_delivered(self, blocks: dict[int, _Block], places: list[Indices], epoch: _Epoch) -> None:
        """Every sample comes once: a block whose samples are all delivered is not needed again.

        Where others deliver some of them it is left to the cache, which drops first what nobody has asked for longest.
        """
        with self._lock:
            for block, some in zip(blocks.values(), places, strict=True):
                block.delivered[some] = True
        for number, block in blocks.items():
            if block.delivered.all():
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
        sorting = rising(order.sort_keys(positions[inside]) >> 32)  # whose lower half rises inside a block anyway
        columns = take_samples(raw, first - origin, count, sorting)
        places = np.full(len(inside), -1)
        places[np.flatnonzero(inside)[sorting]] = np.arange(len(sorting))
        counts = count[sorting]
        delivered = np.zeros(len(sorting), bool)
        return _Block(int(blocks[number]), places, rows[sorting], counts, offsets_of(counts), columns, delivered)

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
                if min(map(len, raw.values())) < end - int(starts[low]):
                    raise UserError(f"{path} has fewer rows than it had when it was opened. Did something replace it?")
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


def _join(parts: list[_Part], names: list[str]) -> Ragged:
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in names}
    counts, rows = (np.concatenate([getattr(part, name) for part in parts]) for name in ("counts", "rows"))
    return Ragged(columns, offsets_of(counts), rows)


def take_samples(columns: Mapping[str, Array], first: Indices, counts: Indices, order: Indices) -> dict[str, Array]:
    """The rows of samples in another order, where sample i has the rows first[i] .. first[i] + counts[i]; read only.

    To arrow the rows of a sample are one long value, which it copies as a whole: several times quicker than row by row.
    """
    bounds = np.stack([first, first + counts], 1).ravel()
    if (np.diff(bounds) < 0).any():  # they do not lie behind one another
        rows = range_indices(first[order], counts[order])[0]
        return {name: column.take(rows, mode="clip") for name, column in columns.items()}
    chosen = pa.array(2 * order)  # every other value: between two samples there may be rows of nobody
    taken = {}
    for name, column in columns.items():
        buffers = [None, pa.py_buffer(bounds * column.itemsize), pa.py_buffer(np.ascontiguousarray(column))]
        found = pa.LargeBinaryArray.from_buffers(pa.large_binary(), max(0, len(bounds) - 1), buffers).take(chosen)
        taken[name] = np.frombuffer(found.buffers()[2], column.dtype)
    return taken
