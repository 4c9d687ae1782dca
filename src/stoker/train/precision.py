"""Numbers of fewer bits: autocast, TF32, and a loss scale for fp16 that lives on the device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from stoker.errors import UserError

GROW_AFTER = 2000  # steps without an overflow, then the scale doubles


def resolve_precision(name: str, device: torch.device) -> str:
    if name == "auto":
        return "bf16" if device.type == "cuda" else "fp32"
    if name == "fp16" and device.type != "cuda":
        raise UserError("train.precision fp16 needs a GPU; on a CPU use bf16 or fp32.")
    return name


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if precision == "bf16" else torch.float16)


def use_tf32(enabled: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if enabled else "ieee"
    torch.backends.cudnn.conv.fp32_precision = "tf32" if enabled else "ieee"  # type: ignore[attr-defined]


class LossScale:
    """Multiplies the loss so that fp16 gradients do not vanish; halves when they overflow, doubles after a quiet while."""

    def __init__(self, device: torch.device, start: float = 2.0**16) -> None:
        self.scale = torch.tensor(start, device=device)
        self.quiet = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        torch._amp_update_scale_(self.scale, self.quiet, overflow, 2.0, 0.5, GROW_AFTER)
