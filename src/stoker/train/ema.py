"""Averaged weights: an exponential moving average that is evaluated beside the raw ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Starts as a copy of the weights; `decay` is reached slowly, so that the first weights are forgotten."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model, self._decay = model, decay
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.updates = torch.zeros((), device=next(model.parameters()).device)

    def update(self, skip: Tensor) -> None:
        """Moves towards the current weights, on the device, unless `skip` is 1."""
        self.updates += 1 - skip
        decay = torch.clamp((1 + self.updates) / (10 + self.updates), max=self._decay)
        share = (1 - decay) * (1 - skip)
        current = self._model.state_dict()
        floats = [name for name, value in self.weights.items() if value.is_floating_point()]
        averaged = [self.weights[name] for name in floats]
        moved = torch._foreach_sub([current[name].detach() for name in floats], averaged)
        torch._foreach_mul_(moved, share)
        torch._foreach_add_(averaged, moved)
        for name, value in self.weights.items():
            if not value.is_floating_point():
                value.copy_(current[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        raw = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        self._model.load_state_dict(self.weights)
        try:
            yield
        finally:
            self._model.load_state_dict(raw)
