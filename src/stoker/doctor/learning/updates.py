"""What a step really does with its gradients: which layers it changes, how many batches count, how much clipping leaves.

The gradient that the optimizer is given is compared with that of the loss of the same batches at the same weights.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.doctor.learning.facts import Update, Updates
from stoker.doctor.learning.kept import optimizer_kept
from stoker.doctor.probe import Probe

STEPS, MOST_STEPS = 12, 64  # calls of the step: as many as there must be, and for two updates at most
ENOUGH = 2  # updates
MOST_NUMBERS = 50_000_000  # parameters whose gradients are kept aside

Gradients = list[Tensor | None]


def updates_of(probe: Probe, batches: Sequence[Any], seconds: float) -> Updates | None:
    """Of a few steps of the loop itself; its optimizer is put back. None: it cannot be looked into, or takes too long."""
    model, optimizer, loss = probe.model, probe.optimizer, probe.loss
    assert isinstance(model, nn.Module)
    assert loss is not None
    learnt = [one for one in model.parameters() if one.requires_grad]
    if optimizer is None or probe.settings or sum(one.numel() for one in learnt) > MOST_NUMBERS:
        return None
    before = [one.detach().clone() for one in learnt]
    made: list[Update] = []
    rates: list[float] = []
    waiting: list[Any] = []

    def look(*_: Any) -> None:
        rates.append(float(optimizer.param_groups[0]["lr"]))
        given = _taken(learnt)
        made.append(_compare(given, loss, learnt, waiting))
        waiting.clear()
        for parameter, gradient in zip(learnt, given, strict=True):
            parameter.grad = gradient

    begin = time.perf_counter()
    with optimizer_kept(optimizer):
        hook = optimizer.register_step_pre_hook(look)
        try:
            for number in range(MOST_STEPS):
                if number >= STEPS and (len(made) >= ENOUGH or time.perf_counter() - begin > seconds):
                    break
                waiting.append(batches[number % len(batches)])
                probe.step(waiting[-1])
        finally:
            hook.remove()
    if not made:  # it does not say when it steps
        return None
    is_same = [torch.equal(one, old) for one, old in zip(learnt, before, strict=True)]
    return Updates(tuple(made), _unchanged(model, learnt, is_same), rates[-1] > rates[0])


def _unchanged(model: nn.Module, learnt: Sequence[nn.Parameter], is_same: Sequence[bool]) -> tuple[str, ...]:
    """Layers none of whose weights have changed."""
    same = {id(one) for one, equal in zip(learnt, is_same, strict=True) if equal}
    found = []
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if one.requires_grad and one.ndim >= 2]
        if own and all(id(one) in same for one in own):
            found.append(name or "model")
    return tuple(found)


def _taken(learnt: Sequence[nn.Parameter]) -> Gradients:
    """The gradients as they are; then there are none."""
    found = [None if one.grad is None else one.grad.detach().clone() for one in learnt]
    for parameter in learnt:
        parameter.grad = None
    return found


def _compare(
    given: Gradients, loss: Callable[[Any], Tensor], learnt: Sequence[nn.Parameter], batches: Sequence[Any]
) -> Update:
    """With the mean over the batches since the last step, and with the last of them."""
    last: Gradients = []
    total: Gradients = [None] * len(given)
    for batch in batches:
        with torch.enable_grad():
            loss(batch).backward()  # type: ignore[no-untyped-call]
        last = _taken(learnt)
        total = [_sum(one, other) for one, other in zip(total, last, strict=True)]
    if not last:
        return Update(0, 0.0, 0.0, 0.0, 0.0)
    size, with_mean = _scale(given, [None if one is None else one / len(batches) for one in total])
    _, with_last = _scale(given, last)
    return Update(len(batches), size, with_mean, with_last, _dot(given, given) ** 0.5)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return one if other is None else other
    return one + other


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
