"""Spikes of a loss, looked at again: which samples, which layers, once or again and again.

The samples of a step follow from the plan. Their losses and gradients are computed with the weights of the nearest
checkpoint, beside those of the step before: where they differ it is the samples, and where they do not it was the weights.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker.data.batch import rows_of, to_device
from stoker.data.plan import Position, Step
from stoker.data.ragged import Indices
from stoker.doctor.finding import Finding
from stoker.errors import UserError
from stoker.runs import schema
from stoker.runs.events import read_events
from stoker.runs.folder import RunFolder
from stoker.train.checkpoint import all_checkpoints, load_weights, read_checkpoint
from stoker.train.precision import autocast, resolve_precision
from stoker.train.run import Run

AT_ONCE = 256  # samples
NAMED, LAYERS = 5, 3
TIMES = 2.0  # that the step's loss must be that of the one before, for its samples to be the cause


@dataclass(frozen=True)
class Look:
    """Of one step, with the weights of a checkpoint."""

    rows: Indices
    losses: Tensor
    norms: dict[str, float]  # gradient, by parameter

    @property
    def loss(self) -> float:
        return float(self.losses.mean())


def spike_steps(folder: RunFolder) -> list[schema.Spike]:
    return list(read_events(folder.events, schema.Spike))


def look_at_spikes(run: Run, folder: RunFolder) -> Finding:
    """The highest of them; needs at least one."""
    spikes = spike_steps(folder)
    worst = max(spikes, key=lambda one: (one.loss - one.mean) / max(one.sigma, 1e-12))
    words = (
        f"The loss spiked {_how_often(spikes)}, most at step {worst.step:,}: {worst.loss:.4g} after {worst.mean:.4g}."
    )
    step, before = step_of(run, folder, worst.step), step_of(run, folder, max(1, worst.step - 1))
    path = _nearest_checkpoint(folder.checkpoints, worst.step)
    if path is None:
        change = "--train.save_every, so that a checkpoint tells whether it is samples or weights"
        return _finding(words, change, [f"its samples: {_names(run, step.rows)}"])
    snapshot = read_checkpoint(path)
    load_weights(snapshot.tensors["model"], run.task.model, str(path))
    run.task.model.to(run.device).train()
    spike, usual = _look(run, step), _look(run, before)
    evidence = [
        f"with the weights of step {snapshot.step:,} its loss is {spike.loss:.4g}, that of the step before {usual.loss:.4g}"
    ]
    if spike.loss < TIMES * usual.loss:
        change = (
            "a lower rate, a longer warm-up or clipping: its samples are like others, and the weights were thrown off"
        )
        return _finding(words, change, evidence)
    order = torch.argsort(spike.losses, descending=True)[:NAMED].tolist()
    ids = run.data.table.columns["id"][spike.rows[order]]
    evidence += [f"sample {one}: {float(spike.losses[place]):.4g}" for one, place in zip(ids, order, strict=True)]
    grown = {name: norm / max(usual.norms.get(name, 0.0), 1e-12) for name, norm in spike.norms.items()}
    names = sorted(grown, key=lambda name: -grown[name])[:LAYERS]
    evidence += [f"gradient of {name}: {grown[name]:.1f} times that of the step before" for name in names]
    return _finding(
        words, "look at these samples; clip gradients (--train.clip_norm) if they are what they should be", evidence
    )


def step_of(run: Run, folder: RunFolder, number: int) -> Step:
    """A step by its number, with its samples; events say where each interval ended."""
    ends = {one.step: one for one in read_events(folder.events, schema.Step)}  # of a step done twice the later event
    begin, position = 0, Position(run.seed)
    known = [step for step in ends if step < number]
    if known:
        last = ends[max(known)]
        begin, position = last.step, Position(run.seed, last.epoch, last.consumed)
    made = number >= 1 and number <= max(ends, default=0)
    found = next(islice(run.training.plan.steps(position), number - begin - 1, None), None) if made else None
    if found is None:
        raise UserError(f"The run {folder.path} has no step {number}.")
    return found


def _look(run: Run, step: Step) -> Look:
    """A part of it at a time: a checkpoint may have been made on a larger machine."""
    run.task.model.zero_grad()
    rows, losses = [], []
    torch.manual_seed(0)
    for first in range(0, len(step.rows), AT_ONCE):
        made = run.training.make(step.rows[first : first + AT_ONCE], step.before.seed, step.before.epoch)
        batch = to_device(made, run.device)
        with autocast(resolve_precision(run.config.precision, run.device), run.device):
            some: Tensor = run.task.losses(run.task.predict(batch), batch)
        (some.sum() / len(step.rows)).backward()  # type: ignore[no-untyped-call]
        rows.append(np.asarray(rows_of(batch).cpu()))
        losses.append(some.detach().float().cpu())
    parameters = run.task.model.named_parameters()
    norms = {name: float(one.grad.norm()) for name, one in parameters if one.grad is not None}
    return Look(np.concatenate(rows), torch.cat(losses), norms)


def _nearest_checkpoint(checkpoints: Path, step: int) -> Path | None:
    """The last before the step; a run keeps few, so it may be the first after it."""
    found = {int(path.name.removeprefix("step-")): path for path in all_checkpoints(checkpoints)}
    before, after = [one for one in found if one < step], [one for one in found if one >= step]
    return found[max(before) if before else min(after)] if found else None


def _how_often(spikes: list[schema.Spike]) -> str:
    if len(spikes) == 1:
        return "once"
    apart = np.diff(sorted(one.step for one in spikes))
    return f"{len(spikes)} times, every {int(np.median(apart)):,} steps or so"


def _names(run: Run, rows: Indices) -> str:
    ids = run.data.table.columns["id"][rows[:8]].tolist()
    return ", ".join(map(str, ids)) + (" ..." if len(rows) > 8 else "")


def _finding(sentence: str, change: str, evidence: list[str]) -> Finding:
    return Finding("spike", 0.15, sentence, change, tuple(evidence), of="learning")
