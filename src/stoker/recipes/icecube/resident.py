"""Packed events that live in the memory of the device: the same plan, the gather done where the model runs.

A request carries only where each event's pulses lie; gathering, thinning and grouping happen on the device, on the stream
that the feed copies with, and never wait for it.
"""

# E events, D DOMs hit, P pulses
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, offsets_of
from stoker.data.store import PackedStore
from stoker.data.thin import kept_rows
from stoker.recipes.icecube.batch import AUXILIARY, EventBatch, decode_charge, dom_offsets, unit_vectors


class ResidentEvents:
    def __init__(self, store: PackedStore, device: torch.device) -> None:
        self.table, self._store = store.table, store
        self.columns = {name: _on_device(column, device) for name, column in store.columns.items()}

    def where(self, rows: Indices) -> str:
        return self._store.where(rows)

    def request(self, micro: MicroBatch, cap: int | None) -> "ResidentRequest":
        """What the device needs to know; the only part that is done on the host."""
        table, rows = self.table.columns, micro.rows
        first, count = np.asarray(table["first"][rows]), np.asarray(table["count"][rows]).astype(np.int64)
        direction = unit_vectors(np.asarray(table["azimuth"][rows]), np.asarray(table["zenith"][rows]))
        kept = self._kept(micro, first, count, cap) if cap is not None and count.max(initial=0) > cap else None
        return ResidentRequest(
            events=self,
            first=torch.from_numpy(first),
            offsets=torch.from_numpy(offsets_of(count)),
            doms=None if kept is not None else torch.from_numpy(np.asarray(table["doms"][rows]).astype(np.int64)),
            kept=None if kept is None else torch.from_numpy(kept),
            kept_offsets=None if kept is None else torch.from_numpy(offsets_of(np.minimum(count, cap or 0))),
            num_pulses=int(count.sum()),
            direction=torch.from_numpy(direction),
            rows=torch.from_numpy(rows),
        )

    def _kept(self, micro: MicroBatch, first: Indices, count: Indices, cap: int) -> Indices | None:
        """Thinning needs the auxiliary bits of the long events; they are read from the store, not the device."""
        offsets = offsets_of(count)
        flags = self._store.columns["flags"]
        last = np.zeros(offsets[-1], bool)
        for event in np.flatnonzero(count > cap):
            last[offsets[event] : offsets[event + 1]] = flags[first[event] : first[event] + count[event]] & AUXILIARY
        ids = np.asarray(self.table.columns["id"][micro.rows])
        return kept_rows(offsets, cap, ids, micro.seed, micro.epoch, last)


@dataclass(frozen=True)
class ResidentRequest:
    events: ResidentEvents
    first: Tensor  # (E,) first pulse in the columns
    offsets: Tensor  # (E + 1,) into the pulses of the batch
    doms: Tensor | None  # (E,) DOMs of each event; None where thinning changes them
    kept: Tensor | None  # pulses of the batch that thinning keeps
    kept_offsets: Tensor | None
    num_pulses: int
    direction: Tensor
    rows: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def pin(self) -> "ResidentRequest":
        pinned: dict[str, Any] = {
            name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **pinned)

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
        )

    def _doms(self, gathered: dict[str, Tensor], event: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        total = len(event)
        if self.doms is None:  # thinned: marks must be made anew, and counting them waits for the device
            sensor = gathered["sensor"]
            is_first = torch.ones(total, dtype=torch.bool, device=device)
            is_first[1:] = (event[1:] != event[:-1]) | (sensor[1:] != sensor[:-1])
            first = torch.nonzero(is_first).squeeze(1)
            event_offsets = torch.searchsorted(event[first], torch.arange(self.num_samples + 1, device=device))
            return torch.cat([first, first.new_full((1,), total)]), event_offsets
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
