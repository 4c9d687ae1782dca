"""GraphNeT's files as events: SQLite databases and folders of Parquet, of IceCube or of any other detector.

They are rewritten once, into the cache, in the layout of the Kaggle competition, and read from there like any other events.
A row of a pulse table says where its sensor is: the places that occur are the detector.
"""

# P pulses
import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker import console
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.locations import Location, identity, is_file, is_folder, named, stat
from stoker.data.storage.urls import Url
from stoker.data.store import is_store
from stoker.errors import UserError
from stoker.files import new_folder
from stoker.recipes.icecube.events import TRUTH
from stoker.recipes.icecube.foreign import EVENT, Columns, Database, Folder, Tables, parquet_files
from stoker.recipes.icecube.geometry import MOST_SENSORS, Geometry, write_geometry

VERSION = 1  # of what is made of the files
DATABASES = (".db", ".sqlite", ".sqlite3")
I3 = (".i3", ".i3.gz", ".i3.bz2", ".i3.zst")
# What a column may be called: by GraphNeT's readers of IceCube files, and by Prometheus.
PULSE_NAMES: dict[str, tuple[str, ...]] = {
    "x": ("dom_x", "sensor_pos_x"),
    "y": ("dom_y", "sensor_pos_y"),
    "z": ("dom_z", "sensor_pos_z"),
    "time": ("dom_time", "t", "time"),
}
FURTHER_NAMES = {"charge": ("charge",), "hlc": ("hlc",), "efficiency": ("rde",)}
TRUTH_NAMES: dict[str, tuple[str, ...]] = {
    "azimuth": ("azimuth", "injection_azimuth"),
    "zenith": ("zenith", "injection_zenith"),
}
FURTHER_TRUTH = {
    "energy": ("energy", "injection_energy"),
    "vertex_x": ("position_x", "injection_position_x"),
    "vertex_y": ("position_y", "injection_position_y"),
    "vertex_z": ("position_z", "injection_position_z"),
}
MOST_EVENTS = 200_000  # of a file that is written, as the competition has
LEAST_FILES = 20  # so that some can be held out, where there are events enough
FARTHEST_M = 1e6
GRID_M = 0.01  # places that differ by less are one: databases hold them with different rounding


def is_foreign(path: Location) -> bool:
    """A database, or a folder of Parquet files with a column event_no."""
    if str(path).lower().endswith(DATABASES) and is_file(path):
        return True
    if isinstance(path, Url) and (is_store(path) or path.scheme in ("https", "http")):
        return False
    if not is_folder(path) or is_file(path / "train_meta.parquet") or is_file(path / "test_meta.parquet"):
        return False
    return any(EVENT in own for own in Folder(path).columns().values())


def loose_facts(path: Location | None) -> frozenset[str]:
    """Of files whose pulses say where they are the detector is what occurs: another file may know other sensors."""
    foreign = path is not None and is_foreign(named(path))
    return frozenset({"sensor_xyz", "efficiency"}) if foreign else frozenset()


def as_layout(path: Location, pulses: str | None = None, truth: str | None = None) -> Location:
    """The folder itself, or a copy of GraphNeT's files in the layout that is read, made on first use."""
    if str(path).lower().endswith(I3):
        raise UserError(
            f"{path} is an I3 file, which only IceCube's own icetray can read. Where that is installed, GraphNeT's "
            f"I3 reader writes SQLite or Parquet, and those can be named here."
        )
    if not is_foreign(path):
        if pulses is not None or truth is not None:
            name = "pulses" if pulses is not None else "truth"
            raise UserError(f"data.{name} names a table of a GraphNeT database, and {path} is none.")
        return path
    digest = hashlib.sha256(f"{VERSION} {pulses} {truth} {identity(path)}".encode())
    journal = path.parent / f"{path.name}-wal"  # what was committed and is not in the database yet
    for file in (
        [path, *([journal] if is_file(journal) else [])]
        if is_file(path)
        else [path / name for name in parquet_files(path)]
    ):
        found = stat(file)
        assert found is not None, "listed a moment ago"
        digest.update(f"{file.name} {found.size} {found.written}\n".encode())
    folder = cache_folder() / "imported" / f"graphnet-{digest.hexdigest()[:16]}"
    with cache_lock(folder, f"Another process reads {path}: waiting for it."):
        if not (folder / "sensor_geometry.csv").exists():
            console.say(f"Reading {path} into {folder}, once.")
            _convert(path, folder, pulses, truth)
    return folder


def _convert(path: Location, out: Path, pulses: str | None, truth_table: str | None) -> None:
    with closing(Database(path)) if is_file(path) else closing(Folder(path)) as tables:
        chosen = _choose(tables.columns(), path, pulses, truth_table)
        events = _read_pulses(tables, chosen, path)
        truth = _read_truth(tables, chosen, path)
    if truth is not None:
        known = np.isin(events.ids, truth[EVENT])
        if not known.all():
            console.say(f"{path}: {int((~known).sum()):,} events have pulses and no truth; they are left out.")
            events = events.only(known)
        silent = len(truth[EVENT]) - int(np.isin(truth[EVENT], events.ids).sum())
        if silent:
            console.say(f"{path}: {silent:,} events of {chosen.truth} have no pulses; they are left out.")
    if len(events.ids) < (1 if truth is None else 2):
        raise UserError(f"{path} holds {len(events.ids)} events with pulses and a direction; two are needed to train.")
    with new_folder(out, force=True, marker="sensor_geometry.csv") as folder:
        _write(folder, events, truth)


@dataclass(frozen=True)
class _Chosen:
    pulses: str
    truth: str | None
    names: Mapping[str, str]  # of pulses: ours to theirs
    truth_names: Mapping[str, str]


def _choose(
    columns: Mapping[str, Sequence[str]], path: Location, wanted: str | None, wanted_truth: str | None
) -> _Chosen:
    """Tables are told by their columns, never by their names."""
    usable = {name: found for name, own in columns.items() if (found := _named(own, PULSE_NAMES)) is not None}
    if wanted is not None and wanted not in usable:
        raise UserError(f"{path} has no table {wanted} of pulses. Tables of pulses: {', '.join(usable) or 'none'}.")
    if wanted is None and len(usable) != 1:
        if not usable:
            raise UserError(
                f"{path} holds no table of pulses with {EVENT}, places and times. Its tables: "
                f"{'; '.join(f'{name} ({len(own)} columns)' for name, own in columns.items()) or 'none'}."
            )
        raise UserError(f"{path} has several tables of pulses, {', '.join(usable)}: choose one, --data.pulses NAME.")
    name = wanted or next(iter(usable))
    truths = {one: found for one, own in columns.items() if (found := _named(own, TRUTH_NAMES)) is not None}
    truths.pop(name, None)
    truth = _choose_truth(list(truths), path, wanted_truth)
    further = _some(columns[name], FURTHER_NAMES)
    more = _some(columns[truth], FURTHER_TRUTH) if truth is not None else {}
    return _Chosen(name, truth, {**usable[name], **further}, {**truths.get(truth or "", {}), **more})


def _choose_truth(found: list[str], path: Location, wanted: str | None) -> str | None:
    """A reconstruction has directions too: only what is called truth is taken for it without asking."""
    if wanted is not None:
        if wanted not in found:
            raise UserError(
                f"{path} has no table {wanted} of directions. Tables of them: {', '.join(found) or 'none'}."
            )
        return wanted
    called = [one for one in found if "truth" in one.lower()]
    if found and len(called) != 1:
        raise UserError(
            f"{path} has directions in {', '.join(called or found)}: say which are the true ones, --data.truth NAME."
        )
    return called[0] if called else None


def _named(own: Sequence[str], names: Mapping[str, tuple[str, ...]]) -> dict[str, str] | None:
    found = _some(own, names)
    return found if EVENT in own and len(found) == len(names) else None


def _some(own: Sequence[str], names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {ours: next(one for one in theirs if one in own) for ours, theirs in names.items() if set(theirs) & set(own)}


@dataclass(frozen=True)
class _Events:
    """Pulses by event, in order of time."""

    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    columns: Columns  # time, charge, auxiliary, sensor_id
    geometry: Geometry

    def only(self, kept: npt.NDArray[np.bool_]) -> "_Events":
        columns = {name: values[np.repeat(kept, self.counts)] for name, values in self.columns.items()}
        return _Events(self.ids[kept], self.counts[kept], columns, self.geometry)


def _read_pulses(tables: Tables, chosen: _Chosen, path: Location) -> _Events:
    theirs = chosen.names
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (EVENT, *theirs)}
    with console.progress(f"read {chosen.pulses}", tables.num_rows(chosen.pulses), "pulses") as bar:
        for piece in tables.rows(chosen.pulses, [EVENT, *theirs.values()]):
            for ours, name in {EVENT: EVENT, **theirs}.items():
                parts[ours].append(piece[name])
            bar.advance(len(piece[EVENT]))
    raw = {name: np.concatenate(some) if some else np.zeros(0) for name, some in parts.items()}
    if not len(raw[EVENT]):
        raise UserError(f"{path}: the table {chosen.pulses} is empty.")
    for name in ("x", "y", "z", "time", "charge"):
        values = raw.get(name)
        wrong = None if values is None else np.flatnonzero(~np.isfinite(values))
        if wrong is not None and wrong.size:
            event = raw[EVENT][wrong[0]]
            raise UserError(f"{path}: event {event} has a {name} that is no number ({wrong.size:,} such pulses).")
    if max(np.abs(raw[axis]).max() for axis in "xyz") > FARTHEST_M:
        raise UserError(f"{path}: {chosen.pulses} has a place farther than {FARTHEST_M:g} m away.")
    if np.abs(raw["time"]).max() >= 2**31:
        raise UserError(
            f"{path}: times of {chosen.pulses} reach {np.abs(raw['time']).max():.3g} ns, more than 32 bits hold."
        )
    geometry, sensor = _detector(raw, path)
    order = np.lexsort((raw["time"], raw[EVENT]))
    event = raw[EVENT][order].astype(np.int64)
    ids, counts = np.unique(event, return_counts=True)
    ones = np.ones(len(event))
    hlc = raw.get("hlc", ones)
    columns: Columns = {
        "sensor_id": sensor[order].astype(np.int16),
        "time": np.round(raw["time"][order]).astype(np.int64),
        "charge": raw.get("charge", ones)[order].astype(np.float64),
        "auxiliary": (hlc == 0)[order] if (hlc != 0).any() else np.zeros(len(event), bool),
    }
    return _Events(ids, counts, columns, geometry)


def _detector(raw: Columns, path: Location) -> tuple[Geometry, npt.NDArray[np.int64]]:
    """The places that occur, in their order, and which of them each pulse is of."""
    grid = np.round(np.stack([raw[axis] for axis in "xyz"], -1) / GRID_M).astype(np.int64)
    places, first, sensor = np.unique(grid, axis=0, return_index=True, return_inverse=True)
    if len(places) > MOST_SENSORS:
        raise UserError(
            f"{path} has pulses at {len(places):,} places; a detector has at most {MOST_SENSORS:,} sensors."
        )
    efficiency = raw["efficiency"][first] if "efficiency" in raw else np.ones(len(first))
    usable = np.where(np.isfinite(efficiency) & (efficiency > 0), efficiency, 1.0)
    return Geometry((places * GRID_M).astype(np.float32), usable.astype(np.float32)), sensor.reshape(-1)


def _read_truth(tables: Tables, chosen: _Chosen, path: Location) -> Columns | None:
    if chosen.truth is None:
        console.say(f"{path} has no table with directions: its events can be predicted, and not trained on.")
        return None
    names = {EVENT: EVENT, **chosen.truth_names}
    parts = list(tables.rows(chosen.truth, list(names.values())))
    if not parts:
        raise UserError(f"{path}: the table {chosen.truth} is empty.")
    found = {ours: np.concatenate([part[name] for part in parts]) for ours, name in names.items()}
    found[EVENT] = found[EVENT].astype(np.int64)
    ids, first = np.unique(found[EVENT], return_index=True)
    if len(ids) != len(found[EVENT]):
        raise UserError(
            f"{path}: the table {chosen.truth} lists {len(found[EVENT]) - len(ids):,} events more than once."
        )
    return {name: values[first] for name, values in found.items()}


def _write(folder: Path, events: _Events, truth: Columns | None) -> None:
    """Files of consecutive events: as many as make them small enough, and enough of them to hold some out."""
    number = max(min(LEAST_FILES, len(events.ids) // 2), -(-len(events.ids) // MOST_EVENTS))
    part = "train" if truth is not None else "test"
    (folder / part).mkdir()
    at = None if truth is None else np.searchsorted(truth[EVENT], events.ids)
    ends = np.cumsum(events.counts)
    metas = []
    for batch, some in enumerate(np.array_split(np.arange(len(events.ids)), number), start=1):
        begin, end = int(ends[some[0]] - events.counts[some[0]]), int(ends[some[-1]])
        columns = {name: values[begin:end] for name, values in events.columns.items()}
        columns["event_id"] = np.repeat(events.ids[some], events.counts[some])
        pq.write_table(pa.table(columns), folder / part / f"batch_{batch}.parquet", write_page_checksum=True)
        last = ends[some] - begin - 1
        meta: Columns = {
            "batch_id": np.full(len(some), batch, np.int64),
            "event_id": events.ids[some],
            "first_pulse_index": last - events.counts[some] + 1,
            "last_pulse_index": last,
        }
        if truth is not None and at is not None:
            meta["azimuth"] = truth["azimuth"][at[some]].astype(np.float64) % (2 * np.pi)
            meta["zenith"] = truth["zenith"][at[some]].astype(np.float64)
        metas.append(pa.table(meta))
    pq.write_table(pa.concat_tables(metas), folder / f"{part}_meta.parquet", write_page_checksum=True)
    if truth is not None and at is not None:
        further = {name: truth[name][at].astype(np.float64) for name in FURTHER_TRUTH if name in truth}
        pq.write_table(pa.table({"event_id": events.ids, **further}), folder / TRUTH)
    write_geometry(events.geometry, folder / "sensor_geometry.csv")
    _date_by_content(folder, events, truth)


def _date_by_content(folder: Path, events: _Events, truth: Columns | None) -> None:
    """Files are told apart by size and time of writing: here the time says what is in them, wherever they were written."""
    digest = hashlib.sha256(events.ids.tobytes() + events.geometry.xyz.tobytes())
    for _, column in sorted(
        {**events.columns, **{f"truth {name}": one for name, one in (truth or {}).items()}}.items()
    ):
        digest.update(np.ascontiguousarray(column).tobytes())
    when = int.from_bytes(digest.digest()[:7], "big")  # ns since 1970, within two years of it
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, ns=(when, when))
