"""What flows through a model: the columns that reach its first matrix product, gradients by layer, units that are dead."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stoker.doctor.learning.facts import Feature, Layer
from stoker.doctor.learning.labels import labels_of

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, nn.GRU, nn.RNN)
KINDS = 20  # of whole numbers, from which a column looks like a number that somebody gave
MOST_FEATURES = 4096
LEAST = 32  # samples that a correlation is told of
MOST_PLACES = 512  # of a sample, at which the target is looked for


@contextmanager
def inputs_of_products(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """(samples, columns) of what each product is given, by its name, in the order in which they are called."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                found.setdefault(name, []).append(_columns(module, inputs[0].detach()))

        return hook

    hooks = [
        module.register_forward_pre_hook(keep(name))
        for name, module in model.named_modules()
        if isinstance(module, PRODUCTS)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _columns(module: nn.Module, values: Tensor) -> Tensor:
    """Channels of images lie in the second place, all else in the last."""
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        values = values.movedim(1, -1) if values.ndim > 2 else values
    return values.reshape(-1, values.shape[-1]).float()


def features(inputs: Sequence[Tensor], batches: Sequence[Any], *, of_pixels: bool = False) -> list[Feature]:
    """Columns of what was read; whole numbers of pixels are no identifiers."""
    values = torch.cat(list(inputs)).cpu()[:, :MOST_FEATURES]
    together = _with_target(values, batches)
    return [_feature(number, values[:, number], together[number], of_pixels) for number in range(values.shape[1])]


def _with_target(values: Tensor, batches: Sequence[Any]) -> list[float]:
    """The largest correlation of each column with the target, over all places of a sample that it stands at."""
    nothing = [0.0] * values.shape[1]
    targets = [labels_of(batch) for batch in batches]
    if any(one is None for one in targets):
        return nothing
    target = torch.cat([one.reshape(len(one), -1)[:, 0].double().cpu() for one in targets if one is not None])
    places, rest = divmod(len(values), len(target))
    if rest or not places or places > MOST_PLACES or not bool(torch.isfinite(target).all()) or len(target) < LEAST:
        return nothing
    target = target - target.mean()
    return [_best_correlation(one.reshape(len(target), places).double(), target) for one in values.T]


def _best_correlation(column: Tensor, target: Tensor) -> float:
    """Over the places of one column; not where next to all samples have the same value, which a single one could decide."""
    column = column[:, (column != column.median(0).values).sum(0) >= LEAST / 2]
    if not column.shape[1]:
        return 0.0
    column = column - column.mean(0)
    found = (column * target[:, None]).sum(0) / (column.norm(dim=0) * target.norm())
    found = found.nan_to_num(0.0, 0.0, 0.0)
    return float(found[found.abs().argmax()])


def _feature(number: int, column: Tensor, with_target: float, of_pixels: bool) -> Feature:
    finite = torch.isfinite(column)
    fit = column[finite].double()
    if len(fit) == 0:
        return Feature(number, 0.0, 0.0, 0.0, 0.0, 1.0, False, True)
    mean, spread = float(fit.mean()), float(fit.std(correction=0))
    skew = float((((fit - mean) / spread) ** 3).mean()) if spread > 0 else 0.0
    whole = not of_pixels and bool((fit == fit.round()).all()) and len(torch.unique(fit)) > KINDS
    bad = 1 - float(finite.double().mean())
    return Feature(number, mean, spread, float(fit.abs().max()), skew, bad, whole, spread == 0, with_target)


def layers_of(model: nn.Module, inputs: dict[str, list[Tensor]]) -> list[Layer]:
    """After a backward pass. In the order of the model."""
    found = []
    for name, module in model.named_modules():
        own = [one for one in module.parameters(recurse=False) if one.ndim >= 2]
        if not own:
            continue
        learnt = [one for one in own if one.requires_grad]
        gradients = [one for one in learnt if one.grad is not None]
        gradient = None
        if gradients:
            size = sum(float(one.detach().norm()) for one in gradients)
            gradient = sum(float(one.grad.norm()) for one in gradients if one.grad is not None) / (size + 1e-12)
        found.append(Layer(name or "model", gradient, not learnt, _dead(inputs.get(name, []))))
    return found


def _dead(inputs: Sequence[Tensor]) -> float:
    if not inputs:
        return 0.0
    alive = torch.stack([(one != 0).any(0) for one in inputs if one.shape[1] == inputs[0].shape[1]]).any(0)
    return float(1 - alive.double().mean())
