"""Learning rates as pure functions of the step."""

import math


def warmup_cosine(step: int, *, warmup_steps: int, total_steps: int, floor: float = 0.01) -> float:
    """Share of the full rate at a step: a straight rise, then half a cosine down to `floor`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
