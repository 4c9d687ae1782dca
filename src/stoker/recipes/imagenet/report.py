"""An evaluation in depth: accuracy of each class, and which classes are taken for which."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stoker.files import write_bytes, write_json
from stoker.recipe import Trained
from stoker.train.evaluate import collect
from stoker.train.run import Run

SHOWN = 20


def report(model: Trained, run: Run, folder: Path) -> Mapping[str, Any]:
    task, names = model.task, model.task.classes.names
    values = collect(
        task, run.validation, model.device, model.precision, lambda batch: task.scores(task.predict(batch), batch)
    )
    label, guess = values["label"].astype(int), values["guess"].astype(int)
    confusion = np.zeros((len(names), len(names)), np.int64)
    np.add.at(confusion, (label, guess), 1)
    count = confusion.sum(1)
    accuracy = confusion.diagonal() / np.maximum(count, 1)
    result: dict[str, Any] = {
        "about": dict(model.about),
        **{name: float(value) for name, value in task.summarise(values).items()},
        "images": len(label),
        "by_class": {
            name: {"images": int(n), "top1": float(a)} for name, n, a in zip(names, count, accuracy, strict=True)
        },
        "confusion": confusion.tolist(),
    }
    write_json(folder / "report.json", result)
    write_bytes(folder / "report.md", _as_text(result, names, confusion).encode())
    return result


def _as_text(result: Mapping[str, Any], names: tuple[str, ...], confusion: Any) -> str:
    lines = [
        f"# Evaluation of {result['images']:,} images",
        "",
        *(f"* {name}: {value}" for name, value in result["about"].items()),
        "",
        f"top-1 {result['top1']:.4f}, top-5 {result['top5']:.4f}",
        "",
    ]
    lines += ["## Classes, the worst first", "", "| class | images | top-1 |", "|---|---|---|"]
    ordered = sorted(result["by_class"].items(), key=lambda item: item[1]["top1"])
    lines += [f"| {name} | {one['images']} | {one['top1']:.3f} |" for name, one in ordered[: 5 * SHOWN]]
    off = confusion - np.diag(confusion.diagonal())
    largest = np.argsort(-off, axis=None)[:SHOWN]
    lines += ["", "## Taken for another most often", "", "| class | taken for | images |", "|---|---|---|"]
    for place in largest:
        true, guess = np.unravel_index(place, off.shape)
        if off[true, guess]:
            lines.append(f"| {names[true]} | {names[guess]} | {off[true, guess]} |")
    return "\n".join(lines) + "\n"
