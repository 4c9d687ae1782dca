"""What pages show of events: resolution along energy, zenith and pulses, the sky, and single events in three dimensions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stoker.data.locations import named
from stoker.data.ragged import Indices
from stoker.data.stages import Stage
from stoker.errors import UserError
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.bins import Numbers, binned
from stoker.recipes.icecube.data import load_rows, open_all

MOST_PULSES = 1500  # of an event on a page; of a larger one those of a DOM are joined
CELLS = (
    (16, 32),
    (8, 16),
    (4, 8),
    (2, 4),
)  # of the sky, by cosine of the zenith and azimuth; the finest that is filled
LEAST_IN_CELL = 20  # events, on average
SHOWN = 12
CPU = torch.device("cpu")


def show_events(path: str, ids: Sequence[int]) -> dict[str, Any]:
    """Events of a data set by their ids, or some at random."""
    from stoker.recipes.icecube.recipe import RECIPE

    preset = next(iter(RECIPE.presets.values()))()
    data = open_all(replace(preset, data=replace(preset.data, path=named(path), mode="direct")))
    known = np.asarray(data.table.columns["id"])
    if ids:
        rows = np.concatenate([_row_of(known, one, path) for one in dict.fromkeys(ids)])
    else:
        rows = np.random.default_rng(0).permutation(len(known))[:SHOWN]
    items = _items(data.stages, np.sort(rows), known, {int(row): "" for row in rows})
    if ids:
        place = {int(one): number for number, one in enumerate(dict.fromkeys(ids))}
        items.sort(key=lambda item: place[item["id"]])
    return _events("Events", data.facts["sensor_xyz"], items)


def _row_of(known: Indices, event: int, path: str) -> Indices:
    rows = np.flatnonzero(known == event)[:1]
    if not len(rows):
        few = ", ".join(map(str, known[:3].tolist()))
        raise UserError(f"{path} holds no event {event}. It has {len(known):,}, among them {few}.")
    return rows


def sections(
    values: Mapping[str, Numbers],
    truth: Mapping[str, Any],
    result: Mapping[str, Any],
    rows: Indices,
    ids: Indices,
    stages: Sequence[Stage],
    detector: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Of an evaluation, for its page; `values` beside `rows`."""
    found = [_against("number of pulses", values, values["pulses"], log=True)]
    found.append(_against("cosine of the true zenith", values, values["true"][:, 2]))
    if "energy" in truth:
        found.insert(0, _against("energy, GeV", values, truth["energy"], log=True))
    if "kappa" in result:
        found.append(_calibration(result["kappa"], result["events"]))
    found += _sky(values)
    chosen = _chosen(values)
    items = _items(
        stages, rows[sorted(chosen)], ids, {int(rows[place]): why for place, why in chosen.items()}, values, rows
    )
    return [*found, _events("Events", detector, items)]


def _against(name: str, values: Mapping[str, Numbers], quantity: Numbers, *, log: bool = False) -> dict[str, Any]:
    series: list[dict[str, Any]] = []
    for key, label in (("error", "model"), ("line_fit", "line fit")):
        one = binned(values[key], quantity)
        series.append(
            {"name": label, "x": one.middle, "y": one.median, "low": one.low, "high": one.high, "n": one.count}
        )
    middle = series[0]["x"]
    series.append({"name": "guessing", "x": middle, "y": [math.pi / 2] * len(middle), "points": False})
    return {
        "kind": "curve",
        "title": f"Median angular error (rad) against {name}",
        "x": name,
        "log": log,
        "series": series,
        "note": f"{len(quantity):,} events, {series[0]['n'][0]:,} a point; bars hold the median in 95 % of samples.",
    }


def _calibration(kappa: Mapping[str, Any], count: int) -> dict[str, Any]:
    series: list[dict[str, Any]] = []
    for name, label, of in (("coverage", "as predicted", count), ("coverage_corrected", "corrected", count // 2)):
        wanted, held = [float(share) for share in kappa[name]], list(kappa[name].values())
        spread = [1.96 * math.sqrt(max(share * (1 - share), 1e-9) / max(1, of)) for share in held]
        series.append(
            {
                "name": label,
                "x": wanted,
                "y": held,
                "low": [max(0.0, a - b) for a, b in zip(held, spread, strict=True)],
                "high": [min(1.0, a + b) for a, b in zip(held, spread, strict=True)],
                "n": [of] * len(held),
            }
        )
    series.append({"name": "as it should be", "x": [0.0, 1.0], "y": [0.0, 1.0], "points": False})
    return {
        "kind": "curve",
        "title": "Calibration: what stated regions hold",
        "x": "share that a region should hold",
        "series": series,
        "note": "Share of events inside regions of the stated uncertainty; bars are 95 %.",
    }


def _sky(values: Mapping[str, Numbers]) -> list[dict[str, Any]]:
    shape = next((one for one in CELLS if len(values["error"]) >= LEAST_IN_CELL * one[0] * one[1]), CELLS[-1])
    size = shape[0] * shape[1]
    true, predicted = _cells(values["true"], shape), _cells(values["predicted"], shape)
    medians: list[float | None] = []
    for cell in range(size):
        inside = values["error"][true == cell]
        medians.append(float(np.median(inside)) if len(inside) else None)
    there, told = np.bincount(true, minlength=size), np.bincount(predicted, minlength=size)
    pulls = [float((b - a) / math.sqrt(max(1, a))) for a, b in zip(there, told, strict=True)]
    about = (
        f"{len(true):,} events. Zenith from above (top) to below, azimuth from left to right; cells of one solid angle."
    )
    return [
        {
            "kind": "sky",
            "title": "Sky: median error by where the neutrino came from",
            "label": "median error, rad",
            "cells": _rows(medians, shape),
            "note": f"{about} Cells without an event are red.",
        },
        {
            "kind": "sky",
            "title": "Sky: predicted less true directions",
            "label": "events too many, in standard deviations",
            "cells": _rows(pulls, shape),
            "note": f"{about} Of a model without preferences nearly all lie between -3 and 3.",
        },
    ]


def _cells(direction: Numbers, shape: tuple[int, int]) -> Indices:
    height = np.clip(((1 - direction[:, 2]) / 2 * shape[0]).astype(int), 0, shape[0] - 1)
    azimuth = np.arctan2(direction[:, 1], direction[:, 0]) % (2 * np.pi)
    around = np.clip((azimuth / (2 * np.pi) * shape[1]).astype(int), 0, shape[1] - 1)
    return np.asarray(height * shape[1] + around, np.int64)


def _rows(cells: list[Any], shape: tuple[int, int]) -> list[list[Any]]:
    return [cells[first : first + shape[1]] for first in range(0, len(cells), shape[1])]


def _chosen(values: Mapping[str, Numbers]) -> dict[int, str]:
    """Places of events worth a look, and why; the first reason counts."""
    by_error, by_size = np.argsort(values["error"], kind="stable"), np.argsort(-values["pulses"], kind="stable")
    some = np.random.default_rng(0).permutation(len(by_error))[:6]
    found: dict[int, str] = {}
    for why, places in (
        ("largest", by_size[:3]),
        ("best", by_error[:3]),
        ("worst", by_error[::-1][:3]),
        ("random", some),
    ):
        for place in places.tolist():
            found.setdefault(place, why)
    return found


def _items(
    stages: Sequence[Stage],
    rows: Indices,
    ids: Indices,
    why: Mapping[int, str],
    values: Mapping[str, Numbers] | None = None,
    value_rows: Indices | None = None,
) -> list[dict[str, Any]]:
    batch = load_rows(stages, rows, CPU)
    found = []
    for number, row in enumerate(batch.rows.tolist()):
        item = _item(batch, number)
        item["id"] = int(ids[row])
        item["text"] = f"{why[row]} event {int(ids[row])}, {item['pulses']:,} pulses".strip()
        if values is not None and value_rows is not None:
            place = int(np.searchsorted(value_rows, row))
            item["predicted"] = [round(float(one), 4) for one in values["predicted"][place]]
            item["about"] = (
                f"Error {float(values['error'][place]):.3f} rad (line fit {float(values['line_fit'][place]):.3f})."
            )
        found.append(item)
    order = {"largest": 0, "best": 1, "worst": 2}
    return sorted(found, key=lambda item: order.get(item["text"].split()[0], 3))


def _item(batch: EventBatch, number: int) -> dict[str, Any]:
    first_dom, last_dom = batch.event_offsets[number : number + 2].tolist()
    begin, end = int(batch.dom_offsets[first_dom]), int(batch.dom_offsets[last_dom])
    time, charge, auxiliary = (getattr(batch, name)[begin:end].numpy() for name in ("time", "charge", "auxiliary"))
    starts = batch.dom_offsets[first_dom:last_dom].numpy() - begin
    sensor, lengths = batch.sensor[first_dom:last_dom].numpy(), np.diff(np.append(starts, len(time)))
    close = auxiliary == 0 if (auxiliary == 0).any() else np.ones(len(time), bool)
    low, high = (float(one) for one in np.percentile(time[close], (1, 99)))
    first, last = low - 100.0, high + 100.0  # the rest of a readout is noise, microseconds away: shown at the ends
    joined = len(time) > MOST_PULSES
    if joined:
        time = np.minimum.reduceat(np.where(close, time, np.inf), starts)
        charge, auxiliary = np.add.reduceat(charge, starts), np.isinf(time)
    else:
        sensor = np.repeat(sensor, lengths)
    direction = batch.direction[number].numpy()
    return {
        "pulses": end - begin,
        "sensor": sensor.tolist(),
        "time": np.clip(time, first, last).round(0).tolist(),
        "charge": np.round(charge, 2).tolist(),
        "auxiliary": auxiliary.astype(int).tolist(),
        "span": [first, last],
        "true": [round(float(one), 4) for one in direction]
        if np.isfinite(direction).all() and direction.any()
        else None,
        "predicted": None,
        "about": "Pulses of a DOM are joined: their charge, at the time of the first. " if joined else "",
    }


def _events(title: str, detector: Sequence[Sequence[float]], items: list[dict[str, Any]]) -> dict[str, Any]:
    places = np.round(np.asarray(detector, np.float64), 1)
    for item in items:
        weight = np.maximum(np.array(item["charge"]), 1e-3) * (1 - 0.99 * np.array(item["auxiliary"]))
        item["centre"] = np.average(places[item["sensor"]], axis=0, weights=weight).round(1).tolist()
    return {"kind": "events", "title": title, "detector": places.tolist(), "items": items}
