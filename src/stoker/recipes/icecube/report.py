"""An evaluation in depth: where a model is good, where it is not, whether it knows, and what it is beside the baselines.

Everything goes into one folder of the run: report.json with every number, report.md with tables, plots, and page.json with
what `stoker report` shows of it.
"""

# E events
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker import console
from stoker.data.locations import Location
from stoker.files import write_bytes, write_json
from stoker.recipe import Trained
from stoker.recipes.icecube.baselines import line_fit
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.data import load_rows
from stoker.recipes.icecube.display import sections
from stoker.recipes.icecube.losses import angle_between, region_angle
from stoker.recipes.icecube.perturb import CHANGES
from stoker.recipes.icecube.task import DirectionTask
from stoker.recipes.icecube.track_fit import track_fit
from stoker.recipes.icecube.truth import read_truth
from stoker.train.evaluate import collect, inference
from stoker.train.precision import autocast
from stoker.train.run import Run

PERCENTILES = (10, 25, 50, 75, 90, 99)
SHARES = (0.1, 0.25, 0.5, 0.68, 0.9, 0.95)
PULSE_EDGES = (0, 40, 60, 100, 200, 1000, math.inf)
ZENITH_EDGES = tuple(math.acos(c) for c in (1, 0.6, 0.2, -0.2, -0.6, -1))
ENERGY_EDGES = (0, 1e3, 1e4, 1e5, 1e6, math.inf)
BY = (
    ("by_kind", "By kind"),
    ("by_energy_gev", "By energy (GeV)"),
    ("by_pulses", "By number of pulses"),
    ("by_zenith_rad", "By true zenith"),
)
MOST_FITTED = 2000  # tracks that the likelihood fit gets: it takes far longer than the model
MOST_PERTURBED = 8192  # events

Numbers = npt.NDArray[np.floating[Any]]


def report(model: Trained, run: Run, data_path: Location, folder: Path) -> dict[str, Any]:
    """Evaluates all validation events and writes into the folder; returns what report.json holds."""
    task, device, precision = model.task, model.device, model.precision
    loader, stages = run.validation, run.data.stages

    def measure(batch: EventBatch) -> dict[str, torch.Tensor]:
        prediction = task.predict(batch)
        fitted = line_fit(batch, task.sensor_xyz.to(device))
        return {
            "predicted": prediction[:, :3],
            "kappa": prediction[:, 3],
            "true": batch.direction,
            "error": angle_between(prediction[:, :3], batch.direction),
            "line_fit": angle_between(fitted, batch.direction),
        }

    values = collect(task, loader, device, precision, measure)
    rows = values["row"].astype(np.int64)
    table = loader.plan.table
    values["pulses"] = np.asarray(table.columns["count"][rows]).astype(float)
    truth = read_truth(data_path, table, rows)
    result: dict[str, Any] = {
        "about": dict(model.about),
        "events": len(rows),
        "angular_error_rad": {"model": _spread(values["error"]), "line fit": _spread(values["line_fit"])},
        "guessing_rad": math.pi / 2,
        "by_pulses": _by_bins(values, values["pulses"], PULSE_EDGES),
        "by_zenith_rad": _by_bins(values, np.arccos(np.clip(values["true"][:, 2], -1, 1)), ZENITH_EDGES),
        "bias": _bias(values),
    }
    if task.has_kappa:
        result["kappa"] = calibration(values["kappa"], values["error"])
    if "energy" in truth:
        result["by_energy_gev"] = _by_bins(values, truth["energy"], ENERGY_EDGES)
    if "kind" in truth:
        result["by_kind"] = {
            str(kind): _beside_line_fit(values, truth["kind"] == kind) for kind in np.unique(truth["kind"])
        }
        result["tracks"] = _tracks(task, stages, rows, values, truth["kind"] == "track", device)
    result["robustness_rad"] = _robustness(task, stages, rows[:MOST_PERTURBED], device, precision)
    write_json(folder / "report.json", result)
    write_bytes(folder / "report.md", as_text(result).encode())
    from stoker.recipes.icecube.plots import draw_plots  # Matplotlib takes a second to come

    draw_plots(values, truth, result, folder)
    ids = np.asarray(table.columns["id"])
    detector = task.sensor_xyz.cpu().tolist()
    shown = sections(values, truth, result, rows, ids, stages, detector)
    write_json(folder / "page.json", {"sections": [*shown, *_tables(result)]})
    return result


def calibration(kappa: Numbers, error: Numbers) -> dict[str, Any]:
    """Whether the stated uncertainty is right: coverage of regions, pulls, and a correction fitted on every other event.

    A pull is the error in units of the stated median error; of a calibrated model half of them are below one.
    """
    fitted = np.arange(len(kappa)) % 2 == 0
    slope, offset = _fit_correction(kappa[fitted], error[fitted])
    corrected = np.exp(offset) * kappa**slope
    rest = ~fitted if (~fitted).any() else fitted
    pulls = error / _region(kappa, 0.5)
    return {
        "coverage": {f"{share:g}": float(np.mean(error < _region(kappa, share))) for share in SHARES},
        "pull_percentiles": {str(p): float(np.percentile(pulls, p)) for p in PERCENTILES},
        "correction": {"log_kappa_slope": slope, "log_kappa_offset": offset},
        "coverage_corrected": {
            f"{share:g}": float(np.mean(error[rest] < _region(corrected[rest], share))) for share in SHARES
        },
    }


def _fit_correction(kappa: Numbers, error: Numbers, share: float = 0.68, bins: int = 20) -> tuple[float, float]:
    """log kappa' = slope log kappa + offset, such that the region of `share` covers that share at small and large kappa."""
    order = np.argsort(kappa)
    log_kappa, wanted = [], []
    for part in np.array_split(order, min(bins, max(1, len(order) // 50))):
        if len(part):
            # The kappa whose region of `share` ends where that share of these events lies.
            quantile = float(np.quantile(error[part], share))
            log_kappa.append(float(np.mean(np.log(kappa[part]))))
            wanted.append(math.log(_kappa_of_region(quantile, share)))
    if len(log_kappa) < 3:
        return 1.0, float(np.mean(wanted) - np.mean(log_kappa)) if wanted else 0.0
    slope, offset = np.polyfit(log_kappa, wanted, 1)
    return float(slope), float(offset)


def _kappa_of_region(angle: float, share: float) -> float:
    """By bisection: the region shrinks as kappa grows. Regions wider than a uniform distribution's have kappa near 0."""
    low, high = math.log(1e-3), math.log(1e6)
    for _ in range(60):
        middle = (low + high) / 2
        wide = float(_region(np.array([math.exp(middle)]), share)[0]) > angle
        low, high = (middle, high) if wide else (low, middle)
    return math.exp((low + high) / 2)


def _region(kappa: Numbers, share: float) -> Numbers:
    return region_angle(torch.from_numpy(np.asarray(kappa, np.float64)), share).numpy()


def _tracks(
    task: DirectionTask,
    stages: Any,
    rows: npt.NDArray[np.int64],
    values: Mapping[str, Numbers],
    is_track: Any,
    device: Any,
) -> dict[str, Any]:
    """Model, likelihood fit and line fit on the same tracks."""
    chosen = np.flatnonzero(is_track)[:MOST_FITTED]
    if not len(chosen):
        return {}
    errors = []
    with console.progress("likelihood fit", len(chosen), "tracks") as bar:
        for part in np.array_split(chosen, -(-len(chosen) // 500)):
            batch = load_rows(stages, rows[part], device)
            errors.append(angle_between(track_fit(batch, task.sensor_xyz), batch.direction).double().cpu().numpy())
            bar.advance(len(part))
    return {
        "events": len(chosen),
        "model": _spread(values["error"][chosen]),
        "likelihood fit": _spread(np.concatenate(errors)),
        "line fit": _spread(values["line_fit"][chosen]),
    }


def _robustness(
    task: DirectionTask, stages: Any, rows: npt.NDArray[np.int64], device: torch.device, precision: str
) -> dict[str, Any]:
    """Mean error on the same events as they are, and changed."""
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in ("as they are", *CHANGES)}
    generator = torch.Generator(device).manual_seed(0)
    with inference(task.model), autocast(precision, device):
        for part in np.array_split(rows, -(-len(rows) // 1024)):
            batch = load_rows(stages, part, device)
            for name in errors:
                changed = CHANGES[name](batch, generator, len(task.sensor_xyz)) if name in CHANGES else batch
                errors[name].append(angle_between(task.predict(changed)[:, :3], changed.direction))
    return {name: float(torch.cat(parts).double().mean()) for name, parts in errors.items()}


def _spread(error: Numbers) -> dict[str, float]:
    return {"mean": float(np.mean(error))} | {f"p{p}": float(np.percentile(error, p)) for p in PERCENTILES}


def _beside_line_fit(values: Mapping[str, Numbers], chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
    kept = {name: values[name][chosen] for name in ("error", "line_fit", "kappa")}
    return {
        "events": int(chosen.sum()),
        "model_mean": float(np.mean(kept["error"])),
        "model_median": float(np.median(kept["error"])),
        "line_fit_mean": float(np.mean(kept["line_fit"])),
        "line_fit_median": float(np.median(kept["line_fit"])),
        "in_68_percent_region": float(np.mean(kept["error"] < _region(kept["kappa"], 0.68))),
    }


def _by_bins(values: Mapping[str, Numbers], quantity: Numbers, edges: tuple[float, ...]) -> dict[str, Any]:
    found = {}
    for low, high in pairwise(edges):
        chosen = (quantity >= low) & (quantity < high)
        if chosen.any():
            found[f"{low:.4g} .. {high:.4g}"] = _beside_line_fit(values, chosen)
    return found


def _bias(values: Mapping[str, Numbers]) -> dict[str, list[float]]:
    """Mean vector of predicted and of true directions: a model that prefers "up" has a larger z than the truth."""
    return {name: values[name].mean(0).tolist() for name in ("predicted", "true")}


def _tables(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same tables as in report.md, for the page."""
    found = []
    for key, title in BY:
        if rows := result.get(key):
            heading = ["", *(name.replace("_", " ") for name in next(iter(rows.values())))]
            cells = [[name, *(_cell(value) for value in row.values())] for name, row in rows.items()]
            found.append({"kind": "table", "title": title, "heading": heading, "rows": cells})
    robust = [[name, f"{value:.4f}"] for name, value in result["robustness_rad"].items()]
    return [
        *found,
        {"kind": "table", "title": "Mean error of changed events (rad)", "heading": ["", "mean"], "rows": robust},
    ]


def as_text(result: Mapping[str, Any]) -> str:
    """Tables of report.json, for people."""
    about = "\n".join(f"* {name}: {value}" for name, value in result["about"].items())
    parts = [f"# Evaluation of {result['events']:,} events", about, "All angles in radians."]
    spreads = result["angular_error_rad"]
    parts.append(
        _table("Angular error", ("", *next(iter(spreads.values()))), {k: list(v.values()) for k, v in spreads.items()})
    )
    if tracks := result.get("tracks"):
        rows = {name: list(tracks[name].values()) for name in ("model", "likelihood fit", "line fit")}
        parts.append(_table(f"{tracks['events']:,} tracks", ("", *tracks["model"]), rows))
    for key, title in BY:
        if found := result.get(key):
            heading = ("", *(name.replace("_", " ") for name in next(iter(found.values()))))
            parts.append(_table(title, heading, {name: list(row.values()) for name, row in found.items()}))
    if kappa := result.get("kappa"):
        rows = {name: list(kappa[name].values()) for name in ("coverage", "coverage_corrected")}
        parts.append(_table("Share of events inside regions that should hold", ("", *kappa["coverage"]), rows))
    parts.append(_table("Mean direction", ("", "x", "y", "z"), result["bias"]))
    robust = {name: [value] for name, value in result["robustness_rad"].items()}
    parts.append(_table("Mean error of changed events", ("", "mean"), robust))
    return "\n\n".join(parts) + "\n"


def _table(title: str, heading: tuple[str, ...], rows: Mapping[str, Any]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    for name, row in rows.items():
        lines.append("| " + " | ".join([name, *map(_cell, row)]) + " |")
    return "\n".join(lines)


def _cell(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
