"""How much a step takes at once: lines of time and memory through a few sizes, the largest that fits, and its proof.

A step is cut into pieces that fit (loader.micro_cost), which changes nothing that is learnt. Another number of samples a
step does: it is offered with the rate that belongs to it, and taken only on request.
"""

import math
from collections.abc import Iterator
from typing import Any

from stoker.tune.search import GAIN, Decision, Line, Search, agree, said_of
from stoker.tune.trial import Answer

ROOM = 0.9  # of the GPU's memory, that a step may fill
CUT = 0.7  # of a size that did not stand the proof
PROOFS = 5
TIMES = (0.5, 2.0)  # of the batch, through which lines are drawn beside its own
OFFERED = 1.1  # times the rate, from which another batch is worth telling
MORE = 8  # times the batch at the most
STEPS = 20  # that an epoch keeps


def tune_pieces(search: Search, now: int | None, largest: int, *, batch_norm: bool = False) -> None:
    """loader.micro_cost: as large as memory has room for on the largest samples, and no slower than smaller ones.

    `batch_norm`: the model looks at samples side by side, so that pieces change what it computes.
    """
    whole = search.trial({}, "resident")
    if not whole.ok and not whole.out_of_memory:
        return
    seen, chosen, why = [(now, said_of(whole))], now, "larger pieces are not faster"
    ended = False
    try:
        best, rate = now, whole.rate if whole.ok else 0.0
        for size in _sizes(search, whole, now, largest):
            answer = search.trial({"loader.micro_cost": size}, "resident")
            same = not (whole.ok and answer.ok) or agree(whole.losses, answer.losses)
            seen.append((size, said_of(answer) if same else f"{answer.rate:,.0f}/s, other losses"))
            if answer.ok and same and answer.rate > rate * (1 + GAIN):
                best, rate = size, answer.rate
        # What a run does already is proven only where memory is short: on a CPU such a step may take minutes.
        if best != now or "total" in whole.memory:
            why = "there was no time to try the largest samples"
            for cut, said, stood in _proofs(search, best, largest):
                seen.append((cut, said))
                why = "no size that was tried stood the largest samples"
                if stood:
                    chosen, why = cut, _reason(now, best, cut, rate, whole)
        ended = True
    finally:
        if chosen != now:
            search.best["loader.micro_cost"] = chosen
            why += "; BatchNorm sees a piece at a time: it is not quite the same training" if batch_norm else ""
        search.decisions.append(Decision("loader.micro_cost", now, chosen, seen, why, ended))


def _reason(now: int | None, best: int | None, chosen: int | None, rate: float, whole: Answer) -> str:
    if chosen != best:
        return f"{best} did not stand the largest samples"
    if chosen == now:
        return "larger pieces are not faster"
    return f"{rate / whole.rate:.2f} times the rate" if whole.ok else "as it was, it did not fit"


def _sizes(search: Search, whole: Answer, now: int | None, largest: int) -> list[int]:
    """What memory has room for, by the line through two sizes; on a CPU half, twice and four times as much."""
    if now is None and not whole.out_of_memory:
        return []  # a step is whole already
    base = now or 16 * largest
    if whole.out_of_memory:
        return sorted({max(largest, base // times) for times in (2, 4, 8)} - {now}, reverse=True)
    if "total" not in whole.memory:
        return sorted({max(largest, int(base * times)) for times in (0.5, 2, 4)} - {base})
    half = search.trial({"loader.micro_cost": max(largest, base // 2)}, "resident")
    points = [
        (float(size), one.memory["peak"]) for size, one in ((base, whole), (max(largest, base // 2), half)) if one.ok
    ]
    line = Line.through(points)
    if line.slope <= 0:
        return [2 * base, 4 * base]
    fits = int((ROOM * whole.memory["total"] - line.fixed) / line.slope)
    return sorted({max(largest, min(4 * base, fits)), max(largest, min(2 * base, fits))} - {base})


def _proofs(search: Search, size: int | None, largest: int) -> Iterator[tuple[int | None, str, bool]]:
    """Sizes down to one that stands the costliest samples in a process of its own, without the allocator trying again."""
    for _ in range(PROOFS):
        answer = search.trial({} if size is None else {"loader.micro_cost": size}, "largest")
        tight = answer.ok and answer.memory.get("retries", 0) > 0
        said = "largest samples: " + ("the allocator had to try again" if tight else said_of(answer))
        yield size, said, answer.ok and not tight
        if not answer.out_of_memory and not tight:
            return  # it stood, or it is not a matter of size
        size = max(largest, int(CUT * (size or 16 * largest)))


def offer_batch(
    search: Search, now: int, lr: float, optimizer: str, *, allowed: bool, samples: int = 1 << 40, scaled: bool = False
) -> str | None:
    """Another number of samples a step, if it is faster: told, and taken with the rate that belongs to it if allowed.

    `samples`: that there are. `scaled`: the rate is stated for a number of samples (train.lr_batch), and grows by itself.
    """
    own = search.trial({}, "resident")
    if not own.ok:
        return None
    points = [(float(now), own.step_s)]
    for times in TIMES:
        size = max(1, int(now * times))
        answer = search.trial({"loader.batch_size": size}, "resident")
        if answer.ok:
            points.append((float(size), answer.step_s))
    line = Line.through(points)
    if len(points) < 2 or line.slope <= 0 or line.fixed <= 0:
        return None
    # Where one step in twenty is what does not depend on the batch: more gains nothing.
    enough = min(MORE * now, samples // STEPS, 2 ** math.ceil(math.log2(max(1.0, 19 * line.fixed / line.slope))))
    gain = (enough / line.at(enough)) / (now / line.at(now))
    if enough <= now or gain < OFFERED:
        return None
    rule = 1.0 if scaled else (enough / now) if optimizer == "sgd" else math.sqrt(enough / now)
    name = "train.lr_batch scales it" if scaled else "linear rule" if optimizer == "sgd" else "square root rule"
    words = (
        f"loader.batch_size {enough} would run {gain:.2f} times as fast (a step takes {1e3 * line.fixed:.2f} ms and "
        f"{1e6 * line.slope:.2f} us a sample). It is another training: with --train.lr {lr * rule:.3g} "
        f"({name})"
    )
    if not allowed:
        return f"{words}. --allow-batch-change takes it if it learns as much."
    return _learns_as_much(search, now, enough, {"loader.batch_size": enough, "train.lr": lr * rule}, words)


def _learns_as_much(search: Search, now: int, size: int, knobs: dict[str, Any], words: str) -> str:
    """As many samples with both, and the loss of the last of them."""
    old, new = search.trial({}, "learn"), search.trial(knobs, "learn")
    count = min(len(old.losses) * now, len(new.losses) * size)
    ends = [_end(one.losses, count // each) for one, each in ((old, now), (new, size))]
    if not (old.ok and new.ok) or None in ends:
        return f"{words}. Whether it learns as much could not be told: not taken."
    (before, error), (after, error_2) = ends  # type: ignore[misc]
    if not (math.isfinite(after) and after <= before + 2 * math.hypot(error, error_2)):
        return f"{words}. After as many samples its loss is {after:.4g} instead of {before:.4g}: not taken."
    search.best |= knobs
    search.decisions.append(
        Decision(
            "loader.batch_size", now, size, [], f"after as many samples the loss is {after:.4g}, {before:.4g} before"
        )
    )
    return f"{words}. Taken: it learns as much."


def _end(losses: list[float], steps: int) -> tuple[float, float] | None:
    last = losses[max(0, steps - max(4, steps // 4)) : steps]
    if len(last) < 2:
        return None
    mean = sum(last) / len(last)
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in last) / (len(last) - 1))
    return mean, spread / math.sqrt(len(last))
