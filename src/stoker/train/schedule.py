"""Learning rates as pure functions of the step, and a small chart of them."""

import math
from collections.abc import Callable

from stoker.errors import UserError
from stoker.train.config import TrainConfig

LrAt = Callable[[TrainConfig, int, int], float]  # of a step, counted from 0, of so many


def lr_at(config: TrainConfig, step: int, total_steps: int) -> float:
    """The rate of step `step`, counted from 0, of a run of `total_steps`."""
    return config.lr * _share(config, step, total_steps)


def checked(schedule: LrAt) -> LrAt:
    """A recipe's own schedule, whose answers are looked at."""

    def rate(config: TrainConfig, step: int, total_steps: int) -> float:
        try:
            value = float(schedule(config, step, total_steps))
        except (TypeError, ValueError) as error:
            raise UserError(f"The recipe's schedule gives no number for step {step}: {error}") from error
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"The recipe's schedule gives {value} for step {step}: a rate is a number from 0 on.")
        return value

    return rate


def scaled_lr(config: TrainConfig, batch_size: int | None) -> tuple[float, str]:
    """The highest rate for steps of `batch_size` samples over all ranks, and the rule that led to it."""
    if config.lr_batch is None:
        return config.lr, f"learning rate {config.lr:g}, as given"
    if batch_size is None:
        raise UserError(
            "train.lr_batch states the rate for a number of samples a step, and this run cuts steps by cost."
        )
    ratio = batch_size / config.lr_batch
    factor = ratio if config.lr_rule == "linear" else math.sqrt(ratio)
    lr = config.lr * factor
    return (
        lr,
        f"learning rate {lr:g}: {config.lr:g} for {config.lr_batch} samples a step, {config.lr_rule} to {batch_size}",
    )


def chart(config: TrainConfig, total_steps: int, rate: LrAt = lr_at, width: int = 60, height: int = 6) -> str:
    """The schedule as text, highest rate at the top."""
    columns = min(width, total_steps)
    steps = [round(column * (total_steps - 1) / max(1, columns - 1)) for column in range(columns)]
    rates = [rate(config, step, total_steps) for step in steps]
    top = config.lr if rate is lr_at else max([*rates, 1e-300])
    shares = [one / top for one in rates]
    lines = []
    for row in range(height, 0, -1):
        label = f"{top * row / height:9.2e} " if row in (height, 1) else " " * 10
        lines.append(label + "|" + "".join("#" if share > (row - 0.5) / height else " " for share in shares).rstrip())
    lines.append(" " * 10 + "+" + "-" * columns)
    lines.append(
        f"{'':11}0{total_steps:>{max(1, columns - 1)},} steps, {config.schedule if rate is lr_at else 'own schedule'}"
    )
    return "\n".join(lines)


def _share(config: TrainConfig, step: int, total_steps: int) -> float:
    if config.schedule == "onecycle":
        return _one_cycle(step, total_steps, config.final_share)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    after, left = step - config.warmup_steps, max(1, total_steps - config.warmup_steps)
    if config.schedule == "cosine":
        return _cosine(min(1.0, after / left), 1.0, config.final_share)
    if config.schedule == "step":
        every = config.decay_every or max(1, -(-left // 3))
        return float(config.decay_by ** (after // every))
    return 1.0


def _one_cycle(step: int, total_steps: int, final: float, rise: float = 0.3, start: float = 0.04) -> float:
    """Up over the first 30 %, from 1/25 of the rate, and down to the end; both halves cosine-shaped."""
    top = max(1.0, rise * total_steps - 1)
    if step <= top:
        return _cosine(step / top, start, 1.0)
    return _cosine(min(1.0, (step - top) / max(1.0, total_steps - 1 - top)), 1.0, final)


def _cosine(progress: float, begin: float, end: float) -> float:
    return end + (begin - end) * (1 + math.cos(math.pi * progress)) / 2
