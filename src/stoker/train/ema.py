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
        current = model.state_dict()  # the tensors themselves: training changes them in place
        floats = [name for name, value in current.items() if value.is_floating_point()]
        others = [name for name in current if name not in floats]
        self._floats = [self.weights[name] for name in floats], [current[name].detach() for name in floats]
        self._others = [self.weights[name] for name in others], [current[name].detach() for name in others]

    def update(self, skip: Tensor) -> None:
        """Moves towards the current weights, on the device, unless `skip` is 1."""
        self.updates += 1 - skip
        decay = torch.clamp((1 + self.updates) / (10 + self.updates), max=self._decay)
        share = (1 - decay) * (1 - skip)
        averaged, current = self._floats
        moved = torch._foreach_sub(current, averaged)
        torch._foreach_mul_(moved, share)
        torch._foreach_add_(averaged, moved)
        if self._others[0]:
            torch._foreach_copy_(*self._others)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block."""
        raw = {name: value.detach().clone() for name, value in self._model.state_dict().items()}
        self._model.load_state_dict(self.weights)
        try:
            yield
        finally:
            self._model.load_state_dict(raw)
