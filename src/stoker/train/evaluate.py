"""Evaluation: every sample of a loader once, over all ranks, scores collected per sample, then summarised by the task."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker import console
from stoker.data.batch import check_batch, num_samples, rows_of, to_device
from stoker.data.device import feed
from stoker.data.loader import Loader
from stoker.data.plan import Position
from stoker.errors import UserError
from stoker.train import parallel
from stoker.train.precision import autocast
from stoker.train.task import Task

REHEARSED = 2  # samples

Values = dict[str, npt.NDArray[np.floating[Any]]]


def evaluate(task: Task, loader: Loader, device: torch.device, precision: str) -> dict[str, float]:
    """Metrics over all samples of the loader's plan, the same for any number of ranks: nothing is padded or repeated."""
    joined = collect(task, loader, device, precision, lambda batch: task.scores(task.predict(batch), batch))
    judged = len(joined.pop("row"))
    return {**{name: float(value) for name, value in task.summarise(joined).items()}, "samples": float(judged)}


def collect(
    task: Task,
    loader: Loader,
    device: torch.device,
    precision: str,
    measure: Callable[[Any], dict[str, torch.Tensor]],
) -> Values:
    """What `measure` says of each sample, (B,) or (B, ...) tensors, over all ranks, ordered by row; and the rows."""
    collected: dict[str, list[torch.Tensor]] = {}
    with console.progress("evaluate", len(loader.plan), "samples") as bar, inference(task.model):
        for step in feed(loader.steps(Position(seed=0), num_epochs=1), device):
            for batch in step.batches:
                if not num_samples(batch):
                    continue
                with autocast(precision, device):
                    values = measure(batch)
                for name, column in {**values, "row": rows_of(batch)}.items():
                    collected.setdefault(name, []).append(column)
            bar.advance(step.num_samples)
    mine = {name: torch.cat(parts).double().cpu().numpy() for name, parts in collected.items()}
    everyone = [part for part in parallel.gather(mine) if part]
    if not everyone:
        raise UserError(
            f"Not one of the {len(loader.plan):,} samples to judge could be read: all of them are broken or in quarantine."
        )
    joined = {name: np.concatenate([part[name] for part in everyone]) for name in everyone[0]}
    order = np.argsort(joined["row"], kind="stable")
    return {name: values[order] for name, values in joined.items()}


def rehearse(task: Task, training: Loader, validation: Loader, device: torch.device, precision: str) -> None:
    """A loss and a score of very few samples, so that what a recipe lacks is said before hours are spent and not after."""
    for loader, side in ((training, "training"), (validation, "validation")):
        if not len(loader.plan):
            raise UserError(f"There are no {side} samples.")
        rows = loader.plan.subset.rows(np.arange(min(REHEARSED, len(loader.plan))))
        batch = to_device(loader.make(rows), device)
        check_batch(batch, f"of {side} samples")
        if not num_samples(batch):
            continue  # all of them are broken or in quarantine
        # Not compiled: shapes that never come again would only be in the way.
        with judged(task.model), torch.compiler.set_stance("force_eager"), autocast(precision, device):
            prediction = task.predict(batch)
            losses, scores = task.losses(prediction, batch), task.scores(prediction, batch)
        for name, values in {"losses": losses, **{f"score {name}": values for name, values in scores.items()}}.items():
            if not isinstance(values, torch.Tensor) or values.shape[:1] != (num_samples(batch),):
                shape = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
                raise UserError(
                    f"The task gives {name} of {shape} for {num_samples(batch)} samples: one a sample is needed."
                )
        metrics = task.summarise({name: values.double().cpu().numpy() for name, values in scores.items()})
        if task.metric not in metrics:
            raise UserError(f"The task is judged by {task.metric!r}, and summarises {', '.join(metrics) or 'nothing'}.")


@contextmanager
def inference(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients, as fast as it goes; the mode before it is put back."""
    with judged(model), torch.inference_mode():
        yield


@contextmanager
def judged(model: torch.nn.Module) -> Iterator[None]:
    """The same, for tensors that a task may keep and train with later."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
