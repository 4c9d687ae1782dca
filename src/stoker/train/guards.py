"""What watches a run: steps that are not finite, spikes of the loss, a loss that stays at chance.

A bad step was already skipped on the device. The host learns of it one step later, when the flag has arrived without
anybody waiting for it; since the step changed nothing, the weights are still those before it, and go into the bundle.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from stoker import console
from stoker.data.ragged import Indices
from stoker.errors import MachineError
from stoker.runs.events import EventLog
from stoker.runs.schema import BadStep, OutOfPatience, Spike, Stuck
from stoker.train.config import TrainConfig
from stoker.train.randomness import RandomStates

SPIKE_WINDOW, SPIKE_SIGMAS, SPIKE_LEAST = 128, 6.0, 64
STUCK_SHARE = 0.98  # of the know-nothing loss


class AsyncCopy:
    """Numbers on their way from the device; by the time they are read the device has the next step queued."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


@dataclass(frozen=True)
class UncheckedStep:
    """A step whose flag has not been looked at: all that is needed to write it down if it turns out bad."""

    step: int
    rows: Indices  # of the sample table
    random: RandomStates  # before the step
    flags: AsyncCopy  # whether it was bad, and whether a rank was asked to stop


class BadSteps:
    """Writes a bundle for each bad step and ends the run after too many in a row; hears of requests to stop too."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        log: EventLog,
        ids: Callable[[Indices], Indices],
        write: Callable[[Path, UncheckedStep], None],
    ) -> None:
        self._limit, self._folder, self._log, self._ids, self._write = config.bad_steps, folder, log, ids, write
        self._pending: UncheckedStep | None = None
        self.total = self.in_a_row = 0
        self.stop_asked = False  # all ranks learn of it at the same step

    def expect(self, unchecked: UncheckedStep) -> None:
        self._pending = unchecked

    def check(self) -> None:
        """Looks at the step before; must be called before the weights change again."""
        unchecked, self._pending = self._pending, None
        if unchecked is None:
            return
        bad, stop = unchecked.flags.read().tolist()
        self.stop_asked |= stop > 0
        if not bad > 0:
            self.in_a_row = 0
            return
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        path = self._folder / f"step-{unchecked.step:08d}"
        self._write(path, unchecked)
        ids = self._ids(unchecked.rows).tolist()
        self._log.write(BadStep(step=unchecked.step, samples=ids, bundle=path.name, in_a_row=self.in_a_row))
        some = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        console.say(
            f"BAD STEP {unchecked.step}: loss or gradient not finite; skipped, weights kept. Samples {some}. Bundle: {path}"
        )
        if self.in_a_row >= self._limit:
            raise MachineError(
                f"{self.in_a_row} steps in a row had a loss or gradient that is not finite, the last one step "
                f"{unchecked.step}. The weights are as they were before the first of them. What is needed to replay it is "
                f"in {path}."
            )


class LossWatch:
    """Spikes, and a loss that is still at the know-nothing baseline."""

    def __init__(self, config: TrainConfig, know_nothing: float, log: EventLog) -> None:
        self._recent: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self._sum = self._squares = 0.0  # of those
        self._after, self._know_nothing, self._log, self._said = config.baseline_after, know_nothing, log, False

    def look_at(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):
            return
        if len(self._recent) >= SPIKE_LEAST and self._may_be_spike(loss):
            mean, spread = float(np.mean(self._recent)), float(np.std(self._recent))
            if spread > 0 and loss > mean + SPIKE_SIGMAS * spread:
                self._log.write(Spike(step=step, loss=loss, mean=mean, sigma=spread))
                console.say(
                    f"SPIKE at step {step}: loss {loss:.4f}, {(loss - mean) / spread:.1f} sigma above {mean:.4f}."
                )
        self._add(loss)
        if self._after is not None and step >= self._after and not self._said:
            self._said = True
            recent = float(np.mean(self._recent))
            if recent > STUCK_SHARE * self._know_nothing:
                self._log.write(Stuck(step=step, loss=recent, know_nothing=self._know_nothing))
                console.say(
                    f"STUCK: after {step} steps the loss is {recent:.4f}; knowing nothing gives {self._know_nothing:.4f}. "
                    f"Next: `stoker fork RUN --train.lr` with a third and with three times the rate, and look at the "
                    f"norms of each layer in events.jsonl (event `norms`)."
                )

    def state(self) -> list[float]:
        return list(self._recent)

    def restore(self, recent: list[float]) -> None:
        for loss in recent:
            self._add(loss)

    def _add(self, loss: float) -> None:
        oldest = self._recent[0] if len(self._recent) == SPIKE_WINDOW else 0.0
        self._recent.append(loss)
        self._sum += loss - oldest
        self._squares += loss * loss - oldest * oldest

    def _may_be_spike(self, loss: float) -> bool:
        """By running sums, which lose digits: whoever may be one is looked at once more. Nearly nobody is."""
        count = len(self._recent)
        mean, square = self._sum / count, self._squares / count
        variance = max(0.0, square * (1 - 1e-9) - mean * mean)
        away = max(0.0, loss - mean)
        return away * away > SPIKE_SIGMAS * SPIKE_SIGMAS / 4 * variance


class Patience:
    """Ends a run whose evaluations have not become better for a while."""

    def __init__(self, limit: int | None, goal: str, log: EventLog) -> None:
        self._limit, self._goal, self._log = limit, goal, log
        self._scores: dict[int, float] = {}

    def look_at(self, step: int, score: float) -> None:
        self._scores[step] = score
        if self.is_lost:
            best = self._best()
            self._log.write(OutOfPatience(step=step, best_step=best, best_score=self._scores[best]))
            console.say(
                f"The score has not been better than at step {best:,} for {self._limit} evaluations: ending here."
            )

    @property
    def is_lost(self) -> bool:
        if self._limit is None or not self._scores:
            return False
        return sum(step > self._best() for step in self._scores) >= self._limit

    def restore(self, scores: Mapping[int, float]) -> None:
        self._scores = dict(scores)

    def _best(self) -> int:
        """The step of the best score, the earliest of equals; a score that is no number is worse than any."""
        sign = 1 if self._goal == "min" else -1
        return min(sorted(self._scores), key=lambda step: _or_infinity(sign * self._scores[step]))


def _or_infinity(value: float) -> float:
    return math.inf if math.isnan(value) else value
