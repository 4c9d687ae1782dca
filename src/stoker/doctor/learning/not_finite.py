"""A loss or a gradient that is not finite before anything was learnt: which samples, which operation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stoker.data.batch import map_tensors, tensors_in
from stoker.doctor.finite import first_bad_operation
from stoker.doctor.learning.facts import NotFinite

MOST_TRIALS = 64  # of parts of a batch

Loss = Callable[[Any], Tensor]


def first_not_finite(loss: Loss, model: nn.Module, batches: Sequence[Any]) -> NotFinite | None:
    for number, batch in enumerate(batches):
        bad = _is_bad(loss, model, batch)
        if bad is not None:
            size = _size(batch)
            samples = tuple(_bad_samples(loss, model, batch, torch.arange(size), [MOST_TRIALS])) if size else ()
            one = _some(batch, torch.tensor(samples)) if samples else batch
            backward = bad == "gradient"
            operation, line = first_bad_operation(lambda one=one: loss(one), backward=backward)  # type: ignore[misc]
            return NotFinite(number, samples, size, operation, line, backward)
    return None


def _is_bad(loss: Loss, model: nn.Module, batch: Any) -> str | None:
    """What is not finite: the loss, or the gradient."""
    learnt = [one for one in model.parameters() if one.requires_grad]
    for parameter in learnt:
        parameter.grad = None
    value = loss(batch)
    if not bool(torch.isfinite(value).all()):
        return "loss"
    value.backward()  # type: ignore[no-untyped-call]
    fine = all(bool(torch.isfinite(one.grad).all()) for one in learnt if one.grad is not None)
    return None if fine else "gradient"


def _bad_samples(loss: Loss, model: nn.Module, batch: Any, rows: Tensor, left: list[int]) -> Iterator[int]:
    """By halves. Samples that are only bad together stay together; what cannot be computed alone is not cut further.

    `left`: so many may still be tried. Where all of them are bad, that is known before each of them is.
    """
    left[0] -= 1
    try:
        bad = _is_bad(loss, model, _some(batch, rows))
    except (RuntimeError, ValueError, IndexError):
        return
    if bad is None:
        return
    middle = len(rows) // 2
    parts = [] if len(rows) == 1 or left[0] <= 0 else [rows[:middle], rows[middle:]]
    found = [one for part in parts for one in _bad_samples(loss, model, batch, part, left)]
    yield from found or rows.tolist()


def _size(batch: Any) -> int:
    """Samples of a batch whose tensors all have one row each; 0: others cannot be taken apart."""
    sizes = {len(one) if one.ndim else -1 for one in tensors_in(batch)}
    return 0 if hasattr(batch, "batches") or len(sizes) != 1 else max(0, *sizes)


def _some(batch: Any, rows: Tensor) -> Any:
    return map_tensors(batch, lambda tensor: tensor[rows.to(tensor.device)])
