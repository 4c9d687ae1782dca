"""The two-stage transformer: pulses of a DOM -> one embedding a DOM; DOMs of an event -> a direction.

Both stages are the same encoder over segments of a flat array. Inputs are normalised here, with constants of the real
data, so that no caller can forget to.
"""

# E events, D DOMs hit, P pulses, C channels
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.recipes.icecube.attention import segment_attention
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.geometry import Geometry
from stoker.settings import AlsoCalled, config

# Trigger and length of a readout (ns), the usual scale of log10 charge, the detector's half-size (m).
TIME_CENTRE_NS, TIME_SCALE_NS = 1e4, 3e3
LOG_CHARGE_SCALE = 3.0
POSITION_SCALE_M = 500.0
# Spread of an event about its own centre: most are much smaller than the detector and shorter than a readout.
EVENT_TIME_SCALE_NS, EVENT_SCALE_M = 500.0, 150.0


@config
class TwoStageConfig:
    width: Annotated[int, Field(ge=8), AlsoCalled("d_model", "hidden_size", "dim")] = 128  # channels
    heads: Annotated[int, Field(ge=1), AlsoCalled("num_heads", "n_head")] = 4
    pulse_layers: Annotated[int, Field(ge=0), AlsoCalled("t1_layers")] = 4  # layers over the pulses of a DOM
    dom_layers: Annotated[int, Field(ge=1), AlsoCalled("t2_layers")] = 4  # layers over the DOMs of an event
    expansion: Annotated[float, Field(gt=0)] = 4.0  # width of the feed-forward part, in units of `width`
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of activations; the data set is larger than the model

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class TwoStageModel(nn.Module):
    sensors: Tensor  # (5160, 4) position and efficiency, normalised

    def __init__(self, config: TwoStageConfig, geometry: Geometry) -> None:
        super().__init__()
        width = config.width
        sensors = torch.cat(
            [torch.from_numpy(geometry.xyz) / POSITION_SCALE_M, torch.from_numpy(geometry.efficiency)[:, None] - 1], -1
        )
        self.register_buffer("sensors", sensors, persistent=False)
        self.pulse_input = nn.Sequential(nn.Linear(11, width), nn.GELU(), nn.Linear(width, width))
        self.sensor_input = nn.Sequential(nn.Linear(7, width), nn.GELU(), nn.Linear(width, width))
        self.pulse_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.pulse_layers))
        self.dom_layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.dom_layers))
        self.pulse_norm, self.event_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, batch: EventBatch) -> Tensor:
        """Unit vectors (E, 3) to where the neutrinos came from."""
        place, pulse_features = self.features(batch)
        sensor = self.sensor_input(place)  # (D, C)
        pulse = self.pulse_input(pulse_features)  # (P, C)
        for layer in self.pulse_layers:
            pulse = layer(pulse, batch.dom_offsets)
        dom = segment_mean(self.pulse_norm(pulse), batch.dom_offsets) + sensor  # (D, C)
        for layer in self.dom_layers:
            dom = layer(dom, batch.event_offsets)
        event = segment_mean(self.event_norm(dom), batch.event_offsets)  # (E, C)
        return F.normalize(self.head(event).float(), dim=-1, eps=1e-6)

    def features(self, batch: EventBatch) -> tuple[Tensor, Tensor]:
        """Normalised inputs: of DOMs (D, 7), of pulses (P, 11).

        Absolute values, and the same relative to the centre of the event's coincident pulses: a direction is a
        matter of differences in place and time, which a small network would otherwise have to learn to take.
        """
        dom = repeat(torch.arange(len(batch.sensor), device=batch.time.device), batch.dom_offsets, len(batch.time))
        dom_event = repeat(torch.arange(batch.num_samples, device=dom.device), batch.event_offsets, len(batch.sensor))
        event = dom_event[dom]
        place = self.sensors[batch.sensor]  # (D, 4)
        weight = 1 - batch.auxiliary + 1e-3  # a floor, for events without a coincident pulse
        where_when = torch.cat([place[dom, :3] * POSITION_SCALE_M, batch.time[:, None]], -1)  # (P, 4)
        total = weight.new_zeros(batch.num_samples).index_add(0, event, weight)
        centre = (
            weight.new_zeros(batch.num_samples, 4).index_add(0, event, weight[:, None] * where_when) / total[:, None]
        )
        nearby = (place[:, :3] * POSITION_SCALE_M - centre[dom_event, :3]) / EVENT_SCALE_M
        place = torch.cat([place, nearby], -1)
        late = ((batch.time - centre[event, 3]) / EVENT_TIME_SCALE_NS).clamp(-8, 8)
        time = (batch.time - TIME_CENTRE_NS) / TIME_SCALE_NS
        charge = torch.log10(batch.charge.clamp_min(1e-3)) / LOG_CHARGE_SCALE
        return place, torch.cat([torch.stack([time, late, charge, batch.auxiliary - 0.5], -1), place[dom]], -1)


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward over segments."""

    def __init__(self, config: TwoStageConfig) -> None:
        super().__init__()
        width, inner = config.width, int(config.width * config.expansion)
        self.heads = config.heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, offsets: Tensor) -> Tensor:  # (T, C), (S + 1,)
        query, key, value = self.qkv(self.attention_norm(tokens)).view(len(tokens), 3, self.heads, -1).unbind(1)
        mixed = segment_attention(query, key, value, offsets).reshape(tokens.shape)
        tokens = tokens + self.dropout(self.mix(mixed))
        fed: Tensor = self.narrow(F.gelu(self.widen(self.feed_norm(tokens))))
        return torch.add(tokens, self.dropout(fed))


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over the rows of each segment: (T, C) -> (S, C); zero for an empty one."""
    lengths = offsets.diff()
    segment = repeat(torch.arange(len(lengths), device=values.device), offsets, len(values))
    total = values.new_zeros(len(lengths), values.shape[1]).index_add(0, segment, values)
    return total / lengths.clamp_min(1)[:, None]


def repeat(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Each segment's value for each of its rows; `total` is their number, given so that nobody waits for the device."""
    return torch.repeat_interleave(values, offsets.diff(), dim=0, output_size=total)
