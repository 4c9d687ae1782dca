"""The essentials of a run for a terminal: verdict, figures, curves in characters, where the time went, findings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stoker import console

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH, ROWS = 60, 8
CURVES = ("loss", "metric", "rate", "wait")


def as_text(runs: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(_one(run) for run in runs) + (f"\n\n{_beside(runs)}" if len(runs) > 1 else "")


def _one(run: Mapping[str, Any]) -> str:
    parts = [f"{run['name']}\n{run['verdict']}", "\n".join(f"{name:24} {value}" for name, value in run["figures"])]
    for chart in run["charts"]:
        if chart["id"] in CURVES:
            parts.append(_curve(chart))
    if run["bars"]:
        parts.append(_bars(run["bars"]))
    for one in run["findings"]:
        parts.append(f"{one['rule']}: {one['sentence']}\n    change: {one['change']}")
    changed = [(key, value, preset) for key, value, differs, preset in run["config"] if differs]
    if changed:
        parts.append(console.table([("key", "value", "the preset has"), *changed]))
    return "\n\n".join(parts)


def _curve(chart: Mapping[str, Any]) -> str:
    """Means of stretches, drawn in eighths of a row."""
    series = chart["series"][0]
    values = _stretches(chart["x"], series["y"])
    known = [one for one in values if one is not None]
    if not known:
        return f"{series['name']}: no numbers"
    low, high = min(known), max(known)
    if not math.isfinite(high - low):
        return f"{series['name']}: from {low:.4g} to {high:.4g}"
    heights = [None if one is None else (one - low) / ((high - low) or 1) * (8 * ROWS - 1) + 1 for one in values]
    lines = []
    for row in reversed(range(ROWS)):
        cells = [" " if one is None else BLOCKS[max(0, min(8, round(one) - 8 * row))] for one in heights]
        edge = f"{high:>11.4g} |" if row == ROWS - 1 else f"{low:>11.4g} |" if row == 0 else f"{'':11} |"
        lines.append(edge + "".join(cells).rstrip())
    return "\n".join([series["name"], *lines, f"{'':13}steps {chart['x'][0]:,.0f} to {chart['x'][-1]:,.0f}"])


def _stretches(x: Sequence[float], y: Sequence[float | None]) -> list[float | None]:
    width = min(WIDTH, len(x))
    parts: list[list[float]] = [[] for _ in range(width)]
    span = (x[-1] - x[0]) or 1
    for place, value in zip(x, y, strict=True):
        if value is not None:
            parts[min(width - 1, int((place - x[0]) / span * width))].append(value)
    return [math.fsum(part) / len(part) if part else None for part in parts]


def _bars(bars: Sequence[Mapping[str, Any]]) -> str:
    total = sum(bar["seconds"] for bar in bars)
    lines = []
    for bar in bars:
        share = bar["seconds"] / total
        lines.append(
            f"{bar['name']:22} {console.seconds_as_text(bar['seconds']):>8} {share:6.1%} {'#' * round(40 * share)}"
        )
    return "\n".join(lines)


def _beside(runs: Sequence[Mapping[str, Any]]) -> str:
    values = [{key: value for key, value, *_ in run["config"]} for run in runs]
    keys = [
        key for key in dict.fromkeys(key for one in values for key in one) if len({one.get(key) for one in values}) > 1
    ]
    if not keys:
        return "No key of their configurations differs."
    rows = [("keys that differ", *(run["name"] for run in runs))]
    return console.table([*rows, *((key, *(one.get(key, "-") for one in values)) for key in keys)])
