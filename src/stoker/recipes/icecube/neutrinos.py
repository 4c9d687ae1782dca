"""Draws neutrino interactions and turns them into sources of light.

A cascade is one shower; a track is a muon of finite range that loses its energy evenly and in a few large showers.
The spectrum and the volume are tuned so that the triggered events have the sizes of the real data
(`stoker simulate --check`).
"""

# E events drawn, S sources
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.recipes.icecube.light import LIGHT_SPEED, PHOTONS_PER_GEV, Points, Tracks

TRACK_SHARE = 0.24  # of the interactions drawn; tracks are seen from further away and trigger more often
# Two power laws: most events lie just above the trigger threshold, and a hard part gives the long tail of sizes.
SOFT_INDEX, SOFT_GEV = 2.8, (100.0, 1e5)
HARD_INDEX, HARD_GEV, HARD_SHARE = 1.6, (1e3, 3e7), 0.02
DOWN_GOING = 0.15  # the Earth absorbs: a little more comes from above, which the PMTs, looking down, half undo
RADIUS_M, HALF_HEIGHT_M = 580.0, 550.0  # cylinder in which a vertex lies or through which a track passes
PHOTONS_PER_M = 2_450.0
IONISATION_GEV_PER_M = 0.24
RADIATION_PER_M = 3.3e-4
LARGE_LOSS_SHARE = 0.6  # of the radiated energy that comes as few large showers, the rest evenly
NUM_LARGE_LOSSES = 5
FAINTEST_SHOWER_GEV = 3.0
TRACK_REACH_M = 900.0  # light from further along the track does not reach the detector
INELASTICITY = 0.45  # mean share of the energy that a muon neutrino leaves in the shower at the vertex
SHOWER_LIGHT = 0.8  # hadrons and neutral products give less light than electrons of the same energy


@dataclass(frozen=True)
class Interactions:
    is_track: Tensor  # (E,) bool
    energy: Tensor  # (E,) GeV, of the neutrino
    muon_energy: Tensor  # (E,) GeV, of a track's muon at the vertex
    direction: Tensor  # (E, 3) unit vector, the way the particle flies
    position: Tensor  # (E, 3) m, vertex of a cascade, a point on a track
    before: Tensor  # (E,) m, how much of a track lies before `position`


def draw_interactions(num_events: int, generator: torch.Generator, device: torch.device) -> Interactions:
    def uniform() -> Tensor:
        return torch.rand(num_events, generator=generator, device=device)

    soft, hard = _power_law(uniform(), SOFT_INDEX, SOFT_GEV), _power_law(uniform(), HARD_INDEX, HARD_GEV)
    energy = torch.where(uniform() < HARD_SHARE, hard, soft)
    muon_energy = energy * (1 - INELASTICITY * 2 * uniform())
    cos_zenith, azimuth = _tilted_cosine(uniform()), 2 * math.pi * uniform()
    sin_zenith = (1 - cos_zenith.square()).clamp_min(0).sqrt()
    direction = -torch.stack([sin_zenith * azimuth.cos(), sin_zenith * azimuth.sin(), cos_zenith], -1)
    radius, turn = RADIUS_M * uniform().sqrt(), 2 * math.pi * uniform()
    height = HALF_HEIGHT_M * (2 * uniform() - 1)
    position = torch.stack([radius * turn.cos(), radius * turn.sin(), height], -1)
    is_track = uniform() < TRACK_SHARE
    before = uniform() * _muon_range_m(muon_energy)
    return Interactions(is_track, energy, muon_energy, direction, position, before)


def showers(drawn: Interactions, generator: torch.Generator) -> Points:
    """The shower at every vertex, and the large losses along tracks."""
    before = torch.where(drawn.is_track, drawn.before, 0.0)
    shower = torch.where(drawn.is_track, drawn.energy - drawn.muon_energy, drawn.energy)
    vertices = Points(
        event=torch.arange(len(shower), device=shower.device),
        position=drawn.position - before[:, None] * drawn.direction,
        direction=drawn.direction,
        time=-before / LIGHT_SPEED,
        photons=shower * SHOWER_LIGHT * PHOTONS_PER_GEV,
    )
    losses = _large_losses(drawn, generator)
    names = ("event", "position", "direction", "time", "photons")
    return Points(**{name: torch.cat([getattr(vertices, name), getattr(losses, name)]) for name in names})


def muons(drawn: Interactions) -> Tracks:
    event = torch.nonzero(drawn.is_track).squeeze(1)
    start, stop, energy = _visible_part(drawn, event)
    minimum = PHOTONS_PER_M * (1.188 + 0.0206 * energy.clamp_min(1.0).log())
    even = (1 - LARGE_LOSS_SHARE) * RADIATION_PER_M * energy * PHOTONS_PER_GEV
    return Tracks(event, drawn.position[event], drawn.direction[event], start, stop, minimum + even)


def _power_law(uniform: Tensor, index: float, limits: tuple[float, float]) -> Tensor:
    power = 1 - index
    low, high = limits[0] ** power, limits[1] ** power
    return torch.pow(low + uniform * (high - low), 1 / power)


def _tilted_cosine(uniform: Tensor) -> Tensor:
    """Cosine of the zenith with density (1 + a c) / 2, by inversion."""
    a = DOWN_GOING
    return (-1 + torch.sqrt(1 - 2 * a * (1 - a / 2 - 2 * uniform))) / a


def _muon_range_m(energy: Tensor) -> Tensor:
    return torch.log1p(energy * (RADIATION_PER_M / IONISATION_GEV_PER_M)) / RADIATION_PER_M


def _visible_part(drawn: Interactions, event: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where a track starts and stops near the detector (m along it), and its energy at `position`."""
    energy, before = drawn.muon_energy[event], drawn.before[event]
    start = (-before).clamp_min(-TRACK_REACH_M)
    stop = (_muon_range_m(energy) - before).clamp_max(TRACK_REACH_M)
    critical = IONISATION_GEV_PER_M / RADIATION_PER_M
    here = (energy + critical) * torch.exp(-RADIATION_PER_M * before) - critical
    return start, stop, here.clamp_min(0.0)


def _large_losses(drawn: Interactions, generator: torch.Generator) -> Points:
    event = torch.nonzero(drawn.is_track).squeeze(1)
    start, stop, energy = _visible_part(drawn, event)
    radiated = (RADIATION_PER_M * energy * (stop - start)).clamp_max(0.9 * energy) * LARGE_LOSS_SHARE
    shape = (len(event), NUM_LARGE_LOSSES)
    # Squared exponentials: one loss usually dominates, as bremsstrahlung does.
    weight = torch.empty(shape, device=energy.device).exponential_(generator=generator).square()
    loss = radiated[:, None] * weight / weight.sum(1, keepdim=True)
    at = start[:, None] + (stop - start)[:, None] * torch.rand(shape, generator=generator, device=energy.device)
    row, column = torch.nonzero(loss > FAINTEST_SHOWER_GEV, as_tuple=True)
    along = at[row, column]
    direction = drawn.direction[event[row]]
    return Points(
        event=event[row],
        position=drawn.position[event[row]] + along[:, None] * direction,
        direction=direction,
        time=along / LIGHT_SPEED,
        photons=loss[row, column] * PHOTONS_PER_GEV,
    )
