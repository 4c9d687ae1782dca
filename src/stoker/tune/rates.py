"""The learning rate: rates side by side from the same weights on the same batches, refined around the best of them.

Beside it the classic range test, in which the rate grows from step to step: quick, and without any error of its own.
"""

import math
import time
from itertools import islice, pairwise
from typing import Any

import numpy as np

from stoker.doctor.learning.arms import SURE, Trainer, try_rates
from stoker.doctor.learning.facts import Arm
from stoker.doctor.legs import on_device
from stoker.doctor.probe import Probe
from stoker.errors import UserError

GRID = tuple(10.0**power for power in np.arange(-5, -0.4, 0.5))
FINER = (10**-0.25, 10**0.25)  # around the best
LEAST = 8  # batches
RANGE_STEPS = 60
SMOOTHED = 0.9  # of the range test's loss


def compare_rates(probe: Probe, seconds: float, most: int) -> dict[str, Any]:
    """Arms, the decision, and the range test's view; within about so many seconds."""
    if probe.loss is None or probe.model is None:
        raise UserError("The probe has no loss and model: rates cannot be compared.")
    batches = [on_device(batch, probe) for batch in islice(probe.loader, most)]
    if len(batches) < LEAST:
        raise UserError(f"The loader gives {len(batches)} batches; {LEAST} are needed to tell rates apart.")
    probe.model.train()
    trainer = Trainer(probe.model, probe.loss, probe.new_optimizer)
    with trainer.put_back():
        trainer.losses(batches[:1], GRID[0])  # compilation, caches
        begin = time.perf_counter()
        trainer.losses(batches[:1], GRID[0])
        each = time.perf_counter() - begin
        count = min(len(batches), max(LEAST, int(seconds / (len(GRID) + len(FINER) + 2) / max(each, 1e-6))))
        arms, best, present = try_rates(trainer, batches[:count], probe.rate, GRID)
        best = best or surely_best(arms)
        if best is not None:
            finer, _, _ = try_rates(trainer, batches[:count], None, [best.rate * step for step in FINER])
            arms = sorted([*arms, *finer], key=lambda arm: arm.rate)
            best = surely_best(arms)
        chosen = None if best is None else cautious(arms, best)
        swept = range_test(trainer, batches, probe)
    return {
        "arms": [_row(arm) for arm in arms],
        "own": None if present is None else _row(present),
        "best": None if best is None else best.rate,
        "chosen": None if chosen is None else chosen.rate,
        "at the end": best is not None and best is arms[-1],
        "range test": swept,
        "batches": count,
    }


def surely_best(arms: list[Arm]) -> Arm | None:
    """Of the rates that surely learn something, the one that learns most."""
    sure = [arm for arm in arms if not arm.is_bad and arm.gain > SURE * arm.error]
    return max(sure, key=lambda arm: arm.gain) if sure else None


def cautious(arms: list[Arm], best: Arm) -> Arm:
    """The largest rate that is surely not worse than the best, and has a stable one above it.

    What wins in a few steps is often the last rate before the loss explodes: a long run needs some distance from that.
    """
    as_good = [arm for arm in arms if not arm.is_bad and arm.gain >= best.gain - SURE * max(arm.error, best.error)]
    stable = [arm for arm, above in pairwise(arms) if not above.is_bad and above.gain > 0]
    safe = [arm for arm in as_good if arm in stable]
    return max(safe, key=lambda arm: arm.rate) if safe else min(as_good, key=lambda arm: arm.rate)


def range_test(trainer: Trainer, batches: list[Any], probe: Probe) -> dict[str, Any]:
    """Losses at growing rates, and the rate at which the smoothed loss falls fastest."""
    rates = np.geomspace(GRID[0], GRID[-1], RANGE_STEPS)
    losses = trainer.sweep([batches[number % len(batches)] for number in range(RANGE_STEPS)], rates.tolist())
    if len(losses) < LEAST:
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


def _row(arm: Arm) -> dict[str, Any]:
    gain = arm.gain if math.isfinite(arm.gain) else None
    return {
        "rate": arm.rate,
        "gain": gain,
        "error": arm.error if math.isfinite(arm.error) else None,
        "bad": arm.bad_layer,
    }


def table_of_rates(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("rate", "the loss falls by", "error", "")]
    for arm in found["arms"]:
        words = ["best" if arm["rate"] == found["best"] else "", "chosen" if arm["rate"] == found["chosen"] else ""]
        said = f"not finite: {arm['bad']}" if arm["bad"] else ", ".join(filter(None, words))
        number = "-" if arm["gain"] is None else f"{arm['gain']:.4g}"
        rows.append((f"{arm['rate']:.2e}", number, "-" if arm["error"] is None else f"{arm['error']:.2g}", said))
    return rows


def draw(found: dict[str, Any], name: str, out: Any) -> None:
    """Both views as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    arms = [arm for arm in found["arms"] if arm["gain"] is not None]
    left.errorbar(
        [a["rate"] for a in arms], [a["gain"] for a in arms], [a["error"] or 0.0 for a in arms], fmt="o", capsize=3
    )
    worst = min((a["gain"] for a in arms), default=0.0)
    left.set(xscale="log", xlabel="learning rate", ylabel="the loss falls by", title=f"{name}: rates side by side")
    left.set_ylim(bottom=max(worst, -2 * max((abs(a["gain"]) for a in arms if a["gain"] > 0), default=1.0)))
    if found["chosen"] is not None:
        left.axvline(found["chosen"], linestyle="--")
    swept = found["range test"]
    right.plot(swept["rates"], swept["losses"])
    if swept["suggests"] is not None:
        right.axvline(swept["suggests"], linestyle=":")
    right.set(xscale="log", xlabel="learning rate", ylabel="loss", title="range test, a second view")
    figure.tight_layout()
    figure.savefig(out, format="png", dpi=110)
    plt.close(figure)
