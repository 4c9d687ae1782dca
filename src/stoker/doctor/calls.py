"""Who calls what: the operations of one step, one by one, with the line of code that each comes from.

Every operation is waited for, so that its time is its own. That is slower than the step itself, and says how its work is
shared out. Compiled parts run as they were written.
"""

import linecache
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker.doctor.lines import Place, own_place

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "_scaled_mm"}
SCORES = {"_softmax", "_safe_softmax", "_softmax_backward_data", "logsumexp"}  # operations that are given them
LEAST_SIDE = 16  # of the scores of attention; smaller ones are classes
LOOPED = 20  # operations of one line in one step: it stands in a loop
READS = 3  # operations of a line for each number that it reads
SYNC = "called a synchronizing CUDA operation"  # of torch's warning


@dataclass(frozen=True)
class Call:
    name: str
    place: Place | None  # None: nobody's line, such as the backward pass
    seconds: float
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class Calls:
    calls: tuple[Call, ...]
    syncs: dict[Place, int] = field(default_factory=dict)  # times that a line makes the host wait for the device

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    def share(self, wanted: Callable[[Call], bool]) -> float:
        return sum(call.seconds for call in self.calls if wanted(call)) / (self.seconds or 1.0)

    def busiest_lines(self, count: int = 3, known: Collection[Place] = ()) -> list[str]:
        """Lines that call the most operations, other than those that are known: loops show."""
        ordered = sorted(self.looped(known).items(), key=lambda one: -one[1])[:count]
        return [f"{told(place)}  ({calls:,} operations a step)" for place, calls in ordered]

    def looped(self, known: Collection[Place] = ()) -> dict[Place, int]:
        """Operations of each line that calls many."""
        return {place: calls for place, calls in self._by_line().items() if calls >= LOOPED and place not in known}

    @property
    def num_placed(self) -> int:
        return sum(call.place is not None for call in self.calls)

    @property
    def read_share(self) -> float:
        """Of all operations, those of lines that do little else than to read a number: they go with the reading."""
        calls = self._by_line()
        reading = sum(calls[place] for place, times in self.syncs.items() if calls[place] <= READS * times)
        return reading / max(1, len(self.calls))

    def _by_line(self) -> dict[Place, int]:
        number: dict[Place, int] = defaultdict(int)
        for call in self.calls:
            if call.place is not None:
                number[call.place] += 1
        return number

    def is_of_scores(self) -> Callable[[Call], bool]:
        """Is an operation one of attention that writes its scores out?"""
        sides = {
            shape[-2:]
            for call in self.calls
            for shape in call.shapes
            if call.name in SCORES and len(shape) >= 3 and min(shape[-2:]) >= LEAST_SIDE
        }
        return lambda call: _is_uncompiled(call) or any(shape[-2:] in sides for shape in call.shapes)

    @property
    def uncompiled(self) -> set[Place | None]:
        """Where attention is called that is made to be compiled, and is not: its operations are called one by one."""
        return {call.place for call in self.calls if _is_uncompiled(call)}

    @property
    def attention_share(self) -> float:
        return self.share(self.is_of_scores())

    def attention_lines(self) -> list[str]:
        wanted = self.is_of_scores()
        spent: dict[Place, float] = defaultdict(float)
        for call in self.calls:
            if call.place is not None and wanted(call):
                spent[call.place] += call.seconds
        ordered = sorted(spent.items(), key=lambda one: -one[1])[:3]
        return [f"{told(place)}  ({seconds / self.seconds:.0%} of the operations)" for place, seconds in ordered]

    def product_share(self, *dtypes: torch.dtype) -> float:
        return self.share(lambda call: call.name in PRODUCTS and call.dtype in dtypes)

    def sync_lines(self, count: int = 3) -> list[str]:
        ordered = sorted(self.syncs.items(), key=lambda one: -one[1])[:count]
        return [f"{told(place)}  ({times:,} times a step)" for place, times in ordered]


def _is_uncompiled(call: Call) -> bool:
    if call.place is not None and "flex_attention(" in linecache.getline(*call.place):
        return True
    return "flex_attention" in call.name


def told(place: Place) -> str:
    file, line = place
    return f"{Path(file).name}:{line}  {linecache.getline(file, line).strip()[:80]}"


def calls_of(step: Callable[[Any], Any], batch: Any, device: torch.device) -> Calls:
    mode = _Calls(device)
    with torch.compiler.set_stance("force_eager"):
        with mode:
            step(batch)
        syncs: dict[Place, int] = defaultdict(int)
        if device.type == "cuda":
            with _synchronisations(syncs):
                step(batch)
    return Calls(tuple(mode.found), dict(syncs))


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True  # attention that is not compiled is one of them

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wait: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.found: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._wait()
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self._wait()
        seconds = time.perf_counter() - begin
        packet = getattr(func, "overloadpacket", func)
        name = str(getattr(packet, "__name__", packet))
        tensors = [one for one in tree_leaves((args, out)) if isinstance(one, torch.Tensor)]
        shapes = tuple(tuple(one.shape) for one in tensors)
        dtype = next((one.dtype for one in tensors if one.is_floating_point()), None)
        self.found.append(Call(name, _caller(sys._getframe(1)), seconds, shapes, dtype))
        return out


def _caller(frame: FrameType | None) -> Place | None:
    """None in the backward pass: who asked for that is not who wrote the operation."""
    place, outer = own_place(frame), frame
    while outer is not None:
        if outer.f_code.co_name == "_engine_run_backward":
            return None
        outer = outer.f_back
    return place


@contextmanager
def _synchronisations(found: dict[Place, int]) -> Iterator[None]:
    """Every time the host waits for the device, torch warns, and we look who asked."""

    def note(message: Any, *_: Any, **__: Any) -> None:
        if SYNC in str(message):
            place = own_place(sys._getframe(1))
            if place is not None:
                found[place] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
