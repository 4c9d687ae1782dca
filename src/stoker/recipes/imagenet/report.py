"""An evaluation in depth: accuracy of each class, which classes are taken for which, and what mistakes look like."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch.nn import functional as F

from stoker.files import write_bytes, write_json
from stoker.recipe import Trained
from stoker.recipes.imagenet.batch import ImageBatch
from stoker.recipes.imagenet.resize import MEAN, STD
from stoker.train.evaluate import collect
from stoker.train.run import Run

SHOWN = 20
MOST_CLASSES = 60  # of the confusion on a page: the worst
PICTURES = 24


def report(model: Trained, run: Run, folder: Path) -> Mapping[str, Any]:
    task, names = model.task, model.task.classes.names

    def measure(batch: ImageBatch) -> dict[str, torch.Tensor]:
        answers = task.predict(batch)
        return {**task.scores(answers, batch), "sure": F.softmax(answers.float(), 1).amax(1)}

    values = collect(task, run.validation, model.device, model.precision, measure)
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
    shown = [*_of_classes(result, names, confusion), _mistakes(run, names, values), _training_samples(run, names)]
    write_json(folder / "page.json", {"sections": [one for one in shown if one is not None]})
    return result


def _of_classes(result: Mapping[str, Any], names: tuple[str, ...], confusion: Any) -> list[dict[str, Any]]:
    ordered = sorted(range(len(names)), key=lambda one: result["by_class"][names[one]]["top1"])
    chosen = sorted(ordered[:MOST_CLASSES])
    rows = [
        [names[one], f"{result['by_class'][names[one]]['images']:,}", f"{result['by_class'][names[one]]['top1']:.3f}"]
        for one in ordered[: 5 * SHOWN]
    ]
    whole = "" if len(chosen) == len(names) else f" The {len(chosen)} worst of {len(names)} classes."
    part = confusion[np.ix_(chosen, chosen)] / np.maximum(confusion[chosen].sum(1, keepdims=True), 1)
    labels = [names[one] for one in chosen]
    return [
        {
            "kind": "matrix",
            "title": "Confusion: share of a class (row) that is taken for another (column)",
            "label": "share",
            "names": labels,
            "columns": labels,
            "rows": np.round(part, 4).tolist(),
            "note": f"{result['images']:,} images.{whole}",
        },
        {"kind": "table", "title": "Classes, the worst first", "heading": ["class", "images", "top-1"], "rows": rows},
    ]


def _mistakes(run: Run, names: tuple[str, ...], values: Mapping[str, Any]) -> dict[str, Any] | None:
    wrong = np.flatnonzero(values["label"] != values["guess"])
    places = wrong[np.argsort(-values["sure"][wrong], kind="stable")][:PICTURES]
    if not len(places):
        return None
    places = places[np.argsort(values["row"][places])]  # as they lie in storage
    batch = run.validation.make(values["row"][places].astype(np.int64)).to(torch.device("cpu"))
    found = {int(row): jpeg for row, jpeg in zip(batch.rows.tolist(), _jpegs(batch.images), strict=True)}
    items = [
        (
            float(values["sure"][place]),
            {
                "jpeg": found[int(values["row"][place])],
                "text": f"{names[int(values['label'][place])]}, taken for {names[int(values['guess'][place])]} "
                f"({values['sure'][place]:.0%} sure)",
            },
        )
        for place in places.tolist()
        if int(values["row"][place]) in found
    ]
    ordered = [item for _, item in sorted(items, key=lambda one: -one[0])]
    return {"kind": "pictures", "title": "Most confident mistakes", "items": ordered}


def _training_samples(run: Run, names: tuple[str, ...]) -> dict[str, Any]:
    rows = run.training.plan.subset.rows(
        np.sort(np.random.default_rng(0).permutation(len(run.training.plan))[:PICTURES])
    )
    batch = run.training.make(rows).to(torch.device("cpu"))
    items = []
    for jpeg, own, other, weight in zip(
        _jpegs(batch.images), batch.labels.tolist(), batch.partner.tolist(), batch.weight.tolist(), strict=True
    ):
        mixed = f" {weight:.0%}, {names[other]} {1 - weight:.0%}" if weight < 1 else ""
        items.append({"jpeg": jpeg, "text": f"{names[own]}{mixed}"})
    return {"kind": "pictures", "title": "Training samples as the model sees them", "items": items}


def _jpegs(images: torch.Tensor) -> list[str]:
    """Normalised images as pictures again."""
    mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in (MEAN, STD))
    pixels = (
        ((images.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    )
    return [base64.b64encode(simplejpeg.encode_jpeg(one.numpy(), quality=85)).decode() for one in pixels]


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
