"""Plots of an evaluation, as PNG files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from stoker.recipes.icecube.bins import binned

mpl.use("Agg")  # a run has no screen
from matplotlib import pyplot as plt

SIZE = (5.0, 3.6)


def draw_plots(values: Mapping[str, Any], truth: Mapping[str, Any], result: Mapping[str, Any], folder: Path) -> None:
    _errors(values, folder / "errors.png")
    _against(values, np.log10(values["pulses"]), "log10 of the number of pulses", folder / "by_pulses.png")
    _against(values, values["true"][:, 2], "cosine of the true zenith", folder / "by_zenith.png")
    if "energy" in truth:
        _against(values, np.log10(truth["energy"]), "log10 of the energy / GeV", folder / "by_energy.png")
    _bias(values, folder / "bias.png")
    if "kappa" in result:
        _coverage(result["kappa"], result["events"], folder / "calibration.png")


def _errors(values: Mapping[str, Any], path: Path) -> None:
    with _axes(path, "angular error (rad)", "share of events below") as axes:
        for name, label in (("error", "model"), ("line_fit", "line fit")):
            ordered = np.sort(values[name])
            axes.plot(ordered, np.linspace(0, 1, len(ordered)), label=f"{label}, {len(ordered):,} events")
        axes.legend()


def _against(values: Mapping[str, Any], quantity: Any, label: str, path: Path) -> None:
    """Median error in bins of equal numbers of events, with what it lies between in 95 % of samples."""
    with _axes(path, label, "median angular error (rad)") as axes:
        for name, what in (("error", "model"), ("line_fit", "line fit")):
            one = binned(values[name], quantity)
            median = np.array(one.median)
            spread = [median - np.array(one.low), np.array(one.high) - median]
            axes.errorbar(one.middle, median, yerr=spread, marker=".", capsize=2, linewidth=1, label=what)
        axes.set_title(f"{len(quantity):,} events, {min(one.count):,} or more a point; bars 95 %", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.legend()


def _bias(values: Mapping[str, Any], path: Path) -> None:
    with _axes(path, "cosine of the zenith", "events") as axes:
        edges = np.linspace(-1, 1, 21)
        for name in ("true", "predicted"):
            count = np.histogram(values[name][:, 2], edges)[0]
            axes.errorbar(
                (edges[1:] + edges[:-1]) / 2, count, np.sqrt(count), drawstyle="steps-mid", capsize=2, label=name
            )
        axes.legend()


def _coverage(kappa: Mapping[str, Any], count: int, path: Path) -> None:
    with _axes(path, "share that a region should hold", "share that it holds") as axes:
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
        for name, label, of in (("coverage", "as predicted", count), ("coverage_corrected", "corrected", count // 2)):
            wanted, held = [float(share) for share in kappa[name]], np.array(list(kappa[name].values()))
            spread = 1.96 * np.sqrt(held * (1 - held) / max(1, of))
            axes.errorbar(wanted, held, spread, marker="o", capsize=2, label=f"{label}, {of:,} events")
        axes.legend()


@contextmanager
def _axes(path: Path, x: str, y: str) -> Iterator[Any]:
    """Axes with labels; the file is written and the memory given back when the block ends."""
    figure, axes = plt.subplots(figsize=SIZE, dpi=150, layout="constrained")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    yield axes
    figure.savefig(path)
    plt.close(figure)
