"""Learning rates side by side: every rate starts from the same weights, sees the same batches, draws the same numbers.

The loss of a batch at a rate is compared with the loss of the very same batch where nothing is learnt, so that what batches
differ by cancels. Whether anything was learnt at all is told by the labels of other samples: what is gained with those too,
such as the mean of all labels, is no knowledge of the inputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.doctor.learning.facts import Arm
from stoker.doctor.learning.kept import chance_kept, model_kept
from stoker.train.optim import step_unless

RATES = tuple(10.0**power for power in np.arange(-5, -0.9, 0.5))
MORE = 4  # times that the range is extended, by half a power of ten each
SURE = 2.0  # errors
ONE_BATCH_STEPS = 80
LEARNT = 0.5  # of its loss that is left of one batch that was learnt
SPREAD = 0.05  # of the size of answers, by which they must differ

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]


class Trainer:
    """Trains for a moment, and puts everything back."""

    def __init__(self, model: nn.Module, loss: Loss, make: MakeOptimizer, clip_norm: float | None = None) -> None:
        self.model, self._loss, self._make, self._clip_norm = model, loss, make, clip_norm
        self._kept = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @contextmanager
    def put_back(self) -> Iterator[None]:
        with chance_kept(self.model), model_kept(self.model):
            yield

    def losses(self, batches: Sequence[Any], rate: float | None) -> tuple[list[float], list[float], str | None]:
        """Loss of each batch before it is learnt from, gradient norms, and the first layer that is not finite."""
        self.model.load_state_dict(self._kept)
        learnt = [one for one in self.model.parameters() if one.requires_grad]
        optimizer = self._make(learnt, rate) if rate is not None else None
        losses: list[float] = []
        norms: list[float] = []
        for number, batch in enumerate(batches):
            torch.manual_seed(number)  # dropout draws the same at every rate
            for parameter in learnt:
                parameter.grad = None
            if optimizer is None:
                with torch.no_grad():
                    losses.append(float(_checked(self._loss(batch))))
                continue
            loss = _checked(self._loss(batch))
            losses.append(float(loss.detach()))
            loss.backward()  # type: ignore[no-untyped-call]
            norms.append(_norm(learnt))
            if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
                return losses, norms, _first_bad(self.model)
            self._update(optimizer, learnt)
        return losses, norms, None

    def sweep(self, batches: Sequence[Any], rates: Sequence[float]) -> list[float]:
        """Losses where every step has a rate of its own, up to the first that is not finite."""
        self.model.load_state_dict(self._kept)
        learnt = [one for one in self.model.parameters() if one.requires_grad]
        optimizer, losses = self._make(learnt, rates[0]), []
        scales = [group["lr"] / rates[0] for group in optimizer.param_groups]  # layers may have rates of their own
        for number, (batch, rate) in enumerate(zip(batches, rates, strict=True)):
            torch.manual_seed(number)
            for group, scale in zip(optimizer.param_groups, scales, strict=True):
                group["lr"] = rate * scale
            for parameter in learnt:
                parameter.grad = None
            loss = _checked(self._loss(batch))
            if not math.isfinite(float(loss.detach())):
                break
            losses.append(float(loss.detach()))
            loss.backward()  # type: ignore[no-untyped-call]
            self._update(optimizer, learnt)
        return losses

    def _update(self, optimizer: torch.optim.Optimizer, learnt: list[nn.Parameter]) -> None:
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(learnt, self._clip_norm)
        step_unless(optimizer, torch.zeros((), device=learnt[0].device))


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of {loss.numel():,} numbers" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"the loss of a batch must be one number, a tensor; the probe's loss gives {what}")
    return loss


def _norm(parameters: Sequence[nn.Parameter]) -> float:
    found = [one.grad for one in parameters if one.grad is not None]
    return float(torch.stack(torch._foreach_norm(found)).norm()) if found else 0.0


def _first_bad(model: nn.Module) -> str:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            return name
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return name
    # All finite, and too large to be squared: the largest of them.
    sizes = {name: float(one.grad.abs().max()) for name, one in model.named_parameters() if one.grad is not None}
    return max(sizes, key=lambda name: sizes[name]) if sizes else "the loss"


def try_rates(
    trainer: Trainer, batches: Sequence[Any], own: float | None, rates: Sequence[float] = RATES
) -> tuple[list[Arm], Arm | None, Arm | None]:
    """All arms, the best of them, and that of the run's own rate. No best one: no decision.

    A best rate at the upper end extends the range.
    """
    still, _, _ = trainer.losses(batches, None)
    arms = [_arm(trainer, batches, still, rate) for rate in rates]
    for _ in range(MORE):
        if _best(arms) is not arms[-1] or arms[-1].is_bad:
            break
        arms.append(_arm(trainer, batches, still, arms[-1].rate * math.sqrt(10)))
    present = None if own is None else _arm(trainer, batches, still, own)
    best = _best(arms)
    return arms, best if best is not None and best.gain > SURE * best.error else None, present


def _arm(trainer: Trainer, batches: Sequence[Any], still: Sequence[float], rate: float) -> Arm:
    losses, norms, bad = trainer.losses(batches, rate)
    gain, error = (-math.inf, 0.0) if bad else later_mean(np.array(still) - np.array(losses))
    half, most, top = (float(np.quantile(norms, share)) for share in (0.5, 0.99, 1.0)) if norms else (0.0, 0.0, 0.0)
    return Arm(rate, gain, error, (half, most, top), bad)


def later_mean(differences: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """Of the later half: the first batches come before anything was learnt."""
    late = differences[len(differences) // 2 :]
    if len(late) < 2:
        return float(late.mean()), math.inf
    # Of few batches the spread itself is uncertain: as much as Student's distribution is wider than the normal one.
    wider = 1 + 2.5 / (len(late) - 1)
    return float(late.mean()), wider * float(late.std(ddof=1) / math.sqrt(len(late)))


def _best(arms: Sequence[Arm]) -> Arm | None:
    fit = [arm for arm in arms if not arm.is_bad]
    return max(fit, key=lambda arm: arm.gain) if fit else None


def beyond_others_labels(
    trainer: Trainer, batches: Sequence[Any], others: Sequence[Any], rate: float
) -> tuple[float, float]:
    """What is gained with a batch's own labels beyond what is gained with those of other samples, and its error."""
    gains = []
    for some in (batches, others):
        still, _, _ = trainer.losses(some, None)
        losses, _, bad = trainer.losses(some, rate)
        if bad:
            return 0.0, math.inf
        gains.append(np.array(still) - np.array(losses))
    return later_mean(gains[0] - gains[1])


def learn_one_batch(
    trainer: Trainer, batch: Any, rates: Sequence[float], spread: Callable[[], float | None]
) -> tuple[tuple[float, float, int], float | None]:
    """Its loss before and after, and how much answers differ then; at the first rate that learns it, or else at the best."""
    found: list[tuple[float, float, float | None]] = []
    for rate in rates:
        losses, _, bad = trainer.losses([batch] * ONE_BATCH_STEPS, rate)
        found.append((losses[0], math.inf if bad else min(losses[-5:]), spread()))
        if is_learnt(*found[-1]):
            break
    before, after, answers = found[-1] if is_learnt(*found[-1]) else min(found, key=lambda one: one[1])
    return (before, after, ONE_BATCH_STEPS), answers


def is_learnt(before: float, after: float, answers: float | None) -> bool:
    """Half of the loss of one batch can be learnt by heart; or its samples get different answers, given the time."""
    return after < before - LEARNT * abs(before) or (answers is not None and answers > SPREAD)
