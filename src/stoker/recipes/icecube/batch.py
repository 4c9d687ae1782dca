"""A batch of events as the models see it: pulses grouped by DOM, DOMs grouped by event, nothing padded."""

# E events, D DOMs hit (of all events), P pulses
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from torch import Tensor

from stoker.data.ragged import Array, Indices, Ragged, offsets_of, sample_of_row
from stoker.recipes.icecube.geometry import NUM_SENSORS


@dataclass(frozen=True)
class EventBatch:
    time: Tensor  # (P,) float32 ns
    charge: Tensor  # (P,) float32 photo-electrons
    auxiliary: Tensor  # (P,) float32, 1 where the pulse was not part of a local coincidence
    dom_offsets: Tensor  # (D + 1,) int64, into pulses
    sensor: Tensor  # (D,) int64
    event_offsets: Tensor  # (E + 1,) int64, into DOMs
    direction: Tensor  # (E, 3) float32, unit vector to where the neutrino came from
    rows: Tensor  # (E,) int64, rows of the sample table

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def to(self, device: torch.device) -> Self:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return type(self)(**moved)


def collate(pulses: Ragged, labels: Mapping[str, Array], rows: Indices) -> EventBatch:
    """Sorts the pulses of each event by DOM, keeping their order in time, and marks where DOMs and events begin."""
    event = sample_of_row(pulses.offsets)
    group = event * NUM_SENSORS + pulses.columns["sensor_id"]
    # Sorting one integer that carries its own index is several times quicker than a stable argsort.
    bits = max(1, int(len(group) - 1).bit_length())
    keyed = np.sort((group << bits) | np.arange(len(group)))
    order, group = keyed & ((1 << bits) - 1), keyed >> bits
    first = np.flatnonzero(np.diff(group, prepend=-1))
    doms_per_event = np.bincount(group[first] // NUM_SENSORS, minlength=len(rows))
    return EventBatch(
        time=torch.from_numpy(pulses.columns["time"][order].astype(np.float32)),
        charge=torch.from_numpy(pulses.columns["charge"][order].astype(np.float32)),
        auxiliary=torch.from_numpy(pulses.columns["auxiliary"][order].astype(np.float32)),
        dom_offsets=torch.from_numpy(np.append(first, len(group))),
        sensor=torch.from_numpy(group[first] % NUM_SENSORS),
        event_offsets=torch.from_numpy(offsets_of(doms_per_event)),
        direction=torch.from_numpy(unit_vectors(labels["azimuth"], labels["zenith"])),
        rows=torch.from_numpy(rows),
    )


def unit_vectors(azimuth: Array, zenith: Array) -> Array:
    sin = np.sin(zenith)
    return np.stack([sin * np.cos(azimuth), sin * np.sin(azimuth), np.cos(zenith)], axis=-1).astype(np.float32)
