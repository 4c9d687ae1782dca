"""Numbers of fewer bits: autocast, TF32, a loss scale for fp16 that lives on the device; and sums in one order."""

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.utils.deterministic
from torch import Tensor

from stoker.errors import UserError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
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


def vouch_for_products(device: torch.device) -> None:
    """Tells torch that cuBLAS gives the same numbers every time; before the first matrix product of the process.

    It asks for this variable once, at the first product, and would warn of every product without it. Where the variable
    stays, torch parses it again at every product: 60 microseconds each (torch 2.11), longer than launching them. It names
    the workspace that Hopper GPUs get anyhow, and torch gives each stream its own.
    """
    if device.type != "cuda" or WORKSPACE in os.environ:
        return
    # Of a process in which somebody was quicker.
    warnings.filterwarnings("ignore", "(?s)Deterministic behavior was enabled.*uses CuBLAS", UserWarning)
    os.environ[WORKSPACE] = ":4096:8"
    one = torch.zeros(8, 8, device=device)
    torch.mm(one, one)
    del os.environ[WORKSPACE]


@contextmanager
def same_sums(device: torch.device, *, exact: bool = True) -> Iterator[None]:
    """Inside the block sums are made in one order, so that the same seed gives the same bits, whichever thread is first.

    Else threads race where a row was taken more than once or a weight is summed over an image, and now and then a run that
    was resumed differs in the last bit. On CPUs it costs nothing that was measured; docs/training.md has the price on a GPU.
    An operation that knows only the racing way warns once.
    """
    if not exact or torch.are_deterministic_algorithms_enabled():
        yield
        return
    vouch_for_products(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # That is for finding mistakes, and would cost every allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


class LossScale:
    """Multiplies the loss so that fp16 gradients do not vanish; halves when they overflow, doubles after a quiet while."""

    def __init__(self, device: torch.device, start: float = 2.0**16) -> None:
        self.scale = torch.tensor(start, device=device)
        self.quiet = torch.tensor(0, dtype=torch.int32, device=device)

    def update(self, overflow: Tensor) -> None:
        torch._amp_update_scale_(self.scale, self.quiet, overflow, 2.0, 0.5, GROW_AFTER)
