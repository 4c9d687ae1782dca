"""Samples read from Parquet shards at any place, where a sample is a range of rows.

Whole row groups are decoded in the thread that needs them and kept in a cache of bounded size. For a whole epoch in
random order see `window`, which decodes each row group once.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.bad_samples import BadShard
from stoker.data.cache import ByteCache
from stoker.data.locations import Location, open_local, read_end, remote_file
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, Ragged, offsets_of, range_indices
from stoker.data.samples import SampleTable
from stoker.data.storage.urls import Url
from stoker.errors import UserError

FOOTER_BYTES = 64 << 10  # of a remote file that are read at once: most footers are smaller

# What pyarrow raises where bytes are not what they should be, such as a name that is no text.
DAMAGE = (OSError, ValueError, ArithmeticError, pa.ArrowException)

# Arrow's own allocator keeps memory for every thread that ever decoded, and each epoch has new threads.
pa.set_memory_pool(pa.system_memory_pool())


class ParquetSource:
    """Gathers rows of a table's samples from its Parquet shards."""

    def __init__(
        self, root: Location, table: SampleTable, columns: Mapping[str, npt.DTypeLike], cache_bytes: int = 2 << 30
    ) -> None:
        self._paths = [root / shard for shard in table.shards]
        self._table = table
        self._types = {name: np.dtype(kind) for name, kind in columns.items()}
        self._starts: dict[int, Indices] = {}
        self._metadata: dict[int, pq.FileMetaData] = {}
        self._cache: ByteCache[tuple[int, int], dict[str, Array]] = ByteCache(cache_bytes)

    def gather(self, micro: MicroBatch) -> Ragged:
        """These samples, in the order asked for; quickest when that is the order of storage."""
        rows, places = micro.rows, self._table.columns
        shard, first, count = (np.asarray(places[name][rows]) for name in ("shard", "first", "count"))
        pieces = self._pieces(shard, first, count)
        offsets = offsets_of(count)
        columns = {name: np.empty(offsets[-1], kind) for name, kind in self._types.items()}
        in_order = bool((np.diff(pieces.target) >= 0).all())
        for start, stop in zip(pieces.group_starts[:-1], pieces.group_starts[1:], strict=True):
            part = slice(start, stop)
            group = self._group(int(pieces.shard[start]), int(pieces.group[start]))
            take, sizes = range_indices(pieces.first[part], pieces.count[part])
            place: slice | Indices
            if in_order:  # pieces of a row group are neighbours in the batch too: no scatter
                begin = offsets[pieces.target[start]] + pieces.skipped[start]
                place = slice(begin, begin + sizes[-1])
            else:
                place = range_indices(offsets[pieces.target[part]] + pieces.skipped[part], pieces.count[part])[0]
            for name, column in columns.items():
                column[place] = group[name].take(take, mode="clip")
        return Ragged(columns, offsets, rows)

    def files_of(self, rows: Indices) -> str:
        numbers = np.unique(self._table.columns["shard"][rows])
        names = ", ".join(str(self._paths[number]) for number in numbers[:3])
        return names + (f" and {len(numbers) - 3} more files" if len(numbers) > 3 else "")

    def _pieces(self, shard: Indices, first: Indices, count: Indices) -> "_Pieces":
        """Cuts the samples at the borders of row groups, and sorts the pieces by row group."""
        begin, end = np.empty(len(shard), np.int64), np.empty(len(shard), np.int64)
        for number in np.unique(shard):
            mine = shard == number
            starts = self.group_starts(int(number))
            begin[mine] = np.searchsorted(starts, first[mine], side="right") - 1
            end[mine] = np.searchsorted(starts, first[mine] + count[mine] - 1, side="right") - 1
        group, offsets = range_indices(begin, end - begin + 1)
        sample = np.repeat(np.arange(len(shard)), np.diff(offsets))
        # Where each row group begins and ends, looked up piece by piece in the starts of its own shard.
        low, high = np.empty(len(sample), np.int64), np.empty(len(sample), np.int64)
        for number in np.unique(shard):
            mine = shard[sample] == number
            starts = self.group_starts(int(number))
            low[mine], high[mine] = starts[group[mine]], starts[group[mine] + 1]
        from_row = np.maximum(first[sample], low)
        to_row = np.minimum(first[sample] + count[sample], high)
        order = np.lexsort((sample, group, shard[sample]))
        shard_of, group_of = shard[sample][order], group[order]
        borders = np.flatnonzero((np.diff(shard_of) != 0) | (np.diff(group_of) != 0)) + 1
        return _Pieces(
            shard=shard_of,
            group=group_of,
            target=sample[order],
            first=(from_row - low)[order],
            count=(to_row - from_row)[order],
            skipped=(from_row - first[sample])[order],
            group_starts=np.concatenate([[0], borders, [len(order)]]) if len(order) else np.zeros(1, np.int64),
        )

    def _group(self, shard: int, group: int) -> dict[str, Array]:
        return self._cache.get((shard, group), lambda: self._decode(shard, group), _size)

    def _decode(self, shard: int, group: int) -> dict[str, Array]:
        names, path = list(self._types), self._paths[shard]
        try:
            with named_if_damaged(path):
                with groups_held(path, self.metadata(shard), group, group):
                    file = open_parquet(path, names, self.metadata(shard))
                    table = file.read_row_group(group, columns=names, use_threads=False)
                return {name: as_array([table.column(name)], kind, name, path) for name, kind in self._types.items()}
        except UserError as error:
            raise BadShard(shard, str(error)) from error

    def group_starts(self, shard: int) -> Indices:
        """Row at which each row group of a shard starts, and the number of rows at the end."""
        if shard not in self._starts:
            self._starts[shard] = group_starts_of(self.metadata(shard))
        return self._starts[shard]

    def metadata(self, shard: int) -> pq.FileMetaData:
        """The footer of a shard, read once."""
        if shard not in self._metadata:
            try:
                self._metadata[shard] = read_footer(self._paths[shard], list(self._types))
            except UserError as error:
                raise BadShard(shard, str(error)) from error
        return self._metadata[shard]


@dataclass(frozen=True)
class _Pieces:
    """Parts of samples that each lie in one row group, sorted by row group."""

    shard: Indices
    group: Indices
    target: Indices  # number of the sample in the batch
    first: Indices  # row inside the row group
    count: Indices
    skipped: Indices  # rows of the sample that lie in earlier row groups
    group_starts: Indices  # where the pieces of each row group begin, and their number


def group_starts_of(metadata: pq.FileMetaData) -> Indices:
    """Row at which each row group of a file starts, and the number of rows at the end."""
    return offsets_of(
        np.array([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], np.int64)
    )


@contextmanager
def named_if_damaged(path: Location) -> Iterator[None]:
    """Turns what pyarrow says of damaged content into an error that names the file."""
    try:
        yield
    except PermissionError as error:
        raise UserError(f"{path} may not be read: {error.strerror or error}.") from error
    except DAMAGE as error:
        raise UserError(f"{path} is damaged and cannot be read ({error}). Fetch it again.") from error


def open_parquet(
    path: Location, columns: Sequence[str] = (), metadata: pq.FileMetaData | None = None, *, verified: bool = False
) -> pq.ParquetFile:
    """Opens a Parquet file that has these columns, or says what is wrong with it; with its footer if that is known.

    `verified`: checksums of pages are compared where the file has them, which takes time.
    """
    try:
        if isinstance(path, Url) and metadata is not None:  # its parts are held by whoever reads them
            opened: Any = pa.BufferReader(pa.py_buffer(remote_file(path).array))
        else:
            opened = open_local(path)
        file = pq.ParquetFile(opened, metadata=metadata, memory_map=True, page_checksum_verification=verified)
        found = file.schema_arrow.names
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.") from None
    except PermissionError as error:
        raise UserError(f"{path} may not be read: {error.strerror or error}.") from error
    except DAMAGE as error:
        raise UserError(
            f"{path} is not a complete Parquet file ({error}). It may have been cut short while it was "
            f"copied: fetch it again."
        ) from error
    missing = [name for name in columns if name not in found]
    if missing:
        raise UserError(f"{path} lacks the column(s) {', '.join(missing)}; it has {', '.join(found)}.")
    return file


def read_footer(path: Location, columns: Sequence[str]) -> pq.FileMetaData:
    """The footer of a file that has these columns; of a remote file nothing else is fetched."""
    if not isinstance(path, Url):
        return open_parquet(path, columns).metadata
    try:
        tail = read_end(path, FOOTER_BYTES)
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if len(tail) < length:
            tail = read_end(path, length)
        metadata = pq.ParquetFile(pa.BufferReader(tail)).metadata
    except FileNotFoundError:
        raise UserError(f"The file {path} is missing.") from None
    except DAMAGE as error:
        raise UserError(f"{path} is not a complete Parquet file ({error}): copy it there again.") from error
    found = metadata.schema.to_arrow_schema().names
    missing = [name for name in columns if name not in found]
    if missing:
        raise UserError(f"{path} lacks the column(s) {', '.join(missing)}; it has {', '.join(found)}.")
    return metadata


def group_bytes(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Where a row group begins in its file, and ends."""
    chunks = [metadata.row_group(group).column(number) for number in range(metadata.num_columns)]
    first = min(chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks)
    return first, max(
        (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size for chunk in chunks
    )


def groups_held(path: Location, metadata: pq.FileMetaData, first: int, last: int) -> AbstractContextManager[None]:
    """Inside the block these row groups of a remote file are here."""
    if not isinstance(path, Url):
        return nullcontext()
    file = remote_file(path)
    begin, end = group_bytes(metadata, first)[0], group_bytes(metadata, last)[1]
    held: AbstractContextManager[None] = file.held(file.blocks_of(begin, end - begin))
    return held


def as_array(columns: Sequence[pa.ChunkedArray], kind: npt.DTypeLike, name: str, path: Location) -> Array:
    """One array of the type wanted, perhaps read only. What would not survive a conversion is an error."""
    dtype = np.dtype(kind)
    parts = [_checked(chunk, dtype, name, path) for column in columns for chunk in column.chunks]
    with np.errstate(over="ignore"):  # a float beyond float32 becomes infinite, which the recipe's checks know
        if len(parts) == 1:
            return parts[0].astype(dtype, copy=False)
        out = np.empty(sum(map(len, parts)), dtype)
        at = 0
        for part in parts:  # converted while they are put together
            out[at : at + len(part)] = part
            at += len(part)
    return out


def _checked(chunk: pa.Array, kind: "np.dtype[Any]", name: str, path: Location) -> Array:
    if chunk.null_count:
        raise UserError(f"{path}: the column {name} has {chunk.null_count:,} empty values where each must have one.")
    values = _as_numpy(chunk)
    _check_fits(values, kind, name, path)
    return values


def _as_numpy(chunk: pa.Array) -> Array:
    if not pa.types.is_boolean(chunk.type):
        return np.asarray(chunk.to_numpy(zero_copy_only=False))
    # Bits to bytes: several times quicker than arrow's own conversion.
    bits = np.frombuffer(chunk.buffers()[1], np.uint8)
    return np.unpackbits(bits, count=chunk.offset + len(chunk), bitorder="little")[chunk.offset :].view(np.bool_)


def _check_fits(values: Array, kind: np.dtype[Any], name: str, path: Location) -> None:
    """A number that a conversion would wrap around or cut off is another number."""
    if values.dtype == kind or not len(values):
        return
    if values.dtype.kind not in {"b": "b", "i": "iuf", "u": "iuf", "f": "iuf"}[kind.kind]:
        raise UserError(f"{path}: the column {name} holds {values.dtype} where {kind} is needed.")
    if kind.kind not in "iu":
        return
    # A minimum and a maximum, instead of comparing every value with what became of it.
    low, high, limits = values.min(), values.max(), np.iinfo(kind)
    if not (low >= limits.min and high <= limits.max):
        wrong = low if not low >= limits.min else high
        raise UserError(f"{path}: the column {name} holds {wrong}, outside {limits.min} .. {limits.max}.")
    if values.dtype.kind == "f" and (values != np.floor(values)).any():
        raise UserError(f"{path}: the column {name} holds fractions where whole numbers are needed.")


def _size(group: Mapping[str, Array]) -> int:
    return sum(column.nbytes for column in group.values())
