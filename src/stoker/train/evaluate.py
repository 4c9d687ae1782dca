"""Evaluation: every validation sample once, scores collected per sample, then summarised by the task."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stoker import console
from stoker.data.device import feed
from stoker.data.loader import Loader
from stoker.data.plan import Position
from stoker.train.task import Task


def evaluate(task: Task, loader: Loader[Any], device: torch.device) -> dict[str, float]:
    """Metrics over all samples of the loader's plan."""
    collected: dict[str, list[torch.Tensor]] = {}
    with console.progress("evaluate", len(loader.plan.subset), "samples") as bar, inference(task.model):
        for step in feed(loader.batches(Position(seed=0), num_epochs=1), device):
            for batch in step.batches:
                for name, values in task.scores(task.predict(batch), batch).items():
                    collected.setdefault(name, []).append(values.float().cpu())
            bar.advance(step.loaded.num_samples)
    scores = {name: torch.cat(parts).double().numpy() for name, parts in collected.items()}
    summary = task.summarise(scores)
    # Kept as plain numbers: a numpy scalar would not survive the way into JSON.
    return {name: float(np.asarray(value)) for name, value in summary.items()}


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
