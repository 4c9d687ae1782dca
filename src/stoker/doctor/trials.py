"""Changes that can be tried on the spot: what a step takes with them is a better prediction than any formula.

Each trial gives back whatever it changes, and writes the seconds of a step of the run with the change into `found.tried`.
A change that cannot be made here, such as a loop written anew, has no trial: its rule computes what would be left.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from stoker.data.batch import map_tensors
from stoker.doctor import legs
from stoker.doctor.calls import narrower
from stoker.doctor.loaders import fetch
from stoker.doctor.looks import largest, used_length
from stoker.doctor.measured import Measured
from stoker.doctor.probe import Probe
from stoker.doctor.rules.loader import best_workers
from stoker.doctor.rules.step import better_times

Trial = Callable[[Probe, Measured, legs.Kept, float], None]


def workers(rule: str) -> Trial:
    def run(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
        other = with_workers(probe.loader, max(1, best_workers(found)))
        if other is not None:
            rate = legs.rate_of(replace(probe, loader=other), seconds)
            found.tried[rule] = found.samples / rate

    return run


def with_workers(loader: Any, count: int) -> "DataLoader[Any] | None":
    """The same batches by so many workers; None: it is no DataLoader that can be made anew."""
    if type(loader) is not DataLoader or loader.batch_sampler is None:
        return None
    return DataLoader(
        loader.dataset,
        batch_sampler=loader.batch_sampler,
        num_workers=count,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if count else None,
        persistent_workers=count > 0,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def larger_batch(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    times = better_times(found)
    some = kept.resident[:2]
    larger = [legs.enlarged(batch, times) for batch in some]
    legs.warm_up(probe, larger[0])
    once, more = legs.in_turns(probe, some, probe, larger, seconds)
    _note(found, "batch", max(1 / times, more / times / once))


def without_padding(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Every batch cut to its own longest sample."""
    cut = []
    for batch in kept.resident:
        tensor = largest(batch)[0]
        whole, used = tensor.shape[1], max(1, used_length(tensor))
        cut.append(map_tensors(batch, lambda one, whole=whole, used=used: _cut(one, whole, used)))  # type: ignore[misc]
    legs.warm_up(probe, cut[0])
    _tried_beside(found, "padding", probe, kept.resident, probe, cut, seconds)


def _cut(tensor: torch.Tensor, whole: int, used: int) -> torch.Tensor:
    return tensor[:, :used].contiguous() if tensor.ndim >= 2 and tensor.shape[1] == whole else tensor


def narrower_floats(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """On a GPU the step in bfloat16 by autocast; elsewhere the float64 products of a step as float32."""
    assert found.resident is not None
    if probe.device.type == "cuda" and not found.wide_floats:

        def step(batch: Any) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                probe.step(batch)

        other = replace(probe, step=step)
        legs.warm_up(other, kept.resident[0])
        _tried_beside(found, "precision", probe, kept.resident, other, kept.resident, seconds)
    elif found.calls is not None:
        _note(found, "precision", max(0.1, 1 - narrower(found.calls) / found.calls.seconds))


def channels_last(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    assert probe.model is not None
    assert found.resident is not None
    batches = map_tensors(kept.resident, _channels_last)
    weights = [one for one in probe.model.parameters() if one.ndim == 4]
    was_last = any(not one.is_contiguous() and one.is_contiguous(memory_format=torch.channels_last) for one in weights)
    probe.model.to(memory_format=torch.channels_last)
    try:
        legs.warm_up(probe, batches[0])
        _note(found, "layout", float(np.mean(legs.repeated(probe, batches, seconds))) / found.resident.mean)
    finally:
        probe.model.to(memory_format=torch.channels_last if was_last else torch.contiguous_format)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def plain_collate(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Batches put together torch's own way, where these samples let it."""
    loader = probe.loader
    assert isinstance(loader, DataLoader)
    assert loader.batch_sampler is not None
    assert found.resident is not None
    spent = []
    for rows in islice(loader.batch_sampler, 4):
        begin = time.perf_counter()
        default_collate(fetch(loader.dataset, rows))
        spent.append(time.perf_counter() - begin)
    workers, made = loader.num_workers, float(np.median(spent))
    resident = found.resident.mean
    found.tried["collate"] = max(resident, made / min(workers, found.cores)) if workers else resident + made


def _tried_beside(
    found: Measured, rule: str, one: Probe, batches: list[Any], other: Probe, others: list[Any], seconds: float
) -> None:
    before, after = legs.in_turns(one, batches, other, others, seconds)
    _note(found, rule, after / before)


def _note(found: Measured, rule: str, ratio: float) -> None:
    """A resident step that takes so much of what it took: what the run adds to it stays."""
    assert found.run is not None
    assert found.resident is not None
    found.tried[rule] = max(0.0, found.run.mean - found.resident.mean) + ratio * found.resident.mean


TRIALS: dict[str, Trial] = {
    **{name: workers(name) for name in ("workers-zero", "workers-few", "workers-many", "fetch-latency")},
    "batch": larger_batch,
    "padding": without_padding,
    "precision": narrower_floats,
    "layout": channels_last,
    "collate": plain_collate,
}
