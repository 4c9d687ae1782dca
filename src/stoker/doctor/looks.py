"""Small looks at what a trial leaves: memory that grows, padding, wide floats, graphs that were compiled again, the GPU."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._logging._internal import _init_logs, log_state, set_logs

from stoker.data.batch import tensor_bytes, tensors_in
from stoker.doctor.learning.labels import labels_of

LEAST_STEPS = 24  # for a trend of memory
# Of NVML's reasons for lower clocks: heat, or power that the board does not get. A limit of power under load is usual.
SLOWED = 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class DeviceFacts:
    """Of a GPU, while it works."""

    used_bytes: int  # the most that tensors took
    total_bytes: int
    retries: int = 0  # times that the allocator gave everything back to find room
    clock: float | None = None  # of the highest there is; None: the driver cannot be asked
    slowed: bool = False  # by heat, or by the board's power


def device_facts(device: torch.device) -> DeviceFacts | None:
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    used, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return DeviceFacts(used, total, int(stats.get("num_alloc_retries", 0)), *_clocks(device))


def _clocks(device: torch.device) -> tuple[float | None, bool]:
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        now = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        most = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return now / most, bool(reasons & SLOWED)
    except Exception:  # no such library, or a driver that does not answer
        return None, False


def length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # of somebody's own, which may not know
        return None


def growth(steps: list[int], memory: list[int]) -> float:
    """Bytes a step, where memory rises all the time and not once; of host memory after so many steps."""
    if len(memory) < LEAST_STEPS:
        return 0.0
    values, after = (np.array(some, float)[len(memory) // 3 :] for some in (memory, steps))
    slope = float(np.polyfit(after, values, 1)[0])
    thirds = [part.mean() for part in np.array_split(values, 3)]
    straight = float(np.corrcoef(after, values)[0, 1]) > 0.98 if values.std() > 0 else False
    steady = thirds[0] < thirds[1] < thirds[2] and straight and values[-1] - values[0] > 24 << 20
    return slope if steady and slope > 0 else 0.0


def largest(batch: Any) -> list[torch.Tensor]:
    """The tensor whose second axis is a length: of tokens, or of values that each have several numbers."""
    labels = labels_of(batch)
    found = [tensor for tensor in tensors_in(batch) if tensor is not labels and _is_sequence(tensor)]
    return sorted(found, key=lambda tensor: -tensor_bytes(tensor))[:1]


def _is_sequence(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.ndim < 2 or tensor.shape[1] < 8 or not tensor.numel():
        return False
    return tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point())


def _used(tensor: torch.Tensor) -> torch.Tensor:
    """Places along the second axis up to the last one of each sample that is not zero."""
    flat = tensor.detach().reshape(tensor.shape[0], tensor.shape[1], -1) != 0
    used = flat.any(-1).cpu()
    return (used * torch.arange(1, used.shape[1] + 1)).max(1).values


def padding_share(tensor: torch.Tensor) -> float:
    return float(1 - _used(tensor).double().mean() / tensor.shape[1])


def used_length(tensor: torch.Tensor) -> int:
    """Of the longest sample."""
    return int(_used(tensor).max())


def has_wide_floats(model: nn.Module | None) -> bool:
    return model is not None and any(tensor.dtype == torch.float64 for tensor in model.parameters())


def has_plain_layout(model: nn.Module | None, batch: Any) -> bool:
    if model is None or not any(isinstance(one, nn.Conv2d) for one in model.modules()):
        return False
    images = [tensor for tensor in tensors_in(batch) if tensor.ndim == 4 and tensor.is_floating_point()]
    return any(not tensor.is_contiguous(memory_format=torch.channels_last) for tensor in images)


@contextmanager
def recompile_reasons() -> Iterator[list[str]]:
    """The guards that failed, as torch.compile logs them."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if "Recompiling" in text or "triggered by" in text:
                found.append(" ".join(text.split())[:300])

    handler, logger = Handler(), logging.getLogger("torch._dynamo.guards.__recompiles")
    before = logger.level
    levels, artifacts = dict(log_state.log_qname_to_level), set(log_state.artifact_names)
    set_logs(recompiles=True)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(before)
        log_state.log_qname_to_level, log_state.artifact_names = levels, artifacts
        _init_logs()
