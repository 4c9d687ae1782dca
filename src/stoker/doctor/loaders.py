"""What a loader is made of, as far as it can be told from outside: workers, what lies ahead, where a batch's time goes."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch

LOOKED_AT = 64  # samples that are read one by one


@dataclass(frozen=True)
class LoaderFacts:
    kind: str = "iterable"  # iterable, DataLoader or stoker
    workers: int | None = None  # processes or threads
    ahead: int | None = None  # batches that each of them, or all of them together, make ahead
    persistent: bool = True  # workers outlive an epoch
    pinned: bool = False
    key: str = ""  # of a recipe: what says how many workers there are

    @property
    def made_ahead(self) -> int:
        if not self.ahead:
            return 0
        return self.ahead * (self.workers or 0) if self.kind == "DataLoader" else self.ahead


@dataclass(frozen=True)
class Split:
    """Seconds of one batch, made by one thread with nobody beside it."""

    cold_s: float  # samples, the first time they are read
    warm_s: float  # samples, once more
    cpu_s: float  # CPU seconds of the second time
    collate_s: float
    sequential_s: float | None = None  # as many samples that lie side by side

    @property
    def busy_s(self) -> float:
        """CPU seconds of a batch."""
        return self.cpu_s + self.collate_s

    @property
    def latency_s(self) -> float:
        """Seconds of a batch in which nobody computes, each time that it is read."""
        return max(0.0, self.warm_s - self.cpu_s)


def describe(loader: Any, settings: Mapping[str, Any], device: str = "cpu") -> LoaderFacts:
    if isinstance(loader, list | tuple):
        return LoaderFacts("batches that are there", 0)
    if settings:
        from stoker.data.loader import LoaderConfig
        from stoker.recipes.imagenet.data import THREADS_THAT_SCALE

        workers, key = settings.get("loader.threads") or LoaderConfig().num_threads, "loader.threads"
        if "data.processes" in settings and settings["data.processes"] != 0:  # of images: it is they who decode
            chosen = settings["data.processes"]
            if chosen or device == "cuda" or workers > THREADS_THAT_SCALE:
                workers, key = chosen or workers, "data.processes"
        return LoaderFacts("stoker", workers, settings.get("loader.look_ahead"), key=key)
    if isinstance(loader, torch.utils.data.DataLoader):
        workers = loader.num_workers
        ahead = (loader.prefetch_factor or 2) if workers else 0
        persistent = bool(loader.persistent_workers) or not workers
        return LoaderFacts("DataLoader", workers, ahead, persistent, bool(loader.pin_memory))
    return LoaderFacts()


def split_of(probe: Any, kept: list[Any]) -> Split | None:
    """Of a DataLoader over a map-style dataset, or of a recipe's loader; other iterables keep theirs to themselves."""
    if probe.make is not None:
        return _of_recipe(probe.make, kept)
    loader = probe.loader
    if not isinstance(loader, torch.utils.data.DataLoader) or loader.batch_sampler is None:
        return None
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return None
    dataset = apart(loader.dataset)
    with torch.random.fork_rng(devices=[]):
        rows = list(next(iter(loader.batch_sampler)))
    scale = len(rows) / min(len(rows), LOOKED_AT)
    some = rows[:LOOKED_AT]
    cold, _, _ = _timed(lambda: fetch(dataset, some))
    warm, cpu, samples = _timed(lambda: fetch(dataset, some))
    sequential = _neighbours(dataset, some)
    collate, _, _ = _timed(lambda: loader.collate_fn(samples))
    aside = None if sequential is None else sequential * scale
    return Split(cold * scale, warm * scale, cpu * scale, collate * scale, aside)


def apart(dataset: Any) -> Any:
    """Not the very one that workers are forked with: a file that it opens at its first sample would be theirs as well."""
    try:
        return copy.copy(dataset)
    except Exception:  # one that lets nobody copy it
        return dataset


def fetch(dataset: Any, rows: Sequence[Any]) -> Any:
    """As a DataLoader does: all at once, where a dataset can."""
    return dataset.__getitems__(rows) if hasattr(dataset, "__getitems__") else [dataset[row] for row in rows]


def _neighbours(dataset: Any, rows: Sequence[Any]) -> float | None:
    """Seconds for as many samples that lie side by side; None where they are not numbered."""
    if not all(isinstance(row, int) for row in rows) or not hasattr(dataset, "__len__"):
        return None
    size = len(dataset)
    first = int(np.random.default_rng(0).integers(0, max(1, size - len(rows))))
    fetch(dataset, [first])  # whatever opening its neighbourhood costs is not a price of every sample
    return _timed(lambda: fetch(dataset, list(range(first, min(first + len(rows), size)))))[0]


def _of_recipe(make: Callable[[Any], Any], kept: list[Any]) -> Split:
    cold, _, _ = _timed(lambda: [make(step) for step in kept])
    before = _seconds_of_children()
    warm, cpu, _ = _timed(lambda: [make(step) for step in kept])
    cpu = (
        min(cpu, warm) + _seconds_of_children() - before
    )  # torch's threads spin while they wait for the next operation
    count = max(1, len(kept))
    return Split(cold / count, warm / count, cpu / count, 0.0)


def _timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds of the process, and what came of it."""
    cpu, begin = time.process_time(), time.perf_counter()
    made = work()
    return time.perf_counter() - begin, time.process_time() - cpu, made


def _seconds_of_children() -> float:
    """CPU seconds of the processes that this one started: images are decoded in such."""
    spent = 0.0
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            times = child.cpu_times()
            spent += times.user + times.system
    return spent
