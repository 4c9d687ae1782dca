"""Batches on the device: copied on a stream of their own while the step before computes.

The next step's batches are always under way, so the copy and the computation overlap. On a CPU batches are only
converted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from stoker.data.loader import Loaded

D = TypeVar("D")


@dataclass(frozen=True)
class OnDevice(Generic[D]):
    """One step, ready to compute."""

    batches: tuple[D, ...]
    loaded: Loaded[Any]  # what it was made from: position, number of samples, waiting time


def feed(steps: Iterator[Loaded[Any]], device: torch.device) -> Iterator[OnDevice[Any]]:
    """Each step with its batches on `device`, one step ahead of the consumer on a GPU."""
    if device.type != "cuda":
        for loaded in steps:
            yield OnDevice(tuple(batch.to(device) for batch in loaded.batches), loaded)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pending: tuple[OnDevice[Any], torch.cuda.Event] | None = None
    for loaded in steps:
        coming = _copy(loaded, device, stream)
        if pending is not None:
            yield _hand_over(*pending)
        pending = coming
    if pending is not None:
        yield _hand_over(*pending)


def _copy(
    loaded: Loaded[Any], device: torch.device, stream: torch.cuda.Stream
) -> tuple[OnDevice[Any], torch.cuda.Event]:
    with torch.cuda.stream(stream):
        moved = OnDevice(tuple(batch.to(device) for batch in loaded.batches), loaded)
        return moved, stream.record_event()


def _hand_over(step: OnDevice[Any], copied: torch.cuda.Event) -> OnDevice[Any]:
    """Makes the computing stream wait for the copy, and keeps the memory until the computation is through with it."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for batch in step.batches:
        for value in vars(batch).values():
            if isinstance(value, torch.Tensor) and value.is_cuda:
                value.record_stream(current)
    return step
