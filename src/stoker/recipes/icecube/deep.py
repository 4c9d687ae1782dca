"""The deep transformer: every pulse is a token, and scores know the space-time interval between two pulses.

Whether light could have come from one pulse to the other is what the strongest published models give their first layers.
Events are thinned to `loader.sample_cost` pulses, coincident ones first, because attention costs their square.
"""

# E events, P pulses, C channels
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from stoker.recipes.icecube.attention import LONG, Activation, Bias, EncoderLayer, Segments, segment_mean
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.geometry import Geometry
from stoker.recipes.icecube.inputs import DirectionConfig, DirectionHead, InputLayer, PulseEmbedding
from stoker.settings import AlsoCalled, config

LIGHT_M_PER_NS = 0.2211  # group velocity at 400 nm in ice
INTERVAL_STEP_M = 50.0  # between knots of the bias


@config
class DeepConfig(DirectionConfig):
    width: Annotated[int, Field(ge=8), AlsoCalled("d_model", "hidden_size", "dim")] = 256
    heads: Annotated[int, Field(ge=1), AlsoCalled("num_heads", "n_head")] = 8
    layers: Annotated[int, Field(ge=1), AlsoCalled("num_layers", "depth")] = 8
    bias_layers: Annotated[int, Field(ge=0)] = 4  # the first ones, whose scores know the interval
    knots: Annotated[int, Field(ge=3, le=64)] = 17  # of the bias, INTERVAL_STEP_M apart
    expansion: Annotated[float, Field(gt=0)] = 4.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    activation: Activation = "relu2"  # of the feed-forward part: squared ReLU, or GELU

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.bias_layers > self.layers:
            raise ValueError(f"bias_layers {self.bias_layers} is more than layers {self.layers}")


class DeepModel(nn.Module):
    def __init__(self, config: DeepConfig, geometry: Geometry) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        self.inputs = InputLayer(config, geometry)
        self.embedding = PulseEmbedding(config, width)
        self.layers = nn.ModuleList(
            EncoderLayer(width, heads, config.expansion, config.dropout, config.activation)
            for _ in range(config.layers)
        )
        self.tables = nn.ParameterList(torch.zeros(heads, config.knots) for _ in range(config.bias_layers))
        self.norm, self.head = nn.LayerNorm(width, elementwise_affine=False), DirectionHead(width, config)

    def forward(self, batch: EventBatch) -> Tensor:
        """(E, 4) unit vectors to where the neutrinos came from, and kappa."""
        inputs = self.inputs(batch)
        segments = Segments.of(batch.dom_offsets[batch.event_offsets], len(batch.time), LONG)
        place = self.inputs.xyz[batch.sensor][inputs.by_dom.number]
        spacetime = torch.cat([place, inputs.late[:, None] * LIGHT_M_PER_NS], -1)  # (P, 4)
        pulse = self.embedding(inputs)  # (P, C)
        for number, layer in enumerate(self.layers):
            table = self.tables[number] if number < len(self.tables) else None
            bias = None if table is None else Bias(spacetime, table, 1 / INTERVAL_STEP_M)
            pulse = layer(pulse, segments, bias)
        return self.head(segment_mean(self.norm(pulse).to(pulse.dtype), segments))  # type: ignore[no-any-return]
