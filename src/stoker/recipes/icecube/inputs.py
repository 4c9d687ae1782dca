"""From a batch to numbers that a network can use: normalised here and nowhere else, so that no caller can forget to.

Constants and where they come from: times are counted from the trigger, which the readout places at 10,000 ns, in units
of 3e4 ns, log10 of the charge in units of 3, positions in units of the detector's half-size, 500 m: what the published
models of the Kaggle competition use. Real pulses have times of 12,909 +- 4,385 ns and a median charge of 1.025 (public
notebooks on that data), so 0.10 +- 0.15 and 0.00. Ice lengths have the centre and scale that those models use. Absolute
numbers alone hide what matters: most events are much smaller than the detector and shorter than a readout, so the same
quantities relative to the centre of the event's coincident pulses stand beside them, with sines and cosines that keep
nanoseconds and metres apart in 16 bits.
"""

# E events, D DOMs hit, P pulses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from stoker.recipes.icecube.attention import LONG, SHORT, Segments, segment_mean, spread
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.geometry import Geometry
from stoker.recipes.icecube.ice import ice_lengths
from stoker.settings import config

TIME_CENTRE_NS, TIME_SCALE_NS = 1e4, 3e4
LOG_CHARGE_SCALE = 3.0
POSITION_SCALE_M = 500.0
SCATTERING_M, ABSORPTION_M = (32.4, 27.175), (111.8, 89.325)  # centre and scale
# Spread of an event about its own centre.
EVENT_TIME_SCALE_NS, EVENT_SCALE_M = 500.0, 150.0
# Longest period and number of octaves of the sines and cosines of times and places relative to the event's centre.
TIME_PERIOD_NS, TIME_OCTAVES = 8000.0, 7
PLACE_PERIOD_M, PLACE_OCTAVES = 1600.0, 5


@config
class DirectionConfig:
    """What all models of directions share."""

    loss: Literal["angle", "vmf", "both"] = "both"  # the angle, von Mises-Fisher likelihood, or their sum
    ice: bool = False  # scattering and absorption length at each DOM as inputs
    energy: bool = False  # learnt beside the direction, with its uncertainty, from truth.parquet
    vertex: bool = False  # likewise


@dataclass(frozen=True)
class Inputs:
    doms: Tensor  # (D, num_dom_inputs) where a DOM is
    pulses: Tensor  # (P, NUM_PULSE_INPUTS)
    late: Tensor  # (P,) ns after the event's centre
    by_dom: Segments  # pulses of DOMs
    by_event: Segments  # DOMs of events
    centre: Tensor  # (E, 4) x, y, z (m), time (ns)


ALIGNED = 8  # numbers of 16 bits
NUM_PULSE_INPUTS = 4 + 2 * TIME_OCTAVES
NUM_PLACE_INPUTS = 7 + 6 * PLACE_OCTAVES
NUM_ICE_INPUTS = 2


def num_dom_inputs(config: DirectionConfig) -> int:
    return NUM_PLACE_INPUTS + (NUM_ICE_INPUTS if config.ice else 0)


class InputLayer(nn.Module):
    """Knows the detector; has no parameters."""

    xyz: Tensor  # (sensors, 3) m
    sensors: Tensor  # (sensors, 4 or 6) position, efficiency, ice, normalised

    def __init__(self, config: DirectionConfig, geometry: Geometry) -> None:
        super().__init__()
        self._ice = config.ice
        self.use(geometry)

    def use(self, geometry: Geometry) -> None:
        """Places are inputs like any other: a model that has learnt can look at another detector."""
        xyz = torch.from_numpy(geometry.xyz)
        columns = [xyz / POSITION_SCALE_M, torch.from_numpy(geometry.efficiency)[:, None] - 1]
        if self._ice:
            columns.append(torch.from_numpy(_ice(geometry)))
        self.register_buffer("xyz", xyz, persistent=False)
        self.register_buffer("sensors", torch.cat(columns, -1), persistent=False)

    @torch.no_grad()
    def forward(self, batch: EventBatch) -> Inputs:
        by_dom = Segments.of(batch.dom_offsets, len(batch.time), SHORT)
        by_event = Segments.of(batch.event_offsets, len(batch.sensor), LONG)
        xyz = self.xyz[batch.sensor]
        centre = _centres(batch, xyz, by_dom, by_event)
        nearby = xyz - centre[by_event.number, :3]
        late = batch.time - centre[by_event.number, 3][by_dom.number]
        doms = torch.cat([self.sensors[batch.sensor], nearby / EVENT_SCALE_M, _places_as_waves(nearby)], -1)
        time = (batch.time - TIME_CENTRE_NS) / TIME_SCALE_NS
        charge = torch.log10(batch.charge.clamp_min(1e-3)) / LOG_CHARGE_SCALE
        plain = torch.stack([time, late_feature(late), charge, batch.auxiliary - 0.5], -1)
        pulses = torch.cat([plain, _waves(late, TIME_PERIOD_NS, TIME_OCTAVES)], -1)
        return Inputs(doms, pulses, late, by_dom, by_event, centre)


def late_feature(late: Tensor) -> Tensor:
    return (late / EVENT_TIME_SCALE_NS).clamp(-8, 8)


def _centres(batch: EventBatch, xyz: Tensor, by_dom: Segments, by_event: Segments) -> Tensor:
    """(E, 4) mean place and time of the coincident pulses: summed by DOM, then by event, without collisions."""
    weight = 1 - batch.auxiliary + 1e-3  # a floor, for events without a coincident pulse
    # Times from the trigger: sums of large numbers would lose nanoseconds.
    of_pulses = torch.stack([weight, weight * (batch.time - TIME_CENTRE_NS)], -1)
    of_doms = segment_mean(of_pulses, by_dom) * by_dom.offsets.diff()[:, None]
    sums = torch.cat([of_doms, of_doms[:, :1] * xyz], -1)
    total = segment_mean(sums, by_event)
    time = total[:, 1:2] / total[:, :1].clamp_min(1e-12) + TIME_CENTRE_NS
    return torch.cat([total[:, 2:] / total[:, :1].clamp_min(1e-12), time], -1)


def _places_as_waves(nearby: Tensor) -> Tensor:
    return torch.cat([_waves(nearby[:, axis], PLACE_PERIOD_M, PLACE_OCTAVES) for axis in range(3)], -1)


def _waves(values: Tensor, period: float, octaves: int) -> Tensor:
    """Sines and cosines of (N,) values: (N, 2 octaves)."""
    periods = period / 2.0 ** torch.arange(octaves, device=values.device, dtype=values.dtype)
    phase = values[:, None] * (2 * math.pi / periods)
    return torch.cat([phase.sin(), phase.cos()], -1)


def _ice(geometry: Geometry) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    scattering, absorption = ice_lengths(geometry.xyz[:, 2])
    columns = [(scattering - SCATTERING_M[0]) / SCATTERING_M[1], (absorption - ABSORPTION_M[0]) / ABSORPTION_M[1]]
    return np.stack(columns, -1).astype(np.float32)


def aligned_linear(layer: nn.Linear, values: Tensor) -> Tensor:
    """layer(values). On a GPU with columns of zeros beside the last: its products read sixteen bytes at a time, and those of
    other numbers of columns are slow ones."""
    extra = -values.shape[1] % ALIGNED
    if not extra or not values.is_cuda:
        return layer(values)  # type: ignore[no-any-return]
    pad = nn.functional.pad
    return nn.functional.linear(pad(values, (0, extra)), pad(layer.weight, (0, extra)), layer.bias)


class PulseEmbedding(nn.Module):
    """A token for each pulse: its own inputs and those of its DOM."""

    def __init__(self, config: DirectionConfig, width: int) -> None:
        super().__init__()
        self.pulse, self.place = (
            nn.Linear(NUM_PULSE_INPUTS, width),
            nn.Linear(num_dom_inputs(config), width, bias=False),
        )
        self.out = nn.Linear(width, width)

    def forward(self, inputs: Inputs) -> Tensor:
        place = aligned_linear(self.place, inputs.doms)
        hidden = aligned_linear(self.pulse, inputs.pulses) + spread(place, inputs.by_dom)
        return self.out(nn.functional.gelu(hidden))  # type: ignore[no-any-return]


MAX_LOG_KAPPA = 12.0  # an uncertainty of 0.2 degrees; no model of this data comes near


@dataclass(frozen=True)
class Answers:
    """Which columns of a model's answer mean what: the direction, kappa, and what else it has learnt."""

    energy: slice | None  # log10 of the energy / GeV in units of its scale, and log of its uncertainty
    vertex: slice | None  # x, y, z in units of their scale, and log of their uncertainty
    width: int

    @classmethod
    def of(cls, config: DirectionConfig) -> "Answers":
        width = 4
        energy = slice(width, width + 2) if config.energy else None
        width += 2 if config.energy else 0
        vertex = slice(width, width + 4) if config.vertex else None
        return cls(energy, vertex, width + (4 if config.vertex else 0))


class DirectionHead(nn.Module):
    """(E, C) -> (E, 4 or more): a unit vector to where the neutrino came from, kappa, how sure it is, and the rest."""

    def __init__(self, width: int, config: DirectionConfig) -> None:
        super().__init__()
        answers = Answers.of(config).width
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, answers))

    def forward(self, events: Tensor) -> Tensor:
        raw = self.layers(events).float() if events.dtype != torch.float64 else self.layers(events)
        direction = nn.functional.normalize(raw[:, :3], dim=-1, eps=1e-6)
        # Bounded softly: no input gives a kappa that is zero or infinite, and small changes of raw scale it.
        kappa = torch.exp(MAX_LOG_KAPPA * torch.tanh(raw[:, 3:4] / MAX_LOG_KAPPA))
        return torch.cat([direction, kappa, raw[:, 4:]], -1)
