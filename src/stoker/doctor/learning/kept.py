"""Everything that a look at somebody's loop may touch, put back as it was."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn


@contextmanager
def optimizer_kept(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """In place: loops keep a group, or the state of a weight, and write into it."""
    if optimizer is None:
        yield
        return
    groups = optimizer.param_groups
    options = [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]
    states = {key: {name: _copied(value) for name, value in state.items()} for key, state in optimizer.state.items()}
    try:
        yield
    finally:
        for group, kept in zip(groups, options, strict=True):
            for key in set(group) - set(kept) - {"params"}:
                del group[key]
            group.update(kept)
        for weight in set(optimizer.state) - set(states):
            del optimizer.state[weight]
        for weight, state in states.items():
            optimizer.state[weight].clear()
            optimizer.state[weight].update(state)


@contextmanager
def model_kept(model: nn.Module) -> Iterator[None]:
    """Weights, buffers that no checkpoint holds, gradients, and which modules are training."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [one.detach().clone() for one in tensors]
    gradients = [one.grad for one in model.parameters()]
    copies = [None if one is None else one.detach().clone() for one in gradients]
    training = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
        for parameter, gradient, kept in zip(model.parameters(), gradients, copies, strict=True):
            parameter.grad = gradient
            if gradient is not None and kept is not None:
                gradient.copy_(kept)
        for module, was_training in training:
            module.training = was_training


@contextmanager
def chance_kept(model: nn.Module) -> Iterator[None]:
    """What others draw: torch's numbers, numpy's and Python's own."""
    devices = sorted({one.device.index or 0 for one in model.parameters() if one.is_cuda})
    numbers, own = np.random.get_state(), random.getstate()  # noqa: NPY002 (what loops of others use)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(numbers)  # noqa: NPY002
        random.setstate(own)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
