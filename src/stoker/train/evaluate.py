"""Evaluation: every sample of a loader once, over all ranks, scores collected per sample, then summarised by the task."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker import console
from stoker.data.device import feed
from stoker.data.loader import Loader
from stoker.data.plan import Position
from stoker.errors import UserError
from stoker.train import parallel
from stoker.train.precision import autocast
from stoker.train.task import Task

Values = dict[str, npt.NDArray[np.floating[Any]]]


def evaluate(task: Task, loader: Loader[Any], device: torch.device, precision: str) -> dict[str, float]:
    """Metrics over all samples of the loader's plan, the same for any number of ranks: nothing is padded or repeated."""
    joined = collect(task, loader, device, precision, lambda batch: task.scores(task.predict(batch), batch))
    judged = len(joined.pop("row"))
    return {**{name: float(value) for name, value in task.summarise(joined).items()}, "samples": float(judged)}


def collect(
    task: Task,
    loader: Loader[Any],
    device: torch.device,
    precision: str,
    measure: Callable[[Any], dict[str, torch.Tensor]],
) -> Values:
    """What `measure` says of each sample, (B,) or (B, ...) tensors, over all ranks, ordered by row; and the rows."""
    collected: dict[str, list[torch.Tensor]] = {}
    with console.progress("evaluate", len(loader.plan), "samples") as bar, inference(task.model):
        for step in feed(loader.batches(Position(seed=0), num_epochs=1), device):
            for batch in step.batches:
                if not batch.num_samples:
                    continue
                with autocast(precision, device):
                    values = measure(batch)
                for name, column in {**values, "row": batch.rows}.items():
                    collected.setdefault(name, []).append(column)
            bar.advance(step.loaded.num_samples)
    mine = {name: torch.cat(parts).double().cpu().numpy() for name, parts in collected.items()}
    everyone = [part for part in parallel.gather(mine) if part]
    if not everyone:
        raise UserError(
            f"Not one of the {len(loader.plan):,} samples to judge could be read: all of them are broken or in quarantine."
        )
    joined = {name: np.concatenate([part[name] for part in everyone]) for name in everyone[0]}
    order = np.argsort(joined["row"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


@contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; the mode before it is put back."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)
