"""Small looks at what a trial leaves: memory that grows, padding, wide floats, graphs that were compiled again."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._logging._internal import set_logs

from stoker.data.batch import tensors_in

LEAST_STEPS = 24  # for a trend of memory


def length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
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
    found = [tensor for tensor in tensors_in(batch) if tensor.ndim >= 2 and tensor.shape[1] >= 8]
    return sorted(found, key=lambda tensor: -tensor.nbytes)[:1]


def padding_share(tensor: torch.Tensor) -> float:
    """Share of the places along the second axis that lie behind the last one of their sample that is not zero."""
    flat = tensor.detach().reshape(tensor.shape[0], tensor.shape[1], -1) != 0
    used = flat.any(-1).cpu()
    places = torch.arange(1, used.shape[1] + 1)
    last = (used * places).max(1).values
    return float(1 - last.double().mean() / used.shape[1])


def has_wide_floats(model: nn.Module | None) -> bool:
    return model is not None and any(tensor.dtype == torch.float64 for tensor in model.parameters())


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


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
    set_logs(recompiles=True)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(before)
        set_logs()
