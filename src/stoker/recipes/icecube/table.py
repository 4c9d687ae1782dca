"""The sample table of a directory in the layout of the Kaggle competition, and all that can be checked before training.

`train_meta.parquet` lists, for each event, rows of a pulse file. The table is made once, streamed, and kept in the cache.
The pulse files name the event of every pulse too: both must say the same, so that shuffled or foreign rows are noticed.
"""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker import console
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.loader import LoaderConfig
from stoker.data.locations import Location, identity, is_file, is_folder, list_folder, listed_once, stat
from stoker.data.parquet import as_array, group_starts_of, named_if_damaged, open_parquet, read_footer
from stoker.data.ragged import Array, Indices, range_indices
from stoker.data.samples import SampleTable, TableWriter, new_table, open_table
from stoker.data.storage.urls import Url
from stoker.errors import UserError
from stoker.recipes.icecube.events import LABELS, PULSE_COLUMNS

COLUMNS: dict[str, npt.DTypeLike] = {
    "batch_id": np.int64,
    "event_id": np.int64,
    "first_pulse_index": np.int64,
    "last_pulse_index": np.int64,
}
TARGETS: dict[str, npt.DTypeLike] = {"azimuth": np.float64, "zenith": np.float64}
PULSE_FILE = re.compile(r"batch_.*\.parquet")
EVENT_ID = "event_id"  # of every pulse
BLOCK_ROWS = 1 << 20
FOOTERS_AT_ONCE = 16  # of remote files
MOST_PULSES = 2**31 - 1  # of an event
Part = Literal["train", "test"]  # of the competition's files; those of `test` have no targets


def open_events(
    root: Location, cache: Path | None = None, part: Part = "train", *, only_present: bool = False
) -> SampleTable:
    """The table of all events below `root`, or of those whose files are there; made anew when the files changed."""
    with listed_once(root):
        return _open_events(root, cache, part, only_present=only_present)


def _open_events(root: Location, cache: Path | None, part: Part, *, only_present: bool) -> SampleTable:
    check_layout(root, part)
    fingerprint = _fingerprint(root, part, only_present=only_present)
    words = f"{identity(root)}{'' if part == 'train' else part}{' present' if only_present else ''}"
    name = f"icecube-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    folder = (cache or cache_folder()) / "tables" / name
    with cache_lock(folder, f"Another process makes the sample table of {root}: waiting for it."):
        table = open_table(folder)
        if table is not None and table.fingerprint != fingerprint:
            console.say(f"{root} changed since its sample table was made: making it again.")
            table = None
        return table or _build(root, folder, fingerprint, part, only_present=only_present)


def check_layout(root: Location, part: Part = "train") -> None:
    if not is_folder(root):
        hint = "" if isinstance(root, Url) else f" `stoker simulate {root}` makes one."
        raise UserError(f"The data directory {root} does not exist.{hint}")
    missing = [name for name in (f"{part}_meta.parquet", "sensor_geometry.csv", part) if stat(root / name) is None]
    if missing:
        raise UserError(
            f"{root} lacks {' and '.join(missing)}. A data directory holds {part}_meta.parquet, sensor_geometry.csv and "
            f"{part}/batch_1.parquet, {part}/batch_2.parquet and so on, as in the Kaggle competition."
        )


def _fingerprint(root: Location, part: Part, *, only_present: bool) -> str:
    """Changes when a file is added, removed, or written again."""
    digest = hashlib.sha256(b"present\n" if only_present else b"")
    files = {f"{part}_meta.parquet": stat(root / f"{part}_meta.parquet")}
    files |= {name: found for name, found in list_folder(root / part).items() if PULSE_FILE.fullmatch(name)}
    for name, found in files.items():
        if found is not None:
            digest.update(f"{name} {found.size} {found.written}\n".encode())
    return digest.hexdigest()


def _build(root: Location, folder: Path, fingerprint: str, part: Part, *, only_present: bool) -> SampleTable:
    """Streams the metadata once, row group by row group: 132 million events never become Python objects."""
    path = root / f"{part}_meta.parquet"
    wanted = COLUMNS | (TARGETS if part == "train" else {})
    meta = open_parquet(path, list(wanted), verified=True)
    batches, counts = _batch_numbers(meta, path)
    missing = [batch for batch in batches if not is_file(root / part / f"batch_{batch}.parquet")]
    if only_present:
        present = ~np.isin(batches, missing)
        batches, counts = batches[present], counts[present]
    if not counts.sum():
        raise UserError(f"Not one of the {len(missing):,} pulse files that {path} lists is in {root / part}.")
    shards = [f"{part}/batch_{batch}.parquet" for batch in batches]
    starts, unreadable = _row_group_starts(root, shards)
    if missing and not only_present:
        unreadable[int(np.searchsorted(batches, missing[0]))] = _missing_words(path, batches, counts, missing)
    checks = _Checks(path, shards, np.array([start[-1] for start in starts], np.int64))
    with (
        new_table(folder, int(counts.sum()), LABELS, shards, fingerprint) as writer,
        console.progress("sample table", meta.metadata.num_rows, "events") as bar,
    ):
        for rows in _batches(meta, wanted, path):
            chunk = _chunk(rows, batches, path)
            checks.look_at(chunk)
            writer.append(chunk)
            bar.advance(rows.num_rows)
        if writer.filled != counts.sum():
            raise UserError(f"{path} is damaged: it holds {writer.filled:,} events, and says {counts.sum():,}.")
        checks.finish(writer.columns)
        if not checks.in_order:
            writer.sort(np.lexsort((writer.columns["first"], writer.columns["shard"])))
        _check_event_ids(root, shards, writer, starts, unreadable)
        writer.unreadable = unreadable
        writer.blocks = _blocks(writer, starts)
    table = open_table(folder)
    assert table is not None, "a table that was just written can be opened"
    return table


def _batches(meta: pq.ParquetFile, wanted: Mapping[str, npt.DTypeLike], path: Location) -> Any:
    """Reading may find damage; what happens to the batches meanwhile is another matter."""
    batches = meta.iter_batches(batch_size=1 << 20, columns=list(wanted), use_threads=False)
    while True:
        with named_if_damaged(path):
            rows = next(batches, None)
        if rows is None:
            return
        yield rows


def _missing_words(path: Location, batches: Indices, counts: Indices, missing: list[int]) -> str:
    here = ~np.isin(batches, missing)
    some = ", ".join(f"batch_{batch}.parquet" for batch in missing[:5]) + (" ..." if len(missing) > 5 else "")
    return (
        f"{path} lists {len(batches):,} pulse files, and {len(missing):,} of them are missing: {some} The {here.sum():,} "
        f"that are there hold {counts[here].sum():,} events: --data.only_present true uses those (`stoker pack`: "
        f"--only-present)."
    )


def _chunk(rows: pa.RecordBatch, batches: Indices, path: Location) -> dict[str, Array]:
    """Columns of the table for some rows of the metadata, without events of files that are left out."""
    names = rows.schema.names
    for name in names:
        if rows.column(name).null_count:
            at = int(np.flatnonzero(rows.column(name).is_null().to_numpy(zero_copy_only=False))[0])
            event = rows.column("event_id")[at].as_py()
            raise UserError(
                f"Event {event} in {path} has no {name} ({rows.column(name).null_count:,} such rows in this part)."
            )
    meta = {name: as_array([pa.chunked_array([rows.column(name)])], kind, name, path)
            for name, kind in (COLUMNS | TARGETS).items() if name in names}  # fmt: skip
    kept = np.isin(meta["batch_id"], batches)
    if not kept.all():
        meta = {name: values[kept] for name, values in meta.items()}
    unknown = np.zeros(int(kept.sum()))  # targets of events that are to be predicted
    first, last = meta["first_pulse_index"], meta["last_pulse_index"]
    return {
        "shard": np.searchsorted(batches, meta["batch_id"]).astype(np.int32),
        "first": first,
        "count": last - first + 1,
        "id": meta["event_id"],
        "azimuth": meta.get("azimuth", unknown).astype(np.float32),
        "zenith": meta.get("zenith", unknown).astype(np.float32),
    }


def _batch_numbers(meta: pq.ParquetFile, path: Location) -> tuple[Indices, Indices]:
    """Numbers of the pulse files, and how many events each has."""
    found: dict[int, int] = {}
    for group in range(meta.num_row_groups):
        with named_if_damaged(path):
            column = meta.read_row_group(group, columns=["batch_id"]).column("batch_id")
        if column.null_count:
            raise UserError(f"{path} has {column.null_count:,} events without a batch_id.")
        for batch, count in zip(
            *np.unique(as_array([column], np.int64, "batch_id", path), return_counts=True), strict=True
        ):
            found[int(batch)] = found.get(int(batch), 0) + int(count)
    if not found:
        raise UserError(f"{path} lists no events.")
    numbers = np.array(sorted(found), np.int64)
    return numbers, np.array([found[int(number)] for number in numbers], np.int64)


def _row_group_starts(root: Location, shards: list[str]) -> tuple[list[Indices], dict[int, str]]:
    """Rows at which the row groups of each file begin; files that cannot be opened are taken for endless."""

    def footer(shard: str) -> Indices | UserError:
        try:
            return group_starts_of(read_footer(root / shard, list(PULSE_COLUMNS)))
        except UserError as error:
            return error

    starts, unreadable = [], {}
    with ThreadPoolExecutor(FOOTERS_AT_ONCE if isinstance(root, Url) else 1, "footers") as pool:
        for number, found in enumerate(pool.map(footer, shards)):
            if isinstance(found, UserError):
                unreadable[number] = str(found)
            starts.append(np.array([0, np.iinfo(np.int64).max]) if isinstance(found, UserError) else found)
    return starts, unreadable


def _check_event_ids(
    root: Location, shards: list[str], writer: TableWriter, starts: list[Indices], unreadable: dict[int, str]
) -> None:
    """Compares the event of every pulse with the table, once, so that no epoch has to."""
    assert writer.shard_starts is not None, "the table is in the order of the files"
    if isinstance(root, Url):
        console.say(
            f"{root} lies elsewhere: whether every pulse belongs to its event is not compared, which would fetch all."
        )
        return
    borders = writer.shard_starts

    def problem(shard: int) -> str | None:
        rows = slice(int(borders[shard]), int(borders[shard + 1]))
        first, count, ids = (writer.columns[name][rows] for name in ("first", "count", "id"))
        try:
            return _wrong_event(
                root / shards[shard], np.asarray(first), np.asarray(count), np.asarray(ids), starts[shard]
            )
        except UserError as error:
            return str(error)

    todo = [shard for shard in range(len(shards)) if shard not in unreadable]
    with (
        ThreadPoolExecutor(LoaderConfig().num_threads, "event ids") as pool,
        console.progress("check event ids", len(todo), "files") as bar,
    ):
        for shard, reason in zip(todo, pool.map(problem, todo), strict=True):
            bar.advance()
            if reason is not None:
                unreadable[shard] = reason


def _wrong_event(path: Location, first: Indices, count: Indices, ids: Indices, starts: Indices) -> str | None:
    """What is wrong with the pulses of a file, whose events stand in the order of their pulses; None: nothing."""
    file = open_parquet(path, verified=True)
    if EVENT_ID not in file.schema_arrow.names:
        console.say(f"{path} has no column {EVENT_ID}: whether its pulses belong to their events cannot be checked.")
        return None
    end = first + count
    for group, (low, high) in enumerate(pairwise(starts.tolist())):
        with named_if_damaged(path):
            column = file.read_row_group(group, columns=[EVENT_ID], use_threads=False).column(EVENT_ID)
        if len(column) != high - low:
            return f"{path} is damaged: row group {group} has {len(column):,} pulses, and says {high - low:,}."
        found = as_array([column], np.int64, EVENT_ID, path)
        here = slice(int(np.searchsorted(end, low, side="right")), int(np.searchsorted(first, high)))
        begin, stop = np.maximum(first[here], low) - low, np.minimum(end[here], high) - low
        take, _ = range_indices(begin, stop - begin)
        expected = np.repeat(ids[here], stop - begin)
        wrong = np.flatnonzero(found[take] != expected)
        if wrong.size:
            at = int(wrong[0])
            return (
                f"{path} and the table of events do not belong together: pulse {take[at] + low} should be of event "
                f"{expected[at]} and says {found[take[at]]} ({wrong.size:,} such pulses in row group {group}). Were rows "
                f"moved, or is one of the files of another set?"
            )
        cut = _cut_event(found, low, first, end, ids)
        if cut is not None:
            return f"{path} has pulses of event {cut} beyond those that the table of events gives it: one of them is wrong."
    return None


def _cut_event(found: Indices, low: int, first: Indices, end: Indices, ids: Indices) -> int | None:
    """An event whose pulses go on before or after the rows that the table names, as far as these rows show."""
    for neighbour in (first - 1, end):
        here = (neighbour >= low) & (neighbour < low + len(found))
        same = np.flatnonzero(found[neighbour[here] - low] == ids[here])
        if same.size:
            return int(ids[here][same[0]])
    return None


def _blocks(writer: TableWriter, starts: list[Indices]) -> Indices | None:
    """Rows of the table at which blocks begin, row groups or several small ones: what a window order reads at once."""
    if writer.shard_starts is None:
        return None
    first = writer.columns["first"]
    blocks = [
        begin + np.searchsorted(first[begin:end], _block_starts(starts[shard]))
        for shard, (begin, end) in enumerate(pairwise(writer.shard_starts.tolist()))
    ]
    return np.unique(np.concatenate(blocks))


def _block_starts(group_starts: Indices) -> Indices:
    """Starts of row groups at least BLOCK_ROWS apart: reading over the end of a block costs the more the smaller it is."""
    kept = np.unique(group_starts[:-1] // BLOCK_ROWS, return_index=True)[1]
    return group_starts[kept]


class _Checks:
    """What must hold before training starts: ranges inside their files, no overlap, unique ids, angles in range."""

    def __init__(self, path: Location, shards: list[str], num_rows: Indices) -> None:
        self._path, self._shards, self._num_rows = path, shards, num_rows
        self._last: dict[str, int] | None = None
        self.in_order = self._ids_rise = True

    def look_at(self, chunk: dict[str, Array]) -> None:
        shard, first, count = chunk["shard"], chunk["first"], chunk["count"]
        if not len(shard):
            return
        end = first + count
        self._refuse(chunk, count < 1, "has no pulses: its last_pulse_index lies before its first_pulse_index")
        beyond = (first < 0) | (end > self._num_rows[shard]) | (count > MOST_PULSES)
        self._refuse(chunk, beyond, "points past the end of its file")
        bad_angle = ~((chunk["zenith"] >= 0) & (chunk["zenith"] <= np.float32(np.pi)))
        bad_angle |= ~((chunk["azimuth"] >= 0) & (chunk["azimuth"] <= np.float32(2 * np.pi)))
        self._refuse(chunk, bad_angle, "has an azimuth outside 0 .. 2 pi or a zenith outside 0 .. pi")
        previous = self._last or {"shard": -1, "end": 0, "id": int(chunk["id"][0]) - 1}
        before_shard, before_end = np.append(previous["shard"], shard[:-1]), np.append(previous["end"], end[:-1])
        follows = (shard > before_shard) | ((shard == before_shard) & (first >= before_end))
        self.in_order &= bool(follows.all())
        self._ids_rise &= bool((np.diff(chunk["id"], prepend=previous["id"]) > 0).all())
        self._last = {"shard": int(shard[-1]), "end": int(end[-1]), "id": int(chunk["id"][-1])}

    def finish(self, columns: Mapping[str, Array]) -> None:
        """Sorting is only needed where the rows are not already in order, as they are in the competition's files."""
        if not self._ids_rise:
            ids = np.sort(columns["id"])
            twice = ids[1:][ids[1:] == ids[:-1]]
            if twice.size:
                raise UserError(f"{self._path} lists event {twice[0]} more than once.")
        if not self.in_order:
            order = np.lexsort((columns["first"], columns["shard"]))
            shard, first = columns["shard"][order], columns["first"][order]
            end = first + columns["count"][order]
            overlap = np.flatnonzero((shard[1:] == shard[:-1]) & (first[1:] < end[:-1]))
            if overlap.size:
                event = columns["id"][order][overlap[0] + 1]
                raise UserError(
                    f"Event {event} in {self._path} shares pulses of "
                    f"{self._shards[shard[overlap[0]]]} with another event."
                )

    def _refuse(self, chunk: dict[str, Array], wrong: npt.NDArray[np.bool_], what: str) -> None:
        if not wrong.any():
            return
        at = int(np.flatnonzero(wrong)[0])
        shard = int(chunk["shard"][at])
        raise UserError(
            f"Event {chunk['id'][at]} in {self._path} {what}: pulses {chunk['first'][at]} to "
            f"{chunk['first'][at] + chunk['count'][at] - 1} of {self._shards[shard]}, which holds "
            f"{self._num_rows[shard]:,}; azimuth {chunk['azimuth'][at]:.4f}, zenith {chunk['zenith'][at]:.4f}. "
            f"({int(wrong.sum()):,} such events in this part of the file.)"
        )
