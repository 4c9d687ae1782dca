"""The legs of a step, measured in one process: the run as it is, the step on batches that are there, the loader alone.

    run = resident step + preparation stall + fetch stall + gaps between epochs

The resident step itself is kernels, and the host that launches them. On a GPU a copy stands between.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import psutil
import torch

from stoker import console
from stoker.data.batch import map_leaves, num_bytes, pin, tensors_in
from stoker.doctor.ceilings import ceilings
from stoker.doctor.lines import Lines, watched_lines
from stoker.doctor.loaders import LoaderFacts, Split, describe, split_of
from stoker.doctor.looks import growth, has_wide_floats, largest, length, num_graphs, padding_share, recompile_reasons
from stoker.doctor.operations import Operations, count_flops, profile_steps
from stoker.doctor.probe import Probe, num_cores

KEPT = 6  # batches that the resident step rotates through
LEAST_STEPS, MOST_STEPS = 6, 400
COUNTED = 0.6  # of the time of operations: with less of it counted no floor is told
MORE = 4  # times the samples, to see what a step costs that does not depend on them
ROUNDS = 2  # in which the run and the resident step take turns
NOTHING = object()  # what a loader without batches gives: a batch may be None
STUCK_S = 300.0  # a trial that does not move for so long is given up


@dataclass(frozen=True)
class Leg:
    """Seconds of each step."""

    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    def interval(self, blocks: int = 8, draws: int = 400) -> tuple[float, float]:
        """5 to 95 % of the mean, by drawing stretches of neighbouring steps anew: batches come in bursts."""
        parts = [
            part.mean() for part in np.array_split(np.array(self.seconds), min(blocks, len(self.seconds))) if len(part)
        ]
        dice = np.random.default_rng(0)
        means = dice.choice(parts, (draws, len(parts))).mean(1)
        return float(np.quantile(means, 0.05)), float(np.quantile(means, 0.95))


@dataclass
class Measured:
    """All that a rule may look at. What could not be measured is None, and `troubles` says why."""

    name: str = ""
    device: str = "cpu"
    cores: int = field(default_factory=num_cores)
    samples: float = 0.0  # of a batch
    run: Leg | None = None
    wait_s: float = 0.0  # of a step of the run, for the loader
    gap_s: float = 0.0  # of a step, for the first batch of an epoch
    epoch_steps: int | None = None
    resident: Leg | None = None
    resident_cpu_s: float = 0.0  # CPU seconds of a resident step, over all threads
    copied: Leg | None = None  # on a GPU: the same with the copy from pinned memory
    once_s: float | None = None  # the resident step beside the next, in the middle
    more_s: float | None = None  # the step with MORE times the samples
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    drained_s: float | None = None  # a batch of the loader with nobody computing
    split: Split | None = None
    operations: Operations | None = None
    floor_s: float | None = None  # what the products of a step would take at this machine's best
    lines: Lines = field(default_factory=Lines)
    graphs: int = 0  # made by torch.compile in steps that should have had none left to make
    graphs_s: float = 0.0  # of a step, for that
    reasons: tuple[str, ...] = ()  # of graphs that were made again
    padding: float = 0.0  # share of the largest tensor of a batch that is padding
    grown_bytes: float = 0.0  # of host memory, a step
    batch_bytes: int = 0
    free_bytes: int = 0
    wide_floats: bool = False  # parameters or inputs in float64
    settings: dict[str, Any] = field(default_factory=dict)  # of a recipe
    evaluation_share: float = 0.0  # of the wall clock, of a run's events
    checkpoint_share: float = 0.0
    drift: float = 0.0  # rate of the last third of a run over that of the first, less one
    slow_rank: tuple[int, float] | None = None  # its number, and how much longer it takes than the median
    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that measuring took

    @property
    def rate(self) -> float | None:
        return self.samples / self.run.mean if self.run is not None else None


class TrialStuck(Exception):
    """Nothing moved for a long time."""


def measure(probe: Probe, seconds: float = 4.0) -> Measured:
    """All legs, each for about so long. A leg that fails is noted, and the others are measured all the same."""
    begin = time.perf_counter()
    found = Measured(name=probe.name, device=probe.device.type, settings=dict(probe.settings))
    found.free_bytes = psutil.virtual_memory().available
    found.loader = describe(probe.loader, probe.settings)
    kept: list[Any] = []
    legs: list[tuple[str, Callable[[], None]]] = [
        ("the run", lambda: _run_and_resident(probe, found, kept, seconds)),
        ("the loader alone", lambda: _drain(probe, found, seconds)),
        ("the parts of the loader", lambda: _split(probe, found, kept, seconds)),
        ("the operations of a step", lambda: _operations(probe, found, kept)),
        ("the floor", lambda: _floor(probe, found, kept)),
        ("a larger batch", lambda: _enlarged(probe, found, kept, seconds / 2)),
        ("the copy to the device", lambda: _copied(probe, found, kept, seconds)),
    ]
    with console.progress("measure", len(legs), "legs") as bar:
        for name, leg in legs:
            _try(found, name, leg)
            bar.advance()
    found.seconds = time.perf_counter() - begin
    return found


def _try(found: Measured, name: str, leg: Callable[[], None]) -> None:
    """Whatever a trial ends with, it ends that trial."""
    try:
        with _not_stuck():
            leg()
    except TrialStuck:
        found.troubles.append(f"{name}: nothing moved for {STUCK_S:.0f} s; given up")
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        found.troubles.append(f"{name}: out of memory")
    except (Exception, SystemExit) as error:
        words = str(error).strip().splitlines()
        found.troubles.append(f"{name}: {type(error).__name__}: {words[0] if words else ''}")


@contextmanager
def _not_stuck() -> Iterator[None]:
    """A trial that blocks the main thread is interrupted, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: Any) -> None:
        raise TrialStuck

    before = signal.signal(signal.SIGUSR1, give_up)
    ident = threading.main_thread().ident
    assert ident is not None
    timer = threading.Timer(STUCK_S, lambda: signal.pthread_kill(ident, signal.SIGUSR1))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR1, before)


def _run_and_resident(probe: Probe, found: Measured, kept: list[Any], seconds: float) -> None:
    """Turn and turn about, so that whatever else the machine does falls on both."""
    source = Endless(probe.loader)
    first = source.take()
    if first is NOTHING:
        raise ValueError("the loader gives not a single batch")
    kept.append(first)
    found.samples, found.batch_bytes = probe.samples_of(first), num_bytes(first)
    for _ in range(3):  # compilation, first allocations, lazy imports
        probe.step(first)
    _synchronise(probe)
    _skip_what_lay_ready(probe, source, found, seconds)
    runs: list[float] = []
    waits: list[float] = []
    residents: list[float] = []
    memory: list[int] = []
    after: list[int] = []
    gaps, cpu = 0.0, 0.0
    graphs = num_graphs()
    with recompile_reasons() as reasons:
        for _ in range(ROUNDS):
            for wait, spent, gap, batch in timed_steps(probe, source, seconds / ROUNDS):
                runs.append(wait + spent + gap)
                waits.append(wait)
                gaps += gap
                memory.append(psutil.Process().memory_info().rss)
                after.append(len(runs) + len(residents))
                if len(kept) < KEPT:
                    kept.append(batch)
            source.rest()
            cpu_before = time.process_time()
            with watched_lines() as lines:
                residents += _resident(probe, kept, seconds / ROUNDS)
            cpu += time.process_time() - cpu_before
            found.lines.add(lines)
    found.run, found.resident = Leg(tuple(runs)), Leg(tuple(residents))
    found.wait_s, found.gap_s = float(np.mean(waits)), gaps / len(runs)
    found.epoch_steps = length(probe.loader)
    found.resident_cpu_s = cpu / max(1, len(residents))
    found.graphs, found.reasons = num_graphs() - graphs, tuple(dict.fromkeys(reasons))[:3]
    if found.graphs:
        found.graphs_s = max(0.0, found.run.mean - found.wait_s - float(np.quantile(residents, 0.25)))
    found.grown_bytes = growth(after, memory)
    shares = [padding_share(tensor) for batch in kept for tensor in largest(batch)]
    found.padding = float(np.mean(shares)) if shares else 0.0
    found.wide_floats = has_wide_floats(probe.model)


def _skip_what_lay_ready(probe: Probe, source: "Endless", found: Measured, seconds: float) -> None:
    """Batches that were made ahead before anybody computed say nothing about what the loader can keep up."""
    ahead = found.loader.made_ahead
    deadline = time.perf_counter() + seconds
    for _ in range(min(ahead, MOST_STEPS)):
        batch = source.take()
        if batch is NOTHING or time.perf_counter() > deadline:
            return
        probe.step(batch)
    _synchronise(probe)


def timed_steps(probe: Probe, source: "Endless", seconds: float) -> Iterator[tuple[float, float, float, Any]]:
    """Wait, step and gap of each step, and its batch."""
    begin = time.perf_counter()
    done = 0
    while done < LEAST_STEPS or (time.perf_counter() - begin < seconds and done < MOST_STEPS):
        asked = time.perf_counter()
        batch = source.take()
        if batch is NOTHING:
            return
        got = time.perf_counter()
        probe.step(batch)
        if probe.device.type == "cuda" and done % 8 == 7:
            torch.cuda.synchronize()
        now = time.perf_counter()
        gap = got - asked if source.began else 0.0
        yield (0.0 if source.began else got - asked), now - got, gap, batch
        done += 1


def rate_of(probe: Probe, seconds: float) -> float:
    """Samples a second of the run as it is, once what lay ready is used up."""
    source = Endless(probe.loader)
    batch = source.take()
    for _ in range(3):
        probe.step(batch)
    _skip_what_lay_ready(probe, source, Measured(loader=describe(probe.loader, probe.settings)), seconds)
    _synchronise(probe)
    samples, begin = 0, time.perf_counter()
    for _, _, _, batch in timed_steps(probe, source, seconds):
        samples += probe.samples_of(batch)
    _synchronise(probe)
    return samples / (time.perf_counter() - begin)


def _resident(probe: Probe, kept: list[Any], seconds: float) -> list[float]:
    spent: list[float] = []
    begin = time.perf_counter()
    while len(spent) < LEAST_STEPS or (time.perf_counter() - begin < seconds and len(spent) < MOST_STEPS):
        before = time.perf_counter()
        probe.step(kept[len(spent) % len(kept)])
        if probe.device.type == "cuda" and len(spent) % 8 == 7:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - before)
    return spent


def _drain(probe: Probe, found: Measured, seconds: float) -> None:
    """What the loader can do at most: its batches are taken and dropped."""
    source = Endless(probe.loader)
    for _ in range(found.loader.made_ahead + 1):
        if source.take() is NOTHING:
            return
    begin, done = time.perf_counter(), 0
    while done < LEAST_STEPS or (time.perf_counter() - begin < seconds / 2 and done < MOST_STEPS):
        if source.take() is NOTHING:
            break
        done += 1
    found.drained_s = (time.perf_counter() - begin) / max(1, done)
    source.rest()


def _split(probe: Probe, found: Measured, kept: list[Any], seconds: float) -> None:
    found.split = split_of(probe, kept[:2], seconds / 2)


def _operations(probe: Probe, found: Measured, kept: list[Any]) -> None:
    if kept:
        found.operations = profile_steps(probe.step, kept, probe.device)


def _floor(probe: Probe, found: Measured, kept: list[Any]) -> None:
    """Not where most of the time is spent in work that nobody can count, and not of graphs, which would be made anew."""
    operations = found.operations
    if not kept or operations is None or operations.counted_share < COUNTED or num_graphs():
        return
    flops = count_flops(probe.step, kept[0], probe.model)
    kinds = {parameter.dtype for parameter in probe.model.parameters()} if probe.model is not None else set()
    name = {torch.float64: "fp64", torch.bfloat16: "bf16"}.get(next(iter(kinds), torch.float32), "fp32")
    if flops and len(kinds) == 1:
        # bf16 by autocast has float32 parameters: the higher ceiling is the one that cannot be beaten.
        best = ceilings(probe.device).products
        found.floor_s = flops / (max(best[name], best["bf16"]) if probe.device.type == "cuda" else best[name])


def _enlarged(probe: Probe, found: Measured, kept: list[Any], seconds: float) -> None:
    """Only of plain batches, whose tensors all have one row a sample."""
    if not kept or probe.settings:
        return
    size = probe.samples_of(kept[0])
    if any(tensor.ndim == 0 or len(tensor) != size for tensor in tensors_in(kept[0])):
        return
    larger = [
        map_leaves(batch, lambda leaf: torch.cat([leaf] * MORE) if isinstance(leaf, torch.Tensor) else leaf)
        for batch in kept
    ]
    once_s: list[float] = []
    more_s: list[float] = []
    begin = time.perf_counter()
    # One by one in turns: what else the machine does falls on both.
    while len(once_s) < LEAST_STEPS or (time.perf_counter() - begin < seconds and len(once_s) < MOST_STEPS):
        for batches, spent in ((kept, once_s), (larger, more_s)):
            before = time.perf_counter()
            probe.step(batches[len(spent) % len(batches)])
            _synchronise(probe)
            spent.append(time.perf_counter() - before)
    found.once_s, found.more_s = float(np.median(once_s[1:])), float(np.median(more_s[1:]))


def _copied(probe: Probe, found: Measured, kept: list[Any], seconds: float) -> None:
    if probe.device.type != "cuda" or not kept or probe.settings:
        return
    host = [
        pin(map_leaves(batch, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)) for batch in kept
    ]
    found.copied = Leg(tuple(_resident(probe, host, seconds)))


class Endless:
    """A loader over and over; `began`: the batch that was taken last is the first of an epoch that is not the first."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._batches = loader, iter(loader)
        self.began = False

    def take(self) -> Any:
        """The next batch; NOTHING: the loader has none."""
        self.began = False
        for batch in islice(self._batches, 1):
            return batch
        self.began = True
        self._batches = iter(self._loader)
        return next(self._batches, NOTHING)

    def rest(self) -> None:
        """Loaders go on making batches ahead, up to their limit; a moment later they stand still."""
        time.sleep(0.05)


def _synchronise(probe: Probe) -> None:
    if probe.device.type == "cuda":
        torch.cuda.synchronize()
