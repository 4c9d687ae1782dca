"""What a model has to beat, on the same events: the line fit, and guessing."""

# E events, P pulses
import math

import torch
from torch import Tensor

from stoker.recipes.icecube.batch import EventBatch

GUESS_RAD = math.pi / 2  # mean angle between a fixed direction and isotropic ones


def line_fit(batch: EventBatch, sensor_xyz: Tensor) -> Tensor:
    """Unit vectors (E, 3): least squares of position on time over the coincident pulses, turned to the origin.

    All pulses count the same. An event whose coincident pulses share one time or one place has no slope; it gets
    "straight up".
    """
    num_events = batch.num_samples
    dom_event = torch.repeat_interleave(torch.arange(num_events, device=batch.time.device), batch.event_offsets.diff())
    dom = torch.repeat_interleave(torch.arange(len(batch.sensor), device=batch.time.device), batch.dom_offsets.diff())
    event = dom_event[dom]  # (P,)
    weight = 1 - batch.auxiliary.double()
    position, time = sensor_xyz.double()[batch.sensor[dom]], batch.time.double()

    def event_sum(values: Tensor) -> Tensor:
        return values.new_zeros(num_events, *values.shape[1:]).index_add_(0, event, values)

    total = event_sum(weight).clamp_min(1)
    centred_time = time - (event_sum(weight * time) / total)[event]
    centred = position - (event_sum(weight[:, None] * position) / total[:, None])[event]
    slope = event_sum((weight * centred_time)[:, None] * centred)
    norm = slope.norm(dim=-1, keepdim=True)
    up = torch.tensor([0.0, 0.0, 1.0], dtype=slope.dtype, device=slope.device)
    return torch.where(norm > 0, -slope / norm.clamp_min(1e-30), up).float()
