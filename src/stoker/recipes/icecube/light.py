"""Expected light and arrival times: from sources of Cherenkov light to (event, DOM, mean photons, time, delay).

Two kinds of source: a point that shines like an electromagnetic shower of some energy, and a straight muon track of
finite length. The mean number of photons interpolates between direct and diffuse light (arXiv:1208.3430), with the
ice averaged along the way. Only strings within reach of a source are looked at.
"""

# S sources, R (source, string) rows, 60 DOMs of a string, Q (source, DOM) pairs that see light
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stoker.recipes.icecube.geometry import DOMS_PER_STRING, NUM_STRINGS, Geometry
from stoker.recipes.icecube.ice import ice_lengths

LIGHT_SPEED = 0.299792458  # m/ns
GROUP_INDEX = 1.356
COS_CHERENKOV = 1 / 1.319
SIN_CHERENKOV = math.sqrt(1 - COS_CHERENKOV**2)
PHOTONS_PER_GEV = 12_900.0  # ppc: 5.25 m of track per GeV at 2,450 detectable photons a metre
# A quarter of the DOM's cross-section: angular sensitivity and glass, from ten PPC events (facts: 3-5x below pi R^2).
DOM_AREA_M2 = 0.25 * math.pi * 0.1651**2
FAINTEST_MEAN = 0.02  # photons at a DOM; the light beyond, summed over all DOMs, is far below the noise
ICE_STEP_M = 5.0
ICE_TOP_M = 1500.0  # the table reaches from +1500 to -1500 m
DELAY_NS_PER_M = 5.1  # mean scattering delay of cascade light in any ice (PPC events)
TRACK_PROMPTNESS = 0.55  # Cherenkov light of a track meets the DOM head on: less delay at the same distance


@dataclass(frozen=True)
class Points:
    """Showers: light from one place, brightest along the Cherenkov cone about `direction`."""

    event: Tensor  # (S,)
    position: Tensor  # (S, 3)
    direction: Tensor  # (S, 3)
    time: Tensor  # (S,) ns
    photons: Tensor  # (S,)


@dataclass(frozen=True)
class Tracks:
    """Muons: light along `position + s * direction` for start <= s <= stop, at `position` when time is 0."""

    event: Tensor  # (S,)
    position: Tensor  # (S, 3)
    direction: Tensor  # (S, 3)
    start: Tensor  # (S,) m
    stop: Tensor  # (S,) m
    photons_per_m: Tensor  # (S,)


@dataclass(frozen=True)
class Light:
    """What each DOM sees of each source."""

    event: Tensor  # (Q,)
    dom: Tensor  # (Q,)
    mean: Tensor  # (Q,) expected photons
    time: Tensor  # (Q,) ns, arrival of unscattered light
    shape: Tensor  # (Q,) of the gamma distribution of the scattering delay
    scale: Tensor  # (Q,) ns


class Detector:
    """Geometry and ice as tensors of one device."""

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.device = device
        self.xyz = torch.from_numpy(geometry.xyz).to(device).view(NUM_STRINGS, DOMS_PER_STRING, 3)
        self.efficiency = torch.from_numpy(geometry.efficiency).to(device).view(NUM_STRINGS, DOMS_PER_STRING)
        self.string_xy = self.xyz[:, :, :2].mean(dim=1)
        heights = np.arange(ICE_TOP_M, -ICE_TOP_M, -ICE_STEP_M)
        inverse = np.stack([1 / length for length in ice_lengths(heights)], axis=-1)
        # The integral of 1/length from the top: its difference between two heights over their distance is the mean.
        self.ice_integral = torch.from_numpy(np.cumsum(inverse, axis=0) * ICE_STEP_M).float().to(device)

    def ice_between(self, z_a: Tensor, z_b: Tensor) -> tuple[Tensor, Tensor]:
        """Mean effective scattering and absorption length (m) between two heights."""
        upper, lower = torch.maximum(z_a, z_b), torch.minimum(z_a, z_b)
        first = ((ICE_TOP_M - upper) / ICE_STEP_M).long().clamp_(0, len(self.ice_integral) - 2)
        last = ((ICE_TOP_M - lower) / ICE_STEP_M).long().clamp_(1, len(self.ice_integral) - 1)
        last = torch.maximum(last, first + 1)
        inverse = (self.ice_integral[last] - self.ice_integral[first]) / ((last - first) * ICE_STEP_M).unsqueeze(-1)
        return 1 / inverse[..., 0], 1 / inverse[..., 1]


def point_light(detector: Detector, points: Points) -> Light:
    reach = _reach_m(points.photons)
    across = torch.cdist(points.position[:, :2], detector.string_xy)
    source, string = torch.nonzero(across < reach[:, None], as_tuple=True)  # (R,)
    delta = detector.xyz[string] - points.position[source, None]  # (R, 60, 3)
    distance = delta.norm(dim=-1).clamp_min_(1.0)
    scattering, absorption = detector.ice_between(
        points.position[source, None, 2].expand_as(distance), detector.xyz[string, :, 2]
    )
    yield_m2 = points.photons[source, None] * DOM_AREA_M2
    diffuse_m, reach_m = _diffusion_lengths(scattering, absorption)
    mean = yield_m2 * torch.exp(-distance / reach_m) / (4 * math.pi * diffuse_m * distance)
    mean = mean / torch.tanh(distance / diffuse_m)
    cos_view = (delta * points.direction[source, None]).sum(-1) / distance
    mean = mean * _cone_brightness(cos_view, distance / scattering)
    mean = mean * _facing(delta[..., 2] / distance, distance / scattering) * detector.efficiency[string]
    time = points.time[source, None] + distance * (GROUP_INDEX / LIGHT_SPEED)
    return _visible(points.event, source, string, mean, time, distance, scattering, DELAY_NS_PER_M)


def track_light(detector: Detector, tracks: Tracks) -> Light:
    reach = _reach_m(tracks.photons_per_m * 60.0)
    flat = tracks.direction[:, :2].norm(dim=-1).clamp_min(1e-3)
    offset = detector.string_xy[None] - tracks.position[:, None, :2]  # (S, 86, 2)
    across = (offset[..., 0] * tracks.direction[:, None, 1] - offset[..., 1] * tracks.direction[:, None, 0]).abs()
    source, string = torch.nonzero(across / flat[:, None] < reach[:, None], as_tuple=True)
    direction = tracks.direction[source, None]
    delta = detector.xyz[string] - tracks.position[source, None]  # (R, 60, 3)
    along = (delta * direction).sum(-1)
    distance = (delta.square().sum(-1) - along.square()).clamp_min_(1.0).sqrt()
    emission = along - distance * (COS_CHERENKOV / SIN_CHERENKOV)  # where on the track the direct light starts
    emission_z = tracks.position[source, None, 2] + emission * tracks.direction[source, None, 2]
    dom_z = detector.xyz[string, :, 2]
    scattering, absorption = detector.ice_between(emission_z, dom_z)
    mean = tracks.photons_per_m[source, None] * DOM_AREA_M2 * _line_dilution(distance, scattering, absorption)
    # Scattered light blurs where a finite track ends.
    blur = 15.0
    mean = mean * torch.sigmoid((emission - tracks.start[source, None]) / blur)
    mean = mean * torch.sigmoid((tracks.stop[source, None] - emission) / blur)
    flight = distance / SIN_CHERENKOV
    mean = mean * _facing((dom_z - emission_z) / flight, flight / scattering) * detector.efficiency[string]
    time = along / LIGHT_SPEED + distance * (GROUP_INDEX / SIN_CHERENKOV - COS_CHERENKOV / SIN_CHERENKOV) / LIGHT_SPEED
    return _visible(tracks.event, source, string, mean, time, distance, scattering, DELAY_NS_PER_M * TRACK_PROMPTNESS)


def join(parts: list[Light]) -> Light:
    names = ("event", "dom", "mean", "time", "shape", "scale")
    return Light(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _reach_m(photons: Tensor) -> Tensor:
    """Distance at which a point of that many photons gives the faintest mean in clear ice."""
    distance = torch.linspace(10.0, 1000.0, 100, device=photons.device)
    clear, transparent = torch.tensor(55.0, device=photons.device), torch.tensor(180.0, device=photons.device)
    diffuse_m, reach_m = _diffusion_lengths(clear, transparent)
    per_photon = DOM_AREA_M2 * torch.exp(-distance / reach_m) / (4 * math.pi * diffuse_m * distance)
    index = torch.searchsorted(-per_photon, -(FAINTEST_MEAN / photons.clamp_min(1.0)))
    return distance[index.clamp_max(99)]


def _diffusion_lengths(scattering: Tensor, absorption: Tensor) -> tuple[Tensor, Tensor]:
    return scattering * torch.exp(scattering / absorption) / 3, torch.sqrt(scattering * absorption / 3)


def _line_dilution(distance: Tensor, scattering: Tensor, absorption: Tensor) -> Tensor:
    diffuse_m, reach_m = _diffusion_lengths(scattering, absorption)
    root = diffuse_m / SIN_CHERENKOV * torch.sqrt(2 / (math.pi * reach_m))
    spread = torch.sqrt(distance)
    return torch.exp(-distance / reach_m) / (2 * math.pi * SIN_CHERENKOV * root * spread * torch.tanh(spread / root))


def _cone_brightness(cos_view: Tensor, depth: Tensor) -> Tensor:
    """Showers shine along the Cherenkov cone; scattering (depth in lengths) washes it out. Mean 1 over all views."""
    cone = 2.0 * torch.exp(-3.5 * (cos_view - COS_CHERENKOV).abs()) - 0.4475  # 0.4475: its mean over cos_view
    return 1 + torch.exp(-depth / 5.0).clamp_min_(0.1) * cone


def _facing(cos_up: Tensor, depth: Tensor) -> Tensor:
    """PMTs look down: light that travels upwards is seen better, the less it was scattered."""
    return 1 + 0.4 * torch.exp(-depth / 4.0) * cos_up


def _visible(
    event: Tensor,
    source: Tensor,
    string: Tensor,
    mean: Tensor,
    time: Tensor,
    distance: Tensor,
    scattering: Tensor,
    delay_ns_per_m: float,
) -> Light:
    row, column = torch.nonzero(mean > FAINTEST_MEAN, as_tuple=True)
    distance = distance[row, column]
    # Shape and scale fitted to the time residuals of the PPC events, 20 to 300 m, in average and in clear ice.
    shape = 0.45 + 0.35 * distance / scattering[row, column]
    return Light(
        event=event[source[row]],
        dom=string[row] * DOMS_PER_STRING + column,
        mean=mean[row, column],
        time=time[row, column],
        shape=shape,
        scale=delay_ns_per_m * distance / shape,
    )
