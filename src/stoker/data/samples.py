"""The sample table: all that is known of each sample without reading it, as memory-mapped columns.

Each sample is a range of rows of a shard: (shard, first, count), with an id, and label columns of the recipe's choice.
The table is made once, beside a fingerprint of its source, and opens in O(1) time and memory for any number of samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.format import open_memmap

from stoker.data.ragged import Array, Indices
from stoker.errors import UserError
from stoker.files import new_folder, write_json

MANIFEST = "samples.json"
PLACE_COLUMNS = {"shard": np.int32, "first": np.int64, "count": np.int32, "id": np.int64}


@dataclass(frozen=True)
class SampleTable:
    shards: tuple[str, ...]  # paths, relative to the data set
    columns: Mapping[str, Array]  # shard, first, count, id, and the labels
    fingerprint: str

    def __len__(self) -> int:
        return len(self.columns["id"])

    def cost(self, rows: Indices) -> Indices:
        return self.columns["count"][rows].astype(np.int64)


class TableWriter:
    """Fills the columns of a table chunk by chunk."""

    def __init__(self, folder: Path, num_samples: int, labels: Mapping[str, npt.DTypeLike]) -> None:
        types = PLACE_COLUMNS | dict(labels)
        self.columns = {
            name: open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.dtype(kind), shape=(num_samples,))
            for name, kind in types.items()
        }
        self._filled = 0

    def append(self, chunk: Mapping[str, Array]) -> None:
        size = len(chunk["id"])
        for name, column in self.columns.items():
            column[self._filled : self._filled + size] = chunk[name]
        self._filled += size


@contextmanager
def new_table(
    folder: Path, num_samples: int, labels: Mapping[str, npt.DTypeLike], shards: Sequence[str], fingerprint: str
) -> Iterator[TableWriter]:
    """Writes a table that appears in `folder` only when the block ends without an error."""
    with new_folder(folder, force=True, marker=MANIFEST) as partial:
        writer = TableWriter(partial, num_samples, labels)
        yield writer
        for column in writer.columns.values():
            column.flush()
        write_json(
            partial / MANIFEST, {"columns": list(writer.columns), "shards": list(shards), "fingerprint": fingerprint}
        )


def open_table(folder: Path) -> SampleTable | None:
    """The table in `folder`, or None where there is none."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        columns = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in manifest["columns"]}
    except (OSError, ValueError, KeyError):
        return None
    return SampleTable(tuple(manifest["shards"]), columns, manifest["fingerprint"])


@dataclass(frozen=True)
class Subset:
    """Some rows of a table in their order: ranges where a split follows files, so that it costs no memory."""

    starts: Indices  # (ranges,) first row of each range
    offsets: Indices  # (ranges + 1,) position in the subset at which each range starts

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def rows(self, positions: Indices) -> Indices:
        which = np.searchsorted(self.offsets, positions, side="right") - 1
        return self.starts[which] + (positions - self.offsets[which])


def whole(table: SampleTable) -> Subset:
    return Subset(np.zeros(1, np.int64), np.array([0, len(table)], np.int64))


def split_by_shard(table: SampleTable, validation: float | Sequence[int]) -> tuple[Subset, Subset, list[str]]:
    """Training and validation subsets of whole shards, and the names of the validation shards.

    A share takes the last files: at least one, and never all. A list names files by their number, counted from 1.
    """
    num_shards = len(table.shards)
    if isinstance(validation, float | int):
        num_held = max(1, round(num_shards * validation))
        held = list(range(num_shards - num_held, num_shards))
    else:
        held = sorted({number - 1 for number in validation})
    if any(not 0 <= shard < num_shards for shard in held) or not 0 < len(held) < num_shards:
        raise UserError(
            f"data.validation is {validation}, and the data set has {num_shards} file(s), numbered from 1: some, but "
            f"not all of them must be held out."
        )
    is_held = np.zeros(num_shards, bool)
    is_held[held] = True
    starts, stops = _runs(table.columns["shard"])
    held_runs = is_held[table.columns["shard"][starts]]
    training, held_out = (_subset(starts[keep], stops[keep]) for keep in (~held_runs, held_runs))
    return training, held_out, [table.shards[shard] for shard in held]


def _runs(values: Array, block: int = 1 << 22) -> tuple[Indices, Indices]:
    """Start and stop of every run of equal values, looked for block by block: the column may be larger than memory."""
    changes = [np.zeros(1, np.int64)]
    for start in range(1, len(values), block):
        part = np.asarray(values[start - 1 : start + block])
        changes.append(np.flatnonzero(part[1:] != part[:-1]) + start)
    starts = np.concatenate(changes)
    return starts, np.append(starts[1:], len(values))


def _subset(starts: Indices, stops: Indices) -> Subset:
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    return Subset(starts, offsets)


def describe(table: SampleTable, subset: Subset) -> dict[str, Any]:
    """What goes into the run's events."""
    return {"samples": len(subset), "of": len(table), "shards": len(table.shards), "fingerprint": table.fingerprint}
