"""The learning rate: rates side by side from the same weights on the same batches, the best of them for longer.

A few steps tell which rates explode and which learn nothing, and not much more: whatever is large enough finds the mean of
the labels first. So those that are as good as the best are trained for longer, with a warm-up and a rate that falls to
nothing as in a run, and the loss at the end decides. Beside it the classic range test, in which the rate grows from step to
step: quick, and without any error of its own.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
from torch import Tensor

from stoker.data.batch import map_tensors, num_bytes
from stoker.doctor.learning.arms import SURE, Trainer, later_mean, try_rates
from stoker.doctor.learning.facts import Arm
from stoker.doctor.learning.labels import with_others_labels
from stoker.doctor.legs import NOTHING, on_device
from stoker.doctor.looks import length
from stoker.doctor.probe import Probe
from stoker.errors import UserError

GRID = tuple(10.0 ** (power / 2) for power in range(-10, 0))
FINER = (10**-0.25, 10**0.25)  # around the best
FEW, LEAST_FEW = 24, 8  # batches of the first look
SHORT_SHARE = 0.2  # of the time, for the first look
CANDIDATES = 6  # that are trained for longer
LONG, LEAST_LONG = 1000, 24  # steps of those
ARMS = CANDIDATES + len(FINER) + 1  # and the one with the labels of others
KEPT_BYTES = 2 << 30  # of batches that lie ready; they come again where more are needed
TIE = 0.005  # of the loss: what is no worse than this is as good
CERTAIN = 3.0  # errors, by which a rate must be better than with the labels of other samples
RANGE_STEPS = 60
SMOOTHED = 0.9  # of the range test's loss


@dataclass(frozen=True)
class LongArm:
    """A rate that was trained for longer."""

    rate: float
    losses: list[float]  # of each batch before it was learnt from; fewer than others where it exploded

    @property
    def late(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        return np.array(self.losses[-max(4, len(self.losses) // 4) :])

    @property
    def end(self) -> float:
        return float(self.late.mean())


def compare_rates(probe: Probe, seconds: float) -> dict[str, Any]:
    """Arms, the decision, and the range test's view; within about so many seconds."""
    if probe.loss is None or probe.model is None:
        raise UserError("The probe has no loss and model: rates cannot be compared.")
    source, begin = iter(probe.loader), time.perf_counter()
    batches: list[Any] = []
    _fill(batches, FEW, probe, source)
    if len(batches) < LEAST_FEW:
        raise UserError(f"The loader gives {len(batches)} batches; {LEAST_FEW} are needed to tell rates apart.")
    reading = (time.perf_counter() - begin) / len(batches)
    if not probe.model.training:  # else parts of it that are not are meant to be so
        probe.model.train()
    trainer = Trainer(probe.model, probe.loss, probe.new_optimizer, probe.settings.get("train.clip_norm"))
    with trainer.put_back():
        trainer.losses(batches[:1], GRID[0])  # compilation, caches
        each = _seconds_of_a_step(trainer, batches)
        few = min(len(batches), FEW, max(LEAST_FEW, int(SHORT_SHARE * seconds / (len(GRID) + 2) / each)))
        arms, _, present = try_rates(trainer, batches[:few], probe.rate, GRID)
        steps = min(LONG, max(LEAST_LONG, int((1 - SHORT_SHARE) * seconds / (ARMS * each + reading))))
        _fill(batches, steps, probe, source)
        del source  # whoever makes batches for nobody takes processors from the rest
        # Batches that come again can be learnt by heart: only where there are very few.
        steps = max(LEAST_LONG, min(steps, len(batches)))
        longer = _longer(trainer, batches, candidates(arms), steps)
        best, chosen = pick(longer, steps)
        sure = chosen is not None and _knows_its_inputs(trainer, batches, chosen, length(probe.loader))
        swept = range_test(trainer, batches)
    ends = {arm.rate: arm for arm in longer}
    return {
        "arms": [_row(arm, ends.pop(arm.rate, None)) for arm in arms]
        + [_row(None, arm) for arm in ends.values()],  # those between two of the grid
        "own": None if present is None else _row(present, None),
        "best": best.rate if best is not None and sure else None,
        "chosen": chosen.rate if chosen is not None and sure else None,
        "at the end": best is not None and float(best.rate) >= max(arm.rate for arm in arms if not arm.is_bad),
        "range test": swept,
        "batches": few,
        "steps": steps,
    }


def _seconds_of_a_step(trainer: Trainer, batches: Sequence[Any]) -> float:
    """Over all of these: batches may differ by far."""
    begin = time.perf_counter()
    trainer.losses(batches, GRID[0])
    return max((time.perf_counter() - begin) / len(batches), 1e-6)


def _fill(batches: list[Any], number: int, probe: Probe, source: Iterator[Any]) -> None:
    """Up to so many batches; fewer where there are no more, or they take too much memory."""
    size = sum(map(num_bytes, batches))
    while len(batches) < number and (size < KEPT_BYTES or len(batches) < LEAST_FEW):
        batch = next(source, NOTHING)
        if batch is NOTHING:
            return
        batches.append(map_tensors(on_device(batch, probe), _own))
        size += num_bytes(batches[-1])


def _own(tensor: Tensor) -> Tensor:
    """What a worker made lies in memory that takes a file descriptor of this process each."""
    shared = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
    return tensor.clone() if shared else tensor


def candidates(arms: Sequence[Arm]) -> list[float]:
    """Rates worth a longer look: all that may be as good as the best of a few steps, and the next below them."""
    fit = [arm for arm in arms if not arm.is_bad]
    if not fit:
        return []
    best = max(fit, key=lambda arm: arm.gain)
    as_good = [arm for arm in fit if arm.gain >= best.gain - SURE * max(arm.error, best.error)]
    below = [arm for arm in fit if arm.rate < as_good[0].rate]
    found = [arm.rate for arm in (*below[-1:], *as_good)]
    places = np.linspace(0, len(found) - 1, min(len(found), CANDIDATES)).round().astype(int)
    return [found[place] for place in places]


def _longer(trainer: Trainer, batches: Sequence[Any], rates: Sequence[float], steps: int) -> list[LongArm]:
    """The candidates, and the rates on both sides of the best of them."""
    arms = [_long_arm(trainer, batches, rate, steps) for rate in rates]
    best, _ = pick(arms, steps)
    if best is not None:
        arms += [_long_arm(trainer, batches, best.rate * factor, steps) for factor in FINER]
    return sorted(arms, key=lambda arm: arm.rate)


def _long_arm(trainer: Trainer, batches: Sequence[Any], rate: float, steps: int) -> LongArm:
    return LongArm(rate, trainer.sweep(list(islice(cycle(batches), steps)), scheduled(rate, steps)))


def scheduled(rate: float, steps: int) -> list[float]:
    """A warm-up over a tenth of the steps, then a cosine down to nothing."""
    warm = max(1, steps // 10)
    return [rate * min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]


def pick(arms: Sequence[LongArm], steps: int) -> tuple[LongArm | None, LongArm | None]:
    """The arm that ends lowest, and the smallest rate that is as good."""
    whole = [arm for arm in arms if len(arm.losses) == steps and math.isfinite(arm.end)]
    if not whole:
        return None, None
    best = min(whole, key=lambda arm: arm.end)
    as_good = [arm for arm in whole if arm.end <= best.end + TIE * abs(best.end)]
    return best, min(as_good, key=lambda arm: arm.rate)


def _knows_its_inputs(trainer: Trainer, batches: Sequence[Any], arm: LongArm, epoch: int | None) -> bool:
    """Whether it ends lower than with labels of other samples, which teach no more than how frequent each is.

    `epoch`: batches after which samples come again; what comes again is known by heart, right or wrong.
    """
    fresh = min(len(batches), len(arm.losses), max(epoch or len(batches), LEAST_FEW))
    others = [with_others_labels(batch, number) for number, batch in enumerate(batches[:fresh])]
    if all(other is not None for other in others):
        rates = scheduled(arm.rate, len(arm.losses))[:fresh]
        control = trainer.sweep(others, rates)
        if len(control) < fresh:
            return False
        if control != arm.losses[:fresh]:
            gain, error = later_mean(np.array(control) - np.array(arm.losses[:fresh]))
            return gain > CERTAIN * error
    # Nobody knows which the labels are, or they are all alike: then lower than where nothing is learnt.
    still, _, _ = trainer.losses(batches[:fresh], None)
    gain, error = later_mean(np.array(still) - np.array(arm.losses[:fresh]))
    return gain > CERTAIN * error


def range_test(trainer: Trainer, batches: Sequence[Any]) -> dict[str, Any]:
    """Losses at growing rates, and the rate at which the smoothed loss falls fastest."""
    rates = np.geomspace(GRID[0], GRID[-1], RANGE_STEPS)
    losses = trainer.sweep(list(islice(cycle(batches), RANGE_STEPS)), rates.tolist())
    if len(losses) < LEAST_FEW:
        return {"rates": [], "losses": [], "suggests": None}
    smooth = [losses[0]]
    for loss in losses[1:]:
        smooth.append(SMOOTHED * smooth[-1] + (1 - SMOOTHED) * loss)
    fell: list[float] = []
    for loss in smooth:  # up to where it has lost more than it had gained
        if fell and loss - min(fell) > max(fell[0] - min(fell), 0.1 * abs(fell[0])):
            break
        fell.append(loss)
    slopes = np.gradient(fell) if len(fell) > 3 else np.zeros(1)
    return {"rates": rates[: len(losses)].tolist(), "losses": losses, "suggests": float(rates[int(np.argmin(slopes))])}


def _row(arm: Arm | None, longer: LongArm | None) -> dict[str, Any]:
    gain, error = (None, None) if arm is None else (arm.gain, arm.error)
    return {
        "rate": arm.rate if arm is not None else longer.rate if longer is not None else None,
        "gain": gain if gain is not None and math.isfinite(gain) else None,
        "error": error if error is not None and math.isfinite(error) else None,
        "bad": None if arm is None else arm.bad_layer,
        "end": None if longer is None or not longer.losses or not math.isfinite(longer.end) else longer.end,
    }


def table_of_rates(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rate", "the loss falls by", "error", f"loss after {found['steps']} steps", "")]
    for arm in sorted(found["arms"], key=lambda arm: arm["rate"]):
        words = ["best" if arm["rate"] == found["best"] else "", "chosen" if arm["rate"] == found["chosen"] else ""]
        said = f"not finite: {arm['bad']}" if arm["bad"] else ", ".join(filter(None, words))
        numbers = [("" if arm[name] is None else f"{arm[name]:.{digits}g}") for name, digits in _DIGITS.items()]
        rows.append((f"{arm['rate']:.2e}", *numbers, said))
    return rows


_DIGITS = {"gain": 4, "error": 2, "end": 5}


def draw(found: dict[str, Any], name: str, out: Any) -> None:
    """All views as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
    arms = [arm for arm in found["arms"] if arm["gain"] is not None]
    left.errorbar(
        [a["rate"] for a in arms], [a["gain"] for a in arms], [a["error"] or 0.0 for a in arms], fmt="o", capsize=3
    )
    worst = min((a["gain"] for a in arms), default=0.0)
    left.set(
        xscale="log", xlabel="learning rate", ylabel="the loss falls by", title=f"{name}: {found['batches']} steps"
    )
    left.set_ylim(bottom=max(worst, -2 * max((abs(a["gain"]) for a in arms if a["gain"] > 0), default=1.0)))
    longer = sorted((a["rate"], a["end"]) for a in found["arms"] if a["end"] is not None)
    middle.plot([rate for rate, _ in longer], [end for _, end in longer], "o-")
    middle.set(xscale="log", xlabel="learning rate", ylabel="loss at the end", title=f"{found['steps']} steps")
    if found["chosen"] is not None:
        middle.axvline(found["chosen"], linestyle="--")
    swept = found["range test"]
    right.plot(swept["rates"], swept["losses"])
    if swept["suggests"] is not None:
        right.axvline(swept["suggests"], linestyle=":")
    right.set(xscale="log", xlabel="learning rate", ylabel="loss", title="range test, a second view")
    figure.tight_layout()
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
