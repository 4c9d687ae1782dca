"""A diagnosis' measurements: every leg of a step, then what the changes that come to mind would gain, tried."""

import linecache
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn

from stoker import console
from stoker.data.locations import parse
from stoker.data.storage.urls import Url
from stoker.doctor import legs, trials
from stoker.doctor.calls import calls_of
from stoker.doctor.ceilings import ceilings, network
from stoker.doctor.learning.habits import restored_rate
from stoker.doctor.learning.measure import look
from stoker.doctor.loaders import describe, split_of
from stoker.doctor.measured import Measured
from stoker.doctor.operations import count_flops, profile_steps
from stoker.doctor.probe import Probe
from stoker.doctor.rules import diagnose

CALLS = "who calls them"
COUNTED = 0.6  # of the time of operations: with less of it counted no floor is told
LEARNING = 4.0  # times the seconds of a leg, for learning rates
SIGNAL = signal.SIGRTMIN + 7  # nobody's
STUCK_S = 300.0  # a trial that does not move for so long is given up


class TrialStuck(BaseException):
    """Nothing moved for a long time. Nobody's `except Exception` is to keep it."""


def measure(probe: Probe, seconds: float = 4.0, only: str | None = None) -> Measured:
    """All legs, each for about so long. A leg that fails is noted, and the others are measured all the same.

    `only`: speed, or learning.
    """
    begin = time.perf_counter()
    probe = replace(probe, step=legs.moving(probe.step), loss=probe.loss and legs.moving(probe.loss))
    found = Measured(name=probe.name, device=probe.device.type, settings=dict(probe.settings))
    found.free_bytes = psutil.virtual_memory().available
    found.loader = describe(probe.loader, probe.settings, probe.device.type)
    kept = legs.Kept()
    parts: list[tuple[str, Callable[[], None]]] = [
        ("the run", lambda: legs.run_and_resident(probe, found, kept, seconds)),
        ("the loader alone", lambda: legs.drain(probe, found, seconds)),
        ("the parts of the loader", lambda: _split(probe, found, kept)),
        ("the operations of a step", lambda: _operations(probe, found, kept)),
        (CALLS, lambda: _calls(probe, found, kept, seconds / 4)),
        ("the floor", lambda: _floor(probe, found, kept)),
        ("a larger batch", lambda: legs.with_more_samples(probe, found, kept, seconds / 2)),
        ("the copy to the device", lambda: legs.on_the_device(probe, found, kept, seconds / 2)),
        ("changes that can be tried", lambda: _tried(probe, found, kept, seconds)),
    ]
    if only == "learning":
        parts = []
    if only != "speed" and probe.loss is not None and isinstance(probe.model, nn.Module):
        # Before any step of ours: afterwards nobody can tell whose steps they were.
        restored = None if probe.settings else restored_rate(probe.optimizer)
        parts.append(("what is learnt", lambda: _learning(probe, found, seconds, restored)))
    with console.progress("measure", len(parts), "legs") as bar:
        for name, part in parts:
            _try(found, name, part)
            bar.advance()
            if name == CALLS:
                _say_first(found, time.perf_counter() - begin)
    found.seconds = time.perf_counter() - begin
    return found


def _say_first(found: Measured, seconds: float) -> None:
    """What is known before anything is tried: whoever can guess the rest need not wait for it."""
    found.first_s, findings = seconds, diagnose(found)
    if findings:
        console.say(f"after {seconds:.0f} s: {findings[0].sentence} Measuring on, to say what a change gains.")


def _split(probe: Probe, found: Measured, kept: legs.Kept) -> None:
    found.split = split_of(probe, kept.given[:2])
    if found.loader.kind == "stoker" and "data.processes" in probe.settings:
        found.decode_rate = ceilings(probe.device).decode
    place = parse(probe.settings.get("data.path"))
    if isinstance(place, Url):
        found.network = network(place)


def _operations(probe: Probe, found: Measured, kept: legs.Kept) -> None:
    if kept.resident:
        found.operations = profile_steps(probe.step, kept.resident, probe.device)


def _calls(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Of a loop of somebody's own; what a recipe of ours calls is ours to know."""
    if not kept.resident or probe.settings:
        return
    found.calls = calls_of(probe.step, kept.resident[0], probe.device)
    if found.calls.syncs:
        # Not the backward pass: who waits in it is the operation that it goes back through.
        readers = set(found.calls.syncs) - found.calls.uncompiled
        places = {place: "sync" for place in readers if ".backward(" not in linecache.getline(*place)}
        found.sync_s = legs.seconds_of_lines(probe, kept, places, seconds).get("sync", 0.0)


def _floor(probe: Probe, found: Measured, kept: legs.Kept) -> None:
    """Not where most of the time is spent in work that nobody can count."""
    operations = found.operations
    if not kept.resident or operations is None or operations.counted_share < COUNTED:
        return
    flops = count_flops(probe.step, kept.resident[0], probe.model)
    kinds = {parameter.dtype for parameter in probe.model.parameters()} if probe.model is not None else set()
    name = {torch.float64: "fp64", torch.bfloat16: "bf16"}.get(next(iter(kinds), torch.float32), "fp32")
    if flops and len(kinds) == 1:
        # bf16 by autocast has float32 parameters: the higher ceiling is the one that cannot be beaten.
        best = ceilings(probe.device).products
        found.floor_s = flops / (max(best[name], best["bf16"]) if probe.device.type == "cuda" else best[name])


def _learning(probe: Probe, found: Measured, seconds: float, restored: tuple[float, float] | None) -> None:
    found.learning = look(probe, LEARNING * seconds)
    found.learning.restored = restored
    if found.learning.trouble:
        found.troubles.append(found.learning.trouble)
    if found.learning.skipped:
        found.troubles.append(f"what is learnt: {found.learning.skipped}")


def _tried(probe: Probe, found: Measured, kept: legs.Kept, seconds: float) -> None:
    """Whatever the rules would change, where that can be done here and now: then the prediction is what it came to.

    A change that was tried in vain may leave room for another cause: they are asked again.
    """
    asked: set[str] = set()
    while coming := [one.rule for one in diagnose(found) if one.rule in trials.TRIALS and one.rule not in asked]:
        for rule in coming:
            trial = trials.TRIALS[rule]
            asked.add(rule)
            _try(found, f"the change of {rule}", lambda trial=trial: trial(probe, found, kept, seconds / 2))  # type: ignore[misc]


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
    except BaseException as error:
        if _is_interrupt(error):
            raise KeyboardInterrupt from error
        found.troubles.append(f"{name}: {type(error).__name__}: {_first_line(error)}")


def _is_interrupt(error: BaseException | None) -> bool:
    """Ctrl-C, also where a library answered it with an error of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    try:
        words = str(error).strip().splitlines()
    except Exception:  # somebody's own, that cannot be put into words
        return ""
    return words[0] if words else ""


@contextmanager
def _not_stuck() -> Iterator[None]:
    """A trial that blocks the main thread is interrupted, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: Any) -> None:
        raise TrialStuck

    before = signal.signal(SIGNAL, give_up)
    ident, over, lock = threading.main_thread().ident, threading.Event(), threading.Lock()
    assert ident is not None
    legs.moved()

    def watch() -> None:
        while not over.wait(min(1.0, STUCK_S / 4)):
            with lock:  # never once the handler is gone: the signal would end the process
                if legs.still_for() > STUCK_S and not over.is_set():
                    signal.pthread_kill(ident, SIGNAL)
                    legs.moved()

    threading.Thread(target=watch, name="trial", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()
        signal.signal(SIGNAL, before)
