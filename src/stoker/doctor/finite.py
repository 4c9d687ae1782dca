"""The first operation of a computation that makes of finite numbers what is not finite, and what helps against it."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker.doctor.calls import told
from stoker.doctor.lines import own_place

# What an operation cannot be given, and what helps.
CURES = {
    "float16": "compute this line in float32 (or bfloat16): float16 ends at 65,504",
    "acos": "clamp cosines to [-1 + 1e-6, 1 - 1e-6]: the slope of arccos is infinite at both ends",
    "asin": "clamp sines to [-1 + 1e-6, 1 - 1e-6]: the slope of arcsin is infinite at both ends",
    "log": "clamp_min(1e-12) before the logarithm",
    "sqrt": "add 1e-12 before the root: its slope is infinite at zero",
    "rsqrt": "add 1e-12 before the root",
    "div": "add a small number to the divisor",
    "pow": "clamp_min before a power that is no whole number",
    "exp": "subtract the largest value first, or clamp",
    "softmax": "a row of which all places are masked has no softmax: leave one open, or fill with zeros",
    "norm": "add 1e-12 under the root: the slope of a norm is not defined at zero",
}

# Operations whose numbers are what somebody wanted, or nobody's yet.
MADE_SO = ("empty", "new_empty", "full", "new_full", "fill", "masked_fill", "where", "scalar_tensor", "lift_fresh")


def cure_of(operation: str) -> str:
    for name, cure in CURES.items():
        if name in operation.lower():
            return cure
    return "look at the values that reach this operation; a lower rate if weights have grown"


def first_bad_operation(loss: Callable[[], Tensor], *, backward: bool) -> tuple[str, str]:
    """Its name, and the line that calls it, of the forward or of the backward pass, which has no lines."""
    with torch.compiler.set_stance("force_eager"):
        if backward:
            value = loss()
            found = _first_bad_node(value)
            value.backward()  # type: ignore[no-untyped-call]
            return (found[0], "") if found else ("", "")
        for is_bad in (torch.isnan, lambda tensor: ~torch.isfinite(tensor)):
            mode = _FirstBad(is_bad)
            with mode, torch.no_grad():
                loss()
            if mode.found[0]:
                break
        return mode.found


def _first_bad_node(loss: Tensor) -> list[str]:
    """Names of operations, once their backward pass makes of finite gradients what is not finite."""
    found: list[str] = []
    seen: set[Any] = set()
    coming = [loss.grad_fn]
    while coming:
        node = coming.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        coming += [following for following, _ in node.next_functions]

        def look(made: Any, given: Any, node: Any = node) -> None:
            if not _all_finite(made) and _all_finite(given):
                found.append(re.sub(r"Backward\d*$", "", node.name()))

        node.register_hook(look)
    return found


def _all_finite(values: Any) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in values if isinstance(one, Tensor))


class _FirstBad(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The first operation that makes something of good numbers that is bad."""

    def __init__(self, is_bad: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self._is_bad = ("", ""), is_bad
        self._overflow: tuple[str, str] | None = None  # the first one that left the range of its numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(getattr(getattr(func, "overloadpacket", func), "__name__", func))
        if self.found[0] or name.startswith(MADE_SO):
            return out
        made, given = tree_leaves(out), tree_leaves((args, kwargs or {}))
        if self._overflow is None and any_bad(made, torch.isposinf) and not any_bad(given, torch.isinf):
            half = any(isinstance(one, Tensor) and one.dtype == torch.float16 for one in made)
            self._overflow = self._here(f"{name} in float16" if half else name)
        if any_bad(made, self._is_bad) and not any_bad(given, self._is_bad):
            from_overflow = self._overflow is not None and any_bad(given, torch.isposinf)
            self.found = self._overflow if from_overflow and self._overflow else self._here(name)
        return out

    def _here(self, name: str) -> tuple[str, str]:
        place = own_place(sys._getframe(2))
        return name, told(place) if place is not None else ""


def any_bad(values: Sequence[Any], is_bad: Callable[[Tensor], Tensor] = torch.isnan) -> bool:
    """Infinite numbers that were put there, such as masks, are not bad: without another word only those that are none."""
    for one in values:
        if isinstance(one, Tensor) and one.is_floating_point() and bool(is_bad(one).any()):
            return True
        if isinstance(one, float) and math.isnan(one):
            return True
    return False
