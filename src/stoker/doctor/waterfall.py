"""The sum that adds up to the time of a step, and its drawing."""

from dataclasses import dataclass

from stoker.doctor.measured import Measured
from stoker.doctor.rules.loader import stall_of

WIDTH = 40


@dataclass(frozen=True)
class Bar:
    name: str
    seconds: float
    low: float  # of the seconds, 5 %
    high: float  # 95 %


def waterfall(found: Measured) -> list[Bar]:
    """Kernels, host, copy, waiting for batches, gaps between epochs: their seconds add up to the step's, as measured."""
    if found.run is None:
        return []
    run_low, run_high = found.run.interval()
    if found.resident is None:
        rest = found.run.mean - found.wait_s - found.gap_s
        return [
            Bar("step", rest, rest, rest),
            Bar("waiting for batches", found.wait_s, max(0.0, run_low - rest), run_high - rest),
            Bar("between epochs", found.gap_s, found.gap_s, found.gap_s),
        ]
    low, high = found.resident.interval()
    # A run that comes out faster than its own step is noise: bars are parts of a step.
    mean = min(found.resident.mean, found.run.mean - found.gap_s)
    bars = []
    if found.operations is not None:
        busy = 1 - found.host_share
        where = "GPU busy" if found.device == "cuda" else "operations"
        # Convolutions by a cleverer algorithm than a product may lie below it: then it is no floor.
        floor = found.floor_s if found.floor_s is not None and found.floor_s < busy * mean else 0.0
        bars += [Bar("floor", floor, floor, floor)] if floor else []
        name = f"{where}, above it" if floor else where
        bars.append(Bar(name, busy * mean - floor, busy * low - floor, busy * high - floor))
        bars.append(Bar("host", (1 - busy) * mean, (1 - busy) * low, (1 - busy) * high))
    else:
        bars.append(Bar("step", mean, low, high))
    copied = 0.0
    if found.given is not None:
        copied = max(0.0, found.given.mean - mean)
        bars.append(Bar("copy", copied, max(0.0, found.given.interval()[0] - high), found.given.interval()[1] - low))
    # Whatever the other legs leave: the sum is the step's time by the clock.
    stall = found.run.mean - found.gap_s - mean - copied
    spread = run_low - found.gap_s - high - copied, run_high - found.gap_s - low - copied
    for name, share in _stalls(found, stall):
        bars.append(Bar(name, share * stall, share * spread[0], share * spread[1]))
    bars.append(Bar("between epochs", found.gap_s, found.gap_s, found.gap_s))
    return bars


def _stalls(found: Measured, stall: float) -> list[tuple[str, float]]:
    """Fetching and preparing, in the shares that one thread alone spends on them, where they can be what it is."""
    split = found.split
    if stall_of(found) is None and found.wait_s < 0.3 * stall:
        return [("not explained", 1.0)]
    if split is None:
        return [("waiting for batches", 1.0)]
    fetch = split.latency_s + max(0.0, split.cold_s - split.warm_s)
    share = fetch / max(fetch + split.busy_s, 1e-12)
    return [("preparation", 1 - share), ("fetch", share)]


def draw(bars: list[Bar]) -> str:
    """For a terminal; a bar that is smaller than its uncertainty is called so."""
    total = sum(bar.seconds for bar in bars)
    lines, begin = [], 0.0
    for bar in bars:
        left, length = round(WIDTH * max(0.0, begin) / total), round(WIDTH * max(0.0, bar.seconds) / total)
        unsure = " (not significant)" if bar.low <= 0 < bar.seconds and bar.seconds > 0 else ""
        drawn = (" " * left + "#" * length)[:WIDTH]
        lines.append(f"{bar.name:20} {1e3 * bar.seconds:9.3f} ms {bar.seconds / total:5.0%} |{drawn:{WIDTH}}|{unsure}")
        begin += bar.seconds
    return "\n".join([*lines, f"{'step':20} {1e3 * total:9.3f} ms"])
