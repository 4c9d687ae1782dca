"""Where the events of a run come from: read directly, packed, or resident on the GPU, as the configuration says."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from stoker import console
from stoker.data import samples, store
from stoker.data.cache import cache_folder, cache_lock, free_bytes
from stoker.data.loader import LoaderConfig
from stoker.data.order import ExactOrder, Order, WindowOrder
from stoker.data.pack import pack
from stoker.data.plan import MicroBatch
from stoker.data.quarantine import BadShard, Quarantine
from stoker.data.ragged import Array, Indices, Ragged, sample_of_row
from stoker.data.samples import SampleTable, Split, Subset, block_positions, split_by_hash, split_by_shard
from stoker.data.stages import Stage
from stoker.data.store import PackedStore, is_store, open_store
from stoker.data.thin import thin
from stoker.data.window import WindowSource
from stoker.errors import UserError
from stoker.recipe import RunConfig, RunData
from stoker.recipes.icecube import events
from stoker.recipes.icecube.batch import AUXILIARY, FIRST_OF_DOM, EventBatch, HostBatch, collate
from stoker.recipes.icecube.resident import ResidentEvents
from stoker.recipes.icecube.simulate import simulate
from stoker.recipes.icecube.table import Part, check_layout, open_events
from stoker.settings import AlsoCalled, config

# Host memory that a pulse needs on its way: nine bytes gathered, eight for its index, and as much again in between.
BYTES_PER_PULSE = 40.0
DECODED_BYTES = 11  # a pulse in the cache of row groups
DECODING_BYTES = (
    70  # a pulse of the block that a thread decodes: as arrow has it, converted, in its new order, and indices
)


Orders = Callable[[Subset], Callable[[int, int], Order]]


@config
class IceCubeData:
    path: Annotated[Path, AlsoCalled("dir", "data_dir", "root")] | None = (
        None  # Kaggle layout or packed; None: simulate
    )
    mode: Literal["auto", "direct", "packed", "resident"] = "auto"  # auto packs once, if the disk has room
    split: Literal["files", "hash"] = "files"  # what is held out: whole files, or events by a hash of their id
    validation: Annotated[float, Field(gt=0, lt=1)] | tuple[int, ...] = 0.05  # share held out, or numbers of files
    only_present: bool = False  # use the pulse files that are there, where train_meta.parquet lists more
    resident_share: Annotated[float, Field(gt=0, le=0.9)] = 0.3  # of the GPU's free memory that events may take
    simulate_events: Annotated[int, Field(ge=10)] = 60_000  # when there is no path
    simulate_files: Annotated[int, Field(ge=2)] = 12

    def __post_init__(self) -> None:
        if self.split == "hash" and not isinstance(self.validation, float):
            raise ValueError(f"split hash needs a share of the events in validation, not {self.validation}")

    def without_effect(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why."""
        found: dict[str, str] = {}
        if self.path is not None:
            found |= dict.fromkeys(("simulate_events", "simulate_files"), "data.path is given, nothing is simulated")
        else:
            found["only_present"] = "all files of a simulated set are there"
        if self.mode in ("direct", "packed"):
            found["resident_share"] = f"data.mode is {self.mode}"
        if self.mode in ("packed", "resident"):
            found["loader.window"] = f"data.mode is {self.mode}, whose order is exact"
        return found


@dataclass(frozen=True)
class _Opened:
    """A source with its table, and how its pulses stand."""

    source: Any
    table: SampleTable
    mode: str
    grouped: bool
    root: Path


def open_data(run: RunConfig, device: torch.device) -> RunData:
    root = data_root(run)
    opened = _open(root, run.data, run.loader, device)
    quarantine = Quarantine(opened.table, run.loader.bad_shards)
    split = _split(opened.table, run.data, quarantine.shards)
    order: Orders = _exact_orders
    if isinstance(opened.source, WindowSource):
        order = _window_orders(opened.source, opened.table, run.loader)
    description = {
        "path": str(root),
        "mode": opened.mode,
        "split": split.description,
        "training": len(split.training),
        "validation": len(split.validation),
        "fingerprint": opened.table.fingerprint,
        "left_out": {opened.table.shards[shard]: reason for shard, reason in quarantine.shards.items()},
    }
    return RunData(
        table=opened.table,
        training=split.training,
        validation=split.validation,
        order=order,
        stages=_stages(opened, run.loader, quarantine),
        where=opened.source.where,
        description=description,
        quarantine=quarantine,
        bytes_per_cost=BYTES_PER_PULSE,
        cache_bytes=_reserved_bytes(run.loader, opened.table) if opened.mode == "direct" else 0,
    )


@dataclass(frozen=True)
class AllEvents:
    """Every event of a data set in the order of its files, with or without targets, each read once."""

    table: SampleTable
    stages: list[Stage]
    where: Callable[[Indices], str]
    cache_bytes: int


def open_all(run: RunConfig) -> AllEvents:
    """The competition's test events where the directory has them, else all others, or those of a packed store."""
    root = data_root(run)
    if is_store(root):
        packed = open_store(root)
        opened, cache_bytes = _Opened(packed, packed.table, "packed", grouped=True, root=root), 0
    else:
        part: Part = "test" if (root / "test_meta.parquet").exists() else "train"
        table = open_events(root, part=part, only_present=run.data.only_present)
        cache_bytes = _reserved_bytes(run.loader, table)
        source = events.open_pulses(root, table, _cache_bytes(run.loader, table))
        opened = _Opened(source, table, "direct", grouped=False, root=root)
    quarantine = Quarantine(opened.table, "stop")
    return AllEvents(opened.table, _stages(opened, run.loader, quarantine), opened.source.where, cache_bytes)


def load_rows(stages: Sequence[Stage], rows: Indices, device: torch.device) -> EventBatch:
    """These events as one batch on the device, in the order of their rows."""
    value: Any = MicroBatch(np.sort(rows), 0, 0)
    for stage in stages:
        value = stage.run(value)
    batch: EventBatch = value.to(device)
    return batch


def data_root(run: RunConfig) -> Path:
    """The user's directory, or simulated events in the cache, made on first use."""
    if run.data.path is not None:
        return Path(run.data.path)
    on_gpu = run.run.device != "cpu" and torch.cuda.is_available()
    return _simulated(run.data.simulate_events, run.data.simulate_files, run.run.seed, "cuda" if on_gpu else "cpu")


def _open(root: Path, config: IceCubeData, loader: LoaderConfig, device: torch.device) -> _Opened:
    if config.mode == "resident" and device.type != "cuda":
        raise UserError("data.mode resident keeps events in the memory of a GPU, and this run uses the CPU.")
    if is_store(root):
        if config.mode == "direct":
            raise UserError(f"data.mode is direct, and {root} is a packed store: use packed or auto.")
        events.open_geometry(root)
        return _opened_store(open_store(root), config, device)
    check_layout(root)
    events.open_geometry(root)  # before anything that takes long
    table = open_events(root, only_present=config.only_present)
    if not table.unreadable:
        _split(table, config, ())
    if config.mode == "direct" or (config.mode == "auto" and not _may_pack(root, table)):
        _check_window(table, loader)
        source = events.open_window(root, table, _cache_bytes(loader, table))
        return _Opened(source, table, "direct", grouped=False, root=root)
    return _opened_store(_packed_copy(root, table, loader), config, device)


def _opened_store(packed: PackedStore, config: IceCubeData, device: torch.device) -> _Opened:
    fits = device.type == "cuda" and packed.num_bytes <= config.resident_share * torch.cuda.mem_get_info(device)[0]
    if config.mode == "resident" and not fits:
        raise UserError(
            f"data.mode is resident, and the {packed.num_bytes / 1e9:.1f} GB of events are more than the share "
            f"{config.resident_share} of the GPU's free memory. Use packed, or raise data.resident_share."
        )
    if fits and config.mode in ("auto", "resident"):
        return _Opened(ResidentEvents(packed, device), packed.table, "resident", grouped=True, root=packed.path)
    return _Opened(packed, packed.table, "packed", grouped=True, root=packed.path)


def _may_pack(root: Path, table: SampleTable) -> bool:
    """Whether there is a packed copy, or room for one with as much again to spare."""
    if is_store(_copy_path(table)):
        return True
    if table.unreadable:
        return False
    needed, free = events.packed_bytes(table), free_bytes(cache_folder())
    if 2 * needed > free:
        console.say(
            f"Reading {root} directly: a packed copy would take {needed / 1e9:.1f} GB and the cache's disk has "
            f"{free / 1e9:.1f} GB free. `stoker pack icecube {root} OUT` packs elsewhere."
        )
        return False
    return True


def _packed_copy(root: Path, table: SampleTable, loader: LoaderConfig) -> PackedStore:
    path = _copy_path(table)
    with cache_lock(path, f"Another process packs {root}: waiting for it."):
        if is_store(path):
            return open_store(path)
        console.say(f"Packing {len(table):,} events of {root} into {path}, once; --data.mode direct does without.")
        packing = events.packing(root, table, threads=loader.num_threads)
        packed = pack(path, packing, threads=loader.num_threads)
        assert packed is not None, "a single rank completes its own store"
        return packed


def _copy_path(table: SampleTable) -> Path:
    return cache_folder() / "packed" / f"icecube-{store.VERSION}.{samples.VERSION}-{table.fingerprint[:16]}"


def _split(table: SampleTable, config: IceCubeData, left_out: Collection[int]) -> Split:
    folder = cache_folder() / "splits"
    if config.split == "hash":
        assert isinstance(config.validation, float), "checked by IceCubeData"
        return split_by_hash(table, config.validation, folder, left_out)
    return split_by_shard(table, config.validation, folder, left_out)


def _exact_orders(subset: Subset) -> Callable[[int, int], Order]:
    return lambda seed, epoch: ExactOrder(len(subset), seed, epoch)


def _window_orders(source: WindowSource, table: SampleTable, loader: LoaderConfig) -> Orders:
    """Orders of a subset; making one tells the source what comes, so that it lays row groups out accordingly."""

    def of_subset(subset: Subset) -> Callable[[int, int], Order]:
        blocks = block_positions(table, subset)

        def of_epoch(seed: int, epoch: int) -> Order:
            order = WindowOrder(blocks, len(subset), loader.window, seed, epoch)

            def sort_keys(rows: Indices) -> Indices | None:
                positions = subset.positions(rows)
                inside = (positions < len(subset)) & (subset.rows(np.minimum(positions, len(subset) - 1)) == rows)
                return order.sort_keys(positions) if inside.all() else None

            assert table.blocks is not None, "a window order has blocks"
            starts = subset.rows(order.block_starts)
            source.follow(sort_keys, np.searchsorted(table.blocks, starts, side="right") - 1)
            return order

        return of_epoch

    return of_subset


def _check_window(table: SampleTable, loader: LoaderConfig) -> None:
    """A window whose row groups do not fit the cache would decode them again and again."""
    some = table.columns["count"][np.linspace(0, len(table) - 1, min(len(table), 4096)).astype(np.int64)]
    needed = int(2.5 * min(loader.window, len(table)) * some.mean() * DECODED_BYTES)
    decoding = _decoding_bytes(loader, table)
    if needed > _cache_bytes(loader, table):
        raise UserError(
            f"A window of {loader.window:,} events keeps about {needed / 1e6:,.0f} MB of row groups in memory, and decoding "
            f"them in {loader.num_threads} threads takes {decoding / 1e6:,.0f} MB more; loader.ram_bytes is "
            f"{loader.ram_bytes / 1e6:,.0f} MB, and half of the rest is for row groups. {2 * needed + decoding:,} would do; "
            f"or lower loader.window or loader.threads."
        )


def _decoding_bytes(loader: LoaderConfig, table: SampleTable) -> int:
    """What the threads need while each decodes the largest block."""
    first, count = table.columns["first"], table.columns["count"]
    blocks = table.blocks if table.blocks is not None else np.zeros(1, np.int64)
    last = np.append(blocks[1:], len(table)) - 1
    largest = int((first[last] + count[last] - first[blocks]).max()) if len(table) else 0
    return loader.num_threads * largest * DECODING_BYTES


def _cache_bytes(loader: LoaderConfig, table: SampleTable) -> int:
    """Of decoded row groups: half of what decoding leaves; the other half is for batches."""
    return max(0, loader.ram_bytes - _decoding_bytes(loader, table)) // 2


def _reserved_bytes(loader: LoaderConfig, table: SampleTable) -> int:
    return _cache_bytes(loader, table) + _decoding_bytes(loader, table)


@dataclass(frozen=True)
class _Read:
    micro: MicroBatch
    rows: Indices
    pulses: Ragged
    doms: Array | None  # of each event, where pulses are grouped by DOM

    @property
    def num_bytes(self) -> int:
        return self.pulses.num_bytes


def _stages(opened: _Opened, loader: LoaderConfig, quarantine: Quarantine) -> list[Stage]:
    """Read, thin, collate; resident events are collated where they lie."""
    cap = loader.sample_cost
    if opened.mode == "resident":
        return [Stage("plan", lambda micro: opened.source.request(micro, cap))]

    def thinned(read: _Read) -> _Read:
        return read if cap is None else _thin(read, opened.table, cap, grouped=opened.grouped)

    def collated(read: _Read) -> HostBatch:
        labels = {name: np.asarray(opened.table.columns[name][read.rows]) for name in events.LABELS}
        return collate(read.pulses, labels, read.rows, read.doms)

    read = Stage("read", lambda micro: _read(opened, quarantine, micro))
    return [read, Stage("thin", thinned), Stage("collate", collated)]


def _read(opened: _Opened, quarantine: Quarantine, micro: MicroBatch) -> _Read:
    """The pulses of a micro-batch, without those of shards that turn out to be bad, if the policy allows that."""
    while True:
        rows = quarantine.usable(micro.rows)
        try:
            return _read_rows(opened, micro, rows)
        except BadShard as error:
            if error.shard not in opened.table.columns["shard"][rows]:
                raise  # none of its samples was asked for: trying again would find it again
            quarantine.add(error)


def _read_rows(opened: _Opened, micro: MicroBatch, rows: Indices) -> _Read:
    if isinstance(opened.source, WindowSource):
        pulses, rows = opened.source.gather(rows)
    else:
        pulses = opened.source.gather(rows)
    if not opened.grouped:
        events.check_pulses(opened.root, opened.table, rows, pulses.columns, pulses.offsets)
        return _Read(micro, rows, stored_columns(pulses), None)
    doms = np.asarray(opened.table.columns["doms"][rows])
    whole = opened.source.verification.done  # then it is what was packed
    if not whole and ((doms < 0).any() or (doms > np.diff(pulses.offsets)).any()):
        raise UserError(f"{opened.root} is damaged: an event has more DOMs than pulses. Pack it again.")
    return _Read(micro, rows, pulses, doms)


def stored_columns(pulses: Ragged) -> Ragged:
    """Columns of the Parquet files under the names of the store."""
    old = pulses.columns
    columns = {
        "time": old["time"],
        "charge": old["charge"],
        "sensor": old["sensor_id"],
        "flags": old["auxiliary"].view(np.uint8) * np.uint8(AUXILIARY),
    }
    return Ragged(columns, pulses.offsets)


def _thin(read: _Read, table: SampleTable, cap: int, *, grouped: bool) -> _Read:
    ids = np.asarray(table.columns["id"][read.rows])
    auxiliary = (read.pulses.columns["flags"] & AUXILIARY).astype(bool)
    pulses = thin(read.pulses, cap, ids, read.micro.seed, read.micro.epoch, last=auxiliary)
    if grouped and pulses is not read.pulses:  # the first pulse of a DOM may be gone: mark anew
        event, sensor = sample_of_row(pulses.offsets), pulses.columns["sensor"]
        is_first = (np.diff(event, prepend=-1) != 0) | (np.diff(sensor, prepend=-1) != 0)
        flags = (pulses.columns["flags"] & AUXILIARY) | np.where(is_first, FIRST_OF_DOM, 0).astype(np.uint8)
        doms = np.bincount(event[is_first], minlength=len(read.rows))
        return _Read(read.micro, read.rows, Ragged({**pulses.columns, "flags": flags}, pulses.offsets), doms)
    return _Read(read.micro, read.rows, pulses, read.doms)


@cache
def _simulated(num_events: int, num_files: int, seed: int, device: str) -> Path:
    """Made on the GPU where the run uses one: much faster, and other events for the same seed."""
    folder = cache_folder() / "simulated" / f"icecube-{num_events}-{num_files}-{seed}-{device}"
    with cache_lock(folder, "Another process simulates the same events: waiting for it."):
        if not (folder / "train_meta.parquet").exists():
            console.say(f"No data.path was given: simulating {num_events:,} events into {folder}.")
            simulate(folder, num_events=num_events, num_files=num_files, seed=seed, device=device, force=True)
    return folder
