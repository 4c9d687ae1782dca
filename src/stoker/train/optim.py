"""Optimizers: fused AdamW and SGD, able to skip a step on the device, without decay on norms, biases and embeddings."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from stoker.train.config import TrainConfig

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    decayed, plain = parameter_groups(model)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)
    nesterov = config.momentum > 0
    optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=nesterov, fused=True)
    # Zeros from the start: fused SGD leaves a buffer uninitialised if the very first step is skipped.
    for group in optimizer.param_groups if nesterov else ():
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


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
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = skip  # type: ignore[attr-defined]
    optimizer.step()
