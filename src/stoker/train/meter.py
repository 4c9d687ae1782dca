"""Numbers of a log interval: kept on the device until they are read, all at once."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from stoker.data.plan import Step
from stoker.train.step import StepResult


@dataclass(frozen=True)
class Reading:
    losses: list[float]  # of each step
    samples: list[int]  # of each step
    loss: float  # mean over samples
    norm: float  # of the last step's gradient
    bad: int
    samples_per_s: float
    wait_share: float
    step_ms: list[float]  # of each step of this process
    copy_s: float
    own_ms: float  # of a step, in which this process did not wait for others


class Meter:
    def __init__(self) -> None:
        self._results: list[Tensor] = []  # (loss, norm, bad) of each step
        self._samples: list[int] = []
        self._wait_s, self._timed, self._begin = 0.0, 0, time.perf_counter()
        self._copies: list[Callable[[], float]] = []
        self._step_ms: list[float] = []
        self._other_s = self._own_s = 0.0
        self._trained_s = 0.0  # of the interval, up to the latest step

    def add(self, step: Step, result: StepResult) -> None:
        self._results.append(torch.stack([result.loss, result.norm, result.bad]).detach())
        self._samples.append(step.num_samples)
        self._copies.append(step.copy_s)
        self._own_s += step.wait_s + result.own_s
        self._wait_s, self._timed = self._wait_s + step.wait_s, self._timed + step.num_samples
        before, self._trained_s = self._trained_s, time.perf_counter() - self._begin - self._other_s
        self._step_ms.append(round(1e3 * max(0.0, self._trained_s - before), 3))

    def leave_out(self, seconds: float) -> None:
        """Time of the interval that was no training: evaluating, saving, compiling."""
        self._other_s += seconds

    def read(self) -> Reading:
        """Waits for the device: the one place in the loop that does, once a log interval."""
        rows = torch.stack(self._results).double().cpu()
        spent = max(time.perf_counter() - self._begin - self._other_s, 1e-9)
        samples = torch.tensor(self._samples, dtype=torch.float64)
        finite = rows[:, 2] == 0
        weight = samples * finite
        mean = float((rows[:, 0].nan_to_num() * weight).sum() / weight.sum()) if weight.sum() > 0 else float("nan")
        return Reading(
            losses=rows[:, 0].tolist(),
            samples=list(self._samples),
            loss=mean,
            norm=rows[-1, 1].item(),
            bad=int(rows[:, 2].sum().item()),
            samples_per_s=self._timed / spent,
            wait_share=min(1.0, self._wait_s / spent),
            step_ms=self._step_ms,
            copy_s=sum(seconds() for seconds in self._copies),  # the device is through with all of them
            own_ms=1e3 * self._own_s / max(1, len(self._step_ms)),
        )

    def state(self) -> dict[str, Any]:
        """The interval so far, so that a resumed run logs the same numbers."""
        rows = torch.stack(self._results).double().cpu().tolist() if self._results else []
        return {"results": [[_word(value) for value in row] for row in rows], "samples": list(self._samples)}

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        self._results = [torch.tensor([float(v) for v in row], device=device) for row in state["results"]]
        # Checkpoints written before 2026-11-16 could hold the samples of a step that came after them.
        self._samples = list(state["samples"])[: len(self._results)]


def _word(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)  # JSON has no NaN


def host_bytes() -> int:
    """Memory of this process that is resident, pages of mapped files among it."""
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class MachineUse:
    """Of the machine's cores and of the GPU, as far as it can be had."""

    cpu_share: float
    device_bytes: int = 0
    device_busy: float | None = None

    def line(self) -> str:
        if not self.device_bytes:
            return ""
        busy = "" if self.device_busy is None else f", {self.device_busy:.0%} busy"
        return f"  GPU {self.device_bytes / 2**30:.1f} GiB{busy}"


def machine_use(device: torch.device) -> MachineUse:
    cpu_share = round(psutil.cpu_percent() / 100, 3)  # since it was asked last
    if device.type != "cuda":
        return MachineUse(cpu_share)
    try:
        busy = torch.cuda.utilization(device) / 100
    except (ModuleNotFoundError, RuntimeError):
        busy = None
    return MachineUse(cpu_share, torch.cuda.max_memory_allocated(device), busy)
