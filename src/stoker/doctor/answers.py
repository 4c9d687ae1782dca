"""What a watched model answers, looked at now and then while somebody else's loop trains it.

Which loss the loop takes is not known, and an answer is only compared with labels where its gradient proves that the loop
does so too: that of cross entropy is negative at the label and nowhere else, that of a distance points away from the target.
"""

import math
import statistics
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.data.batch import tensors_in
from stoker.doctor.learning.labels import labels_of

EVERY = 64  # steps from one look to the next: a look takes as long as a small step
MOST_LOOKS = 1024  # then half of them are dropped, and looks become half as frequent
LEAST_LOOKS = 8  # to say that nothing is learnt
PROVEN = 0.95  # of the samples, whose gradient fits a loss
WEIGHED = 1.5  # times that gradients of some samples weigh more: classes have weights


@dataclass(frozen=True)
class Look:
    step: int
    bad: str  # what is not finite: answers, or gradients; none: ""
    pushed: bool  # a gradient other than zero came back to the answer
    norm: float | None  # of all gradients; None: they are cleared already
    spread: float | None = None  # of answers over samples: relative to that of the targets, or to their size
    right: float | None = None  # share of right classes, or correlation with the targets
    loss: float | None = None  # of classes: cross entropy
    values: int = 0  # that were compared


@dataclass(frozen=True)
class Answers:
    """Of a run so far."""

    looks: tuple[Look, ...]
    counts: dict[int, int]  # of labels, by class; empty: they are numbers, or unknown
    classes: int  # that the model knows

    @property
    def late(self) -> tuple[Look, ...]:
        return self.looks[len(self.looks) // 2 :]

    @property
    def is_enough(self) -> bool:
        return len(self.looks) >= LEAST_LOOKS

    @property
    def values(self) -> int:
        return sum(one.values for one in self.late)

    def mean(self, name: str) -> float | None:
        """Of the later half; None where a look could not tell."""
        values = [getattr(one, name) for one in self.late]
        return None if not values or None in values else statistics.fmean(values)


class ModelWatch:
    """Hooks that live for one step in many, and a look at what they caught when the step is over."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"stoker.watch(loader, model): the model is a {type(model).__name__}, no torch.nn.Module.")
        self._model, self._steps, self._every = model, 0, EVERY
        self._caught: list[tuple[Tensor, list[Tensor]]] = []
        self._hook: Any = None
        self._looks: list[Look] = []
        self._counts: Counter[int] = Counter()
        self._classes = 0

    def before(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            with suppress(Exception):  # some modules take no hooks
                self._hook = self._model.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, answer: Any) -> None:
        found = next((one for one in tensors_in(answer) if one.ndim and one.requires_grad), None)
        if found is None or not module.training or found.is_complex():
            return
        gradients: list[Tensor] = []
        found.register_hook(lambda gradient: gradients.append(gradient.detach()))  # type: ignore[no-untyped-call]
        self._caught.append((found.detach(), gradients))

    def after(self, batch: Any) -> None:
        """It is somebody else's loop: whatever cannot be looked at must not hurt it."""
        if self._hook is None:
            return
        self._hook.remove()
        caught, self._hook, self._caught = self._caught, None, []
        with suppress(Exception), torch.no_grad():
            # A loop may call its model several times; what it learns from is what a gradient comes back to.
            answer, gradients = next((one for one in caught if one[1]), caught[0])
            self._looks.append(
                self._look(answer.float(), gradients[0].float() if gradients else None, labels_of(batch))
            )
        if len(self._looks) > MOST_LOOKS:
            del self._looks[1::2]
            self._every *= 2

    def answers(self) -> Answers | None:
        return Answers(tuple(self._looks), dict(self._counts), self._classes) if self._looks else None

    def _look(self, answer: Tensor, gradient: Tensor | None, labels: Tensor | None) -> Look:
        own = [one.grad for one in self._model.parameters() if one.grad is not None]
        norm = float(torch.stack(torch._foreach_norm(own)).norm()) if own else None
        bad = "answers" if not bool(torch.isfinite(answer).all()) else ""
        bad = bad or ("gradients" if norm is not None and not math.isfinite(norm) else "")
        pushed = gradient is not None and bool(gradient.any())
        plain = Look(self._steps, bad, pushed, norm or None)
        if bad or gradient is None or labels is None or len(labels) != len(answer) or len(answer) < 2:
            return plain
        labels = labels.to(answer.device)
        if labels.ndim == 1 and not labels.is_floating_point() and answer.ndim == 2:
            return self._of_classes(plain, answer, gradient, labels)
        if labels.is_floating_point() and labels.numel() == answer.numel():
            return self._of_numbers(
                plain, answer.flatten(1), gradient.flatten(1), labels.float().reshape(len(answer), -1)
            )
        return plain

    def _of_classes(self, plain: Look, answer: Tensor, gradient: Tensor, labels: Tensor) -> Look:
        counted = labels >= 0  # some are left out of a loss, as -100
        answer, gradient, labels = answer[counted], gradient[counted], labels[counted]
        if len(labels) < 2 or int(labels.max()) >= answer.shape[1] or not _is_cross_entropy(answer, gradient, labels):
            return plain
        self._counts.update(labels.tolist())
        self._classes = answer.shape[1]
        right = float((answer.argmax(1) == labels).float().mean())
        spread = float(answer.std(0).mean() / answer.abs().mean().clamp_min(1e-12))
        return _with(plain, spread, right, float(F.cross_entropy(answer, labels)), len(labels))

    def _of_numbers(self, plain: Look, answer: Tensor, gradient: Tensor, targets: Tensor) -> Look:
        away = (answer - targets).sign() == gradient.sign()
        if float(away.float().mean()) < PROVEN:
            return plain
        both = [one - one.mean(0) for one in (answer, targets)]
        along = (both[0] * both[1]).sum() / (both[0].norm() * both[1].norm()).clamp_min(1e-12)
        return _with(plain, float(both[0].norm() / both[1].norm().clamp_min(1e-12)), float(along), None, answer.numel())


def _with(plain: Look, spread: float, right: float, loss: float | None, values: int) -> Look:
    return Look(plain.step, plain.bad, plain.pushed, plain.norm, spread, right, loss, values)


def _is_cross_entropy(answer: Tensor, gradient: Tensor, labels: Tensor) -> bool:
    """Of logits, all samples alike: each row adds up to nothing, and only its label is pushed up."""
    at = gradient.gather(1, labels[:, None])[:, 0]
    adds_up = gradient.sum(1).abs() < 1e-3 * gradient.abs().sum(1)
    others = gradient.scatter(1, labels[:, None], 0.0)
    fits = adds_up & (at <= 0) & (others >= 0).all(1)
    share = answer.softmax(1).gather(1, labels[:, None])[:, 0]
    weights = (-at / (1 - share).clamp_min(1e-6))[share < 0.9]
    alike = len(weights) < 2 or bool(weights.max() < WEIGHED * weights.min())
    return float(fits.float().mean()) >= PROVEN and alike


_WATCHED: "WeakKeyDictionary[nn.Module, ModelWatch]" = WeakKeyDictionary()


def watch_of(model: nn.Module) -> ModelWatch:
    """One for a model: a loop that is wrapped anew every epoch goes on with the looks it had."""
    found = _WATCHED.get(model) if isinstance(model, nn.Module) else None
    if found is None:
        found = ModelWatch(model)
        _WATCHED[model] = found
    return found
