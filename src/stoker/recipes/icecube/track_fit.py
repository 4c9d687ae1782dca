"""A maximum-likelihood fit of a straight track, the role that spline-MPE plays for the experiment.

For each DOM the first coincident pulse must be the earliest of as many photons as the DOM saw; each photon is late by a
gamma-distributed scattering delay that grows with its distance from the track (a Pandel function). Constants are those of
the simulated light (light.py), and the spread of times and the noise were chosen on 400 simulated tracks: on simulated
events the fit is as good as we could make it. All events, and several
starts of each, are fitted at once.
"""

# E events, D DOMs with a coincident pulse, S starts
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stoker.recipes.icecube.baselines import line_fit
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.light import (
    COS_CHERENKOV,
    DELAY_NS_PER_M,
    GROUP_INDEX,
    LIGHT_SPEED,
    SIN_CHERENKOV,
    TRACK_PROMPTNESS,
)

# Spread of arrival times about the model: wide at first, so that a bad start finds its way, then as sharp as a track of
# finite length with showers on it allows.
WIDE_NS, SHARP_NS = 50.0, 8.0
SCATTERING_M = 30.0  # effective, averaged over the ice
NOISE_PER_NS = 1e-4  # density of coincident pulses that are not of the track
MOST_PHOTONS = 200.0  # of a DOM: a saturated one must not outvote the others
COARSE_STEPS, FINE_STEPS = 40, 160
# One unit of the optimizer: metres, nanoseconds, radians.
PLACE_UNIT, TIME_UNIT, DIRECTION_UNIT = 30.0, 100.0, 0.3
LATENESS_PER_M = (GROUP_INDEX / SIN_CHERENKOV - COS_CHERENKOV / SIN_CHERENKOV) / LIGHT_SPEED  # of Cherenkov light


@dataclass(frozen=True)
class _Hits:
    event: Tensor  # (D,)
    place: Tensor  # (D, 3) m
    time: Tensor  # (D,) ns, of the first coincident pulse
    photons: Tensor  # (D,)


def track_fit(batch: EventBatch, sensor_xyz: Tensor) -> Tensor:
    """Unit vectors (E, 3) to where the tracks came from; the line fit's where an event has no coincident pulse."""
    guess = line_fit(batch, sensor_xyz).double()
    hits = _first_hits(batch, sensor_xyz)
    starts = torch.cat([-guess[None], _directions(guess).expand(-1, len(guess), 3)])  # (S, E, 3)
    coarse, loss = _minimise(hits, starts, COARSE_STEPS, WIDE_NS, WIDE_NS)
    best = loss.argmin(0)  # (E,)
    chosen = coarse[best, torch.arange(len(best), device=best.device)][None]
    direction, _ = _minimise(hits, chosen, FINE_STEPS, WIDE_NS, SHARP_NS)
    has_hits = torch.zeros(len(guess), device=guess.device).index_add_(
        0, hits.event, torch.ones_like(hits.time).float()
    )
    return torch.where(has_hits[:, None] > 0, -direction[0], guess).float()


def _first_hits(batch: EventBatch, sensor_xyz: Tensor) -> _Hits:
    num_doms, device = len(batch.sensor), batch.time.device
    dom = torch.repeat_interleave(torch.arange(num_doms, device=device), batch.dom_offsets.diff())
    event = torch.repeat_interleave(torch.arange(batch.num_samples, device=device), batch.event_offsets.diff())
    coincident = batch.auxiliary == 0
    late = torch.full((num_doms,), math.inf, dtype=torch.float64, device=device)
    time = late.scatter_reduce(0, dom[coincident], batch.time[coincident].double(), "amin")
    charge = torch.zeros_like(late).index_add_(0, dom[coincident], batch.charge[coincident].double())
    hit = torch.isfinite(time)
    place = sensor_xyz.to(device).double()[batch.sensor[hit]]
    return _Hits(event[hit], place, time[hit], charge[hit].clamp(1.0, MOST_PHOTONS))


def _directions(like: Tensor) -> Tensor:
    """(12, 1, 3) corners of an icosahedron: starts all around, so that a wrong line fit does not decide."""
    golden = (1 + math.sqrt(5)) / 2
    corners = [
        corner[turn:] + corner[:turn]
        for turn in range(3)
        for corner in ([0.0, a, b * golden] for a in (-1.0, 1.0) for b in (-1.0, 1.0))
    ]
    return torch.nn.functional.normalize(torch.tensor(corners, dtype=like.dtype, device=like.device), dim=-1)[:, None]


def _minimise(hits: _Hits, start: Tensor, steps: int, first_ns: float, last_ns: float) -> tuple[Tensor, Tensor]:
    """Directions (S, E, 3) and their losses (S, E) after `steps` of Adam, every event on its own."""
    num_starts, num_events, _ = start.shape
    weight = torch.zeros(num_events, 1, dtype=start.dtype, device=start.device)
    weight = weight.index_add(0, hits.event, hits.photons[:, None]).clamp_min(1e-9)
    centre = torch.zeros_like(start[0]).index_add(0, hits.event, hits.photons[:, None] * hits.place) / weight
    shape = (num_starts, num_events)
    time = _earliest(hits, start, centre)
    parameters = [
        torch.zeros(*shape, 3, dtype=start.dtype, device=start.device, requires_grad=True),  # place, PLACE_UNIT
        torch.zeros(shape, dtype=start.dtype, device=start.device, requires_grad=True),  # time, TIME_UNIT
        torch.zeros(*shape, 3, dtype=start.dtype, device=start.device, requires_grad=True),  # turn, DIRECTION_UNIT
    ]
    optimizer = torch.optim.Adam(parameters, lr=0.2)

    def losses(jitter_ns: float) -> tuple[Tensor, Tensor]:
        place, shift, turn = parameters
        direction = torch.nn.functional.normalize(start + DIRECTION_UNIT * turn, dim=-1)
        loss = _losses(hits, direction, centre + PLACE_UNIT * place, time + TIME_UNIT * shift, jitter_ns)
        return direction.detach(), loss

    with torch.enable_grad():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 0.2 * (1 - step / steps) + 0.005
            optimizer.zero_grad()
            losses(first_ns * (last_ns / first_ns) ** (step / steps))[1].sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        return losses(last_ns)


def _earliest(hits: _Hits, direction: Tensor, centre: Tensor) -> Tensor:
    """(S, E) the time at `centre` that leaves the mean pulse as late as scattering makes it."""
    residual, distance = _residuals(hits, direction, centre, torch.zeros_like(direction[..., 0]))
    late = residual - DELAY_NS_PER_M * TRACK_PROMPTNESS * distance
    total = torch.zeros_like(direction[..., 0]).index_add(1, hits.event, late)
    count = torch.zeros_like(centre[:, 0]).index_add(0, hits.event, torch.ones_like(hits.time))
    return total / count.clamp_min(1)


def _residuals(hits: _Hits, direction: Tensor, place: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """(S, D) how late each first pulse is against unscattered Cherenkov light, and its distance from the track."""
    place = place.expand_as(direction)
    apart = hits.place - place[:, hits.event]
    along = (apart * direction[:, hits.event]).sum(-1)
    distance = (apart.square().sum(-1) - along.square()).clamp_min(1.0).sqrt()
    expected = time[:, hits.event] + along / LIGHT_SPEED + distance * LATENESS_PER_M
    return hits.time - expected, distance


def _losses(hits: _Hits, direction: Tensor, place: Tensor, time: Tensor, jitter_ns: float) -> Tensor:
    """(S, E) minus the log likelihood of the first pulses of all DOMs."""
    residual, distance = _residuals(hits, direction, place, time)
    shape = 1.0 + 0.35 * distance / SCATTERING_M
    scale = DELAY_NS_PER_M * TRACK_PROMPTNESS * distance / shape
    # Jitter smears the edge at zero: early pulses pay a Gaussian price, and the density is never asked at zero itself.
    late = (residual.clamp_min(0).square() + jitter_ns**2).sqrt()
    density = (shape - 1) * (late / scale).log() - late / scale - scale.log() - torch.lgamma(shape)
    early = residual.clamp_max(0).square() / (2 * jitter_ns**2)
    survival = _LogSurvival.apply(shape, residual.clamp_min(0) / scale)
    first = density - early + hits.photons.log() + (hits.photons - 1) * survival
    floor = torch.full_like(first, math.log(NOISE_PER_NS))
    loss = -torch.logaddexp(first, floor)
    return torch.zeros_like(time).index_add(1, hits.event, loss)


class _LogSurvival(torch.autograd.Function):
    """log of the upper incomplete gamma function; PyTorch has no derivative in its shape, a difference quotient does."""

    @staticmethod
    def forward(ctx: Any, shape: Tensor, x: Tensor) -> Tensor:
        value = _log_survival(shape, x)
        step = 1e-4
        by_shape = (_log_survival(shape + step, x) - _log_survival(shape - step, x)) / (2 * step)
        log_density = (shape - 1) * x.clamp_min(1e-12).log() - x - torch.lgamma(shape)
        ctx.save_for_backward(by_shape, -torch.exp(log_density - value))
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        by_shape, by_x = ctx.saved_tensors
        return gradients[0] * by_shape, gradients[0] * by_x


def _log_survival(shape: Tensor, x: Tensor) -> Tensor:
    survival: Tensor = torch.special.gammaincc(shape, x)
    return survival.clamp_min(1e-30).log()
