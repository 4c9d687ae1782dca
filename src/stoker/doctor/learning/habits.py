"""What only a whole loop can get wrong: labels of mixed samples, averages that nobody uses, a rate from a checkpoint.

The step of the loop is run as it is, with the same draws each time, and everything is put back.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.data.batch import map_leaves, tensors_in
from stoker.doctor.learning.facts import Mixed
from stoker.doctor.learning.kept import chance_kept, model_kept, optimizer_kept
from stoker.doctor.learning.labels import labels_of
from stoker.doctor.probe import Probe

COLUMNS = 256  # of a sample, that are compared
MOST_SAMPLES = 256
EXACT = 1e-3  # of a sample's size, by which a mixture may be off
LEAST_MIXED = 0.5  # of the samples of a batch
TRIED = 4  # samples whose labels are changed
LEAST_PASTED = 4  # of the columns that are compared
STEPS, MOST_STEPS = 2, 64  # before averaged weights are looked at; until they must have changed


def restored_rate(optimizer: torch.optim.Optimizer | None) -> tuple[float, float] | None:
    """The rate that an optimizer was made with and the one that its schedule goes on with, where a checkpoint brought it.

    Only before the first step here, and with a schedule of torch's, which remembers the rate it began with: a loop that sets
    its rates by hand sets them again.
    """
    if optimizer is None or not optimizer.state or len(optimizer.param_groups) != 1:
        return None
    group, made = optimizer.param_groups[0], optimizer.defaults.get("lr")
    # Some schedules set both ends themselves.
    if made is None or "initial_lr" not in group or {"max_lr", "min_lr"} & group.keys():
        return None
    present = float(group["initial_lr"])
    return None if np.isclose(present, float(made), rtol=1e-6) else (float(made), present)


def mixing_of(probe: Probe, batch: Any) -> Mixed | None:
    """How the step mixes samples before the model sees them, and whether both of their labels count; None: it does not."""
    model, labels = probe.model, labels_of(batch)
    assert isinstance(model, nn.Module)
    if labels is None or labels.ndim != 1 or labels.is_floating_point() or len(labels) < 4:
        return None
    seen, gradient = _one_step(probe, batch)
    given = next((one for one in tensors_in(batch) if seen is not None and one.shape == seen.shape), None)
    if seen is None or gradient is None or given is None or torch.equal(given.to(seen), seen):
        return None
    partners, shares = _mixture(seen, given.to(seen))
    mixed = [place for place, other in enumerate(partners) if other != place]
    if len(mixed) < LEAST_MIXED * min(len(labels), MOST_SAMPLES):
        return None
    counts = []
    for place in mixed[:TRIED]:
        again = _one_step(probe, _with_label(batch, labels, partners[place]))[1]
        counts.append(again is not None and not torch.equal(again[place], gradient[place]))
    return Mixed(float(np.median([shares[place] for place in mixed])), any(counts))


def average_of(probe: Probe, batches: list[Any], seconds: float) -> str | None:
    """Whether averaged weights are "used" when the loop evaluates, "unused", or "unchanged" by its steps; None: unknown."""
    model, average = probe.model, probe.average
    assert isinstance(model, nn.Module)
    if average is None:
        return None
    begin = time.perf_counter()
    with model_kept(average), _put_back(probe):
        before = [one.detach().clone() for one in average.parameters()]
        for number in range(MOST_STEPS):
            probe.step(batches[number % len(batches)])
            changed = any(not torch.equal(one, old) for one, old in zip(average.parameters(), before, strict=True))
            if number + 1 >= STEPS and (changed or time.perf_counter() - begin > seconds):
                break
        if not changed:
            return "unchanged"
        return None if probe.evaluate is None else _judged_by(probe.evaluate, model, average, seconds)


class _EnoughError(Exception):
    pass


def _judged_by(evaluate: Callable[[], Any], model: nn.Module, average: nn.Module, seconds: float) -> str | None:
    """A loop may call the averaged model, or lend its weights to the other one."""
    used, begin = [], time.perf_counter()

    def look(module: nn.Module, *_: Any) -> None:
        if module is not model or _first_equals(model, average):
            used.append(True)
        if used or time.perf_counter() - begin > seconds:
            raise _EnoughError

    hooks = [one.register_forward_pre_hook(look) for one in (model, *average.modules())]
    try:
        evaluate()
    except _EnoughError:
        return "used" if used else None
    finally:
        for hook in hooks:
            hook.remove()
    return "unused"


def _first_equals(model: nn.Module, average: nn.Module) -> bool:
    pairs = list(zip(model.parameters(), average.parameters(), strict=False))
    return bool(pairs) and all(torch.equal(one, other) for one, other in pairs)


@contextmanager
def _put_back(probe: Probe) -> Iterator[None]:
    assert isinstance(probe.model, nn.Module)
    with model_kept(probe.model), optimizer_kept(probe.optimizer), chance_kept(probe.model):
        yield


def _one_step(probe: Probe, batch: Any) -> tuple[Tensor | None, Tensor | None]:
    """What the model was given, and the gradient of what it answered, from the same weights with the same draws."""
    model = probe.model
    assert isinstance(model, nn.Module)
    inputs: list[Tensor] = []
    gradients: list[Tensor] = []

    def look(module: nn.Module, given: tuple[Any, ...], answer: Any) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(answer, Tensor) and answer.requires_grad:
            inputs.append(given[0].detach().clone())
            answer.register_hook(lambda gradient: gradients.append(gradient.detach().clone()))  # type: ignore[no-untyped-call]

    with _put_back(probe):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002 (what loops of others use)
        random.seed(0)
        hook = model.register_forward_hook(look)
        try:
            probe.step(batch)
        finally:
            hook.remove()
    return (inputs[0], gradients[0]) if inputs and gradients else (None, None)


def _mixture(seen: Tensor, given: Tensor) -> tuple[list[int], list[float]]:
    """For each sample the one that it was mixed with, itself where it was not, and its own share."""
    rows = min(len(seen), MOST_SAMPLES)
    flat, own = (one[:rows].reshape(rows, -1).double().cpu() for one in (seen, given))
    columns = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))[:COLUMNS]
    flat, own = flat[:, columns], own[:, columns]
    partners, shares = list(range(rows)), [1.0] * rows
    for place in range(rows):
        # seen = other + share * (own - other), for every other one at once
        apart = own[place] - own
        share = ((flat[place] - own) * apart).sum(1) / apart.square().sum(1).clamp_min(1e-12)
        rest = (flat[place] - own - share[:, None] * apart).norm(dim=1) / flat[place].norm().clamp_min(1e-12)
        rest[place] = torch.inf
        # or a part of it was replaced by that of the other one
        is_own = flat[place] == own[place]
        pasted = ((flat[place] == own) | is_own).all(1)
        pasted[place] = False
        # Zeros that stand in place of values are none of another sample's.
        if bool(pasted.any()) and int((flat[place][~is_own] != 0).sum()) >= LEAST_PASTED:
            partners[place], shares[place] = int(pasted.int().argmax()), float(is_own.double().mean())
            continue
        best = int(rest.argmin())
        if float(rest[best]) < EXACT and 0.01 < float(share[best]) < 0.99:
            partners[place], shares[place] = best, float(share[best])
    return partners, shares


def _with_label(batch: Any, labels: Tensor, place: int) -> Any:
    """The same batch, in which one sample is called what another one is."""
    changed = labels.clone()
    other = labels[labels != labels[place]]
    changed[place] = other[0] if len(other) else labels[place]
    return map_leaves(batch, lambda leaf: changed if leaf is labels else leaf)
