"""The legs of a step, measured in one process: the run as it is, the step on batches that are there, the loader alone.

    run = resident step + copy + preparation stall + fetch stall + gaps between epochs

The resident step itself is kernels, and the host that launches them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np
import psutil
import torch

from stoker.data.batch import map_tensors, num_bytes, tensors_in, to_device
from stoker.doctor.ceilings import ceilings
from stoker.doctor.lines import Place, timed_lines, watched_lines
from stoker.doctor.loaders import describe
from stoker.doctor.looks import (
    device_facts,
    growth,
    has_plain_layout,
    has_wide_floats,
    largest,
    length,
    padding_share,
    recompile_reasons,
)
from stoker.doctor.measured import Leg, Measured
from stoker.doctor.probe import Probe
from stoker.doctor.rules.step import MORE
from stoker.train.compilation import num_graphs

KEPT = 6  # batches that the resident step rotates through
LEAST_STEPS, MOST_STEPS = 6, 400
ROUNDS = 2  # in which the run and the resident step take turns
TOGETHER_S = 0.2  # steps of so long are waited for together on a GPU: waiting for each would hold the host up
IN_A_ROW, SETTLE = 9, 3  # steps of one kind before those of the other; the first of them do not count
PATIENCE = 4  # times the seconds of a leg, for what lay ready to be used up
COMPILES = 5.0  # times the step in the middle: no step takes so long that finds its graph
MOST_MORE = 1.25  # times the share of a traced step, that lines have of one that is not
AT_MOST = 0.2  # of free memory, for larger batches
NOTHING = object()  # what a loader without batches gives: a batch may be None


_moved_at = time.monotonic()


def moved() -> None:
    """A trial has got somewhere: it does not hang."""
    global _moved_at
    _moved_at = time.monotonic()


def moving(work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same work, which is seen to end."""

    def done(batch: Any) -> Any:
        result = work(dict(batch) if type(batch) is dict else batch)  # who takes things out of it finds them again
        moved()
        return result

    return done


def still_for() -> float:
    """Seconds since anything moved."""
    return time.monotonic() - _moved_at


@dataclass
class Kept:
    """Batches of the run, as the loader gave them and where the step computes on them."""

    given: list[Any] = field(default_factory=list)
    resident: list[Any] = field(default_factory=list)

    def add(self, batch: Any, probe: Probe) -> None:
        self.given.append(batch)
        self.resident.append(on_device(batch, probe))


def on_device(batch: Any, probe: Probe) -> Any:
    """Of a recipe they are there already."""
    if probe.device.type == "cpu" or probe.settings:
        return batch
    return to_device(batch, probe.device)


def run_and_resident(probe: Probe, found: Measured, kept: Kept, seconds: float) -> None:
    """Turn and turn about, so that whatever else the machine does falls on both."""
    with closing(Endless(probe.loader)) as source:
        _in_turns(probe, found, kept, source, seconds)
    found.epoch_steps = length(probe.loader)
    shares = [padding_share(tensor) for batch in kept.given for tensor in largest(batch)]
    found.padding = float(np.mean(shares)) if shares else 0.0
    found.wide_floats = has_wide_floats(probe.model)
    found.plain_layout = not probe.settings and has_plain_layout(probe.model, kept.given[0])
    found.pieces = len(kept.given[0].batches) if probe.settings else 1


def _in_turns(probe: Probe, found: Measured, kept: Kept, source: "Endless", seconds: float) -> None:
    first = source.take()
    if first is NOTHING:
        raise ValueError("the loader gives not a single batch")
    kept.add(first, probe)
    found.samples, found.batch_bytes = probe.samples_of(first), num_bytes(first)
    warm_up(probe, first)
    _skip_what_lay_ready(probe, source, found, seconds)
    runs: list[float] = []
    waits: list[float] = []
    residents: list[float] = []
    memory: list[int] = []
    after: list[int] = []
    gaps: list[float] = []
    samples, cpu = 0, 0.0
    graphs = num_graphs()
    with recompile_reasons() as reasons:
        for _ in range(ROUNDS):
            for wait, spent, gap, batch in timed_steps(probe, source, seconds / ROUNDS):
                runs.append(wait + spent + gap)
                samples += probe.samples_of(batch)
                (gaps if gap else waits).append(gap or wait)
                memory.append(psutil.Process().memory_info().rss)
                after.append(len(runs) + len(residents))
                if len(kept.given) < KEPT:
                    kept.add(batch, probe)
            source.rest()
            cpu_before = time.process_time()
            residents += repeated(probe, kept.resident, seconds / ROUNDS)
            cpu += time.process_time() - cpu_before
            with watched_lines() as lines:  # looking costs something: not while the clock runs
                repeated(probe, kept.resident, seconds / ROUNDS)
            found.lines.add(lines)
        timed = seconds_of_lines(probe, kept, found.lines.places, seconds / ROUNDS) if found.lines.places else {}
    if not runs:
        raise ValueError("the loader can be read only once: give one that begins anew each time")
    found.run, found.resident = Leg(tuple(runs)), Leg(tuple(residents))
    found.lines.timed = {kind: min(1.0, some / found.resident.mean) for kind, some in timed.items()}
    found.samples = samples / len(runs)
    found.wait_s, found.gap_s = _waits_and_gaps(waits, gaps, len(runs), in_between=found.loader.workers == 0)
    found.resident_cpu_s = cpu / max(1, len(residents))
    found.graphs, found.reasons = num_graphs() - graphs, tuple(dict.fromkeys(reasons))[:3]
    if found.graphs:
        found.graphs_s = max(0.0, found.run.mean - found.wait_s - _without_compiling(residents))
    found.grown_bytes = growth(after, memory)


def _without_compiling(steps: list[float]) -> float:
    """Seconds of a step among which a few waited for a graph."""
    calm = [spent for spent in steps if spent < COMPILES * np.median(steps)]
    return float(np.mean(calm))


def seconds_of_lines(probe: Probe, kept: Kept, places: dict[Place, str], seconds: float) -> dict[str, float]:
    """Of a step, by kind of line."""
    with timed_lines(places) as spent:
        steps = repeated(probe, kept.resident, seconds)
    # All else in that step is slower than it was, since it is traced: what lines take of it is too little, of a step that
    # is not traced too much where the machine was slower just now.
    before = repeated(probe, kept.resident, seconds / 4)
    plain = sum(before) / len(before)
    return {kind: min(some / len(steps), MOST_MORE * some / sum(steps) * plain) for kind, some in spent.items()}


def _waits_and_gaps(waits: list[float], gaps: list[float], steps: int, *, in_between: bool) -> tuple[float, float]:
    """Of a step: waiting for batches, and what the first batch of an epoch takes beyond an ordinary one.

    Where every epoch has one batch, and nobody makes it ahead, all of its making is ordinary.
    """
    ordinary = float(np.median(waits)) if waits else (max(gaps, default=0.0) if in_between else 0.0)
    beyond = sum(max(0.0, gap - ordinary) for gap in gaps)
    return (sum(waits) + sum(gaps) - beyond) / steps, beyond / steps


def warm_up(probe: Probe, batch: Any) -> None:
    """Compilation, first allocations, lazy imports, a graph that is recorded at its fourth step."""
    for _ in range(3 if probe.device.type == "cpu" else 6):
        probe.step(batch)
    synchronise(probe)


def _skip_what_lay_ready(probe: Probe, source: "Endless", found: Measured, seconds: float) -> None:
    """Batches that were made ahead before anybody computed say nothing about what the loader can keep up."""
    ahead = found.loader.made_ahead
    deadline = time.perf_counter() + PATIENCE * seconds
    for _ in range(min(ahead, MOST_STEPS)):
        batch = source.take()
        if batch is NOTHING or time.perf_counter() > deadline:
            return
        probe.step(batch)
    synchronise(probe)


class Pace:
    """How many steps a leg has, and which of them the host waits for on a GPU, so that a leg ends with nothing under way."""

    def __init__(self, probe: Probe, seconds: float) -> None:
        self._probe, self._seconds = probe, seconds
        self._begin = self._waited = time.perf_counter()
        self.done, self._since, self._on_gpu = 0, 0, probe.device.type == "cuda"

    def goes_on(self) -> bool:
        if self._since:
            return True
        enough = time.perf_counter() - self._begin >= self._seconds or self.done >= MOST_STEPS
        return self.done < LEAST_STEPS or not enough

    def step_made(self) -> None:
        self.done, self._since = self.done + 1, self._since + 1
        now = time.perf_counter()
        if not self._on_gpu:
            self._since = 0
        elif self.done == 1 or now - self._waited >= TOGETHER_S or self._since >= 8:
            synchronise(self._probe)
            self._waited, self._since = time.perf_counter(), 0


def timed_steps(probe: Probe, source: "Endless", seconds: float) -> Iterator[tuple[float, float, float, Any]]:
    """Wait, step and gap of each step, and its batch."""
    pace = Pace(probe, seconds)
    while pace.goes_on():
        asked = time.perf_counter()
        batch = source.take()
        if batch is NOTHING:
            return
        got = time.perf_counter()
        probe.step(batch)
        pace.step_made()
        now = time.perf_counter()
        gap = got - asked if source.began else 0.0
        yield (0.0 if source.began else got - asked), now - got, gap, batch


def rate_of(probe: Probe, seconds: float) -> float:
    """Samples a second of the run as it is, once what lay ready is used up."""
    with closing(Endless(probe.loader)) as source:
        first = source.take()
        if first is NOTHING:
            raise ValueError("the loader gives no more batches: it can be read only once")
        warm_up(probe, first)
        _skip_what_lay_ready(
            probe, source, Measured(loader=describe(probe.loader, probe.settings, probe.device.type)), seconds
        )
        samples, begin = 0, time.perf_counter()
        for _, _, _, batch in timed_steps(probe, source, seconds):
            samples += probe.samples_of(batch)
        return samples / (time.perf_counter() - begin)


def repeated(probe: Probe, batches: list[Any], seconds: float) -> list[float]:
    """Seconds of steps on these batches, over and over."""
    spent: list[float] = []
    pace = Pace(probe, seconds)
    while pace.goes_on():
        before = time.perf_counter()
        probe.step(batches[len(spent) % len(batches)])
        pace.step_made()
        spent.append(time.perf_counter() - before)
    return spent


def drain(probe: Probe, found: Measured, seconds: float) -> None:
    """What the loader can do at most: its batches are taken and dropped."""
    with closing(Endless(probe.loader)) as source:
        for _ in range(found.loader.made_ahead + 1):
            if source.take() is NOTHING:
                return
        begin, done = time.perf_counter(), 0
        while done < LEAST_STEPS or (time.perf_counter() - begin < seconds / 2 and done < MOST_STEPS):
            if source.take() is NOTHING:
                break
            done += 1
        synchronise(probe)
        found.drained_s = (time.perf_counter() - begin) / max(1, done)


def on_the_device(probe: Probe, found: Measured, kept: Kept, seconds: float) -> None:
    """On a GPU: the same step with its copy, how long the host needs to launch it, memory and clocks under load."""
    if probe.device.type != "cuda" or not kept.given:
        return
    if any(not tensor.is_cuda for tensor in tensors_in(kept.given[0])) and not probe.settings:
        found.given = Leg(tuple(repeated(probe, kept.given, seconds)))
        best = ceilings(probe.device).to_device
        found.pinned_copy_s = found.batch_bytes / best if best else 0.0
    launches = []
    for number in range(2 * LEAST_STEPS):
        begin = time.perf_counter()
        probe.step(kept.resident[number % len(kept.resident)])
        launches.append(time.perf_counter() - begin)
        if number == LEAST_STEPS:
            found.gpu = device_facts(probe.device)
        synchronise(probe)
    found.launch_s = float(np.median(launches[1:]))
    found.call_s = ceilings(probe.device).call_s


def enlarged(batch: Any, times: int) -> Any:
    return map_tensors(batch, lambda tensor: torch.cat([tensor] * times))


def can_be_enlarged(probe: Probe, kept: Kept) -> bool:
    """Only plain batches, whose tensors all have one row a sample."""
    if not kept.resident or probe.settings:
        return False
    size, tensors = probe.samples_of(kept.resident[0]), list(tensors_in(kept.resident[0]))
    alike = all(one.layout == torch.strided and one.ndim and len(one) == size for one in tensors)
    return bool(tensors) and size > 0 and alike


def with_more_samples(probe: Probe, found: Measured, kept: Kept, seconds: float) -> None:
    if not can_be_enlarged(probe, kept):
        return
    some = kept.resident[:2]
    if len(some) * MORE * found.batch_bytes > AT_MOST * found.free_bytes:
        return
    larger = [enlarged(batch, MORE) for batch in some]
    found.once_s, found.more_s = in_turns(probe, some, probe, larger, seconds)


def in_turns(one: Probe, batches: list[Any], other: Probe, others: list[Any], seconds: float) -> tuple[float, float]:
    """Seconds of a step of both, in the middle. What else the machine does falls on both.

    Of a few steps in a row the first find the caches full of the other's, and do not count; a GPU is waited for after the
    last of them, since in a run the host is ahead of it.
    """
    spent: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(spent[0]) < LEAST_STEPS or (time.perf_counter() - begin < seconds and len(spent[0]) < MOST_STEPS):
        for probe, some, times in ((one, batches, spent[0]), (other, others, spent[1])):
            times += _in_a_row(probe, [some[(len(times) + number) % len(some)] for number in range(IN_A_ROW)])
    return float(np.median(spent[0])), float(np.median(spent[1]))


def _in_a_row(probe: Probe, batches: list[Any]) -> list[float]:
    for batch in batches[:SETTLE]:
        probe.step(batch)
    synchronise(probe)
    times, before = [], time.perf_counter()
    for batch in batches[SETTLE:]:
        probe.step(batch)
        times.append(time.perf_counter())
    synchronise(probe)
    if probe.device.type == "cuda":
        return [(time.perf_counter() - before) / len(times)]
    return [after - start for start, after in pairwise([before, *times])]


class Endless:
    """A loader over and over; `began`: the batch that was taken last is the first of an epoch that is not the first."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader, self._batches = loader, iter(loader)
        self.began = False

    def take(self) -> Any:
        """The next batch; NOTHING: the loader has none."""
        moved()
        self.began = False
        for batch in islice(self._batches, 1):
            return batch
        self.began = True
        self._batches = iter(self._loader)
        return next(self._batches, NOTHING)

    def rest(self) -> None:
        """Loaders go on making batches ahead, up to their limit; a moment later they stand still."""
        time.sleep(0.05)

    def close(self) -> None:
        """Whoever makes batches for nobody any more takes processors from the next measurement."""
        if hasattr(self._batches, "close") and self._batches is not self._loader:  # a generator may be its own loader
            self._batches.close()
        self._batches = iter(())


def synchronise(probe: Probe) -> None:
    if probe.device.type == "cuda":
        torch.cuda.synchronize()
