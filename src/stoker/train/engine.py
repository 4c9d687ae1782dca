"""The moving parts of a run: model, optimizer, averages, guards, counters; what a checkpoint holds and brings back."""

import dataclasses
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from stoker import console
from stoker.data.bad_samples import LeftOut
from stoker.data.loader import Loader
from stoker.data.plan import Position, Step
from stoker.data.ragged import Indices
from stoker.data.workers import release_freed_memory
from stoker.errors import UserError
from stoker.runs import schema as events
from stoker.runs.events import EventLog, in_words, read_events
from stoker.train import checkpoint, parallel
from stoker.train.checkpoint import Saver, Snapshot
from stoker.train.compilation import compile_task, keep_compiled, num_graphs, recompile_reasons
from stoker.train.config import TrainConfig
from stoker.train.evaluate import evaluate, rehearse
from stoker.train.guards import AsyncCopy, BadSteps, LossWatch, Patience, UncheckedStep
from stoker.train.layers import freeze
from stoker.train.meter import MachineUse, Meter, Reading, host_bytes, machine_use
from stoker.train.optim import check_optimizer
from stoker.train.precision import resolve_precision, use_tf32
from stoker.train.randomness import RandomStates, by_rank, of_rank, random_states, restore_random_states
from stoker.train.run import Run
from stoker.train.schedule import lr_at, scaled_lr
from stoker.train.step import Stepper, StepResult

COMPILE_WARMUP = 20  # steps in which new graphs are expected


class Engine:
    def __init__(self, run: Run, folder: Path, log: EventLog) -> None:
        lr, self.lr_rule = scaled_lr(run.config, run.training.plan.batch_size)
        config, task = dataclasses.replace(run.config, lr=lr), run.task
        if config.warmup_epochs is not None:
            steps = round(config.warmup_epochs * run.training.plan.steps_per_epoch())
            config = dataclasses.replace(config, warmup_steps=steps)
        use_tf32(config.tf32)
        keep_compiled(run.device)
        self.run, self.config, self.task, self.log = run, config, task, log
        self.model = task.model.to(run.device).train()
        self.frozen = freeze(self.model, config.freeze) if config.freeze else []
        self.precision = resolve_precision(config.precision, run.device)
        self.optimizer = run.make_optimizer(self.model, config)
        check_optimizer(self.optimizer, self.model)
        self.stepper = Stepper(task, self.optimizer, config, self.precision, run.device)
        if config.compile:
            compile_task(task, exact=config.deterministic)
        self.step, self.position = 0, Position(run.seed)
        self.limit = config.steps
        self.total = total_steps(config, run.training)  # an estimate where steps are cut by cost
        self.score: float | None = None
        self.evaluation_due = False  # of the step that was restored
        self.recompiles = self._digest = 0
        self._norms: tuple[int, AsyncCopy] | None = None
        self.meter, self.watch = Meter(), LossWatch(config, task.know_nothing_loss, log)
        self.bad_steps = BadSteps(config, folder / "bad_steps", log, self._ids, self._write_bundle)
        self.patience, self._events = Patience(config.patience, task.goal, log), folder / "events.jsonl"
        self.saver = Saver(folder / "checkpoints", task.goal, config.keep_best)

    def rehearse(self) -> None:
        """Whether the recipe has all that training and judging will ask of it."""
        before = random_states().tensors()
        rehearse(self.task, self.run.training, self.run.validation, self.run.device, self.precision)
        restore_random_states(before)

    def is_done(self) -> bool:
        """All steps that were asked for, or all samples of the last epoch, or nothing to wait for any more."""
        if (self.limit is not None and self.step >= self.limit) or self.patience.is_lost:
            return True
        consumed_all = self.position.consumed >= len(self.run.training.plan)
        return self.position.epoch >= self.config.epochs or (
            self.position.epoch == self.config.epochs - 1 and consumed_all
        )

    def compute(self, step: Step, stop_asked: bool) -> StepResult:
        """Gradients of a step. Its flags are sent to the host, who looks at them one step later."""
        before = random_states()
        with self._compilation_noted() if self.config.compile else nullcontext():
            result = self.stepper.compute(step, stop_asked)
        flags = AsyncCopy(torch.stack([result.alarm, result.stop]))
        # The unchecked of the step before is looked at now: the weights have not changed since, if it was bad.
        self.bad_steps.check()
        self.write_norms()
        self.bad_steps.expect(UncheckedStep(self.step + 1, step.rows, before, flags))
        self._digest = zlib.crc32(step.rows.tobytes())
        return result

    @contextmanager
    def _compilation_noted(self) -> Iterator[None]:
        """A step that compiles takes its time for that: it is no training."""
        graphs, begin = num_graphs(), time.perf_counter()
        yield
        made = num_graphs() - graphs
        if made:
            spent, reasons = time.perf_counter() - begin, recompile_reasons(made)
            self.meter.leave_out(spent)
            self.log.write(
                events.Compilation(step=self.step + 1, graphs=made, seconds=round(spent, 3), reasons=reasons)
            )
            if self.step >= COMPILE_WARMUP:
                self.recompiles += made
                for reason in reasons:
                    console.say(f"step {self.step + 1} was compiled again, which took {spent:.1f} s: {reason}")

    @property
    def norms_due(self) -> bool:
        """Of the coming update."""
        return self.config.norms_every is not None and (self.step + 1) % self.config.norms_every == 0

    def advance(self, step: Step, result: StepResult, norms: torch.Tensor | None) -> None:
        """The weights have changed: notes where the run stands now."""
        self.step, self.position = self.step + 1, step.after
        self.meter.add(step, result)
        if norms is not None:
            self._norms = self.step, AsyncCopy(norms)

    def log_interval(self, lr: float) -> None:
        """Reads and writes what happened since the last time."""
        run, reading = self.run, self.meter.read()
        first, usual = self.step - len(reading.losses) + 1, max(reading.samples)
        for number, (loss, samples) in enumerate(zip(reading.losses, reading.samples, strict=True), start=first):
            # The remainder at the end of an epoch may be a handful of samples, whose mean says little.
            if 2 * samples >= usual:
                self.watch.look_at(number, loss)
        use = machine_use(run.device)
        self._write_step(reading, lr, use)
        self.log.write(events.LoaderTimes(step=self.step, **run.training.read_times()))
        if run.ranks.is_first:  # what others found is asked for at the next evaluation
            self._write_left_out(run.data.bad_samples.drain())
        metric = "" if self.score is None else f"  {self.task.metric} {self.score:.4f}"
        console.say(
            f"step {self.step}/{self.total}  loss {reading.loss:.4f}{metric}  lr {lr:.2e}  gradient {reading.norm:.2f}  "
            f"{reading.samples_per_s:,.0f} samples/s  waiting for data {reading.wait_share:.0%}{use.line()}"
        )
        self.meter = Meter()
        release_freed_memory(at_once=False)

    def _write_step(self, reading: Reading, lr: float, use: MachineUse) -> None:
        self.log.write(
            events.Step(
                step=self.step,
                epoch=self.position.epoch,
                consumed=self.position.consumed,
                samples_crc32=self._digest,
                lr=lr,
                loss=reading.loss,
                grad_norm=reading.norm,
                bad=reading.bad,
                samples_per_s=round(reading.samples_per_s, 1),
                wait_share=round(reading.wait_share, 4),
                host_bytes=host_bytes(),
                **dataclasses.asdict(use),
                step_ms=reading.step_ms,
                copy_s=round(reading.copy_s, 5),
                loss_scale=None if self.stepper.scale is None else float(self.stepper.scale.scale),
                rank_ms=[round(one, 3) for one in parallel.gather(reading.own_ms)],
            )
        )

    def _write_left_out(self, found: Sequence[LeftOut]) -> None:
        for one in found:
            self.log.write(
                events.LeftOut(step=self.step, what=one.kind, name=one.name, samples=one.samples, reason=one.reason)
            )

    def write_norms(self) -> None:
        """Norms that were sent a step ago, or none."""
        if self._norms is None:
            return
        (step, sent), self._norms = self._norms, None
        gradient, ratio = sent.read().tolist()
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        gradients, ratios = dict(zip(names, gradient, strict=True)), dict(zip(names, ratio, strict=True))
        self.log.write(events.Norms(step=step, gradient=gradients, update_ratio=ratios))

    def evaluate(self) -> dict[str, float]:
        """Raw weights, and averaged ones beside them; the run is judged by the averaged ones where there are any.

        Comes after `save`, which has shared the running statistics of all ranks.
        """
        run, task, begin = self.run, self.task, time.perf_counter()
        # A run that is resumed from the checkpoint before this evaluation must draw the same numbers after it.
        before = random_states().tensors()
        metrics = evaluate(task, run.validation, run.device, self.precision)
        self.score, weights = metrics[task.metric], "raw"
        if self.stepper.average is not None:
            with self.stepper.average.applied():
                averaged = evaluate(task, run.validation, run.device, self.precision)
            metrics |= {f"ema_{name}": value for name, value in averaged.items()}
            self.score, weights = averaged[task.metric], "averaged"
        restore_random_states(before)
        for rank, found in enumerate(parallel.gather(run.data.bad_samples.drain())):
            self._write_left_out(found)
            for left_out in found if rank != run.ranks.rank else ():  # nobody else has said it
                console.say(str(left_out))
        release_freed_memory()
        spent = time.perf_counter() - begin
        self.meter.leave_out(spent)
        self.log.write(
            events.Evaluation(
                step=self.step,
                metric=task.metric,
                goal=task.goal,
                score=self.score,
                weights=weights,
                metrics=metrics,
                seconds=round(spent, 3),
                host_bytes=host_bytes(),
            )
        )
        console.say(f"evaluation at step {self.step}: {task.metric} {self.score:.4f}")
        if run.ranks.is_first:
            self.saver.record_score(self.step, self.score)
        self.patience.look_at(self.step, self.score)
        self.evaluation_due = False
        return metrics

    def save(self, *, evaluation_due: bool = False) -> None:
        """Hands a copy to the background writer; weights that are not finite are never written."""
        self.bad_steps.check()
        if self.run.device.type == "cuda":
            torch.cuda.synchronize()  # steps that are still queued are training, and what follows waits for them anyway
        begin = time.perf_counter()
        self._share_statistics()
        if not all(bool(torch.isfinite(value).all()) for value in self.model.state_dict().values()):
            self.log.write(events.NotSaved(step=self.step, reason="weights are not finite"))
            console.say(f"NOT SAVED at step {self.step}: weights are not finite. The checkpoint before stays.")
            return
        snapshot = self.snapshot(random_states(), evaluation_due=evaluation_due)
        if self.run.ranks.is_first:
            self.saver.save(snapshot)
        spent = time.perf_counter() - begin
        self.meter.leave_out(spent)
        self.log.write(events.Checkpoint(step=self.step, seconds=round(spent, 3)))

    def snapshot(self, states: RandomStates, *, evaluation_due: bool = False) -> Snapshot:
        """All ranks take part, each with its random states."""
        tensors: dict[str, dict[str, torch.Tensor]] = {
            "model": {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()},
            "optimizer": checkpoint.optimizer_tensors(self.model, self.optimizer),
            "random": by_rank(parallel.gather(states.tensors())),
        }
        if (average := self.stepper.average) is not None:
            tensors["average"] = {name: value.cpu().clone() for name, value in average.weights.items()}
            tensors["average"]["__updates__"] = average.updates.cpu().clone()
        if (scale := self.stepper.scale) is not None:
            tensors["scale"] = {"scale": scale.scale.cpu().clone(), "quiet": scale.quiet.cpu().clone()}
        state = {
            "step": self.step,
            "position": dataclasses.asdict(self.position),
            "latest_score": in_words(self.score),
            "evaluation_due": evaluation_due,
            "optimizer": type(self.optimizer).__name__,
            "settings": self.run.settings,
            "meter": self.meter.state(),
            "recent_losses": self.watch.state(),
            "bad_steps": [self.bad_steps.total, self.bad_steps.in_a_row],
        }
        return Snapshot(tensors, state)

    def restore(self, snapshot: Snapshot, path: Path) -> None:
        """Everything: the run goes on as if it had never stopped."""
        self.take_over(snapshot, str(path))
        state = snapshot.state
        self.step, self.position = int(state["step"]), Position(**state["position"])
        self._check_place(path, state["settings"])
        score = checkpoint.read_score(path)
        latest = score if score is not None else state["latest_score"]
        self.score = None if latest is None else float(latest)
        judged = {one.step: one.score for one in read_events(self._events, events.Evaluation) if one.step <= self.step}
        self.patience.restore(parallel.from_first(judged))
        # Killed between saving and judging; or done, and nobody has seen the result.
        self.evaluation_due = bool(state.get("evaluation_due")) and (score is None or self.is_done())
        try:
            self.meter.restore(state["meter"], self.run.device)
            restore_random_states(of_rank(snapshot.tensors["random"], self.run.ranks.rank))
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise UserError(f"The checkpoint {path} holds random states that are none: {error}.") from error
        self.watch.restore(state["recent_losses"])
        self.bad_steps.total, self.bad_steps.in_a_row = state["bad_steps"]

    def _check_place(self, path: Path, settings: Mapping[str, Any]) -> None:
        """A step takes at least one sample, an epoch at least one step, and no epoch has more samples than there are."""
        size, epochs = len(self.run.training.plan), settings.get("train.epochs", self.config.epochs)
        epoch, consumed = self.position.epoch, self.position.consumed
        possible = consumed <= size and epoch <= min(epochs, self.step) and self.step <= epoch * size + consumed
        if not possible:
            raise UserError(
                f"The checkpoint {path} says step {self.step:,}, epoch {epoch:,}, {consumed:,} samples of it done: that "
                f"cannot be with {size:,} samples and {epochs} epochs. It is damaged, or of other data."
            )

    def take_over(self, snapshot: Snapshot, origin: str) -> None:
        """Weights, moments, averages and scale; counters and positions start anew."""
        checkpoint.load_weights(snapshot.tensors["model"], self.model, origin)
        kind = snapshot.state.get("optimizer")
        checkpoint.load_optimizer(self.model, self.optimizer, snapshot.tensors["optimizer"], kind, origin)
        if (average := self.stepper.average) is not None:
            saved = dict(snapshot.tensors.get("average", snapshot.tensors["model"]))
            average.updates.copy_(saved.pop("__updates__", torch.zeros(())))
            for name, value in average.weights.items():
                if name not in saved or saved[name].shape != value.shape:
                    raise UserError(f"The averaged weights in {origin} are of another model: {name} does not fit.")
                value.copy_(saved[name])
        if (scale := self.stepper.scale) is not None and "scale" in snapshot.tensors:
            scale.scale.copy_(snapshot.tensors["scale"]["scale"])
            scale.quiet.copy_(snapshot.tensors["scale"]["quiet"])

    def _share_statistics(self) -> None:
        """Running statistics (batch norm) of each rank are of its own samples: the mean over ranks is judged and saved."""
        count = self.run.ranks.count
        names = self.stepper.statistics
        if count == 1 or not names:
            return
        sides = [self.model.state_dict(), *([self.stepper.average.weights] if self.stepper.average else [])]
        buffers = [side[name] for side in sides for name in names]
        parallel.sum_over_ranks(buffers)
        torch._foreach_div_(buffers, count)

    def notices(self) -> list[str]:
        """Settings that cannot mean what they say beside the others."""
        config, plan, found = self.config, self.run.training.plan, []
        planned = plan.steps_per_epoch() * config.epochs
        if config.steps is not None and config.steps > planned:
            found.append(
                f"train.steps is {config.steps:,}, and {config.epochs} epoch(s) have about {planned:,}: it ends there. "
                f"--train.epochs allows more."
            )
        usual = self.run.lr_at is lr_at and config.schedule != "onecycle"
        if usual and config.warmup_steps >= self.total > 1:
            found.append(
                f"The warm-up of {config.warmup_steps:,} steps is as long as the run ({self.total:,}): the full rate is "
                f"never used, and never lowered."
            )
        if not config.deterministic:
            found.append(
                "train.deterministic is false: the same seed gives the same run but for its last bits, and so does a resume."
            )
        left = len(plan) % (plan.batch_size or 1)
        if 0 < left <= self.run.ranks.count and any(isinstance(part, _BatchNorm) for part in self.model.modules()):
            found.append(
                f"The last step of an epoch has {left} sample(s), one a rank at most: batch norm may not be able to use it. "
                f"Another loader.batch_size leaves more."
            )
        if plan.batch_size is not None and plan.batch_size > len(plan):
            found.append(
                f"A step would take {plan.batch_size:,} samples, and there are {len(plan):,}: it takes all of them."
            )
        return found

    def summary(self) -> tuple[tuple[str, str], ...]:
        """What a run came to, besides its metrics."""
        frozen = [("frozen", f"{len(self.frozen):,} parameters")] if self.frozen else []
        rows = [("steps", f"{self.step:,}"), ("bad steps", f"{self.bad_steps.total:,}"), *frozen]
        rows += [("recompiles after warm-up", f"{self.recompiles:,}")] if self.config.compile else []
        if self.run.device.type == "cuda":
            rows.append(("most GPU memory", f"{torch.cuda.max_memory_allocated(self.run.device) / 2**30:.2f} GiB"))
        return tuple(rows)

    def _ids(self, rows: Indices) -> Indices:
        return np.array(self.run.training.plan.table.columns["id"][rows], np.int64)

    def _write_bundle(self, path: Path, unchecked: UncheckedStep) -> None:
        """Weights and optimizer before the step, samples, random numbers and configuration: enough to replay it.

        Every rank learns of a bad step at the same moment and comes here; the first one writes.
        """
        snapshot = self.snapshot(unchecked.random)
        if not self.run.ranks.is_first:
            return
        ids = torch.from_numpy(self._ids(unchecked.rows))
        samples = {"rows": torch.from_numpy(unchecked.rows.copy()), "ids": ids}
        path.parent.mkdir(exist_ok=True)
        tensors = {**snapshot.tensors, "samples": samples}
        checkpoint.write_checkpoint(path, Snapshot(tensors, {**snapshot.state, "step": unchecked.step}))


def total_steps(config: TrainConfig, loader: Loader) -> int:
    planned = loader.plan.steps_per_epoch() * config.epochs
    return min(planned, config.steps) if config.steps else planned
