"""The optimizer: AdamW, without weight decay on norms, biases and embeddings."""

import torch
from torch import nn


def build_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Decides by module type and parameter shape, never by name: names are the recipe's own affair."""
    plain: list[nn.Parameter] = []
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.LayerNorm | nn.Embedding) or parameter.ndim < 2:
                plain.append(parameter)
    without = {id(parameter) for parameter in plain}
    decayed = [parameter for parameter in model.parameters() if id(parameter) not in without]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, fused=True)
