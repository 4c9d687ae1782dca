"""What `stoker.watch` costs a loop: the same small training, bare, watched, and watched with its model, in turns.

A step takes about 5 ms. What a watch adds is the difference of medians over turns, as a share of the step.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from measure import emit, line
from torch import nn
from torch.nn import functional as F

import stoker

STEPS = 640  # of a turn: ten looks at the model


def make_step(width: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    return model, step


def seconds_a_step(loader: Any, step: Any) -> float:
    begin = time.perf_counter()
    for batch in loader:
        step(batch)
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--width", type=int, default=2560, help="of the model: how long a step takes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, step = make_step(options.width)
    batch = torch.randn(64, 64), torch.randint(0, 10, (64,))
    batches = [batch] * STEPS
    ways = {
        "bare": lambda: batches,
        "watched": lambda: stoker.watch(batches, say=False),
        "watched with its model": lambda: stoker.watch(batches, model, say=False),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    nothing: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, loader in ways.items():
            taken[name].append(1e3 * seconds_a_step(loader(), step))
            nothing[name].append(1e6 * seconds_a_step(loader(), lambda batch: None))
            model._forward_hooks.clear()
    for name, values in taken.items():
        emit(line(f"a step, {name}", values, "ms"))
    bare = statistics.median(taken["bare"])
    for name in list(ways)[1:]:
        ratios = [value / other for value, other in zip(taken[name], taken["bare"], strict=True)]
        emit(line(f"{name} / bare", ratios, "ratio", bar=1.01))
        own = [value - other for value, other in zip(nothing[name], nothing["bare"], strict=True)]
        emit(
            line(
                f"what {name} adds to a step that does nothing",
                own,
                "us",
                share_of_step=statistics.median(own) / 1e3 / bare,
            )
        )


if __name__ == "__main__":
    main()
