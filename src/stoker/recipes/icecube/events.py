"""Pulses in the layout of the Kaggle competition, read directly or packed. `table` says which of them form which event."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stoker import console
from stoker.data.bad_samples import BadShard
from stoker.data.locations import Location, is_file
from stoker.data.order import rising
from stoker.data.pack import Packing, ShardContent
from stoker.data.parquet import ParquetSource, as_array, named_if_damaged, open_parquet
from stoker.data.ragged import Array, Indices, Ragged, offsets_of, range_indices, sample_of_element
from stoker.data.samples import SampleTable
from stoker.errors import UserError
from stoker.recipes.icecube.batch import (
    AUXILIARY,
    CHARGE_FIRST,
    CHARGE_STEP,
    CHARGE_UNIT,
    FIRST_OF_DOM,
    HostBatch,
    begins_dom,
    collate,
)
from stoker.recipes.icecube.geometry import MOST_SENSORS, Geometry, read_geometry

PULSE_COLUMNS: dict[str, npt.DTypeLike] = {
    "sensor_id": np.int16,
    "time": np.int32,
    "charge": np.float32,
    "auxiliary": np.bool_,
}
CHARGE_TYPES = (np.uint16, np.float32, np.float64)  # codes of the grid, or the charge itself
MOST_CHARGE = float(np.finfo(np.float32).max)  # what models compute with
TRUTH = "truth.parquet"  # beside the events, where more than their direction is known: energy, kind, vertex_x, _y, _z
LABELS: dict[str, npt.DTypeLike] = {"azimuth": np.float32, "zenith": np.float32}


def open_geometry(root: Location) -> Geometry:
    return read_geometry(root / "sensor_geometry.csv")


def open_pulses(root: Location, table: SampleTable) -> ParquetSource:
    return ParquetSource(root, table, PULSE_COLUMNS)


def packing(root: Location, table: SampleTable, shuffled: int | None = None, threads: int = 1) -> Packing:
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

    num_sensors = len(open_geometry(root))

    def read_shard(shard: int, rows: Indices) -> ShardContent:
        return _encode(root / table.shards[shard], table, rows, num_sensors, on_grid=charge_type == np.uint16)

    return Packing(
        table=table,
        columns=columns,
        read_shard=read_shard,
        sample_columns={"doms": np.int32},
        extra={"recipe": "icecube"},
        files={name: root / name for name in ("sensor_geometry.csv", TRUTH) if name != TRUTH or is_file(root / name)},
        shuffled=shuffled,
    )


def packed_bytes(table: SampleTable) -> int:
    """About what a packed copy takes: nine bytes a pulse and forty an event."""
    return 9 * int(table.columns["count"].sum(dtype=np.int64)) + 40 * len(table)


def group_by_dom(sensor: Array, event: Indices) -> tuple[Indices, npt.NDArray[np.bool_]]:
    """Order that sorts pulses by event and DOM, keeping their order in time, and marks of each DOM's first pulse."""
    order = rising(event * MOST_SENSORS + sensor)
    return order, begins_dom(event[order], sensor[order])


def _encode(path: Location, table: SampleTable, rows: Indices, num_sensors: int, *, on_grid: bool) -> ShardContent:
    """All events of a file, encoded; a million pulses at a time, so that sorting stays in the cache."""
    with named_if_damaged(path):
        file = open_parquet(path, list(PULSE_COLUMNS), verified=True).read(
            columns=list(PULSE_COLUMNS), use_threads=False
        )
        kinds = {**PULSE_COLUMNS, "charge": _charge_kind(file.column("charge").type)}  # as exact as it is stored
        raw = {name: as_array([file.column(name)], kind, name, path) for name, kind in kinds.items()}
    first, count = np.asarray(table.columns["first"][rows]), np.asarray(table.columns["count"][rows])
    parts: list[dict[str, Array]] = []
    doms: list[Array] = []
    for begin, end in _stretches(count, 1 << 20):
        take, offsets = range_indices(first[begin:end], count[begin:end])
        pulses = {name: column[take] for name, column in raw.items()}
        check_pulses(path.parent.parent, table, Ragged(pulses, offsets, rows[begin:end]), num_sensors)
        event = sample_of_element(offsets)
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


def check_pulses(root: Location, table: SampleTable, pulses: Ragged, num_sensors: int) -> None:
    """Refuses pulses that no detector makes, by the name of their event and file."""
    for name, most, what in (
        ("sensor_id", num_sensors - 1, f"a sensor id outside 0 .. {num_sensors - 1}"),
        ("charge", MOST_CHARGE, "a charge that is negative, not a number or beyond all bounds"),
    ):
        values = pulses.columns[name]
        # The smallest and the largest tell, and are not a number where one is not: quicker than a mark for each.
        if not len(values) or (values.min() >= 0 and values.max() <= most):
            continue
        wrong = ~((values >= 0) & (values <= most))
        at = int(np.flatnonzero(wrong)[0])
        row = pulses.rows[np.searchsorted(pulses.offsets, at, side="right") - 1]
        event, shard = table.columns["id"][row], int(table.columns["shard"][row])
        words = f"has {what}: {values[at]} ({int(wrong.sum()):,} such pulses)"
        raise BadShard(shard, f"Event {event} in {root / table.shards[shard]} {words}.")


def as_batch(pulses: Sequence[Mapping[str, Any]], num_sensors: int) -> HostBatch:
    """Events in hand, each a dict of arrays under the names of the competition's columns; their directions are unknown."""
    for number, event in enumerate(pulses):
        missing = [name for name in PULSE_COLUMNS if name not in event]
        if missing:
            raise UserError(f"Event {number} lacks {', '.join(missing)}; it has {', '.join(map(str, event))}.")
    columns = {
        name: np.concatenate([np.asarray(event[name], kind) for event in pulses]) if pulses else np.zeros(0, kind)
        for name, kind in PULSE_COLUMNS.items()
    }
    counts = np.array([len(event["time"]) for event in pulses], np.int64)
    rows = np.arange(len(pulses))
    found = Ragged(columns, offsets_of(counts), rows)
    sensor = columns["sensor_id"]
    if ((sensor < 0) | (sensor >= num_sensors)).any() or (counts < 1).any():
        raise UserError(f"An event needs pulses, and a sensor id is one of 0 .. {num_sensors - 1}.")
    nowhere = np.zeros(len(pulses), np.float32)
    return collate(stored_columns(found), {"azimuth": nowhere, "zenith": nowhere}, None)


def stored_columns(pulses: Ragged) -> Ragged:
    """Columns of the Parquet files under the names of the store."""
    old = pulses.columns
    columns = {
        "time": old["time"],
        "charge": old["charge"],
        "sensor": old["sensor_id"],
        "flags": old["auxiliary"].view(np.uint8) * np.uint8(AUXILIARY),
    }
    return Ragged(columns, pulses.offsets, pulses.rows)


def _charge_kind(kind: pa.DataType) -> npt.DTypeLike:
    return np.float32 if pa.types.is_float32(kind) else np.float64


def _charge_type(paths: list[Location], threads: int) -> npt.DTypeLike:
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


def _charge_type_of_file(path: Location) -> int:
    needed = 0
    file = open_parquet(path, list(PULSE_COLUMNS))
    for group in range(file.num_row_groups):
        with named_if_damaged(path):
            table = file.read_row_group(group, columns=["charge"], use_threads=False)
            charge = as_array([table.column("charge")], _charge_kind(table.column("charge").type), "charge", path)
        if not (np.isfinite(charge).all() and _on_grid(charge)):
            with np.errstate(over="ignore"):
                exact = (charge.astype(np.float32) == charge) | np.isnan(charge)
            needed = max(needed, 1 if exact.all() else 2)
    return needed


def _on_grid(charge: Array) -> bool:
    code = np.round((charge * CHARGE_UNIT - CHARGE_FIRST) / CHARGE_STEP)
    decoded = ((CHARGE_FIRST + CHARGE_STEP * code) / CHARGE_UNIT).astype(charge.dtype)
    return bool(((decoded == charge) & (code >= 0) & (code < 1 << 16)).all())


def _charge_codes(path: Location, charge: Array) -> Array:
    if not _on_grid(charge):
        raise UserError(
            f"{path} changed while it was being packed: its charges are no longer what they were. Start again."
        )
    return np.round((charge * CHARGE_UNIT - CHARGE_FIRST) / CHARGE_STEP).astype(np.uint16)
