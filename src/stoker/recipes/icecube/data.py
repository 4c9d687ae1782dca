"""Where the events of a run come from: read directly, packed, or resident on the GPU, as the configuration says."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from stoker import console
from stoker.data import samples, store
from stoker.data.bad_samples import BadSamples, Quarantine
from stoker.data.cache import budget_bytes, cache_folder, cache_lock, free_bytes, made_bytes
from stoker.data.loader import LoaderConfig
from stoker.data.locations import DataPath, Location, is_file, named
from stoker.data.pack import pack
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices
from stoker.data.samples import SampleTable, Split, Subset, split_by_hash, split_by_shard, whole
from stoker.data.source import Content, RunData
from stoker.data.stages import Stage
from stoker.data.storage.keeping import make_room
from stoker.data.storage.urls import Url
from stoker.data.store import PackedStore, is_store, open_store
from stoker.errors import UserError
from stoker.recipe import RunConfig
from stoker.recipes.icecube import events
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.content import contents_of
from stoker.recipes.icecube.graphnet import as_layout, loose_facts
from stoker.recipes.icecube.simulate import simulate
from stoker.recipes.icecube.sources import (
    DirectEvents,
    EventSource,
    PackedEvents,
    ResidentEvents,
    check_window,
)
from stoker.recipes.icecube.table import Part, check_layout, open_events
from stoker.recipes.icecube.truth import targets
from stoker.settings import AlsoCalled, config

# Host memory that a pulse needs on its way: nine bytes gathered, eight for its index, and as much again in between.
BYTES_PER_PULSE = 40.0
SIMULATED_BYTES = 1000  # of an event on disk: 872 in a set of 40,000


@config
class IceCubeData:
    path: Annotated[DataPath, AlsoCalled("dir", "data_dir", "root")] | None = (
        None  # Kaggle layout, packed, or GraphNeT's SQLite or Parquet; None: simulate
    )
    pulses: str | None = None  # table of a GraphNeT database to use, where it has several
    truth: str | None = None  # likewise, of directions
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
        if self.path is None:
            found |= dict.fromkeys(("pulses", "truth"), "events are simulated")
        if self.path is not None:
            found |= dict.fromkeys(("simulate_events", "simulate_files"), "data.path is given, nothing is simulated")
        else:
            found["only_present"] = "all files of a simulated set are there"
        if self.mode in ("direct", "packed"):
            found["resident_share"] = f"data.mode is {self.mode}"
        if self.mode in ("packed", "resident") and not isinstance(self.path, Url):
            found["loader.window"] = f"data.mode is {self.mode}, whose order is exact"
        return found


def open_data(run: RunConfig, device: torch.device) -> RunData:
    root, bad_samples = data_root(run), BadSamples()
    table, open_source = _open(root, run.data, run.loader, device)
    quarantine = Quarantine(table, run.loader.bad_shards, bad_samples)
    split = _split(table, run.data, quarantine.shards)
    source = open_source(split.training)
    truth = targets(root, table, energy=run.model.energy, vertex=run.model.vertex)
    description = {
        "path": str(run.data.path or root),
        "mode": source.mode,
        "split": split.description,
        "training": len(split.training),
        "validation": len(split.validation),
        "fingerprint": _fingerprint(table, truth),
        **({"order": source.kind_of_order} if source.kind_of_order != "exact" else {}),
        "left_out": {table.shards[shard]: reason for shard, reason in quarantine.shards.items()},
    }
    return RunData(
        table=table,
        training=split.training,
        validation=split.validation,
        order=source.order(split.training),
        stages=source.stages(run.loader.sample_cost, quarantine, truth),
        files_of=source.files_of,
        contents=_contents(root, source, run.loader),
        description=description,
        facts=events.open_geometry(root).facts(),
        loose_facts=loose_facts(run.data.path),
        honours=frozenset({"sample_cost", "bad_shards", "window", "order"}),
        bad_samples=bad_samples,
        bytes_per_cost=BYTES_PER_PULSE,
        cache_bytes=source.cache_bytes,
        ahead=source.ahead(split.training),
    )


def _contents(
    root: Location, source: EventSource, loader: LoaderConfig
) -> Callable[[Indices], Iterable[Content]] | None:
    """Read from any place, and not through the window of an epoch; what lies on a device is not read back."""
    if isinstance(source, DirectEvents):
        return partial(contents_of, DirectEvents(root, source.table, loader))
    return partial(contents_of, source) if isinstance(source, PackedEvents) else None


def _fingerprint(table: SampleTable, truth: Array | None) -> str:
    """Of what is trained on, with what is learnt beside the direction."""
    if truth is None:
        return table.fingerprint
    return hashlib.sha256(table.fingerprint.encode() + truth.tobytes()).hexdigest()


def open_all(run: RunConfig) -> RunData:
    """Every event of a data set in the order of its files, with or without targets, each read once: the competition's test
    events where the directory has them, else all others, or those of a packed store."""
    root = data_root(run)
    source: EventSource
    if is_store(root):
        source = PackedEvents(open_store(root), run.loader)
    else:
        part: Part = "test" if is_file(root / "test_meta.parquet") else "train"
        source = DirectEvents(root, open_events(root, part=part, only_present=run.data.only_present), run.loader)
    everything, bad_samples = whole(source.table), BadSamples()
    return RunData(
        table=source.table,
        training=everything,
        validation=everything,
        order=source.order(everything),
        stages=source.stages(run.loader.sample_cost, Quarantine(source.table, "stop", bad_samples), None),
        files_of=source.files_of,
        description={"path": str(run.data.path or root), "fingerprint": source.table.fingerprint},
        facts=events.open_geometry(root).facts(),
        loose_facts=loose_facts(run.data.path),
        bad_samples=bad_samples,
        bytes_per_cost=BYTES_PER_PULSE,
        cache_bytes=source.cache_bytes,
    )


def load_rows(stages: Sequence[Stage], rows: Indices, device: torch.device) -> EventBatch:
    """These events as one batch on the device, in the order of their rows."""
    value: Any = MicroBatch(np.sort(rows), 0, 0)
    for stage in stages:
        value = stage.run(value)
    batch: EventBatch = value.to(device)
    return batch


def data_root(run: RunConfig) -> Location:
    """The user's directory, or simulated events in the cache, made on first use."""
    if run.data.path is not None:
        return as_layout(named(run.data.path), run.data.pulses, run.data.truth)
    on_gpu = run.run.device != "cpu" and torch.cuda.is_available()
    return _simulated(run.data.simulate_events, run.data.simulate_files, run.run.seed, "cuda" if on_gpu else "cpu")


def _open(
    root: Location, config: IceCubeData, loader: LoaderConfig, device: torch.device
) -> tuple[SampleTable, Callable[[Subset], EventSource]]:
    """The table of all events, and what opens their pulses once it is known which of them are trained on."""
    if loader.micro_cost is not None and loader.sample_cost is None:
        raise UserError(
            f"loader.micro_cost {loader.micro_cost} cannot be kept while a single event may have more pulses: set "
            f"loader.sample_cost to {loader.micro_cost} or less, and longer events are thinned to that."
        )
    if config.mode == "resident" and device.type != "cuda":
        raise UserError("data.mode resident keeps events in the memory of a GPU, and this run uses the CPU.")
    if is_store(root):
        if config.mode == "direct":
            raise UserError(f"data.mode is direct, and {root} is a packed store: use packed or auto.")
        events.open_geometry(root)
        return _of_store(open_store(root), config, loader, device)
    check_layout(root)
    events.open_geometry(root)  # before anything that takes long
    table = open_events(root, only_present=config.only_present)
    if not table.unreadable:
        _split(table, config, ())
    if config.mode == "direct" or (config.mode == "auto" and not _may_pack(root, table)):
        check_window(table, loader)
        return table, lambda training: DirectEvents(root, table, loader, training)
    return _of_store(_packed_copy(root, table, loader), config, loader, device)


def _of_store(
    packed: PackedStore, config: IceCubeData, loader: LoaderConfig, device: torch.device
) -> tuple[SampleTable, Callable[[Subset], EventSource]]:
    fits = device.type == "cuda" and packed.num_bytes <= config.resident_share * torch.cuda.mem_get_info(device)[0]
    if config.mode == "resident" and not fits:
        raise UserError(
            f"data.mode is resident, and the {packed.num_bytes / 1e9:.1f} GB of events are more than the share "
            f"{config.resident_share} of the GPU's free memory. Use packed, or raise data.resident_share."
        )
    resident = fits and config.mode in ("auto", "resident")
    return packed.table, lambda training: ResidentEvents(packed, device) if resident else PackedEvents(packed, loader)


def _may_pack(root: Location, table: SampleTable) -> bool:
    """Whether there is a packed copy, or room for one with as much again to spare; remote files are not copied first."""
    if isinstance(root, Url):
        console.say(f"Reading {root} directly; `stoker pack icecube {root} OUT` makes a store that is read faster.")
        return False
    if is_store(_copy_path(table)):
        return True
    if table.unreadable:
        return False
    needed, free = events.packed_bytes(table), free_bytes(cache_folder())
    room = budget_bytes() - made_bytes()
    if needed > room:
        console.say(
            f"Reading {root} directly: a packed copy would take {needed / 1e9:.1f} GB and the cache's budget leaves "
            f"{room / 1e9:.1f} GB (STOKER_CACHE_BYTES). `stoker pack icecube {root} OUT` packs elsewhere."
        )
        return False
    if 2 * needed > free:
        console.say(
            f"Reading {root} directly: a packed copy would take {needed / 1e9:.1f} GB and the cache's disk has "
            f"{free / 1e9:.1f} GB free. `stoker pack icecube {root} OUT` packs elsewhere."
        )
        return False
    return True


def _packed_copy(root: Location, table: SampleTable, loader: LoaderConfig) -> PackedStore:
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


@cache
def _simulated(num_events: int, num_files: int, seed: int, device: str) -> Path:
    """Made on the GPU where the run uses one: much faster, and other events for the same seed."""
    folder = cache_folder() / "simulated" / f"icecube-{num_events}-{num_files}-{seed}-{device}"
    with cache_lock(folder, "Another process simulates the same events: waiting for it."):
        if not (folder / "train_meta.parquet").exists():
            instead = "simulate elsewhere: `stoker simulate DIR`, then --data.path DIR."
            make_room(num_events * SIMULATED_BYTES, f"{num_events:,} simulated events", instead)
            console.say(f"No data.path was given: simulating {num_events:,} events into {folder}.")
            simulate(folder, num_events=num_events, num_files=num_files, seed=seed, device=device, force=True)
    return folder
