"""Events in the layout of the Kaggle competition: `train_meta.parquet` lists, for each event, rows of a pulse file.

In goes the directory, out come the sample table (made once and kept in the cache) and a source of pulses, read directly
or packed.
"""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stoker import console
from stoker.data.cache import cache_folder
from stoker.data.pack import Packing, ShardContent
from stoker.data.parquet import ParquetSource, group_starts_of, named_if_damaged, open_parquet
from stoker.data.ragged import Array, Indices, offsets_of, range_indices, sample_of_row
from stoker.data.samples import SampleTable, TableWriter, new_table, open_table
from stoker.data.window import WindowSource
from stoker.errors import UserError
from stoker.recipes.icecube.batch import AUXILIARY, CHARGE_FIRST, CHARGE_STEP, CHARGE_UNIT, FIRST_OF_DOM
from stoker.recipes.icecube.geometry import NUM_SENSORS, Geometry, read_geometry

PLACE_COLUMNS = ("batch_id", "event_id", "first_pulse_index", "last_pulse_index")
TARGET_COLUMNS = ("azimuth", "zenith")
PULSE_COLUMNS: dict[str, npt.DTypeLike] = {
    "sensor_id": np.int16,
    "time": np.int32,
    "charge": np.float32,
    "auxiliary": np.bool_,
}
CHARGE_TYPES = (np.uint16, np.float32, np.float64)  # codes of the grid, or the charge itself
BLOCK_ROWS = 1 << 20
Part = Literal["train", "test"]  # of the competition's files; those of `test` have no targets
LABELS: dict[str, npt.DTypeLike] = {"azimuth": np.float32, "zenith": np.float32}


def open_geometry(root: Path) -> Geometry:
    return read_geometry(root / "sensor_geometry.csv")


def open_events(root: Path, cache: Path | None = None, part: Part = "train") -> SampleTable:
    """The table of all events below `root`; made anew when the files changed since it was stored."""
    check_layout(root, part)
    fingerprint = _fingerprint(root, part)
    name = hashlib.sha256(f"{root.resolve()}{'' if part == 'train' else part}".encode()).hexdigest()[:16]
    folder = (cache or cache_folder()) / "tables" / f"icecube-{name}"
    table = open_table(folder)
    if table is not None and table.fingerprint != fingerprint:
        console.say(f"{root} changed since its sample table was made: making it again.")
        table = None
    return table or _build(root, folder, fingerprint, part)


def open_pulses(root: Path, table: SampleTable, cache_bytes: int = 1 << 30) -> ParquetSource:
    return ParquetSource(root, table, PULSE_COLUMNS, cache_bytes)


def open_window(root: Path, table: SampleTable, cache_bytes: int) -> WindowSource:
    return WindowSource(root, table, PULSE_COLUMNS, cache_bytes)


def packing(root: Path, table: SampleTable, shuffled: int | None = None, threads: int = 1) -> Packing:
    """How events are packed: pulses grouped by DOM, nine bytes each while all charges lie on their grid."""
    for reason in table.unreadable.values():
        raise UserError(reason)
    charge_type = _charge_type([root / shard for shard in table.shards], threads)
    columns: dict[str, npt.DTypeLike] = {
        "time": np.int32,
        "charge": charge_type,
        "sensor": np.int16,
        "flags": np.uint8,
    }

    def read_shard(shard: int, rows: Indices) -> ShardContent:
        return _encode(root / table.shards[shard], table, rows, on_grid=charge_type == np.uint16)

    return Packing(
        table=table,
        columns=columns,
        read_shard=read_shard,
        sample_columns={"doms": np.int32},
        extra={"recipe": "icecube"},
        files={"sensor_geometry.csv": root / "sensor_geometry.csv"},
        shuffled=shuffled,
    )


def packed_bytes(table: SampleTable) -> int:
    """About what a packed copy takes: nine bytes a pulse and forty an event."""
    return 9 * int(table.columns["count"].sum(dtype=np.int64)) + 40 * len(table)


def group_by_dom(sensor: Array, event: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Order that sorts pulses by event and DOM, keeping their order in time, and marks of each DOM's first pulse."""
    group = event * NUM_SENSORS + sensor
    # Sorting one integer that carries its own index is quicker than a stable argsort.
    bits = max(1, int(len(group) - 1).bit_length())
    keyed = np.sort((group << bits) | np.arange(len(group)))
    group = keyed >> bits
    return keyed & ((1 << bits) - 1), np.diff(group, prepend=-1) != 0


def _encode(path: Path, table: SampleTable, rows: Indices, *, on_grid: bool) -> ShardContent:
    """All events of a file, encoded; a million pulses at a time, so that sorting stays in the cache."""
    with named_if_damaged(path):
        file = open_parquet(path, list(PULSE_COLUMNS)).read(columns=list(PULSE_COLUMNS), use_threads=False)
    raw: dict[str, Array] = {name: file.column(name).to_numpy() for name in PULSE_COLUMNS}
    first, count = np.asarray(table.columns["first"][rows]), np.asarray(table.columns["count"][rows])
    parts: list[dict[str, Array]] = []
    doms: list[Array] = []
    for begin, end in _stretches(count, 1 << 20):
        take, offsets = range_indices(first[begin:end], count[begin:end])
        pulses = {name: column[take] for name, column in raw.items()}
        check_pulses(path.parent.parent, table, rows[begin:end], pulses, offsets)
        event = sample_of_row(offsets)
        order, is_first = group_by_dom(pulses["sensor_id"], event)
        flags = np.where(pulses["auxiliary"][order], AUXILIARY, 0) | np.where(is_first, FIRST_OF_DOM, 0)
        charge = pulses["charge"][order]
        parts.append(
            {
                "time": pulses["time"][order],
                "charge": _charge_codes(path, charge) if on_grid else charge,
                "sensor": pulses["sensor_id"][order],
                "flags": flags.astype(np.uint8),
            }
        )
        doms.append(np.bincount(event[order][is_first], minlength=end - begin).astype(np.int32))
    names = ("time", "charge", "sensor", "flags")
    columns = {name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0) for name in names}
    return ShardContent(columns, {"doms": np.concatenate(doms) if doms else np.zeros(0, np.int32)})


def _stretches(count: Array, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of events of about `size` pulses, at least one event each."""
    offsets = offsets_of(count)
    begin = 0
    while begin < len(count):
        end = max(begin + 1, int(np.searchsorted(offsets, offsets[begin] + size, side="right")) - 1)
        yield begin, end
        begin = end


def check_pulses(root: Path, table: SampleTable, rows: Indices, pulses: Mapping[str, Array], offsets: Indices) -> None:
    """Refuses pulses that no detector makes, by the name of their event and file."""
    sensor, charge = pulses["sensor_id"], pulses["charge"]
    for wrong, what, values in (
        ((sensor < 0) | (sensor >= NUM_SENSORS), f"a sensor id outside 0 .. {NUM_SENSORS - 1}", sensor),
        (~(charge >= 0) | ~np.isfinite(charge), "a charge that is negative or not a number", charge),
    ):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            row = rows[np.searchsorted(offsets, at, side="right") - 1]
            event, path = table.columns["id"][row], root / table.shards[table.columns["shard"][row]]
            raise UserError(f"Event {event} in {path} has {what}: {values[at]} ({int(wrong.sum()):,} such pulses).")


def _charge_type(paths: list[Path], threads: int) -> npt.DTypeLike:
    """The smallest type that holds every charge exactly; all of them are looked at."""
    widest = 0
    with (
        ThreadPoolExecutor(threads, "charges") as pool,
        console.progress("look at charges", len(paths), "files") as bar,
    ):
        for needed in pool.map(_charge_type_of_file, paths):
            widest = max(widest, needed)
            bar.advance()
    return CHARGE_TYPES[widest]


def _charge_type_of_file(path: Path) -> int:
    needed = 0
    file = open_parquet(path, list(PULSE_COLUMNS))
    for group in range(file.num_row_groups):
        with named_if_damaged(path):
            table = file.read_row_group(group, columns=["charge"], use_threads=False)
        charge = table.column("charge").to_numpy()
        if not (np.isfinite(charge).all() and _on_grid(charge)):
            exact = (charge.astype(np.float32) == charge) | np.isnan(charge)
            needed = max(needed, 1 if exact.all() else 2)
    return needed


def _on_grid(charge: Array) -> bool:
    code = np.round((charge * CHARGE_UNIT - CHARGE_FIRST) / CHARGE_STEP)
    decoded = ((CHARGE_FIRST + CHARGE_STEP * code) / CHARGE_UNIT).astype(charge.dtype)
    return bool(((decoded == charge) & (code >= 0) & (code < 1 << 16)).all())


def _charge_codes(path: Path, charge: Array) -> Array:
    if not _on_grid(charge):
        raise UserError(
            f"{path} changed while it was being packed: its charges are no longer what they were. Start again."
        )
    return np.round((charge * CHARGE_UNIT - CHARGE_FIRST) / CHARGE_STEP).astype(np.uint16)


def check_layout(root: Path, part: Part = "train") -> None:
    if not root.is_dir():
        raise UserError(f"The data directory {root} does not exist. `stoker simulate {root}` makes one.")
    missing = [name for name in (f"{part}_meta.parquet", "sensor_geometry.csv", part) if not (root / name).exists()]
    if missing:
        raise UserError(
            f"{root} lacks {' and '.join(missing)}. A data directory holds {part}_meta.parquet, sensor_geometry.csv and "
            f"{part}/batch_1.parquet, {part}/batch_2.parquet and so on, as in the Kaggle competition."
        )


def _fingerprint(root: Path, part: Part) -> str:
    """Changes when a file is added, removed, or written again."""
    digest = hashlib.sha256()
    for path in [root / f"{part}_meta.parquet", *sorted((root / part).glob("batch_*.parquet"))]:
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _build(root: Path, folder: Path, fingerprint: str, part: Part) -> SampleTable:
    """Streams the metadata once, row group by row group: 132 million events never become Python objects."""
    path = root / f"{part}_meta.parquet"
    wanted = [*PLACE_COLUMNS, *(TARGET_COLUMNS if part == "train" else ())]
    meta = open_parquet(path, wanted)
    batches = _batch_numbers(meta)
    shards = [f"{part}/batch_{batch}.parquet" for batch in batches]
    starts, unreadable = _row_group_starts(root, shards)
    checks = _Checks(path, shards, np.array([start[-1] for start in starts], np.int64))
    num_samples = meta.metadata.num_rows
    with (
        named_if_damaged(path),
        new_table(folder, num_samples, LABELS, shards, fingerprint) as writer,
        console.progress("sample table", num_samples, "events") as bar,
    ):
        for rows in meta.iter_batches(batch_size=1 << 20, columns=wanted, use_threads=False):
            chunk = _chunk(rows, wanted, batches, path)
            checks.look_at(chunk)
            writer.append(chunk)
            bar.advance(rows.num_rows)
        checks.finish(writer.columns)
        writer.unreadable = unreadable
        writer.blocks = _blocks(writer, starts)
    table = open_table(folder)
    assert table is not None, "a table that was just written can be opened"
    return table


def _chunk(rows: pa.RecordBatch, names: list[str], batches: Indices, path: Path) -> dict[str, Array]:
    for name in names:
        if rows.column(name).null_count:
            at = int(np.flatnonzero(rows.column(name).is_null().to_numpy(zero_copy_only=False))[0])
            event = rows.column("event_id")[at].as_py()
            raise UserError(
                f"Event {event} in {path} has no {name} ({rows.column(name).null_count:,} such rows in this part)."
            )
    meta: dict[str, Any] = {name: rows.column(name).to_numpy(zero_copy_only=False) for name in names}
    unknown = np.zeros(rows.num_rows)  # targets of events that are to be predicted
    first, last = meta["first_pulse_index"], meta["last_pulse_index"]
    return {
        "shard": np.searchsorted(batches, meta["batch_id"]).astype(np.int32),
        "first": first.astype(np.int64),
        "count": (last - first + 1).astype(np.int64),
        "id": meta["event_id"].astype(np.int64),
        "azimuth": meta.get("azimuth", unknown).astype(np.float32),
        "zenith": meta.get("zenith", unknown).astype(np.float32),
    }


def _batch_numbers(meta: Any) -> Indices:
    found: list[Indices] = [np.zeros(0, np.int64)]
    for group in range(meta.num_row_groups):
        column = meta.read_row_group(group, columns=["batch_id"]).column("batch_id")
        found.append(np.unique(column.to_numpy()).astype(np.int64))
    numbers = np.unique(np.concatenate(found))
    if not numbers.size:
        raise UserError("train_meta.parquet lists no events.")
    return numbers


def _row_group_starts(root: Path, shards: list[str]) -> tuple[list[Indices], dict[int, str]]:
    """Rows at which the row groups of each file begin; files that cannot be opened are taken for endless."""
    starts, unreadable = [], {}
    for number, shard in enumerate(shards):
        try:
            starts.append(group_starts_of(open_parquet(root / shard, list(PULSE_COLUMNS)).metadata))
        except UserError as error:
            unreadable[number] = str(error)
            starts.append(np.array([0, np.iinfo(np.int64).max]))
    return starts, unreadable


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

    def __init__(self, path: Path, shards: list[str], num_rows: Indices) -> None:
        self._path, self._shards, self._num_rows = path, shards, num_rows
        self._last: dict[str, int] | None = None
        self._in_order = self._ids_rise = True

    def look_at(self, chunk: dict[str, Array]) -> None:
        shard, first, count = chunk["shard"], chunk["first"], chunk["count"]
        end = first + count
        self._refuse(chunk, count < 1, "has no pulses: its last_pulse_index lies before its first_pulse_index")
        beyond = (first < 0) | (end > self._num_rows[shard])
        self._refuse(chunk, beyond, "points past the end of its file")
        bad_angle = ~((chunk["zenith"] >= 0) & (chunk["zenith"] <= np.float32(np.pi)))
        bad_angle |= ~((chunk["azimuth"] >= 0) & (chunk["azimuth"] <= np.float32(2 * np.pi)))
        self._refuse(chunk, bad_angle, "has an azimuth outside 0 .. 2 pi or a zenith outside 0 .. pi")
        previous = self._last or {"shard": -1, "end": 0, "id": int(chunk["id"][0]) - 1}
        before_shard, before_end = np.append(previous["shard"], shard[:-1]), np.append(previous["end"], end[:-1])
        follows = (shard > before_shard) | ((shard == before_shard) & (first >= before_end))
        self._in_order &= bool(follows.all())
        self._ids_rise &= bool((np.diff(chunk["id"], prepend=previous["id"]) > 0).all())
        self._last = {"shard": int(shard[-1]), "end": int(end[-1]), "id": int(chunk["id"][-1])}

    def finish(self, columns: Mapping[str, Array]) -> None:
        """Sorting is only needed where the rows are not already in order, as they are in the competition's files."""
        if not self._ids_rise:
            ids = np.sort(columns["id"])
            twice = ids[1:][ids[1:] == ids[:-1]]
            if twice.size:
                raise UserError(f"{self._path} lists event {twice[0]} more than once.")
        if not self._in_order:
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
