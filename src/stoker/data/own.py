"""Other people's data, as samples that can be asked for by number: arrays, Parquet, files, any map-style dataset.

`samples.loader(batch_size=64)` is a loader for a loop of one's own; `samples.run_data()` is what a recipe hands to the
engine. Every batch carries its labels and `rows`, which samples it holds: nothing has to be looked up beside it.
"""

import dataclasses
import hashlib
import json
import pickle
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
from stoker.data.locations import Location, is_folder, named, open_local, walk
from stoker.data.order import ExactOrder, StorageOrder, hashed
from stoker.data.plan import MicroBatch, Position
from stoker.data.processes import Processes
from stoker.data.ragged import Array, Indices, offsets_of
from stoker.data.samples import ListSubset, SampleTable, Subset, whole
from stoker.data.source import RunData
from stoker.data.stages import Stage
from stoker.errors import UserError
from stoker.runs.environment import environment_number
from stoker.settings import Layer, resolve

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
        if batch_size is None and settings.get("batch_cost") is None:
            raise UserError("A step needs a size: loader(batch_size=64), or loader(batch_cost=10_000).")
        _check_honoured(settings)
        config, _ = resolve(LoaderConfig(), [Layer("loader(...)", {"batch_size": batch_size, **settings})])
        if not isinstance(seed, int) or seed < 0:
            raise UserError(f"A seed is a whole number from 0 on, not {seed!r}.")
        data = self.run_data(validation=None)
        if not shuffle:
            data = dataclasses.replace(data, order=lambda seed, epoch: StorageOrder())
        own = environment_number("RANK") if rank is None else rank
        count = max(1, environment_number("WORLD_SIZE")) if num_ranks is None else num_ranks
        if not 0 <= own < count:
            raise UserError(f"There is no rank {own} of {count}.")
        target = _device(device)
        loader = loader_of(data, config, target, training=True, rank=own, num_ranks=count)
        return EpochLoader(loader, seed, target)

    def run_data(self, validation: float | None = 0.1, facts: Mapping[str, Any] | None = None) -> RunData:
        """What a recipe hands to the engine. `validation` is the share that is held out, told by a hash of each number."""
        everything: Subset = whole(self.table)
        training, held = everything, everything
        try:
            json.dumps(facts or {}, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(f"The facts must be JSON, for the run to keep: {error}.") from error
        if validation is not None:
            if not 0 < validation < 1:
                raise UserError(f"The share that is held out lies between 0 and 1, and is {validation}.")
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
    stands, and the next `iter` after `load_state_dict` goes on from there, with the whole of a step that comes in pieces."""

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
            for number, batch in enumerate(step.batches, start=1):
                if number == len(step.batches):  # a step in pieces is done with its last one, and not in between
                    self._position = step.after
                yield batch.values if isinstance(batch, Collated) else batch
        self._position, self._goes_on = Position(self._position.seed, epoch + 1), True

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self._position)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        try:
            position = Position(**{name: int(value) for name, value in state.items()})
        except (TypeError, ValueError) as error:
            raise UserError(f"{state} is no position of a loader: {error}.") from error
        if not 0 <= position.consumed <= len(self._loader.plan) or min(position.seed, position.epoch) < 0:
            raise UserError(f"{state} is no position in {len(self._loader.plan):,} samples: is it of other data?")
        self._position, self._goes_on = position, True


@dataclass(frozen=True)
class Collated:
    """Whatever a dataset's samples were collated to, and which samples they are. Unpacks like what it holds."""

    values: Any
    rows: torch.Tensor

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, key: Any) -> Any:
        return self.values[key]


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
    if not hasattr(items, "__len__") or not hasattr(items, "__getitem__"):
        raise UserError(f"A {type(items).__name__} has no length or no items by number: a map-style dataset is needed.")
    size = len(items)
    put_together = collate or torch.utils.data.default_collate
    several = getattr(items, "__getitems__", None)
    if processes < 0:
        raise UserError(f"processes is {processes}: none are 0.")

    def make(rows: list[int]) -> Any:
        if not rows:  # a rank that got nothing of a short last step: the same structure with no samples
            return map_leaves(make([0]), lambda leaf: leaf[:0] if isinstance(leaf, torch.Tensor) else leaf)
        return put_together(several(rows) if several is not None else [items[row] for row in rows])

    pool = Processes(lambda rows, room: _packed(make(rows), room), processes, ROOM_BYTES) if processes else None

    def read(micro: MicroBatch) -> Any:
        rows = micro.rows.tolist()
        values = make(rows) if pool is None else pool.run([rows], _unpacked)[0]
        numbers = torch.from_numpy(micro.rows)
        if isinstance(values, Mapping) and "rows" in values:
            raise UserError("The samples have a key `rows`, which batches use themselves: rename it.")
        return {**values, "rows": numbers} if isinstance(values, Mapping) else Collated(values, numbers)

    words = name or f"{type(items).__module__}.{type(items).__qualname__}"
    weights = np.ones(size, np.int64) if costs is None else np.asarray(costs, np.int64)
    if weights.shape != (size,) or (weights < 1).any():
        raise UserError(f"costs must be {size:,} whole numbers from 1 on, one a sample.")
    table = memory_table(size, weights, f"dataset {hashlib.sha256(words.encode()).hexdigest()[:16]} {size}")
    return Samples(table, read, lambda rows: words)


def from_files(
    folder: Location | str,
    decode: Callable[[Path], Any],
    *,
    endings: Sequence[str] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    processes: int = 0,
) -> Samples:
    """A file a sample: all files below a folder, in the order of their names, or those with these endings."""
    root = named(folder)
    if not is_folder(root):
        raise UserError(f"There is no folder {root}.")
    suffixes = (endings,) if isinstance(endings, str) else tuple(endings)
    found = sorted(_chosen(root, tuple(suffix.lower() for suffix in suffixes)))
    if not found:
        raise UserError(f"{root} holds no files{f' that end in {endings}' if endings else ''}.")

    class Files:
        def __len__(self) -> int:
            return len(found)

        def __getitem__(self, number: int) -> Any:
            return decode(open_local(root / found[number][0]))

    names = hashlib.sha256("\n".join(f"{name} {size}" for name, size in found).encode()).hexdigest()
    made = from_dataset(Files(), collate=collate, processes=processes, name=names)
    return dataclasses.replace(made, files_of=lambda rows: ", ".join(str(root / found[row][0]) for row in rows[:3]))


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


def _check_honoured(settings: Mapping[str, Any]) -> None:
    for name in ("sample_cost", "bad_shards", "window"):
        if name in settings:
            raise UserError(f"{name} means nothing to these samples: they are not thinned, and no shards are read.")


def _device(name: "str | torch.device") -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"{name!r} is no device: use cpu, cuda, cuda:N or auto.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"The device is {device}, and torch sees no GPU here. Use cpu or auto.")
    return device


def memory_table(size: int, costs: Indices, fingerprint: str) -> SampleTable:
    if not size:
        raise UserError("There are no samples.")
    columns: dict[str, Array] = {
        "shard": np.zeros(size, np.int32),
        "first": offsets_of(costs)[:-1],
        "count": costs.astype(np.int32),
        "id": np.arange(size),
    }
    return SampleTable(("all",), columns, fingerprint, shard_starts=np.array([0, size]))


def _chosen(folder: Location, endings: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    for name, found in walk(folder):
        if not endings or name.lower().endswith(endings):
            if not found.is_plain:
                raise UserError(f"{folder / name} is no plain file.")
            yield name, found.size
