"""Events in the layout of the Kaggle competition: `train_meta.parquet` lists, for each event, rows of a pulse file.

In goes the directory, out come the sample table (made once and kept in the cache) and a source of pulses.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stoker import console
from stoker.data.cache import cache_folder
from stoker.data.parquet import ParquetSource, open_parquet
from stoker.data.ragged import Array, Indices
from stoker.data.samples import SampleTable, new_table, open_table
from stoker.errors import UserError
from stoker.recipes.icecube.geometry import Geometry, read_geometry

META_COLUMNS = ("batch_id", "event_id", "first_pulse_index", "last_pulse_index", "azimuth", "zenith")
PULSE_COLUMNS: dict[str, npt.DTypeLike] = {
    "sensor_id": np.int16,
    "time": np.int32,
    "charge": np.float32,
    "auxiliary": np.bool_,
}
LABELS: dict[str, npt.DTypeLike] = {"azimuth": np.float32, "zenith": np.float32}


def open_geometry(root: Path) -> Geometry:
    return read_geometry(root / "sensor_geometry.csv")


def open_events(root: Path, cache: Path | None = None) -> SampleTable:
    """The table of all events below `root`; made anew when the files changed since it was stored."""
    check_layout(root)
    fingerprint = _fingerprint(root)
    name = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    folder = (cache or cache_folder()) / "tables" / f"icecube-{name}"
    table = open_table(folder)
    if table is not None and table.fingerprint != fingerprint:
        console.say(f"{root} changed since its sample table was made: making it again.")
        table = None
    return table or _build(root, folder, fingerprint)


def open_pulses(root: Path, table: SampleTable) -> ParquetSource:
    return ParquetSource(root, table, PULSE_COLUMNS)


def check_layout(root: Path) -> None:
    if not root.is_dir():
        raise UserError(f"The data directory {root} does not exist. `stoker simulate {root}` makes one.")
    missing = [name for name in ("train_meta.parquet", "sensor_geometry.csv", "train") if not (root / name).exists()]
    if missing:
        raise UserError(
            f"{root} lacks {' and '.join(missing)}. A data directory holds train_meta.parquet, sensor_geometry.csv and "
            f"train/batch_1.parquet, train/batch_2.parquet and so on, as in the Kaggle competition."
        )


def _fingerprint(root: Path) -> str:
    """Changes when a file is added, removed, or written again."""
    digest = hashlib.sha256()
    for path in [root / "train_meta.parquet", *sorted((root / "train").glob("batch_*.parquet"))]:
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _build(root: Path, folder: Path, fingerprint: str) -> SampleTable:
    """Streams the metadata once, row group by row group: 132 million events never become Python objects."""
    meta = open_parquet(root / "train_meta.parquet", META_COLUMNS)
    batches = _batch_numbers(meta)
    shards = [f"train/batch_{batch}.parquet" for batch in batches]
    num_rows = np.array([_num_rows(root / shard) for shard in shards], np.int64)
    checks = _Checks(root, shards, num_rows)
    num_samples = meta.metadata.num_rows
    with (
        new_table(folder, num_samples, LABELS, shards, fingerprint) as writer,
        console.progress("sample table", num_samples, "events") as bar,
    ):
        for rows in meta.iter_batches(batch_size=1 << 20, columns=list(META_COLUMNS), use_threads=False):
            chunk = _chunk(rows, batches, root)
            checks.look_at(chunk)
            writer.append(chunk)
            bar.advance(rows.num_rows)
        checks.finish(writer.columns)
    table = open_table(folder)
    assert table is not None, "a table that was just written can be opened"
    return table


def _chunk(rows: pa.RecordBatch, batches: Indices, root: Path) -> dict[str, Array]:
    meta: dict[str, Any] = {name: rows.column(name).to_numpy(zero_copy_only=False) for name in META_COLUMNS}
    empty = [name for name in META_COLUMNS if rows.column(name).null_count]
    if empty:
        raise UserError(f"{root / 'train_meta.parquet'} has rows without a value in {', '.join(empty)}.")
    first, last = meta["first_pulse_index"], meta["last_pulse_index"]
    return {
        "shard": np.searchsorted(batches, meta["batch_id"]).astype(np.int32),
        "first": first.astype(np.int64),
        "count": (last - first + 1).astype(np.int64),
        "id": meta["event_id"].astype(np.int64),
        "azimuth": meta["azimuth"].astype(np.float32),
        "zenith": meta["zenith"].astype(np.float32),
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


def _num_rows(path: Path) -> int:
    return int(open_parquet(path, list(PULSE_COLUMNS)).metadata.num_rows)


class _Checks:
    """What must hold before training starts: ranges inside their files, no overlap, unique ids, angles in range."""

    def __init__(self, root: Path, shards: list[str], num_rows: Indices) -> None:
        self._root, self._shards, self._num_rows = root, shards, num_rows
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
                raise UserError(f"{self._root / 'train_meta.parquet'} lists event {twice[0]} more than once.")
        if not self._in_order:
            order = np.lexsort((columns["first"], columns["shard"]))
            shard, first = columns["shard"][order], columns["first"][order]
            end = first + columns["count"][order]
            overlap = np.flatnonzero((shard[1:] == shard[:-1]) & (first[1:] < end[:-1]))
            if overlap.size:
                event = columns["id"][order][overlap[0] + 1]
                raise UserError(
                    f"Event {event} in {self._root / 'train_meta.parquet'} shares pulses of "
                    f"{self._shards[shard[overlap[0]]]} with another event."
                )

    def _refuse(self, chunk: dict[str, Array], wrong: npt.NDArray[np.bool_], what: str) -> None:
        if not wrong.any():
            return
        at = int(np.flatnonzero(wrong)[0])
        shard = int(chunk["shard"][at])
        raise UserError(
            f"Event {chunk['id'][at]} in {self._root / 'train_meta.parquet'} {what}: pulses {chunk['first'][at]} to "
            f"{chunk['first'][at] + chunk['count'][at] - 1} of {self._shards[shard]}, which holds "
            f"{self._num_rows[shard]:,}; azimuth {chunk['azimuth'][at]:.4f}, zenith {chunk['zenith'][at]:.4f}. "
            f"({int(wrong.sum()):,} such events in this part of the file.)"
        )
