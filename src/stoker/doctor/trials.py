"""Changes that can be tried on the spot: what a step takes with them is a better prediction than any formula.

Each trial gives back whatever it changes, and writes the seconds of a step of the run with the change into `found.tried`.
A change that cannot be made here, such as a loop written anew, has no trial: its rule computes what would be left.
"""

import copy
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from stoker.data.batch import map_tensors
from stoker.doctor import legs
from stoker.doctor.loaders import LOOKED_AT, apart, fetch
from stoker.doctor.looks import largest, used_length
from stoker.doctor.measured import Measured
from stoker.doctor.probe import Probe
from stoker.doctor.rules.loader import best_workers
from stoker.doctor.rules.step import better_times

READS = ("item", "tolist", "__float__", "__int__", "__bool__")  # of a tensor, for which the host waits

Trial = Callable[[Probe, Measured, legs.Kept, float], None]


def workers(rule: str) -> Trial:
    def run(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
        _try_loader(probe, found, rule, anew(probe.loader, max(1, best_workers(found))), seconds)

    return run


def _try_loader(probe: Probe, found: Measured, rule: str, other: Any, seconds: float) -> None:
    if other is not None:
        found.tried[rule] = found.samples / legs.rate_of(replace(probe, loader=other), seconds)


def neighbours(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Batches of samples that lie side by side: what an order that reads each file once would take."""
    loader, size = probe.loader, max(1, round(found.samples))
    assert isinstance(loader, DataLoader)
    rows = range(len(loader.dataset))  # type: ignore[arg-type]
    batches = [rows[first : first + size] for first in range(0, len(rows), size)]
    _try_loader(probe, found, "shuffle", anew(loader, loader.num_workers, batches), seconds)


def workers_that_stay(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """The same workers, which outlive an epoch."""
    if found.loader.workers and not found.loader.persistent:
        _try_loader(probe, found, "epoch-gap", anew(probe.loader, found.loader.workers), seconds)


class Remembered(Dataset[Any]):
    """Samples that were read before."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __getitem__(self, row: int) -> Any:
        return copy.copy(self._samples[row % len(self._samples)])  # who collates may take things out of it

    def __len__(self) -> int:
        return len(self._samples)


def storage_beside(rule: str) -> Trial:
    """Samples that come from memory, through the same workers: what a store that takes no time would give."""

    def run(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
        loader, split, count = probe.loader, found.split, found.loader.workers or 0
        if anew(loader, count) is None or split is None:
            return
        assert isinstance(loader, DataLoader)
        with torch.random.fork_rng(devices=[]):
            rows = list(next(iter(loader.batch_sampler)))  # type: ignore[arg-type]
        samples = fetch(apart(loader.dataset), rows[:LOOKED_AT])
        if not isinstance(samples, list) or len(samples) != len(rows[:LOOKED_AT]):
            return  # a batch of its own kind
        batches = [range(len(rows))] * legs.MOST_STEPS
        _try_loader(probe, found, rule, anew(loader, count, batches, Remembered(samples)), seconds)
        # What reading computes, such as decoding, is not the store's, and stays.
        if count:
            found.tried[rule] = max(found.tried[rule], split.busy_s / min(count, found.cores))
        else:
            found.tried[rule] += split.cpu_s

    return run


def anew(loader: Any, count: int, batches: Any = None, dataset: Any = None) -> "DataLoader[Any] | None":
    """The same batches, or others, by so many workers; None: it is no DataLoader that can be made anew."""
    if type(loader) is not DataLoader or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
        return None
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        batch_sampler=batches or loader.batch_sampler,
        num_workers=count,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn if dataset is None else None,  # it may open the very dataset
        multiprocessing_context=loader.multiprocessing_context if count else None,
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
    """Float64 as float32; on a GPU float32 as bfloat16 by autocast."""
    if found.wide_floats and probe.model is not None:
        before = np.median(legs.repeated(probe, kept.resident, seconds / 2))
        batches = map_tensors(kept.resident, _single)
        with _changed(probe.model, _single):
            legs.warm_up(probe, batches[0])
            after = np.median(legs.repeated(probe, batches, seconds / 2))
        _note(found, "precision", float(after / before))
    elif probe.device.type == "cuda":

        def step(batch: Any) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                probe.step(batch)

        other = replace(probe, step=step)
        legs.warm_up(other, kept.resident[0])
        _tried_beside(found, "precision", probe, kept.resident, other, kept.resident, seconds)


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


@contextmanager
def _changed(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside the block the model and what its optimizers keep are changed; then they are what they were."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.data for tensor in tensors]
    states = [
        (state, dict(state))
        for one in _optimizers_of(model)
        for key, state in one.state.items()
        if torch.is_tensor(key)
    ]
    try:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.grad, tensor.data = None, change(value)
        for state, kept in states:
            state.update({name: change(value) for name, value in kept.items() if torch.is_tensor(value)})
        yield
    finally:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.grad, tensor.data = None, value
        for state, kept in states:
            state.update(kept)


def _optimizers_of(model: nn.Module) -> "list[torch.optim.Optimizer]":
    """A step hides its optimizer; it is somewhere among all that Python keeps."""
    mine = set(map(id, model.parameters()))
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    return [one for one in found if any(id(weight) in mine for group in one.param_groups for weight in group["params"])]


def channels_last(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    assert probe.model is not None
    assert found.resident is not None
    batches = map_tensors(kept.resident, _channels_last)
    with _changed(probe.model, _channels_last):
        legs.warm_up(probe, batches[0])
        _note(found, "layout", float(np.mean(legs.repeated(probe, batches, seconds))) / found.resident.mean)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def without_reading(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Numbers that a step reads are those that the same line read before: nobody waits for them."""
    before = np.mean(legs.repeated(probe, kept.resident, seconds / 2))
    with numbers_of_before() as remember:
        probe.step(kept.resident[0])
        remember()
        legs.warm_up(probe, kept.resident[0])
        after = np.mean(legs.repeated(probe, kept.resident, seconds / 2))
    _note(found, "sync", float(after / before))


@contextmanager
def numbers_of_before() -> Iterator[Callable[[], None]]:
    """Reading a tensor's number gives, once `remember` was called, what the same line was given before that."""
    known: dict[tuple[str, str, int], Any] = {}
    is_over = threading.Event()

    def reading(name: str, original: Any) -> Any:
        def read(tensor: torch.Tensor) -> Any:
            frame = sys._getframe(1)
            place = name, frame.f_code.co_filename, frame.f_lineno
            if not (is_over.is_set() and place in known):
                known[place] = original(tensor)
            return known[place]

        return read

    had = {name: name in vars(torch.Tensor) for name in READS}
    originals = {name: getattr(torch.Tensor, name) for name in READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, reading(name, original))
    try:
        yield is_over.set
    finally:
        for name, original in originals.items():
            if had[name]:
                setattr(torch.Tensor, name, original)
            else:
                delattr(torch.Tensor, name)


def plain_collate(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Batches put together torch's own way, where these samples let it."""
    loader = probe.loader
    assert isinstance(loader, DataLoader)
    assert loader.batch_sampler is not None
    assert found.resident is not None
    spent, dataset = [], apart(loader.dataset)
    for rows in islice(loader.batch_sampler, 4):
        begin = time.perf_counter()
        default_collate(fetch(dataset, rows))
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
    """A resident step that takes so much of what it took: what the run adds to it stays, as far as its loader can be why."""
    assert found.run is not None
    assert found.resident is not None
    added = min(max(0.0, found.run.mean - found.resident.mean), found.drained_s or float("inf"))
    found.tried[rule] = added + ratio * found.resident.mean


TRIALS: dict[str, Trial] = {
    **{name: workers(name) for name in ("workers-zero", "workers-few", "workers-many", "fetch-latency")},
    **{name: storage_beside(name) for name in ("fetch-bandwidth", "cold-storage")},
    "epoch-gap": workers_that_stay,
    "shuffle": neighbours,
    "batch": larger_batch,
    "padding": without_padding,
    "precision": narrower_floats,
    "layout": channels_last,
    "sync": without_reading,
    "collate": plain_collate,
}
