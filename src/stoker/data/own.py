"""Other people's data, as samples that can be asked for by number: arrays, Parquet, files, any map-style dataset.

`samples.loader(batch_size=64)` is a loader for a loop of one's own; `samples.run_data()` is what a recipe hands to the
engine. Every batch carries its labels and `rows`, which samples it holds: nothing has to be looked up beside it.
"""

import dataclasses
import hashlib
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from stoker.data.batch import map_leaves
from stoker.data.device import feed
from stoker.data.loader import Loader, LoaderConfig, loader_of
from stoker.data.locations import Location, list_folder
from stoker.data.order import ExactOrder, StorageOrder, hashed
from stoker.data.plan import MicroBatch, Position
from stoker.data.processes import Processes
from stoker.data.ragged import Array, Indices, offsets_of, range_indices
from stoker.data.samples import ListSubset, SampleTable, Subset, whole
from stoker.data.source import RunData
from stoker.data.stages import Stage
from stoker.data.store import PackedStore
from stoker.errors import UserError
from stoker.runs.environment import environment_number

ROOM_BYTES = 64 << 20  # of a process: a larger answer goes through a pipe


@dataclass(frozen=True)
class Samples:
    """What each sample costs, and how some of them become a batch."""

    table: SampleTable
    read: Callable[[MicroBatch], Any]  # gives a batch
    files_of: Callable[[Indices], str]
    bytes_per_cost: float = 1024.0  # host memory that a unit of cost needs on its way, about

    def __len__(self) -> int:
        return len(self.table)

    def loader(
        self,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        device: str | torch.device = "cpu",
        rank: int | None = None,
        num_ranks: int | None = None,
        **settings: Any,
    ) -> "EpochLoader":
        """For a loop of one's own: each `for` over it is an epoch. `settings` are those of LoaderConfig, such as batch_cost,
        threads and look_ahead. Ranks are found as torchrun names them."""
        config = LoaderConfig(batch_size=batch_size, **settings)
        data = self.run_data(validation=None)
        if not shuffle:
            data = dataclasses.replace(data, order=lambda seed, epoch: StorageOrder())
        where = torch.device(device)
        own = environment_number("RANK") if rank is None else rank
        count = max(1, environment_number("WORLD_SIZE")) if num_ranks is None else num_ranks
        loader = loader_of(data, config, where, training=True, rank=own, num_ranks=count)
        return EpochLoader(loader, seed, where)

    def run_data(self, validation: float | None = 0.1, facts: Mapping[str, Any] | None = None) -> RunData:
        """What a recipe hands to the engine. `validation` is the share that is held out, told by a hash of each number."""
        everything: Subset = whole(self.table)
        training, held = everything, everything
        if validation is not None:
            drawn = hashed(np.arange(len(self), dtype=np.uint64)) < np.uint64(validation * 2**64)
            training, held = ListSubset(np.flatnonzero(~drawn)), ListSubset(np.flatnonzero(drawn))
            if not len(training) or not len(held):
                raise UserError(
                    f"Holding out a share of {validation} leaves {len(training)} samples to train on and {len(held)} to "
                    f"validate on: both are needed."
                )
        return RunData(
            table=self.table,
            training=training,
            validation=held,
            order=lambda seed, epoch: ExactOrder(len(training), seed, epoch),
            stages=[Stage("read", self.read)],
            files_of=self.files_of,
            description={"fingerprint": self.table.fingerprint, "training": len(training), "validation": len(held)},
            bytes_per_cost=self.bytes_per_cost,
            facts=facts or {},
        )


class EpochLoader:
    """Batches for a loop of one's own. Each `iter` goes through an epoch, in an order of its own; `state_dict` says where it
    stands, and the next `iter` after `load_state_dict` goes on from there."""

    def __init__(self, loader: Loader, seed: int, device: torch.device) -> None:
        self._loader, self._device = loader, device
        self._position, self._goes_on = Position(seed), True

    def __len__(self) -> int:
        """Batches of this rank in the epoch that comes next."""
        plan, position = self._loader.plan, Position(self._position.seed, self._coming)
        if plan.batch_size is not None and plan.micro_cost is None:
            return plan.steps_per_epoch()
        return sum(len(step.micro_batches) for step in self._planned(position))

    def _planned(self, position: Position) -> Iterator[Any]:
        rank, num_ranks = self._loader.rank, self._loader.num_ranks
        return self._loader.plan.steps(position, position.epoch + 1, rank=rank, num_ranks=num_ranks)

    @property
    def _coming(self) -> int:
        """The epoch that the next `iter` goes through: one that was left half-way is gone on with if that was asked."""
        return self._position.epoch + (self._position.consumed > 0 and not self._goes_on)

    def __iter__(self) -> Iterator[Any]:
        if not self._goes_on and self._position.consumed:
            self._position = Position(self._position.seed, self._position.epoch + 1)
        self._goes_on = False
        epoch = self._position.epoch
        for step in feed(self._loader.steps(self._position, epoch + 1), self._device):
            self._position = step.after
            for batch in step.batches:
                yield batch.values if isinstance(batch, Collated) else batch
        self._position, self._goes_on = Position(self._position.seed, epoch + 1), True

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self._position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._position, self._goes_on = Position(**state), True


@dataclass(frozen=True)
class Collated:
    """Whatever a dataset's samples were collated to, and which samples they are. Unpacks like what it holds."""

    values: Any
    rows: torch.Tensor

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]


def from_arrays(**columns: Any) -> Samples:
    """Arrays of one length, a row a sample; a list of arrays is a ragged column: one flat tensor and `NAME_offsets`."""
    if not columns:
        raise UserError("stoker.from_arrays needs at least one column: stoker.from_arrays(x=x, y=y).")
    parts = {name: _column(name, values) for name, values in columns.items()}
    sizes = {name: len(part) for name, part in parts.items()}
    if len(set(sizes.values())) > 1:
        raise UserError(f"The columns have different numbers of samples: {sizes}.")
    size = next(iter(sizes.values()))
    costs = sum((part.counts for part in parts.values() if isinstance(part, _RaggedColumn)), np.zeros(size, np.int64))
    digest = zlib.crc32(repr(list(parts)).encode())
    for part in parts.values():
        digest = zlib.crc32(np.ascontiguousarray(part.content).tobytes(), digest)

    def read(micro: MicroBatch) -> dict[str, torch.Tensor]:
        batch = {"rows": torch.from_numpy(micro.rows)}
        for name, part in parts.items():
            batch |= part.take(name, micro.rows)
        return batch

    table = _table(size, np.maximum(costs, 1), f"arrays {digest:08x} {size}")
    return Samples(table, read, lambda rows: "arrays in memory")


def from_dataset(
    items: Any,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    processes: int = 0,
    costs: Sequence[int] | None = None,
    name: str | None = None,
) -> Samples:
    """Any map-style dataset: `items[i]`, or `items.__getitems__([i, ...])` where there is one, as Hugging Face has.

    Threads read it; `processes` do where reading keeps Python busy (made here, by forking: before CUDA is used). `name`
    tells one set from another when a run is resumed.
    """
    size = len(items)
    put_together = collate or torch.utils.data.default_collate
    several = getattr(items, "__getitems__", None)

    def make(rows: list[int]) -> Any:
        return put_together(several(rows) if several is not None else [items[row] for row in rows])

    pool = Processes(lambda rows, room: _packed(make(rows), room), processes, ROOM_BYTES) if processes else None

    def read(micro: MicroBatch) -> Any:
        rows = micro.rows.tolist()
        values = make(rows) if pool is None else pool.run([rows], _unpacked)[0]
        numbers = torch.from_numpy(micro.rows)
        return {**values, "rows": numbers} if isinstance(values, Mapping) else Collated(values, numbers)

    words = name or f"{type(items).__module__}.{type(items).__qualname__}"
    weights = np.ones(size, np.int64) if costs is None else np.asarray(costs, np.int64)
    table = _table(size, weights, f"dataset {hashlib.sha256(words.encode()).hexdigest()[:16]} {size}")
    return Samples(table, read, lambda rows: words)


def from_files(
    folder: Location | str,
    decode: Callable[[Path], Any],
    *,
    endings: tuple[str, ...] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    processes: int = 0,
) -> Samples:
    """A file a sample: all files below a folder, in the order of their names, or those with these endings."""
    root = Location(folder)
    found = sorted(_below(root, endings))
    if not found:
        raise UserError(f"{root} holds no files{f' that end in {endings}' if endings else ''}.")

    class Files:
        def __len__(self) -> int:
            return len(found)

        def __getitem__(self, number: int) -> Any:
            return decode(root / found[number][0])

    names = hashlib.sha256("\n".join(f"{name} {size}" for name, size in found).encode()).hexdigest()
    made = from_dataset(Files(), collate=collate, processes=processes, name=names)
    return dataclasses.replace(made, files_of=lambda rows: ", ".join(str(root / found[row][0]) for row in rows[:3]))


def store_samples(store: PackedStore, labels: Sequence[str]) -> Samples:
    """A packed store: ragged columns as flat tensors with one `offsets`, and label columns of its table."""

    def read(micro: MicroBatch) -> dict[str, torch.Tensor]:
        found = store.gather(micro)
        batch = {name: torch.from_numpy(column) for name, column in found.columns.items()}
        batch |= {name: torch.from_numpy(np.asarray(store.table.columns[name][found.rows])) for name in labels}
        return {**batch, "offsets": torch.from_numpy(found.offsets), "rows": torch.from_numpy(found.rows)}

    width = sum(column.dtype.itemsize for column in store.columns.values())
    return Samples(store.table, read, store.files_of, bytes_per_cost=3.0 * width + 16)


class _AsArray:
    """A tensor on its way between processes: torch would open a file for each."""

    def __init__(self, array: Array) -> None:
        self.array = array


def _packed(values: Any, room: memoryview) -> tuple[tuple[bytes, list[int]], int]:
    """Numbers go into the shared memory as far as it reaches, the rest through the pipe."""
    buffers: list[memoryview] = []
    used = 0

    def outside(buffer: pickle.PickleBuffer) -> bool:
        nonlocal used
        raw = buffer.raw()
        if used + raw.nbytes > len(room):
            return True  # inside the pickle
        room[used : used + raw.nbytes] = raw
        buffers.append(raw)
        used += raw.nbytes
        return False

    plain = map_leaves(values, lambda leaf: _AsArray(leaf.numpy()) if isinstance(leaf, torch.Tensor) else leaf)
    content = pickle.dumps(plain, protocol=5, buffer_callback=outside)
    return (content, [buffer.nbytes for buffer in buffers]), used


def _unpacked(answer: tuple[bytes, list[int]], room: memoryview) -> Any:
    content, sizes = answer
    copy = bytearray(room)  # the process will use its memory again
    borders = offsets_of(np.array(sizes, np.int64)).tolist()
    buffers = [memoryview(copy)[begin:end] for begin, end in pairwise(borders)]
    plain = pickle.loads(content, buffers=buffers)  # of a process of our own
    return map_leaves(plain, lambda leaf: torch.from_numpy(leaf.array) if isinstance(leaf, _AsArray) else leaf)


@dataclass(frozen=True)
class _DenseColumn:
    content: Array

    def __len__(self) -> int:
        return len(self.content)

    def take(self, name: str, rows: Indices) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(self.content[rows])}


@dataclass(frozen=True)
class _RaggedColumn:
    content: Array
    first: Indices
    counts: Indices

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, name: str, rows: Indices) -> dict[str, torch.Tensor]:
        indices, offsets = range_indices(self.first[rows], self.counts[rows])
        return {name: torch.from_numpy(self.content[indices]), f"{name}_offsets": torch.from_numpy(offsets)}


def _column(name: str, values: Any) -> _DenseColumn | _RaggedColumn:
    if isinstance(values, list | tuple):
        pieces = [np.asarray(piece) for piece in values]
        if any(piece.ndim == 0 for piece in pieces):
            return _DenseColumn(np.asarray(values))
        counts = np.array([len(piece) for piece in pieces], np.int64)
        content = np.concatenate(pieces) if pieces else np.zeros(0)
        return _RaggedColumn(content, offsets_of(counts)[:-1], counts)
    array = np.asarray(values)
    if array.ndim == 0 or array.dtype.kind not in "biuf":
        raise UserError(f"The column {name} must be an array of numbers, one row a sample, not {array.dtype}.")
    return _DenseColumn(array)


def _table(size: int, costs: Indices, fingerprint: str) -> SampleTable:
    if not size:
        raise UserError("There are no samples.")
    columns: dict[str, Array] = {
        "shard": np.zeros(size, np.int32),
        "first": offsets_of(costs)[:-1],
        "count": costs.astype(np.int32),
        "id": np.arange(size),
    }
    return SampleTable(("all",), columns, fingerprint, shard_starts=np.array([0, size]))


def _below(folder: Location, endings: tuple[str, ...], before: str = "") -> Iterator[tuple[str, int]]:
    for name, found in list_folder(folder).items():
        if name.startswith("."):
            continue
        if found.is_folder:
            yield from _below(folder / name, endings, f"{before}{name}/")
        elif not endings or name.lower().endswith(endings):
            yield f"{before}{name}", found.size
