"""What the operations of a step are: how long the device is busy, how many there are, of what kinds, who reads numbers."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

STEPS = 3
SHORT_US = 20.0  # an operation that takes less is mostly the call itself
SHORT_KERNEL_US = 6.0  # of a GPU: about what any kernel takes
LOOPED = 0.5  # of the forward pass in such operations, from which all of it counts as a loop
ALIKE, ALIKE_US = 200, 500.0  # so many of one name in a step, and no longer than this on average, come from a loop
PRODUCTS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "linear",
    "matmul",
    "scaled_dot_product",
    "conv2d",
    "einsum",
)


# Of a GPU's kernels, which have names of their own.
KERNELS = ("gemm", "nvjet", "cutlass", "xmma", "conv", "wgrad", "dgrad", "splitk", "implicit", "triton_tem")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync")  # of the host, for the device
MARKS = ("stoker step", "Optimizer.")  # of the profiler, over all that is computed inside
BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class Operations:
    """Of one step."""

    busy_share: float  # of the wall clock that the device computes: the union of its intervals
    count: float  # operations that were called by Python, or kernels that were launched
    short_share: float  # of the wall clock in operations that are called one by one: very short, or hundreds alike
    product_share: float  # of the time of operations in matrix products and convolutions
    reads: float  # times that the host asked for a number of the device
    softmax_share: float  # of the time of operations
    fused_attention: bool
    fused_optimizer: bool
    counted_share: float = 0.0  # of the time of operations, in those whose work can be counted
    top: tuple[tuple[str, float], ...] = field(default=())  # operations and their share of the time
    busy_s: float = 0.0  # of a step, that the device computes
    wait_s: float = 0.0  # of a step, that the host waits for a GPU inside of it

    @property
    def host_share(self) -> float:
        """Of the step: Python between operations, and calling those that are too short to matter."""
        return min(1.0, max(0.0, 1 - self.busy_share + self.short_share))


def profile_steps(step: Callable[[Any], Any], batches: Sequence[Any], device: torch.device) -> Operations:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    step(batches[0])
    with _silent(), profile(activities=activities) as seen:
        for number in range(STEPS):
            with torch.profiler.record_function("stoker step"):
                step(batches[number % len(batches)])
                if device.type == "cuda":
                    torch.cuda.synchronize()
    events = list(seen.events())
    wall = sum(
        event.time_range.elapsed_us() for event in events if event.name == "stoker step" and not _on_device(event)
    )
    called = [event for event in events if event.name.startswith("aten::") and not _on_device(event) and _top(event)]
    kernels = [event for event in events if _on_device(event) and not event.name.startswith(MARKS)]
    counted = kernels or called
    short = [event for event in kernels if event.time_range.elapsed_us() < SHORT_KERNEL_US]
    busy_us, short_us = (_union(kernels), _union(short)) if kernels else _busy_and_short_us(events, called)
    total = sum(event.time_range.elapsed_us() for event in counted) or 1.0
    words = KERNELS if kernels else PRODUCTS
    return Operations(
        busy_share=busy_us / wall,
        count=len(counted) / STEPS,
        short_share=short_us / wall,
        product_share=_share(counted, words, total),
        reads=sum(event.name == "aten::_local_scalar_dense" for event in events) / STEPS,
        softmax_share=_share(counted, ("softmax",), total),
        fused_attention=any(word in event.name for event in events for word in ("scaled_dot_product", "flash", "fmha")),
        fused_optimizer=any("_fused_" in event.name or "_foreach_" in event.name for event in events),
        counted_share=_share(counted, words, total) - _share(called, ("scaled_dot_product",), total),
        top=_top_names(counted, total),
        busy_s=1e-6 * busy_us / STEPS,
        wait_s=1e-6 * sum(event.time_range.elapsed_us() for event in events if event.name in WAITS) / STEPS,
    )


def _busy_and_short_us(events: Sequence[Any], called: Sequence[Any]) -> tuple[float, float]:
    """Microseconds in operations, and in those of them that are called one by one.

    The backward pass is as much of a loop as what it goes back through. Where that is none, its time between operations is
    torch's own, and nobody's Python.
    """
    alike = _from_loops(called)
    short: dict[bool, float] = {}
    forward_us = 0.0
    for backward in (False, True):
        some = [event for event in called if _in_backward(event) == backward]
        few = [event for event in some if event.time_range.elapsed_us() < SHORT_US or event.name in alike]
        short[backward] = _union(few)
        forward_us = forward_us if backward else _union(some)
    looped = min(1.0, short[False] / (LOOPED * forward_us)) if forward_us else 1.0
    inside = _union(called)
    between = _union([*called, *(event for event in events if event.name.startswith(BACKWARD))]) - inside
    return inside + between * (1 - looped), short[False] + short[True] * looped


def _in_backward(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name.startswith(BACKWARD):
            return True
        parent = parent.cpu_parent
    return False


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler's library speaks to the terminal by itself."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _from_loops(events: Sequence[Any]) -> set[str]:
    spent: dict[str, list[float]] = {}
    for event in events:
        spent.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {
        name
        for name, some in spent.items()
        if len(some) >= ALIKE * STEPS
        and sum(some) / len(some) < ALIKE_US
        and not any(word in name for word in PRODUCTS)  # a deep model has hundreds of those, and needs them
    }


def _on_device(event: Any) -> bool:
    return "CUDA" in str(event.device_type)


def _top(event: Any) -> bool:
    """Called by Python, or by autograd: not by another operation."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return parent is None


def _share(events: Sequence[Any], words: tuple[str, ...], total: float) -> float:
    chosen = (event for event in events if any(word in event.name.lower() for word in words))
    return float(sum(event.time_range.elapsed_us() for event in chosen) / total)


def _top_names(events: Sequence[Any], total: float, count: int = 5) -> tuple[tuple[str, float], ...]:
    spent: dict[str, float] = {}
    for event in events:
        spent[event.name] = spent.get(event.name, 0.0) + event.time_range.elapsed_us()
    ordered = sorted(spent.items(), key=lambda one: -one[1])[:count]
    return tuple((_short_name(name), round(value / total, 4)) for name, value in ordered)


def _short_name(name: str) -> str:
    """Without the templates that kernels are made from."""
    return name.removeprefix("aten::").removeprefix("void ").split("<")[0].split("(")[0][:60]


def _union(events: Sequence[Any]) -> float:
    """Microseconds in which at least one of them runs."""
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def count_flops(step: Callable[[Any], Any], batch: Any, model: nn.Module | None) -> float | None:
    """Of matrix products and convolutions of one step; None: they cannot be counted.

    torch counts the backward pass of grouped convolutions many times over, and attention on a CPU not at all; models with
    the first are not counted, and what the second leaves out is seen in `counted_share`.
    """
    from torch.utils.flop_counter import FlopCounterMode

    layers = [] if model is None else list(model.modules())
    if any(isinstance(one, nn.Conv1d | nn.Conv2d | nn.Conv3d) and one.groups > 1 for one in layers):
        return None
    counter = FlopCounterMode(display=False)
    with torch.compiler.set_stance("force_eager"), counter:
        step(batch)
    return float(counter.get_total_flops())
