"""Where pulses come from: read directly from the competition's files, from a packed store, or resident on the GPU.

Three implementations of one `EventSource`. Each says how an epoch is best ordered, and which stages turn a micro-batch into
a batch on the host; what it becomes on the device is in `batch`.
"""

# E events, D DOMs hit, P pulses
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from stoker.data.bad_samples import BadShard, Quarantine
from stoker.data.batch import map_tensors, pin_tensor
from stoker.data.loader import LoaderConfig
from stoker.data.locations import Location
from stoker.data.order import ExactOrder, Order, WindowOrder
from stoker.data.parquet import ParquetSource
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, Ragged, offsets_of, sample_of_element
from stoker.data.samples import SampleTable, Subset, block_positions
from stoker.data.source import Ahead, EpochOrder, Source
from stoker.data.stages import Stage
from stoker.data.storage.orders import Choice, check_budget, choose_order, fetch_stage, fetched_ahead, remote_order
from stoker.data.storage.urls import Url
from stoker.data.store import PackedStore
from stoker.data.thin import kept_elements, thin
from stoker.data.window import WindowSource
from stoker.errors import UserError
from stoker.recipes.icecube import events
from stoker.recipes.icecube.batch import (
    AUXILIARY,
    FIRST_OF_DOM,
    EventBatch,
    HostBatch,
    begins_dom,
    collate,
    decode_charge,
    dom_offsets,
    unit_vectors,
)

DECODED_BYTES = 11  # a pulse in the cache of row groups
DECODING_BYTES = (
    70  # a pulse of the block that a thread decodes: as arrow has it, converted, in its new order, and indices
)


class EventSource(Protocol):
    mode: str  # direct, packed or resident
    table: SampleTable
    path: Location
    cache_bytes: int  # of the RAM budget, for what is kept and for what decoding needs
    kind_of_order: Choice

    def order(self, subset: Subset) -> EpochOrder:
        """The order in which a subset is trained on."""

    def stages(self, sample_cost: int | None, quarantine: Quarantine, truth: Array | None) -> list[Stage]:
        """From a micro-batch to a batch on the host; events of more pulses than `sample_cost` are thinned to it.

        `truth` (rows of the table, 4): what goes into batches besides the direction.
        """

    def files_of(self, rows: Indices) -> str: ...

    def ahead(self, subset: Subset) -> Ahead | None:
        """What fetches samples that lie elsewhere before they are needed."""


@dataclass(frozen=True)
class Pulses:
    """Events as they were read, one after the other: columns time, charge, sensor and flags."""

    micro: MicroBatch
    ragged: Ragged
    doms: Array | None  # of each event, where its pulses stand by DOM; None: in order of time

    @property
    def num_bytes(self) -> int:
        return self.ragged.num_bytes


class DirectEvents:
    """The competition's Parquet files as they are; a subset to train on comes in a window order."""

    mode = "direct"
    kind_of_order: Choice = "exact"  # of its kind: there is only one

    def __init__(
        self, root: Location, table: SampleTable, loader: LoaderConfig, training: Subset | None = None
    ) -> None:
        self.path, self.table, self._loader = root, table, loader
        if loader.order not in ("auto", "window"):
            raise UserError(
                f"loader.order is {loader.order}, and files that are read directly come in a window order only."
            )
        self._num_sensors = len(events.open_geometry(root))
        kept = _kept_bytes(loader, table)
        self.cache_bytes = kept + _decoding_bytes(loader, table)
        self._source: Source
        if training is None:
            self._source = ParquetSource(root, table, events.PULSE_COLUMNS, kept)
        else:
            order = self._window_order(training)
            self._source = WindowSource(root, table, events.PULSE_COLUMNS, kept, training, order)

    def order(self, subset: Subset) -> EpochOrder:
        return self._window_order(subset)

    def _window_order(self, subset: Subset) -> Callable[[int, int], WindowOrder]:
        blocks, window = block_positions(self.table, subset), self._loader.window
        return lambda seed, epoch: WindowOrder(blocks, len(subset), window, seed, epoch)

    def stages(self, sample_cost: int | None, quarantine: Quarantine, truth: Array | None) -> list[Stage]:
        stages = _reading_stages(self.table, self.gather, sample_cost, quarantine, truth)
        if not isinstance(self._source, WindowSource):
            return stages
        stages = [replace(stages[0], read_ahead=self._source.read_ahead), *stages[1:]]
        return [fetch_stage(self._source.missing), *stages] if isinstance(self.path, Url) else stages

    def gather(self, micro: MicroBatch) -> Pulses:
        found = self._source.gather(micro)
        events.check_pulses(self.path, self.table, found, self._num_sensors)
        return Pulses(micro, events.stored_columns(found), None)

    def files_of(self, rows: Indices) -> str:
        return self._source.files_of(rows)

    def ahead(self, subset: Subset) -> Ahead | None:
        if not isinstance(self.path, Url) or not isinstance(self._source, WindowSource):
            return None
        return fetched_ahead(self._source.places, kept_for=self._loader.window)


def check_window(table: SampleTable, loader: LoaderConfig) -> None:
    """A window whose row groups do not fit the cache would decode them again and again."""
    some = table.columns["count"][np.linspace(0, len(table) - 1, min(len(table), 4096)).astype(np.int64)]
    needed = int(2.5 * min(loader.window, len(table)) * some.mean() * DECODED_BYTES)
    decoding = _decoding_bytes(loader, table)
    if needed > _kept_bytes(loader, table):
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


def _kept_bytes(loader: LoaderConfig, table: SampleTable) -> int:
    """Of decoded row groups: half of what decoding leaves; the other half is for batches."""
    return max(0, loader.ram_bytes - _decoding_bytes(loader, table)) // 2


class PackedEvents:
    """A packed store: pulses stand by DOM, and every order costs the same."""

    mode = "packed"
    cache_bytes = 0

    def __init__(self, store: PackedStore, loader: LoaderConfig) -> None:
        self.path, self.table, self._store, self._loader = store.path, store.table, store, loader
        self.kind_of_order: Choice = "exact"
        if isinstance(store.path, Url):
            self.kind_of_order = choose_order(loader.order, store.num_bytes, in_blocks=True)
        elif loader.order != "auto":
            self.kind_of_order = loader.order

    def order(self, subset: Subset) -> EpochOrder:
        if self.kind_of_order == "exact":
            return _exact_order(subset)
        if isinstance(self.path, Url) and self.kind_of_order == "window":
            check_budget(self.table, subset, self._store.num_bytes, self._loader)
        table = replace(self.table, blocks=self._store.block_rows())
        return remote_order(self.kind_of_order, table, subset, self._loader, str(self.path))

    def ahead(self, subset: Subset) -> Ahead | None:
        if not isinstance(self.path, Url):
            return None
        kept_for = self._loader.window if self.kind_of_order == "window" else None
        store = self._store
        return fetched_ahead(store.places, kept_for=kept_for, rows_of=store.rows_of, rest=store.want_rest)

    def stages(self, sample_cost: int | None, quarantine: Quarantine, truth: Array | None) -> list[Stage]:
        stages = _reading_stages(self.table, self.gather, sample_cost, quarantine, truth)
        if not isinstance(self.path, Url):
            return stages
        return [fetch_stage(lambda micro: self._store.places(micro.rows)), *stages]

    def gather(self, micro: MicroBatch) -> Pulses:
        found = self._store.gather(micro)
        doms = np.asarray(self.table.columns["doms"][micro.rows])
        whole = self._store.verification.done  # then it is what was packed
        if not whole and ((doms < 0).any() or (doms > np.diff(found.offsets)).any()):
            raise UserError(f"{self.path} is damaged: an event has more DOMs than pulses. Pack it again.")
        return Pulses(micro, found, doms)

    def files_of(self, rows: Indices) -> str:
        return self._store.files_of(rows)


def _exact_order(subset: Subset) -> EpochOrder:
    def order(seed: int, epoch: int) -> Order:
        return ExactOrder(len(subset), seed, epoch)

    return order


def _reading_stages(
    table: SampleTable,
    gather: Callable[[MicroBatch], Pulses],
    sample_cost: int | None,
    quarantine: Quarantine,
    truth: Array | None,
) -> list[Stage]:
    """Read, thin where that is asked for, collate."""

    def read(micro: MicroBatch) -> Pulses:
        """Without samples of shards that turn out to be bad, if the policy allows that."""
        while True:
            usable = micro.only(quarantine.usable(micro.rows))
            try:
                return gather(usable)
            except BadShard as error:
                if error.shard not in table.columns["shard"][usable.rows]:
                    raise  # none of its samples was asked for: trying again would find it again
                quarantine.add(error)

    def collated(pulses: Pulses) -> HostBatch:
        rows = pulses.ragged.rows
        labels = {name: np.asarray(table.columns[name][rows]) for name in events.LABELS}
        return collate(pulses.ragged, labels, pulses.doms, truth)

    thinning = [] if sample_cost is None else [Stage("thin", partial(_thin, table, sample_cost))]
    return [Stage("read", read), *thinning, Stage("collate", collated)]


def _thin(table: SampleTable, most: int, pulses: Pulses) -> Pulses:
    before, micro = pulses.ragged, pulses.micro
    if np.diff(before.offsets).max(initial=0) <= most:
        return pulses  # the usual case, without a look at every pulse
    ids = np.asarray(table.columns["id"][before.rows])
    auxiliary = (before.columns["flags"] & AUXILIARY).astype(bool)
    kept = thin(before, most, ids, micro.seed, micro.epoch, last=auxiliary)
    if pulses.doms is None:
        return Pulses(micro, kept, None)
    # The first pulse of a DOM may be gone: marked anew.
    event = sample_of_element(kept.offsets)
    is_first = begins_dom(event, kept.columns["sensor"])
    flags = (kept.columns["flags"] & AUXILIARY) | np.where(is_first, FIRST_OF_DOM, 0).astype(np.uint8)
    doms = np.bincount(event[is_first], minlength=len(kept.rows))
    return Pulses(micro, Ragged({**kept.columns, "flags": flags}, kept.offsets, kept.rows), doms)


class ResidentEvents:
    """A packed store in the memory of the device: the host only says where each event lies."""

    mode = "resident"
    cache_bytes = 0
    kind_of_order: Choice = "exact"

    def __init__(self, store: PackedStore, device: torch.device) -> None:
        self.path, self.table, self._store = store.path, store.table, store
        store.keep()
        self.columns = {name: _on_device(column, device) for name, column in store.columns.items()}

    def order(self, subset: Subset) -> EpochOrder:
        return _exact_order(subset)

    def stages(self, sample_cost: int | None, quarantine: Quarantine, truth: Array | None) -> list[Stage]:
        return [Stage("request", lambda micro: self.request(micro, sample_cost, truth))]

    def files_of(self, rows: Indices) -> str:
        return self._store.files_of(rows)

    def ahead(self, subset: Subset) -> Ahead | None:
        return None  # everything is here

    def request(self, micro: MicroBatch, sample_cost: int | None, truth: Array | None = None) -> "ResidentRequest":
        """What the device needs to know; the only part that is done on the host."""
        table, rows = self.table.columns, micro.rows
        first, count = np.asarray(table["first"][rows]), np.asarray(table["count"][rows]).astype(np.int64)
        direction = unit_vectors(np.asarray(table["azimuth"][rows]), np.asarray(table["zenith"][rows]))
        kept = None
        if sample_cost is not None and count.max(initial=0) > sample_cost:
            kept = self._kept(micro, first, count, sample_cost)
        return ResidentRequest(
            events=self,
            first=torch.from_numpy(first),
            offsets=torch.from_numpy(offsets_of(count)),
            doms=None if kept is not None else torch.from_numpy(np.asarray(table["doms"][rows]).astype(np.int64)),
            kept=None if kept is None else torch.from_numpy(kept),
            kept_offsets=None if kept is None else torch.from_numpy(offsets_of(np.minimum(count, sample_cost or 0))),
            num_pulses=int(count.sum()),
            direction=torch.from_numpy(direction),
            rows=torch.from_numpy(rows),
            truth=None if truth is None else torch.from_numpy(truth[rows]),
        )

    def _kept(self, micro: MicroBatch, first: Indices, count: Indices, most: int) -> Indices | None:
        """Thinning needs the auxiliary bits of the long events; they are read from the store, not the device."""
        offsets = offsets_of(count)
        flags = self._store.columns["flags"]
        last = np.zeros(offsets[-1], bool)
        for event in np.flatnonzero(count > most):
            last[offsets[event] : offsets[event + 1]] = flags[first[event] : first[event] + count[event]] & AUXILIARY
        ids = np.asarray(self.table.columns["id"][micro.rows])
        return kept_elements(offsets, most, ids, micro.seed, micro.epoch, last)


@dataclass(frozen=True)
class ResidentRequest:
    """A batch that still lies where it is kept. Gathering happens on the stream that the feed copies with."""

    events: ResidentEvents
    first: Tensor  # (E,) first pulse in the columns
    offsets: Tensor  # (E + 1,) into the pulses of the batch
    doms: Tensor | None  # (E,) DOMs of each event; None where thinning changes them
    kept: Tensor | None  # pulses of the batch that thinning keeps
    kept_offsets: Tensor | None
    num_pulses: int
    direction: Tensor
    rows: Tensor
    truth: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def pin(self) -> Any:
        return map_tensors(self, pin_tensor)

    def to(self, device: torch.device) -> EventBatch:
        first, offsets = self.first.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True)
        event = _segment_numbers(offsets, self.num_pulses)
        index = torch.arange(self.num_pulses, device=device) - offsets[event] + first[event]
        if self.kept is not None and self.kept_offsets is not None:
            kept = self.kept.to(device, non_blocking=True)
            index, event = index[kept], event[kept]
            offsets = self.kept_offsets.to(device, non_blocking=True)
        gathered = {name: column[index] for name, column in self.events.columns.items()}
        first_pulse, event_offsets = self._doms(gathered, event, device)
        return EventBatch(
            time=gathered["time"].float(),
            charge=decode_charge(gathered["charge"]),
            auxiliary=(gathered["flags"] & AUXILIARY).float(),
            dom_offsets=first_pulse,
            sensor=gathered["sensor"][first_pulse[:-1]].long(),
            event_offsets=event_offsets,
            direction=self.direction.to(device, non_blocking=True),
            rows=self.rows.to(device, non_blocking=True),
            truth=None if self.truth is None else self.truth.to(device, non_blocking=True),
        )

    def _doms(self, gathered: dict[str, Tensor], event: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        if self.doms is None:  # thinned: marks must be made anew, and counting them waits for the device
            first = torch.nonzero(begins_dom(event, gathered["sensor"])).squeeze(1)
            event_offsets = torch.searchsorted(event[first], torch.arange(self.num_samples + 1, device=device))
            return torch.cat([first, first.new_full((1,), len(event))]), event_offsets
        event_offsets = torch.cat([self.doms.new_zeros(1), self.doms.cumsum(0)])
        num_doms = int(event_offsets[-1])  # on the host: no waiting
        return dom_offsets(gathered["flags"], num_doms), event_offsets.to(device, non_blocking=True)


def _segment_numbers(offsets: Tensor, total: int) -> Tensor:
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths, output_size=total)


def _on_device(column: Array, device: torch.device) -> Tensor:
    array = column.view(np.int16) if column.dtype == np.uint16 else column
    # In pieces: a read-only map cannot be handed to torch as it is, and one copy of everything might not fit the host.
    out = torch.empty(len(array), dtype=torch.from_numpy(np.zeros(1, array.dtype)).dtype, device=device)
    piece = 1 << 26
    for start in range(0, len(array), piece):
        out[start : start + piece] = torch.from_numpy(np.array(array[start : start + piece]))
    return out
