"""What the events of a run can tell, without running anything: where its time went, and whether it got slower."""

import math
import statistics
from pathlib import Path
from typing import Any

from stoker import settings
from stoker.doctor.loaders import LoaderFacts
from stoker.doctor.measured import Leg, Measured
from stoker.errors import UserError
from stoker.runs import schema
from stoker.runs.events import read_events
from stoker.runs.folder import RunFolder

LEAST = 6  # intervals, to speak of a trend
LEAST_S = 60.0  # of steps, to speak of anything that a moment of the machine could explain


def from_events(run: RunFolder) -> Measured:
    steps = list(read_events(run.events, schema.Step))
    if not steps:
        raise UserError(
            f"{run.path} holds no steps yet: there is nothing to look at. `stoker doctor TARGET` runs trials."
        )
    found = Measured(name=run.path.name)
    # The first step of an interval may have compiled.
    taken = [one / 1e3 for event in steps for one in (event.step_ms[1:] or event.step_ms)]
    durations = [one for one in taken if math.isfinite(one) and one > 0]
    rates = [event.samples_per_s for event in steps if math.isfinite(event.samples_per_s) and event.samples_per_s > 0]
    waits = [event.wait_share for event in steps if math.isfinite(event.wait_share)]
    if not durations or not rates or not waits:
        raise UserError(f"The steps of {run.path} do not say how long they took: there is nothing to look at.")
    mean = statistics.fmean(durations)
    found.run = Leg(tuple(durations))
    found.samples = statistics.median(rates) * mean
    found.wait_s = statistics.fmean(waits) * mean
    found.settings = _settings(run.config)
    found.loader = LoaderFacts("stoker", found.settings.get("loader.threads"), found.settings.get("loader.look_ahead"))
    _outside(run, found, sum(one / 1e3 for event in steps for one in event.step_ms) or sum(durations))
    if len(rates) >= LEAST and sum(durations) >= LEAST_S:
        third = len(rates) // 3
        found.drift = statistics.median(rates[-third:]) / max(statistics.median(rates[:third]), 1e-9) - 1
        found.grown_bytes = _growth(steps)
    _elsewhere(run, found)
    scales = [event.loss_scale for event in steps if event.loss_scale is not None]
    found.loss_scale = scales[-1] if scales else None
    compiled = list(read_events(run.events, schema.Compilation))
    late = [event for event in compiled if event.step > 20]
    found.graphs = sum(event.graphs for event in late)
    found.graphs_s = sum(event.seconds for event in late) / len(durations)
    ranks = [event.rank_ms for event in steps if len(event.rank_ms) > 1]
    if ranks and sum(durations) >= LEAST_S:
        typical = [statistics.median(values) for values in zip(*ranks, strict=False)]
        slowest = max(range(len(typical)), key=typical.__getitem__)
        others = (
            statistics.median(value for rank, value in enumerate(typical) if rank != slowest) if len(typical) > 1 else 0
        )
        if others:
            found.slow_rank = slowest, typical[slowest] / others - 1
    return found


def _outside(run: RunFolder, found: Measured, trained_s: float) -> None:
    """Shares of the wall clock that are no steps."""
    judged = sum(event.seconds for event in read_events(run.events, schema.Evaluation))
    saved = sum(event.seconds for event in read_events(run.events, schema.Checkpoint))
    total = trained_s + judged + saved
    if total > 0:
        found.evaluation_share, found.checkpoint_share = judged / total, saved / total


def _elsewhere(run: RunFolder, found: Measured) -> None:
    """What storage did, of a run whose data lie elsewhere."""
    loaded = [event for event in read_events(run.events, schema.LoaderTimes) if event.storage]
    if not loaded:
        return
    summed = ("bytes", "requests", "retries", "hits", "misses")
    found.storage = {
        **loaded[-1].storage,
        **{name: sum(one.storage.get(name, 0.0) for one in loaded) for name in summed},
    }
    found.storage["latency_p99_ms"] = max(one.storage.get("latency_p99_ms", 0.0) for one in loaded)
    found.storage["seconds"] = sum(one.seconds for one in loaded)
    busy = {name: sum(one.stages.get(name, {}).get("busy_s", 0.0) for one in loaded) for name in loaded[-1].stages}
    found.fetch_share = busy.get("fetch", 0.0) / max(sum(busy.values()), 1e-9)


def _growth(steps: list[schema.Step]) -> float:
    """Bytes of host memory a step, where the second half rises as the first did."""
    used = [(event.step, event.host_bytes) for event in steps[len(steps) // 3 :] if event.host_bytes]
    if len(used) < LEAST:
        return 0.0
    (first, low), (last, high) = used[0], used[-1]
    middle = used[len(used) // 2][1]
    steady = low < middle < high and high - low > 64 << 20
    return (high - low) / max(1, last - first) if steady else 0.0


def _settings(config: Path) -> dict[str, Any]:
    def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in values.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return found

    return flat(settings.read_yaml(config)) if config.is_file() else {}
