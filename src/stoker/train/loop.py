"""The life of a run on one screen: restore, batches, step, log, evaluate, save."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from stoker import console
from stoker.data.device import OnDevice, feed
from stoker.data.loader import Loader
from stoker.data.plan import Position
from stoker.data.quarantine import Quarantine
from stoker.runs.events import EventLog
from stoker.settings import AlsoCalled, config
from stoker.train import checkpoint
from stoker.train.checkpoint import Progress
from stoker.train.evaluate import evaluate
from stoker.train.optim import build_optimizer
from stoker.train.schedule import warmup_cosine
from stoker.train.task import Task


@config
class TrainConfig:
    epochs: Annotated[int, Field(ge=1), AlsoCalled("num_epochs", "max_epochs")] = 1
    steps: Annotated[int, Field(ge=1), AlsoCalled("max_steps")] | None = None  # stop here, if before the last epoch
    lr: Annotated[float, Field(gt=0), AlsoCalled("learning_rate")] = 1e-3  # highest rate, after the warm-up
    warmup_steps: Annotated[int, Field(ge=0), AlsoCalled("warmup")] = (
        100  # attention diverges when started at full rate
    )
    weight_decay: Annotated[float, Field(ge=0), AlsoCalled("wd")] = 0.01
    clip_norm: Annotated[float, Field(gt=0), AlsoCalled("grad_clip", "max_grad_norm")] | None = 1.0
    log_every: Annotated[int, Field(ge=1)] = 20  # steps; reading the loss makes the GPU wait, so not every one
    evaluate_every: Annotated[int, Field(ge=1), AlsoCalled("eval_every")] | None = None  # steps; None: each epoch's end
    save_every: Annotated[int, Field(ge=1), AlsoCalled("checkpoint_every")] | None = None  # steps, besides evaluations


@dataclass(frozen=True)
class Trainer:
    """What a run is made of."""

    config: TrainConfig
    task: Task
    training: Loader[Any]
    validation: Loader[Any]
    device: torch.device
    log: EventLog
    checkpoints: Path
    quarantine: Quarantine


def train(trainer: Trainer, seed: int, resume_from: Path | None = None) -> dict[str, float]:
    """Trains to the end of the configuration; returns the metrics of the last evaluation."""
    config, task = trainer.config, trainer.task
    model = task.model.to(trainer.device).train()
    optimizer = build_optimizer(model, config.lr, config.weight_decay)
    progress = Progress(step=0, position=Position(seed))
    if resume_from is not None:
        progress = checkpoint.restore(resume_from, model, optimizer)
    total = total_steps(config, trainer.training)
    metrics: dict[str, float] = {}
    with console.progress("train", total - progress.step, "steps") as bar:
        meter = Meter()
        steps = trainer.training.batches(progress.position, config.epochs)
        for step in feed(steps, trainer.device):
            if progress.step >= total:
                break
            loaded = step.loaded
            lr = config.lr * warmup_cosine(progress.step, warmup_steps=config.warmup_steps, total_steps=total)
            loss, norm = update(task, optimizer, step, lr, config.clip_norm)
            progress = Progress(progress.step + 1, loaded.after, best_score=progress.best_score)
            meter.add(loss, norm, loaded.num_samples, loaded.wait_s)
            if progress.step % config.log_every == 0 or progress.step == total:
                trainer.log.write("step", step=progress.step, epoch=loaded.after.epoch, lr=lr, **meter.read())
                trainer.log.write("loader", step=progress.step, **trainer.training.times.read())
                for news in trainer.quarantine.take_news():
                    trainer.log.write("quarantine", step=progress.step, **news)
                console.say(meter.line(progress.step, total, lr))
                meter = Meter()
            if is_due(config.evaluate_every, trainer, progress, total):
                metrics = evaluate(task, trainer.validation, trainer.device)
                progress = judged(trainer, progress, metrics)
                checkpoint.save(trainer.checkpoints, model, optimizer, progress, goal=task.goal)
                meter = Meter()
            elif config.save_every and progress.step % config.save_every == 0:
                checkpoint.save(trainer.checkpoints, model, optimizer, progress, goal=task.goal)
            bar.advance()
    return metrics


def update(
    task: Task, optimizer: torch.optim.Optimizer, step: OnDevice[Any], lr: float, clip_norm: float | None
) -> tuple[Tensor, Tensor]:
    """One optimizer step over all its micro-batches; the loss and the gradient norm stay on the device."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    losses = []
    for batch in step.batches:
        if not batch.num_samples:
            continue
        # Each sample weighs the same, however the step was cut.
        loss = task.losses(task.predict(batch), batch).sum() / step.loaded.num_samples
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    loss = torch.stack(losses).sum()
    norm = nn.utils.clip_grad_norm_(task.model.parameters(), clip_norm if clip_norm else float("inf"))
    optimizer.step()
    return loss.detach(), norm.detach()


def total_steps(config: TrainConfig, loader: Loader[Any]) -> int:
    planned = loader.plan.steps_per_epoch() * config.epochs
    return min(planned, config.steps) if config.steps else planned


def is_due(every: int | None, trainer: Trainer, progress: Progress, total: int) -> bool:
    if progress.step == total:
        return True
    if every is not None:
        return progress.step % every == 0
    return progress.position.consumed >= len(trainer.training.plan.subset)


def judged(trainer: Trainer, progress: Progress, metrics: dict[str, float]) -> Progress:
    """Writes the evaluation down and notes whether it is the best so far."""
    task, score = trainer.task, metrics[trainer.task.metric]
    trainer.log.write("evaluation", step=progress.step, metric=task.metric, goal=task.goal, **metrics)
    console.say(f"evaluation at step {progress.step}: {task.metric} {score:.4f}")
    choose = min if task.goal == "min" else max
    best_score = score if progress.best_score is None else choose(score, progress.best_score)
    return Progress(progress.step, progress.position, score=score, best_score=best_score)


class Meter:
    """Sums over a log interval, on the device until they are read."""

    def __init__(self) -> None:
        self._loss = self._norm = torch.zeros(())
        self._samples = self._steps = 0
        self._wait_s, self._begin = 0.0, time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor, samples: int, wait_s: float) -> None:
        self._loss = self._loss.to(loss.device) + loss * samples
        self._norm = norm
        self._samples, self._steps = self._samples + samples, self._steps + 1
        self._wait_s += wait_s

    def read(self) -> dict[str, float]:
        """Waits for the device: the only place in the loop that does."""
        loss = float(self._loss) / max(1, self._samples)
        spent = time.perf_counter() - self._begin
        return {
            "loss": loss,
            "grad_norm": float(self._norm),
            "samples_per_s": self._samples / spent,
            "wait_share": min(1.0, self._wait_s / spent),
        }

    def line(self, step: int, total: int, lr: float) -> str:
        now = self.read()
        return (
            f"step {step}/{total}  loss {now['loss']:.4f}  lr {lr:.2e}  gradient {now['grad_norm']:.2f}  "
            f"{now['samples_per_s']:,.0f} samples/s  waiting for data {now['wait_share']:.0%}"
        )
