"""A bad step, once more: which samples make it bad, which module and operation is the first, and whether float32 cures it.

A bundle holds the weights before the step, its samples and the random numbers. A loss that is not finite names its samples
itself; where only gradients are not, halves of the samples are tried until one is left.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stoker.data.batch import rows_of, tensors_in, to_device
from stoker.data.ragged import Indices
from stoker.doctor.finding import Finding
from stoker.doctor.finite import any_bad, cure_of, first_bad_operation
from stoker.train.checkpoint import Snapshot, load_weights, read_checkpoint
from stoker.train.precision import autocast, resolve_precision
from stoker.train.randomness import restore_random_states
from stoker.train.run import Run

AT_ONCE = 256  # samples


@dataclass(frozen=True)
class Replay:
    step: int
    samples: tuple[int, ...]  # ids of those that do it
    of: int  # samples of the step
    module: str = ""  # the first whose answer, or gradient, is not finite
    operation: str = ""
    line: str = ""
    backward: bool = False  # the loss is finite, and a gradient is not
    inputs: bool = False  # what was read is not finite already
    cured: bool | None = None  # by float32; None: it was float32

    def finding(self) -> Finding:
        if not self.samples:
            sentence = f"Step {self.step} was not finite, and is now: its {self.of} samples and weights do it no more."
            change = (
                "it depended on something that is not in the bundle, such as a random number of a kernel or the machine"
            )
            return Finding("bad-step", 0.15, sentence, change, of="learning")
        names = ", ".join(map(str, self.samples[:8])) + (" ..." if len(self.samples) > 8 else "")
        what = "gradient" if self.backward else "loss"
        sentence = f"Step {self.step} was not finite: the {what} of sample {names} ({len(self.samples)} of {self.of})."
        return Finding("bad-step", 0.9, sentence, self._change(), tuple(self._evidence()), of="learning")

    def _evidence(self) -> Iterator[str]:
        if self.inputs:
            yield "what was read of it is not finite already"
        if self.operation:
            yield f"first operation: {self.operation}{' in the backward pass' if self.backward else ''}"
        if self.line:
            yield self.line
        if self.module:
            yield f"first module: {self.module}"
        if self.cured is not None:
            yield f"in float32 it is {'finite' if self.cured else 'not finite either'}"

    def _change(self) -> str:
        if self.inputs:
            return "look at the sample where it is stored; loader.bad_shards or data.broken leave out what is damaged"
        if self.cured:
            return "--train.precision fp32, or bf16 instead of fp16; or compute this operation in float32"
        return cure_of(self.operation)


def replay(run: Run, bundle: Path) -> Replay:
    """In this process; the run's files are only read."""
    snapshot = read_checkpoint(bundle)
    rows = np.asarray(snapshot.tensors["samples"]["rows"])
    ids = np.asarray(snapshot.tensors["samples"]["ids"])
    load_weights(snapshot.tensors["model"], run.task.model, str(bundle))
    run.task.model.to(run.device).train()
    precision = resolve_precision(run.config.precision, run.device)
    trial = _Trial(run, snapshot, precision)
    bad, backward = trial.bad_rows(rows)
    step = int(snapshot.state["step"])
    if not len(bad):
        return Replay(step, (), len(rows))
    name_of = dict(zip(rows.tolist(), ids.tolist(), strict=True))
    samples = tuple(int(name_of[row]) for row in bad.tolist())
    operation, line = trial.first_operation(bad[:1], backward=backward)
    cured = None
    if precision != "fp32":
        cured = not len(_Trial(run, snapshot, "fp32").bad_rows(bad)[0])
    return Replay(
        step,
        samples,
        len(rows),
        trial.first_module(bad[:1]),
        operation,
        line,
        backward,
        trial.inputs_are_bad(bad[:1]),
        cured,
    )


class _Trial:
    """Samples of the step, computed as it was, with the weights before it."""

    def __init__(self, run: Run, snapshot: Snapshot, precision: str) -> None:
        self._run, self._precision = run, precision
        self._random = {
            key.removeprefix("0/"): value for key, value in snapshot.tensors["random"].items() if key.startswith("0/")
        }
        self._position = snapshot.state["position"]

    def batch(self, rows: Indices) -> Any:
        made = self._run.training.make(rows, self._position["seed"], self._position["epoch"])
        return to_device(made, self._run.device)

    def losses(self, batch: Any) -> Tensor:
        restore_random_states(self._random)
        with autocast(self._precision, self._run.device):
            found: Tensor = self._run.task.losses(self._run.task.predict(batch), batch)
        return found

    def bad_rows(self, rows: Indices) -> tuple[Indices, bool]:
        """Those whose loss is not finite; if there are none, those whose gradient is not, and True."""
        found: list[int] = []
        parts = [rows[first : first + AT_ONCE] for first in range(0, len(rows), AT_ONCE)]
        for part in parts:
            batch = self.batch(part)
            with torch.no_grad():
                bad = ~torch.isfinite(self.losses(batch)).cpu()
            found += rows_of(batch).cpu()[bad].tolist()
        if found:
            return np.array(sorted(found)), False
        return np.array([row for part in parts for row in self._without_gradient(part)], np.int64), True

    def _without_gradient(self, rows: Indices) -> Iterator[int]:
        if len(rows) and self._gradient_is_bad(rows):
            if len(rows) == 1:
                yield int(rows[0])
                return
            middle = len(rows) // 2
            yield from self._without_gradient(rows[:middle])
            yield from self._without_gradient(rows[middle:])

    def _gradient_is_bad(self, rows: Indices) -> bool:
        model = self._run.task.model
        model.zero_grad()
        self.losses(self.batch(rows)).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        return any(not bool(torch.isfinite(one).all()) for one in gradients)

    def inputs_are_bad(self, rows: Indices) -> bool:
        tensors = [one for one in tensors_in(self.batch(rows)) if one.is_floating_point()]
        return any(not bool(torch.isfinite(one).all()) for one in tensors)

    def first_module(self, rows: Indices) -> str:
        with _watched(self._run.task.model) as found, torch.no_grad():
            self.losses(self.batch(rows))
        return found[0] if found else ""

    def first_operation(self, rows: Indices, *, backward: bool) -> tuple[str, str]:
        """Its name, and the line that calls it."""
        batch = self.batch(rows)
        return first_bad_operation(lambda: self.losses(batch).sum(), backward=backward)


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Names of modules whose answer holds NaN, in the order in which they answer; only those that have no others inside."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, answer: found.append(name) if any_bad(tree_leaves(answer)) else None

    leaves = [(name, one) for name, one in model.named_modules() if not list(one.children())]
    hooks = [module.register_forward_hook(look(name)) for name, module in leaves]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
