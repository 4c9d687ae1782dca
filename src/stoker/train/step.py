"""One optimizer step, on the device from begin to end: the host only queues work and never waits for a number.

The result stays on the device too; `guards` and the meter of the loop look at it later.
"""

import time
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from stoker.data.batch import num_samples
from stoker.data.plan import Step
from stoker.errors import UserError
from stoker.train.config import TrainConfig
from stoker.train.ema import Average
from stoker.train.graph import GraphedBackward
from stoker.train.optim import step_unless
from stoker.train.parallel import sum_over_ranks
from stoker.train.precision import LossScale, autocast
from stoker.train.task import Task, has_fixed_shapes


@dataclass(frozen=True)
class StepResult:
    """Still on the device."""

    loss: Tensor  # mean over the samples of the step
    norm: Tensor  # of the gradient, before clipping
    norms: Tensor  # (parameters,) of each parameter's gradient
    bad: Tensor  # 1 where the loss or the gradient was not finite and nothing was updated
    alarm: Tensor  # the same, without fp16 gradients that only overflowed because the loss scale is too high
    stop: Tensor  # more than 0 where a rank was asked to stop
    own_s: float = 0.0  # of the host, until it had to wait for other ranks


class Stepper:
    def __init__(
        self, task: Task, optimizer: torch.optim.Optimizer, config: TrainConfig, precision: str, device: torch.device
    ) -> None:
        self.task, self.optimizer = task, optimizer
        for (
            group
        ) in optimizer.param_groups:  # rates of groups keep their ratio to the run's, whatever the schedule does
            group["lr_scale"] = float(group["lr"]) / config.lr
        self.parameters = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
        self.average = Average(task.model, config.ema) if config.ema else None
        self.scale = LossScale(device) if precision == "fp16" else None
        self._config, self._precision, self._device = config, precision, device
        graphs = config.cuda_graphs and device.type == "cuda" and has_fixed_shapes(task)
        self._graphed = GraphedBackward(self._backward, self.parameters) if graphs else None
        # Running statistics (batch norm) are written in the forward pass, before anyone knows that the step is bad.
        saved = task.model.state_dict()
        found = {
            name: buffer for name, buffer in task.model.named_buffers() if name in saved and buffer.is_floating_point()
        }
        self.statistics, self._statistics = list(found), list(found.values())

    def compute(self, step: Step, stop_asked: bool = False) -> StepResult:
        """Gradients of the whole step, summed over micro-batches and ranks; nothing is updated yet."""
        begin, before = time.perf_counter(), _flat(self._statistics)
        # None rather than zeros: the first micro-batch then writes its gradients instead of adding them.
        for parameter in self.parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        stop = torch.full((), float(stop_asked), device=self._device)
        # A graph writes its gradients and cannot add to those of another micro-batch.
        graphed = self._graphed if len(step.batches) == 1 else None
        for batch in step.batches:
            if num_samples(batch):
                losses.append((graphed or self._backward)(batch, step.num_samples))
        for parameter in self.parameters:
            if parameter.grad is None:  # not used by the model, or this rank had no samples
                parameter.grad = torch.zeros_like(parameter)
        loss = reduce(torch.add, losses) if losses else torch.zeros((), device=self._device)
        gradients, own_s = self._gradients(), time.perf_counter() - begin
        sum_over_ranks([*gradients, loss, stop])
        if self.scale is not None:
            torch._foreach_mul_(gradients, 1 / self.scale.scale)
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(norms)
        # Before clipping: a norm that is not finite would spread over every gradient. Infinity less itself is not a number,
        # and that is unequal to anything; three kernels where `isfinite` takes seven.
        both = norm + loss
        bad = (both - both).ne(0).float()
        alarm = bad
        if self.scale is not None:
            alarm = bad * ((~torch.isfinite(loss)) | (self.scale.scale <= 1)).float()
        self._restore(before, bad)
        return StepResult(loss, norm, norms, bad, alarm, stop, own_s)

    def update(self, result: StepResult, lr: float, *, with_norms: bool = False) -> Tensor | None:
        """Clips and applies the gradients, unless they are bad.

        `with_norms`: (2, parameters) the norm of each gradient, and how far the step moved the parameter, relative to
        its size before.
        """
        before = [parameter.detach().clone() for parameter in self.parameters] if with_norms else []
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self._config.clip_norm is not None:
            torch._foreach_mul_(self._gradients(), (self._config.clip_norm / (result.norm + 1e-6)).clamp(max=1.0))
        step_unless(self.optimizer, result.bad)
        if self.average is not None:
            self.average.update(result.bad)
        if self.scale is not None:
            self.scale.update(result.bad)
        if not with_norms:
            return None
        moved = torch._foreach_norm(torch._foreach_sub([p.detach() for p in self.parameters], before))
        ratios = torch.stack(moved) / torch.stack(torch._foreach_norm(before)).clamp_min(1e-12)
        return torch.stack([result.norms, ratios])

    def _backward(self, batch: Any, samples: int) -> Tensor:
        try:
            with autocast(self._precision, self._device):
                prediction = self.task.predict(batch)
                # Each sample weighs the same, however the step was cut.
                loss = self.task.losses(prediction, batch).sum() / samples
        except Exception as error:
            if self._config.compile and type(error).__module__.startswith("torch._"):
                raise UserError(
                    f"torch.compile failed on the model: {_reason(error)}. --train.compile false trains without it."
                ) from error
            raise
        scaled = loss if self.scale is None else loss * self.scale.scale
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach().float()

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def _restore(self, before: Tensor, bad: Tensor) -> None:
        """Few calls for all buffers: a model has hundreds, and a call each would keep the host busier than the device."""
        if self._statistics:
            kept = torch.where(bad > 0, before, _flat(self._statistics))
            parts = torch.split(kept, [buffer.numel() for buffer in self._statistics])
            shaped = [part.view_as(buffer) for part, buffer in zip(parts, self._statistics, strict=True)]
            torch._foreach_copy_(self._statistics, shaped)


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors]) if tensors else torch.empty(0)


def _reason(error: BaseException) -> str:
    """Dynamo wraps what went wrong, and puts it into the second line or behind the last cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:500]}"
