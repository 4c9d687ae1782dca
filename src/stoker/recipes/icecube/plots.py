"""Plots of an evaluation, as PNG files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")  # a run has no screen
from matplotlib import pyplot as plt

BINS = 24
SIZE = (5.0, 3.6)


def draw_plots(values: Mapping[str, Any], truth: Mapping[str, Any], result: Mapping[str, Any], folder: Path) -> None:
    _errors(values, folder / "errors.png")
    _against(values, np.log10(values["pulses"]), "log10 of the number of pulses", folder / "by_pulses.png")
    _against(values, values["true"][:, 2], "cosine of the true zenith", folder / "by_zenith.png")
    if "energy" in truth:
        _against(values, np.log10(truth["energy"]), "log10 of the energy / GeV", folder / "by_energy.png")
    _bias(values, folder / "bias.png")
    if "kappa" in result:
        _coverage(result["kappa"], folder / "calibration.png")


def _errors(values: Mapping[str, Any], path: Path) -> None:
    with _axes(path, "angular error (rad)", "share of events below") as axes:
        for name, label in (("error", "model"), ("line_fit", "line fit")):
            ordered = np.sort(values[name])
            axes.plot(ordered, np.linspace(0, 1, len(ordered)), label=label)
        axes.legend()


def _against(values: Mapping[str, Any], quantity: Any, label: str, path: Path) -> None:
    """Median error in bins of equal numbers of events."""
    order = np.argsort(quantity, kind="stable")
    parts = [part for part in np.array_split(order, BINS) if len(part)]
    with _axes(path, label, "median angular error (rad)") as axes:
        for name, what in (("error", "model"), ("line_fit", "line fit")):
            middle = [float(np.median(quantity[part])) for part in parts]
            axes.plot(middle, [float(np.median(values[name][part])) for part in parts], marker=".", label=what)
        axes.set_ylim(bottom=0)
        axes.legend()


def _bias(values: Mapping[str, Any], path: Path) -> None:
    with _axes(path, "cosine of the zenith", "events") as axes:
        edges = np.linspace(-1, 1, 41).tolist()
        axes.hist(values["true"][:, 2], bins=edges, histtype="step", label="true")
        axes.hist(values["predicted"][:, 2], bins=edges, histtype="step", label="predicted")
        axes.legend()


def _coverage(kappa: Mapping[str, Any], path: Path) -> None:
    with _axes(path, "share that a region should hold", "share that it holds") as axes:
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
        for name, label in (("coverage", "as predicted"), ("coverage_corrected", "corrected")):
            wanted = [float(share) for share in kappa[name]]
            axes.plot(wanted, list(kappa[name].values()), marker="o", label=label)
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
