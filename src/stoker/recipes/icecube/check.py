"""`stoker simulate --check`: the distributions of a directory of events beside those of the real data.

The bands are what a faithful simulation must meet; the real values come from published notebooks over one million
events of the competition's data.
"""

# E events, P pulses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stoker import console
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, Ragged, sample_of_element
from stoker.recipes.icecube import events
from stoker.recipes.icecube.baselines import line_fit
from stoker.recipes.icecube.batch import EventBatch, collate
from stoker.recipes.icecube.losses import angle_between
from stoker.recipes.icecube.table import open_events

MOST_EVENTS = 200_000  # looked at; more would not change a figure
EVENTS_AT_ONCE = 2_000


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    real: float
    low: float
    high: float

    @property
    def ok(self) -> bool:
        return bool(self.low <= self.value <= self.high)


def check_events(root: Path) -> list[Figure]:
    """Compares the first events of a directory in the Kaggle layout, real or simulated."""
    table = open_events(root)
    source = events.open_pulses(root, table)
    xyz = torch.from_numpy(events.open_geometry(root).xyz)
    collected: dict[str, list[Array]] = {}
    num_events = min(len(table), MOST_EVENTS)
    with console.progress("check", num_events, "events") as bar:
        for rows in _stretches(num_events):
            pulses = source.gather(MicroBatch(rows))
            labels = {name: np.asarray(table.columns[name][rows]) for name in events.LABELS}
            batch = collate(events.stored_columns(pulses), labels, None).to(torch.device("cpu"))
            for name, values in (_of_pulses(pulses) | _of_batch(batch, xyz)).items():
                collected.setdefault(name, []).append(values)
            bar.advance(len(rows))
    return _figures({name: np.concatenate(parts) for name, parts in collected.items()})


def _stretches(num_events: int) -> Iterator[Indices]:
    for start in range(0, num_events, EVENTS_AT_ONCE):
        yield np.arange(start, min(start + EVENTS_AT_ONCE, num_events))


def _of_pulses(pulses: Ragged) -> dict[str, Array]:
    count = np.diff(pulses.offsets)
    auxiliary = np.bincount(sample_of_element(pulses.offsets), pulses.columns["auxiliary"], minlength=len(count))
    time = pulses.columns["time"]
    return {
        "pulses": count,
        "auxiliary": auxiliary,
        "first": np.minimum.reduceat(time, pulses.offsets[:-1]),
        "last": np.maximum.reduceat(time, pulses.offsets[:-1]),
        "charge": pulses.columns["charge"],
    }


def _of_batch(batch: EventBatch, xyz: torch.Tensor) -> dict[str, Array]:
    error = angle_between(line_fit(batch, xyz), batch.direction)
    return {
        "doms": batch.event_offsets.diff().numpy(),
        "pulses_of_dom": batch.dom_offsets.diff().numpy(),
        "line_fit": error.numpy(),
        "zenith": torch.arccos(batch.direction[:, 2].clamp(-1, 1)).numpy(),
    }


def _figures(seen: dict[str, Array]) -> list[Figure]:
    # float32 holds a charge to about one part in 1e7, so the distance to the grid is judged relative to the charge.
    charge = seen["charge"].astype(np.float64)
    off_grid = np.abs(charge - (np.round((charge - 0.025) / 0.05) * 0.05 + 0.025)) > 1e-4 + 1e-6 * charge
    figures = [
        ("pulses per event, median", np.median(seen["pulses"]), 63, 50, 80),
        ("pulses per event, 90 %", np.percentile(seen["pulses"], 90), 144, 110, 190),
        ("pulses per event, 99 %", np.percentile(seen["pulses"], 99), 1167, 600, 2500),
        ("pulses per event, largest", seen["pulses"].max(), 178_250, 10_000, 400_000),
        ("DOMs per event, median", np.median(seen["doms"]), 49, 40, 60),
        ("DOMs per event, 99 %", np.percentile(seen["doms"], 99), 242, 170, 350),
        ("DOMs with a single pulse", np.mean(seen["pulses_of_dom"] == 1), 0.78, 0.70, 0.85),
        ("auxiliary, mean over events", np.mean(seen["auxiliary"] / seen["pulses"]), 0.64, 0.55, 0.72),
        ("auxiliary, of all pulses", seen["auxiliary"].sum() / seen["pulses"].sum(), 0.28, 0.20, 0.40),
        ("first pulse (ns), median", np.median(seen["first"]), 6129, 5900, 6400),
        ("last pulse (ns), median", np.median(seen["last"]), 17_242, 16_000, 18_500),
        ("charge, median", np.median(seen["charge"]), 1.025, 0.8, 1.3),
        ("charges that are 0.025 + 0.05 k", 1 - np.mean(off_grid), 1.0, 0.999, 1.0),
        ("zenith (rad), mean", np.mean(seen["zenith"]), 1.534, 1.50, 1.60),
        ("line fit error (rad), mean", np.mean(seen["line_fit"]), 1.214, 1.10, 1.30),
    ]
    return [Figure(name, float(value), real, low, high) for name, value, real, low, high in figures]
