"""Batches as they might have been: clocks that jitter, charges miscalibrated, more noise, DOMs gone.

What the real detector does and no simulation has quite right; a model that falls apart here is not ready for data.
"""

# E events, D DOMs hit, P pulses
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stoker.recipes.icecube.batch import AUXILIARY, EventBatch, HostBatch

JITTER_NS = 5.0
CHARGE_SCALE = 1.10
NOISE_SHARE = 0.20  # of an event's pulses, added as single uncorrelated ones
DEAD_SHARE = 0.05  # of all sensors, the same in all events

Change = Callable[[EventBatch, torch.Generator, int], EventBatch]  # the number is that of the detector's sensors


def time_jitter(batch: EventBatch, generator: torch.Generator, num_sensors: int) -> EventBatch:
    """Each pulse up to 5 ns early or late."""
    shift = (2 * torch.rand(batch.time.shape, generator=generator, device=batch.time.device) - 1) * JITTER_NS
    return replace(batch, time=batch.time + shift)


def charge_scale(batch: EventBatch, generator: torch.Generator, num_sensors: int) -> EventBatch:
    return replace(batch, charge=batch.charge * CHARGE_SCALE)


def extra_noise(batch: EventBatch, generator: torch.Generator, num_sensors: int) -> EventBatch:
    """Single photo-electrons on random sensors, spread over the event's readout."""
    event, sensor = _of_pulses(batch)
    counts = torch.bincount(event, minlength=batch.num_samples)
    added = torch.poisson(NOISE_SHARE * counts, generator=generator).long()
    owner = torch.repeat_interleave(torch.arange(len(counts), device=event.device), added)

    def uniform() -> Tensor:
        return torch.rand(len(owner), generator=generator, device=event.device)

    first = batch.time.new_full((len(counts),), float("inf")).scatter_reduce(0, event, batch.time, "amin")
    last = batch.time.new_full((len(counts),), float("-inf")).scatter_reduce(0, event, batch.time, "amax")
    return _regrouped(
        batch,
        torch.cat([event, owner]),
        torch.cat([sensor, (uniform() * num_sensors).long()]),
        torch.cat([batch.time, first[owner] + uniform() * (last - first)[owner]]),
        torch.cat([batch.charge, torch.ones(len(owner), device=event.device)]),
        torch.cat([batch.auxiliary, torch.ones(len(owner), device=event.device)]),
    )


def dead_doms(batch: EventBatch, generator: torch.Generator, num_sensors: int) -> EventBatch:
    """Sensors that say nothing; an event keeps its first pulse if all of its sensors are dead."""
    event, sensor = _of_pulses(batch)
    fixed = torch.Generator(batch.time.device).manual_seed(0)
    dead = torch.rand(num_sensors, generator=fixed, device=batch.time.device) < DEAD_SHARE
    keep = ~dead[sensor]
    alive = torch.bincount(event[keep], minlength=batch.num_samples) > 0
    first = torch.diff(event, prepend=event.new_full((1,), -1)) != 0
    keep |= first & ~alive[event]
    return _regrouped(
        batch, event[keep], sensor[keep], batch.time[keep], batch.charge[keep], batch.auxiliary[keep]
    )  # fmt: skip


CHANGES: dict[str, Change] = {
    f"times +-{JITTER_NS:.0f} ns": time_jitter,
    f"charges x {CHARGE_SCALE:.2f}": charge_scale,
    f"{NOISE_SHARE:.0%} more noise": extra_noise,
    f"{DEAD_SHARE:.0%} dead DOMs": dead_doms,
}


def _of_pulses(batch: EventBatch) -> tuple[Tensor, Tensor]:
    """Event and sensor of each pulse."""
    device = batch.time.device
    dom = torch.repeat_interleave(torch.arange(len(batch.sensor), device=device), batch.dom_offsets.diff())
    event = torch.repeat_interleave(torch.arange(batch.num_samples, device=device), batch.event_offsets.diff())
    return event[dom], batch.sensor[dom]


def _regrouped(
    batch: EventBatch, event: Tensor, sensor: Tensor, time: Tensor, charge: Tensor, auxiliary: Tensor
) -> EventBatch:
    """A batch from pulses in any order: sorted by event and time, then grouped by DOM like one that was just read."""
    order = torch.argsort(time, stable=True)
    order = order[torch.argsort(event[order], stable=True)]
    counts = torch.bincount(event, minlength=batch.num_samples)
    host = HostBatch(
        time=time[order],
        charge=charge[order],
        sensor=sensor[order].to(torch.int16),
        flags=(auxiliary[order] * AUXILIARY).to(torch.uint8),
        pulse_offsets=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        event_offsets=None,
        num_doms=0,
        direction=batch.direction,
        rows=batch.rows,
        truth=batch.truth,
    )
    return host.to(batch.time.device)
