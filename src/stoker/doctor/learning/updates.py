"""What a step really does with its gradients: which layers it changes, how many batches count, how much clipping leaves.

The gradient that the optimizer is given is compared with that of the loss of the same batches at the same weights.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.doctor.learning.facts import Update, Updates
from stoker.doctor.probe import Probe

STEPS = 12
MOST_NUMBERS = 50_000_000  # parameters whose gradients are kept aside

Gradients = list[Tensor | None]


def updates_of(probe: Probe, batches: Sequence[Any]) -> Updates | None:
    """Of a few steps of the loop itself; its optimizer is put back. None: it cannot be looked into."""
    model, optimizer, loss = probe.model, probe.optimizer, probe.loss
    assert isinstance(model, nn.Module)
    assert loss is not None
    learnt = [one for one in model.parameters() if one.requires_grad]
    if optimizer is None or probe.settings or sum(one.numel() for one in learnt) > MOST_NUMBERS:
        return None
    before = [one.detach().clone() for one in learnt]
    state = copy.deepcopy(optimizer.state_dict())
    made: list[Update] = []
    rates: list[float] = []
    waiting: list[Any] = []

    def look(*_: Any) -> None:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        given = [None if one.grad is None else one.grad.detach().clone() for one in learnt]
        made.append(_compare(given, [_gradients(loss, learnt, batch) for batch in waiting]))
        waiting.clear()
        for parameter, gradient in zip(learnt, given, strict=True):
            parameter.grad = gradient

    hook = optimizer.register_step_pre_hook(look)
    try:
        for number in range(STEPS):
            waiting.append(batches[number % len(batches)])
            probe.step(waiting[-1])
    finally:
        hook.remove()
        optimizer.load_state_dict(state)
    is_same = [torch.equal(one, old) for one, old in zip(learnt, before, strict=True)]
    return Updates(tuple(made), _unchanged(model, learnt, is_same), bool(rates) and rates[-1] > rates[0])


def _unchanged(model: nn.Module, learnt: Sequence[nn.Parameter], is_same: Sequence[bool]) -> tuple[str, ...]:
    """Layers none of whose weights have changed."""
    same = {id(one) for one, equal in zip(learnt, is_same, strict=True) if equal}
    found = []
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if one.requires_grad and one.ndim >= 2]
        if own and all(id(one) in same for one in own):
            found.append(name or "model")
    return tuple(found)


def _gradients(loss: Callable[[Any], Tensor], learnt: Sequence[nn.Parameter], batch: Any) -> Gradients:
    with torch.enable_grad():
        return list(torch.autograd.grad(loss(batch), learnt, allow_unused=True))


def _compare(given: Gradients, own: Sequence[Gradients]) -> Update:
    """With the mean over the batches since the last step, and with the last of them."""
    if not own:
        return Update(0, 0.0, 0.0, 0.0, 0.0)
    mean = [_mean([one[place] for one in own]) for place in range(len(given))]
    size, with_mean = _scale(given, mean)
    _, with_last = _scale(given, own[-1])
    return Update(len(own), size, with_mean, with_last, _dot(given, given) ** 0.5)


def _mean(values: Sequence[Tensor | None]) -> Tensor | None:
    there = [one for one in values if one is not None]
    return torch.stack(there).sum(0) / len(values) if there else None


def _scale(given: Gradients, other: Gradients) -> tuple[float, float]:
    """How long one is along the other, and the cosine between them."""
    own, along = _dot(other, other), _dot(given, other)
    return along / (own or 1.0), along / ((own * _dot(given, given)) ** 0.5 or 1.0)


def _dot(one: Gradients, other: Gradients) -> float:
    return sum(
        float((left.double() * right.double()).sum())
        for left, right in zip(one, other, strict=True)
        if left is not None and right is not None
    )
