"""A batch of events, nothing padded: as it is read on the host (small), and as the models see it on the device.

On the host a pulse takes nine bytes. On its way to the device times and charges become floats, and pulses that were
read from Parquet, in order of time, are grouped by DOM; those of the packed store already are.
"""

# E events, D DOMs hit (of all events), P pulses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.data.batch import map_tensors
from stoker.data.ragged import Array, Ragged, offsets_of
from stoker.recipes.icecube.geometry import MOST_SENSORS

# Bits of `flags`.
AUXILIARY, FIRST_OF_DOM = 1, 2
# What numbers of DOMs and pulses are rounded to on a GPU.
DOMS_STEP, PULSES_STEP = 1024, 4096
TRIGGER_NS = 1e4  # the time of the trigger in a readout
# Charges are 0.025 + 0.05 k photo-electrons: thousandths of (25 + 50 k), exact in float64 and the nearest in float32.
CHARGE_FIRST, CHARGE_STEP, CHARGE_UNIT = 25, 50, 1000


@dataclass(frozen=True)
class EventBatch:
    """On the device."""

    time: Tensor  # (P,) float32 ns
    charge: Tensor  # (P,) float32 photo-electrons
    auxiliary: Tensor  # (P,) float32, 1 where the pulse was not part of a local coincidence
    dom_offsets: Tensor  # (D + 1,) int64, into pulses
    sensor: Tensor  # (D,) int64
    event_offsets: Tensor  # (E + 1,) int64, into DOMs
    direction: Tensor  # (E, 3) float32, unit vector to where the neutrino came from
    rows: Tensor  # (E,) int64, rows of the sample table
    truth: Tensor | None = None  # (E, 4) log10 of the energy / GeV, vertex (m), where a model learns them

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def rounded(self) -> "EventBatch":
        """These events, and behind them small ones that nobody asked for: round numbers of pulses, DOMs and events.

        For every new shape cuBLAS looks for its best kernel, 0.1 to 0.4 ms a product (H200, CUDA 13) where a known one takes
        0.02: with sixty products a step the host was slower than the GPU. Now shapes come again. Each of these DOMs is an
        event of its own with few pulses, so that nobody attends to anybody; they are about one in a hundred.
        """
        pulses, doms, device = len(self.time), len(self.sensor), self.time.device
        more_doms = -doms % DOMS_STEP + DOMS_STEP
        more_pulses = (-pulses - more_doms) % PULSES_STEP + more_doms  # at least one a DOM
        each, left = divmod(more_pulses, more_doms)
        number = torch.arange(1, 2 * DOMS_STEP + 1, device=device).clamp_max(more_doms)
        ends = pulses + number * each + number.clamp_max(left)
        return replace(
            self,
            time=F.pad(self.time, (0, more_pulses), value=TRIGGER_NS),
            charge=F.pad(self.charge, (0, more_pulses), value=1.0),
            auxiliary=F.pad(self.auxiliary, (0, more_pulses)),
            dom_offsets=torch.cat([self.dom_offsets, ends[:more_doms]]),
            sensor=F.pad(self.sensor, (0, more_doms)),
            event_offsets=torch.cat([self.event_offsets, doms + number]),  # the last of them are empty
        )


@dataclass(frozen=True)
class HostBatch:
    """As read. Unsigned 16-bit codes are carried as int16, which every torch operation knows."""

    time: Tensor  # (P,) int32 ns
    charge: Tensor  # (P,) int16 code, or float32
    sensor: Tensor  # (P,) int16
    flags: Tensor  # (P,) uint8
    pulse_offsets: Tensor  # (E + 1,) int32, into pulses
    event_offsets: Tensor | None  # (E + 1,) int32, into DOMs; None where pulses are not grouped
    num_doms: int  # of all events; 0 where pulses are not grouped
    direction: Tensor  # (E, 3)
    rows: Tensor  # (E,)
    truth: Tensor | None = None  # (E, 4)

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> EventBatch:
        moved: HostBatch = map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))
        return moved._grouped() if moved.event_offsets is not None else moved._sorted()._grouped()

    def _grouped(self) -> EventBatch:
        assert self.event_offsets is not None
        offsets = dom_offsets(self.flags, self.num_doms)
        return EventBatch(
            time=self.time.float(),
            charge=decode_charge(self.charge),
            auxiliary=(self.flags & AUXILIARY).float(),
            dom_offsets=offsets,
            sensor=self.sensor[offsets[:-1]].long(),
            event_offsets=self.event_offsets.long(),
            direction=self.direction,
            rows=self.rows,
            truth=self.truth,
        )

    def _sorted(self) -> "HostBatch":
        """Groups pulses by DOM, in their order of time. Waits for the device once: the number of DOMs is not known."""
        counts = self.pulse_offsets.diff()
        event = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        order = torch.sort(event * MOST_SENSORS + self.sensor, stable=True).indices
        is_first = begins_dom(event[order], self.sensor[order])
        doms = torch.bincount(event[order][is_first], minlength=len(counts))
        event_offsets = torch.cat([doms.new_zeros(1), doms.cumsum(0)])
        grouped = {name: getattr(self, name)[order] for name in ("time", "charge", "sensor")}
        flags = (self.flags[order] & AUXILIARY) | (is_first * FIRST_OF_DOM).to(torch.uint8)
        return replace(self, **grouped, flags=flags, event_offsets=event_offsets, num_doms=int(event_offsets[-1]))


def begins_dom(event: Any, sensor: Any) -> Any:
    """Marks of the pulses at which a DOM begins, where pulses stand by event and DOM; for arrays and for tensors."""
    marks = event == event
    marks[1:] = (event[1:] != event[:-1]) | (sensor[1:] != sensor[:-1])
    return marks


def collate(pulses: Ragged, labels: Mapping[str, Array], doms: Array | None, truth: Array | None = None) -> HostBatch:
    """From columns (time, charge, sensor, flags) to a batch.

    `doms`, the number of DOMs of each event, is given where pulses stand by DOM, as flags tell.
    """
    columns = pulses.columns
    charge = columns["charge"]
    event_offsets = None if doms is None else offsets_of(doms)
    return HostBatch(
        time=torch.from_numpy(columns["time"]),
        charge=torch.from_numpy(charge.view(np.int16) if charge.dtype == np.uint16 else charge),
        sensor=torch.from_numpy(columns["sensor"].view(np.int16)),
        flags=torch.from_numpy(columns["flags"].view(np.uint8)),
        pulse_offsets=torch.from_numpy(pulses.offsets.astype(np.int32)),
        event_offsets=None if event_offsets is None else torch.from_numpy(event_offsets.astype(np.int32)),
        num_doms=0 if event_offsets is None else int(event_offsets[-1]),
        direction=torch.from_numpy(unit_vectors(labels["azimuth"], labels["zenith"])),
        rows=torch.from_numpy(pulses.rows),
        truth=None if truth is None else torch.from_numpy(truth[pulses.rows]),
    )


def dom_offsets(flags: Tensor, num_doms: int) -> Tensor:
    """(D + 1,) where each DOM's pulses begin, from the marks of their first pulses; nobody waits for the device."""
    position = torch.arange(len(flags), device=flags.device)
    dom = torch.cumsum((flags & FIRST_OF_DOM) > 0, 0) - 1
    offsets = torch.full((num_doms + 1,), len(flags), dtype=torch.int64, device=flags.device)
    return offsets.scatter_reduce_(0, dom, position, "amin")


def decode_charge(charge: Tensor) -> Tensor:
    """Photo-electrons from 16-bit codes; floats are charges already."""
    if charge.dtype != torch.int16:
        return charge.float()
    code = charge.int() & 0xFFFF
    # In float64: a GPU divides by a constant through its reciprocal, which in float32 misses the nearest value.
    return ((CHARGE_FIRST + CHARGE_STEP * code).double() / CHARGE_UNIT).float()


def unit_vectors(azimuth: Array, zenith: Array) -> Array:
    sin = np.sin(zenith)
    return np.stack([sin * np.cos(azimuth), sin * np.sin(azimuth), np.cos(zenith)], axis=-1).astype(np.float32)
