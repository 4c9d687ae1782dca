"""The two-stage transformer: pulses of a DOM -> one embedding a DOM; DOMs of an event -> a direction.

Both stages are the same encoder over segments of a flat array, nothing padded.
"""

# E events, D DOMs hit, P pulses, C channels
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from stoker.recipes.icecube.attention import Activation, EncoderLayer, segment_mean
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.geometry import Geometry
from stoker.recipes.icecube.inputs import (
    DirectionConfig,
    DirectionHead,
    InputLayer,
    PulseEmbedding,
    aligned_linear,
    num_dom_inputs,
)
from stoker.settings import AlsoCalled, config


@config
class TwoStageConfig(DirectionConfig):
    width: Annotated[int, Field(ge=8), AlsoCalled("d_model", "hidden_size", "dim")] = 128  # channels
    heads: Annotated[int, Field(ge=1), AlsoCalled("num_heads", "n_head")] = 4
    pulse_layers: Annotated[int, Field(ge=0), AlsoCalled("t1_layers")] = 4  # layers over the pulses of a DOM
    dom_layers: Annotated[int, Field(ge=1), AlsoCalled("t2_layers")] = 4  # layers over the DOMs of an event
    expansion: Annotated[float, Field(gt=0)] = 4.0  # width of the feed-forward part, in units of `width`
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of activations; the data set is larger than the model
    activation: Activation = "relu2"  # of the feed-forward part: squared ReLU, or the seed's GELU

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")


class TwoStageModel(nn.Module):
    def __init__(self, config: TwoStageConfig, geometry: Geometry) -> None:
        super().__init__()
        width = config.width

        def layers(count: int) -> nn.ModuleList:
            return nn.ModuleList(
                EncoderLayer(width, config.heads, config.expansion, config.dropout, config.activation)
                for _ in range(count)
            )

        self.inputs = InputLayer(config, geometry)
        self.embedding = PulseEmbedding(config, width)
        self.place = nn.Sequential(nn.Linear(num_dom_inputs(config), width), nn.GELU(), nn.Linear(width, width))
        self.pulse_layers, self.dom_layers = layers(config.pulse_layers), layers(config.dom_layers)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.head = DirectionHead(width, config)

    def forward(self, batch: EventBatch) -> Tensor:
        """(E, 4) unit vectors to where the neutrinos came from, and kappa."""
        inputs = self.inputs(batch)
        pulse = self.embedding(inputs)  # (P, C)
        for layer in self.pulse_layers:
            pulse = layer(pulse, inputs.by_dom)
        # Autocast's norm makes numbers wider, and every layer would carry that on.
        dom = segment_mean(self.norm(pulse).to(pulse.dtype), inputs.by_dom) + self._placed(inputs.doms)  # (D, C)
        for layer in self.dom_layers:
            dom = layer(dom, inputs.by_event)
        event = segment_mean(self.norm(dom).to(dom.dtype), inputs.by_event)  # (E, C)
        return self.head(event)  # type: ignore[no-any-return]

    def _placed(self, doms: Tensor) -> Tensor:
        into, activation, out = self.place
        assert isinstance(into, nn.Linear)
        return out(activation(aligned_linear(into, doms)))  # type: ignore[no-any-return]
