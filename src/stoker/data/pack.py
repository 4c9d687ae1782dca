"""Packing: any ragged columns, once, into a store that can be read at random places at full speed.

In go a sample table and a function that reads one shard; out comes a `PackedStore`. Shards are packed in parallel by
threads, and by ranks under torchrun or a Slurm array. Work goes on in `.NAME.packing` beside the result: a shard that is
done has a file there with its checksums, so a killed pack goes on where it was, and the result, renamed at the end, is
the same byte for byte.
"""

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker import console
from stoker.data.checksums import checksums, read_manifest, write_manifest
from stoker.data.loader import LoaderConfig
from stoker.data.locations import Location, open_local
from stoker.data.order import ExactOrder
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, offsets_of, range_indices
from stoker.data.samples import PLACE_COLUMNS, SampleTable, check_column_name, new_table, open_table, shard_rows
from stoker.data.store import COLUMNS, MANIFEST, VERSION, PackedStore, is_store, open_store
from stoker.errors import MachineError, UserError
from stoker.files import file_lock, said_if_full, sync_folder, write_json
from stoker.runs.environment import environment_number


@dataclass(frozen=True)
class PackRequest:
    """What `stoker pack` was asked for; `options` are the recipe's own, of its `pack_options`."""

    source: Location
    out: Any  # a local path; of `stoker pack` also a URL
    shuffled: int | None = None
    threads: int | None = None
    verify: bool = False
    options: Any = None
    rank: int = 0
    num_ranks: int = 1

    @property
    def num_threads(self) -> int:
        return self.threads or LoaderConfig().num_threads


@dataclass(frozen=True)
class ShardContent:
    """All samples of a shard in the order of the table: their rows, and new facts about each sample."""

    columns: Mapping[str, Array]  # rows, one sample after the other
    samples: Mapping[str, Array] = field(default_factory=dict)  # one value a sample, become columns of the table


@dataclass(frozen=True)
class Packing:
    """What to pack: the source's table, the types to store, and how to read a shard in those types."""

    table: SampleTable
    columns: Mapping[str, npt.DTypeLike]
    read_shard: Callable[[int, Indices], ShardContent]  # (number of the shard, its rows in the table)
    sample_columns: Mapping[str, npt.DTypeLike] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)  # goes into the manifest
    files: Mapping[str, Location] = field(default_factory=dict)  # copied into the store
    shuffled: int | None = None  # seed of a random order of the samples in the store

    @property
    def fingerprint(self) -> dict[str, Any]:
        kinds = {name: np.dtype(kind).str for name, kind in self.columns.items()}
        return {
            "source": self.table.fingerprint,
            "columns": kinds,
            "extra": dict(self.extra),
            "shuffled": self.shuffled,
        }


def pack(out: Path, packing: Packing, *, threads: int, rank: int = 0, num_ranks: int = 1) -> PackedStore | None:
    """Packs this rank's share of the shards; the rank that finds all of them done completes the store.

    Returns the store, or None on a rank that left others at work.
    """
    for name in packing.columns:
        check_column_name(name)
    if out.exists():
        raise UserError(f"{out} exists already. Choose another name, or remove it to pack again.")
    work = out.with_name(f".{out.name}.packing")

    def stays() -> str:
        done = len(list((work / "done").glob("*.json")))
        return f"{work} stays, with {done} of {len(packing.table.shards)} files done, and will be used."

    with said_if_full(stays):
        return _pack(out, work, packing, threads, rank, num_ranks)


def pack_as_asked(request: PackRequest, packing: Packing) -> dict[str, Any]:
    """Packs, or with `verify` looks at a store that exists; returns what to tell."""
    threads = request.num_threads
    if request.verify and is_store(request.out):
        store = open_store(request.out)
    else:
        packed = pack(request.out, packing, threads=threads, rank=request.rank, num_ranks=request.num_ranks)
        if packed is None:
            return {"path": str(request.out), "state": "other ranks are still at work"}
        store = packed
    result: dict[str, Any] = {
        "path": str(request.out),
        "samples": len(store.table),
        "rows": store.num_elements,
        "bytes": store.num_bytes,
    }
    if request.verify:
        result["values_verified"] = verify(store, packing, threads)
    return result


def _pack(out: Path, work: Path, packing: Packing, threads: int, rank: int, num_ranks: int) -> PackedStore | None:
    if not (work / MANIFEST).is_file():  # else it was killed between the last file and the new name
        _write_share(work, packing, threads, rank, num_ranks)
    with file_lock(work / "lock", may_vanish=True):
        if out.exists():  # another rank was quicker
            return open_store(out)
        if not (work / MANIFEST).is_file():
            if not all(_done_path(work, shard).exists() for shard in range(len(packing.table.shards))):
                console.say(f"rank {rank} is done; other ranks still work on {out}.")
                return None
            _write_manifest(work, packing, threads)
        _check_same_pack(work, read_manifest(work / MANIFEST)["plan"], packing)
        shutil.rmtree(work / "done", ignore_errors=True)
        for name in ("plan.json", "lock"):
            (work / name).unlink(missing_ok=True)
        work.rename(out)
        sync_folder(out.parent)
    return open_store(out)


def _write_share(work: Path, packing: Packing, threads: int, rank: int, num_ranks: int) -> None:
    """The shards that are this rank's to write, but for those that are done."""
    _prepare(work, packing, rank)
    todo = [
        shard for shard in range(rank, len(packing.table.shards), num_ranks) if not _done_path(work, shard).exists()
    ]
    with console.progress("pack", len(todo), "shards") as bar, ThreadPoolExecutor(threads, "pack") as pool:
        writer = _Writer(work, packing)
        for _ in pool.map(writer.write_shard, todo):
            bar.advance()


def verify(store: PackedStore, packing: Packing, threads: int) -> int:
    """Reads every shard again and compares each value with the store; returns the number of values compared."""

    def compare(shard: int) -> int:
        rows = shard_rows(packing.table, shard)
        content = packing.read_shard(shard, rows)
        stored = store.gather(MicroBatch(_packed_rows(packing, rows)))
        compared = 0
        for name, column in content.columns.items():
            wrong = np.flatnonzero(~_same(np.asarray(column, store.columns[name].dtype), stored.columns[name]))
            if wrong.size or not _exact(column, store.columns[name].dtype):
                at = int(wrong[0]) if wrong.size else 0
                sample = packing.table.columns["id"][rows[np.searchsorted(stored.offsets, at, side="right") - 1]]
                raise UserError(
                    f"{store.path} differs from its source: {name} of sample {sample} in {packing.table.shards[shard]} "
                    f"is {stored.columns[name][at]} and should be {column[at]} ({wrong.size:,} differences in this shard)."
                )
            compared += len(column)
        return compared

    with ThreadPoolExecutor(threads, "verify") as pool:
        total = 0
        with console.progress("verify", len(packing.table.shards), "shards") as bar:
            for compared in pool.map(compare, range(len(packing.table.shards))):
                total += compared
                bar.advance()
    return total


def ranks_from_environment() -> tuple[int, int]:
    """This process's number and how many there are: under torchrun, in a Slurm array, or alone."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, count = environment_number("RANK"), environment_number("WORLD_SIZE")
    elif "SLURM_ARRAY_TASK_ID" in os.environ and "SLURM_ARRAY_TASK_COUNT" in os.environ:
        names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP")
        task, first, step = (environment_number(name, int(name[-1] == "P")) for name in names)
        rank, count = (task - first) // max(1, step), environment_number("SLURM_ARRAY_TASK_COUNT")
    else:
        return 0, 1
    if not 0 <= rank < count:
        raise UserError(
            f"This process would be number {rank} of {count}: the numbers of a Slurm array must follow one another, as in "
            f"--array=0-{max(0, count - 1)}. Whatever is packed already stays and is used."
        )
    return rank, count


def _prepare(work: Path, packing: Packing, rank: int) -> None:
    """Makes the files at their full size, so that a full disk is found now; rank 0 does, the others wait."""
    asked = work / "plan.json"
    if rank == 0 and not asked.exists():
        shutil.rmtree(work, ignore_errors=True)
        (work / COLUMNS).mkdir(parents=True)
        (work / "done").mkdir()
        num_elements = _write_table(work / "table", packing)
        for name, kind in packing.columns.items():
            _allocate(work / COLUMNS / f"{name}.bin", np.dtype(kind).itemsize * num_elements)
        write_json(asked, packing.fingerprint)
    for waited in range(600):
        if asked.exists():
            break
        if waited == 5:
            console.say(f"rank {rank} waits for rank 0 to prepare {work}.")
        time.sleep(1)
    else:
        raise MachineError(f"Rank 0 did not prepare {work} within ten minutes. Is it running, on the same disk?")
    _check_same_pack(work, json.loads(asked.read_text()), packing)


def _check_same_pack(work: Path, asked: Any, packing: Packing) -> None:
    if asked != json.loads(json.dumps(packing.fingerprint)):
        raise UserError(
            f"{work} holds a pack that was begun from other data or with other options. Remove it, or go on with what it "
            f"was begun with."
        )


def _write_table(folder: Path, packing: Packing) -> int:
    """The store's own table: the same samples in the order they are packed, `first` counted over the whole store."""
    table, size = packing.table, len(packing.table)
    labels = {name: column.dtype for name, column in table.columns.items() if name not in PLACE_COLUMNS}
    kinds: dict[str, npt.DTypeLike] = {**labels, **packing.sample_columns}
    first = 0
    with new_table(folder, size, kinds, table.shards, table.fingerprint) as writer:
        for start in range(0, size, 1 << 20):
            rows = _source_rows(packing, np.arange(start, min(start + (1 << 20), size)))
            chunk = {name: np.asarray(column[rows]) for name, column in table.columns.items()}
            offsets = offsets_of(chunk["count"]) + first
            first = int(offsets[-1])
            missing = {name: np.zeros(len(rows), kind) for name, kind in packing.sample_columns.items()}
            writer.append({**chunk, **missing, "first": offsets[:-1]})
    return first


def _allocate(path: Path, num_bytes: int) -> None:
    with path.open("wb") as file:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)


class _Writer:
    """Writes shards into the files of the work folder."""

    def __init__(self, work: Path, packing: Packing) -> None:
        table = open_table(work / "table")
        assert table is not None, "the table is written before plan.json, which was found"
        self._work, self._packing, self._table = work, packing, table
        self._sample_columns = {
            name: np.load(work / "table" / f"{name}.npy", mmap_mode="r+") for name in packing.sample_columns
        }
        self._columns = {
            name: np.memmap(work / COLUMNS / f"{name}.bin", dtype=kind, mode="r+")
            if (work / COLUMNS / f"{name}.bin").stat().st_size
            else None
            for name, kind in packing.columns.items()
        }
        self._lock = threading.Lock()

    def write_shard(self, shard: int) -> None:
        packing = self._packing
        rows = shard_rows(packing.table, shard)
        content = packing.read_shard(shard, rows)
        self._check(shard, rows, content)
        packed = _packed_rows(packing, rows)
        first, count = self._table.columns["first"][packed], self._table.columns["count"][packed]
        contiguous = bool(len(packed)) and bool((first[1:] == first[:-1] + count[:-1]).all())
        place: Any = slice(first[0], first[-1] + count[-1]) if contiguous else range_indices(first, count)[0]
        sums = {}
        for name, column in content.columns.items():
            values = np.ascontiguousarray(column, packing.columns[name])
            target = self._columns[name]
            if target is not None:
                target[place] = values
            sums[name] = zlib.crc32(values.tobytes())
        for name, values in content.samples.items():
            self._sample_columns[name][packed] = values
        for target in (*self._columns.values(), *self._sample_columns.values()):
            if target is not None:
                target.flush()
        write_json(_done_path(self._work, shard), {"samples": len(rows), "crc32": sums})

    def _check(self, shard: int, rows: Indices, content: ShardContent) -> None:
        name, needed = self._packing.table.shards[shard], int(self._packing.table.columns["count"][rows].sum())
        if set(content.columns) != set(self._packing.columns) or set(content.samples) != set(self._sample_columns):
            raise UserError(f"read_shard gave other columns for {name} than the packing names.")
        for column, values in content.columns.items():
            if len(values) != needed:
                raise UserError(f"read_shard gave {len(values):,} rows of {column} for {name}, which has {needed:,}.")
            if not _exact(values, np.dtype(self._packing.columns[column])):
                raise UserError(f"{column} of {name} does not fit {self._packing.columns[column]} without loss.")


def _exact(values: Array, kind: np.dtype[Any]) -> bool:
    """Whether the values survive the type they are stored in."""
    if values.dtype == kind or not len(values):
        return True
    return bool(_same(values.astype(kind).astype(values.dtype), values).all())


def _same(first: Array, second: Array) -> npt.NDArray[np.bool_]:
    """Equal, or both not a number."""
    return np.asarray((first == second) | ((first != first) & (second != second)))


def _write_manifest(work: Path, packing: Packing, threads: int) -> None:
    shards = []
    for number, name in enumerate(packing.table.shards):
        shards.append({"name": name, **json.loads(_done_path(work, number).read_text())})
    for name, path in packing.files.items():
        shutil.copyfile(open_local(path), work / name)
    kinds = {name: np.dtype(kind).str for name, kind in packing.columns.items()}
    num_elements = int(packing.table.columns["count"].sum(dtype=np.int64))
    names = [*(f"{COLUMNS}/{name}.bin" for name in packing.columns), *packing.files]
    names += sorted(f"table/{path.name}" for path in (work / "table").iterdir())
    write_manifest(
        work / MANIFEST,
        {
            "version": VERSION,
            "columns": kinds,
            "num_rows": num_elements,
            "num_samples": len(packing.table),
            "shuffled": packing.shuffled,
            "extra": dict(packing.extra),
            "shards": shards,
            "files": checksums(work, names, threads),
            "plan": packing.fingerprint,
        },
    )


def _source_rows(packing: Packing, packed: Indices) -> Indices:
    """Rows of the source's table for rows of the store."""
    return packed if packing.shuffled is None else ExactOrder(len(packing.table), packing.shuffled, 0).forward(packed)


def _packed_rows(packing: Packing, rows: Indices) -> Indices:
    return rows if packing.shuffled is None else ExactOrder(len(packing.table), packing.shuffled, 0).inverse(rows)


def _done_path(work: Path, shard: int) -> Path:
    return work / "done" / f"{shard:06d}.json"
