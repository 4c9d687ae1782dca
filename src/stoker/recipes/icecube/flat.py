"""The flat transformer: one token a DOM, made of its place, its number of pulses and its first few of them.

Blocks follow the later design of the seed's authors: RMS norms without weights, normalised queries and keys, squared ReLU,
projections that begin at zero, and learnt weights of the residual stream and of the first embedding.
"""

# E events, D DOMs hit, K pulses kept of a DOM, C channels
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.recipes.icecube.attention import Segments, attend, layer_kernels, segment_mean
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.geometry import Geometry
from stoker.recipes.icecube.inputs import (
    NUM_PULSE_INPUTS,
    DirectionConfig,
    DirectionHead,
    InputLayer,
    Inputs,
    aligned_linear,
    num_dom_inputs,
)
from stoker.settings import AlsoCalled, config

EPS = 2.0**-23  # of norms: what torch takes for float32, in every precision
NUM_LATER_INPUTS = 4  # of a pulse that is not the DOM's first: time, charge, auxiliary, and whether it exists


@config
class FlatConfig(DirectionConfig):
    width: Annotated[int, Field(ge=8), AlsoCalled("d_model", "hidden_size", "dim")] = 256
    heads: Annotated[int, Field(ge=1), AlsoCalled("num_heads", "n_head")] = 8
    layers: Annotated[int, Field(ge=1), AlsoCalled("num_layers", "depth")] = 6
    expansion: Annotated[float, Field(gt=0)] = 4.0
    first_pulses: Annotated[int, Field(ge=1)] = 16  # of each DOM that its token holds

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class FlatModel(nn.Module):
    def __init__(self, config: FlatConfig, geometry: Geometry) -> None:
        super().__init__()
        self.first_pulses = config.first_pulses
        self.inputs = InputLayer(config, geometry)
        num_inputs = num_dom_inputs(config) + NUM_PULSE_INPUTS + 2 + NUM_LATER_INPUTS * (config.first_pulses - 1)
        self.embedding = nn.Linear(num_inputs, config.width)
        self.layers = nn.ModuleList(FlatLayer(config) for _ in range(config.layers))
        self.head = DirectionHead(config.width, config)

    def forward(self, batch: EventBatch) -> Tensor:
        """(E, 4) unit vectors to where the neutrinos came from, and kappa."""
        inputs = self.inputs(batch)
        first = token = _rms(aligned_linear(self.embedding, self.tokens(batch, inputs)))  # (D, C)
        for layer in self.layers:
            token = layer(token, first, inputs.by_event)
        return self.head(segment_mean(_rms(token), inputs.by_event))  # type: ignore[no-any-return]

    @torch.no_grad()
    def tokens(self, batch: EventBatch, inputs: Inputs) -> Tensor:
        """(D, inputs): place, logarithms of count and charge, the first pulse in full, later ones in short."""
        begin, count = batch.dom_offsets[:-1], batch.dom_offsets.diff()
        charge = segment_mean(batch.charge[:, None], inputs.by_dom) * count[:, None]
        parts = [inputs.doms, torch.log10(count)[:, None], torch.log10(charge.clamp_min(1e-3)), inputs.pulses[begin]]
        if self.first_pulses > 1:
            step = torch.arange(1, self.first_pulses, device=begin.device)
            there = step < count[:, None]  # (D, K - 1)
            index = begin[:, None] + torch.minimum(step, count[:, None] - 1)
            later = inputs.pulses[:, 1:4][index] * there[:, :, None]
            parts += [later.flatten(1), there.to(later.dtype)]
        return torch.cat(parts, -1)


class FlatLayer(nn.Module):
    def __init__(self, config: FlatConfig) -> None:
        super().__init__()
        width, inner = config.width, int(config.width * config.expansion)
        self.heads = config.heads
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.residual = nn.Parameter(torch.tensor([1.0, 0.0]))  # of the stream and of the first embedding
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, token: Tensor, first: Tensor, segments: Segments) -> Tensor:
        token = (self.residual[0] * token + self.residual[1] * first).to(token.dtype)
        if (fast := layer_kernels(token, self.heads, self.widen.out_features)) is not None:
            return self._at_once(fast, token, segments)
        query, key, value = self.qkv(_rms(token)).view(len(token), 3, self.heads, -1).unbind(1)
        mixed = attend(torch.stack([_rms(query), _rms(key), value], 1), segments)
        token = token + self.mix(mixed.reshape(token.shape))
        return torch.add(token, self.narrow(F.relu(self.widen(_rms(token))).square()))

    def _at_once(self, fast: Any, token: Tensor, segments: Segments) -> Tensor:
        """The same in one operator, with much of what is wider than a token kept on the chip."""
        weights = fast.LayerWeights(self.qkv.weight, self.mix.weight, self.widen.weight, self.narrow.weight)
        options = {"heads": self.heads, "eps": EPS, "centred": False, "unit_eps": EPS}
        return fast.layer(token, weights, segments, None, **options)  # type: ignore[no-any-return]


def _rms(values: Tensor) -> Tensor:
    return F.rms_norm(values, values.shape[-1:], eps=EPS).to(values.dtype)
