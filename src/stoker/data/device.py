"""Batches on the device: copied on a stream of their own while the step before computes.

The next step's batches are always under way, so the copy and the computation overlap. On a CPU batches are only
converted.
"""

import time
from collections.abc import Callable, Iterator

import torch

from stoker.data.batch import tensors_in, to_device
from stoker.data.plan import Step


def feed(steps: Iterator[Step], device: torch.device) -> Iterator[Step]:
    """Each step with its batches on `device`, one step ahead of the consumer on a GPU."""
    if device.type != "cuda":
        for step in steps:
            begin = time.perf_counter()
            step.batches = tuple(to_device(batch, device) for batch in step.batches)
            step.copy_s = _always(time.perf_counter() - begin)
            yield step
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    pending: tuple[Step, torch.cuda.Event] | None = None
    for step in steps:
        coming = step, _copy(step, device, stream)
        if pending is not None:
            yield _hand_over(*pending)
        pending = coming
    if pending is not None:
        yield _hand_over(*pending)


def _copy(step: Step, device: torch.device, stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Queues the copy; the event comes when it is done."""
    with torch.cuda.stream(stream):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        step.batches = tuple(to_device(batch, device) for batch in step.batches)
        end.record(stream)
    step.copy_s = lambda: begin.elapsed_time(end) / 1e3
    return end


def _hand_over(step: Step, copied: torch.cuda.Event) -> Step:
    """Makes the computing stream wait for the copy, and keeps the memory until the computation is through with it."""
    current = torch.cuda.current_stream()
    current.wait_event(copied)
    for tensor in tensors_in(step.batches):
        if tensor.is_cuda:
            tensor.record_stream(current)
    return step


def _always(seconds: float) -> Callable[[], float]:
    return lambda: seconds
