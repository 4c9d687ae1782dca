"""Optimizers: fused AdamW and SGD, and LAMB; able to skip a step on the device, no decay on norms, biases, embeddings."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stoker.errors import UserError
from stoker.train.config import TrainConfig
from stoker.train.layers import layer_numbers

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


MakeOptimizer = Callable[[nn.Module, TrainConfig], torch.optim.Optimizer]


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    groups = _groups(model, config)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    if config.optimizer == "lamb":
        return Lamb(groups, lr=config.lr, betas=(config.beta1, config.beta2))
    nesterov = config.momentum > 0
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=True)
    # Zeros from the start: fused SGD leaves a buffer uninitialised if the very first step is skipped.
    for group in optimizer.param_groups if nesterov else ():
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """What a recipe's own function made must be one that can be driven, and kept in a checkpoint."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"The recipe's optimizer is a {type(optimizer).__name__}, and must be one of torch's.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("LBFGS computes the loss several times a step, which is not done here.")
    known = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise UserError("The optimizer trains a parameter that the model does not have: make it one of the model's.")


def _groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Parameters by weight decay and, with `layer_decay`, by layer; each group with its highest rate."""
    decayed, plain = parameter_groups(model)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if config.layer_decay is not None:
        groups = [one for group in groups for one in _by_layer(model, group, config.lr, config.layer_decay)]
    return [group for group in groups if group["params"]]


def _by_layer(model: nn.Module, group: dict[str, Any], lr: float, decay: float) -> list[dict[str, Any]]:
    """The last layer has the full rate, each one before it less by the factor `decay`."""
    numbers, names = layer_numbers(model), {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        found.setdefault(numbers[names[id(parameter)]], []).append(parameter)
    top = max(numbers.values())
    return [{**group, "params": some, "lr": lr * decay ** (top - number)} for number, some in sorted(found.items())]


class Lamb(torch.optim.Optimizer):
    """Adam whose step of each parameter is as long as the parameter, times the rate (arXiv:1904.00962).

    Parameters without weight decay (norms, biases) take plain Adam steps. Like the fused optimizers it looks at `found_inf`
    on the device and changes nothing where that is 1.
    """

    found_inf: Tensor

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float = 1e-6) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        keep = 1 - self.found_inf  # 0 where the step is bad: nothing moves, moments neither
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group, keep)

    def _update(self, parameter: Tensor, group: dict[str, Any], keep: Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        assert parameter.grad is not None
        gradient = torch.where(keep > 0, parameter.grad, torch.zeros_like(parameter.grad))
        state["step"].add_(keep)
        state["exp_avg"].lerp_(gradient, (1 - beta1) * keep)
        state["exp_avg_sq"].mul_(1 - (1 - beta2) * keep).addcmul_(gradient * keep, gradient, value=1 - beta2)
        correction1, correction2 = 1 - beta1 ** state["step"], 1 - beta2 ** state["step"]
        update = (state["exp_avg"] / correction1.clamp_min(1e-12)) / (
            (state["exp_avg_sq"] / correction2.clamp_min(1e-12)).sqrt() + group["eps"]
        )
        decay = group["weight_decay"]
        if decay:
            update = update + decay * parameter
            length, step = parameter.norm(), update.norm()
            trust = torch.where((length > 0) & (step > 0), length / step.clamp_min(1e-12), torch.ones_like(length))
            update = update * trust
        parameter.sub_(group["lr"] * keep * update)


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with and without weight decay, told by the type of their module and never by name."""
    without: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            bias = name == "bias" and hasattr(module, "weight")
            if isinstance(module, (*NORMS, nn.Embedding)) or bias or parameter.ndim < 2:
                without.add(id(parameter))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trained if id(p) not in without], [p for p in trained if id(p) in without]


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Updates the weights unless `skip` (a float 0-d tensor) is 1; neither weights nor moments are touched then."""
    if not (isinstance(optimizer, Lamb) or getattr(optimizer, "_step_supports_amp_scaling", False)):
        if not skip.item():  # the host waits for it: an optimizer of others does not look at the device itself
            optimizer.step()
        return
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
