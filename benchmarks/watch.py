"""What `stoker.watch` costs a loop: the same small training, bare, watched, and watched with its model, in turns.

A step takes about 5 ms. What a watch adds to it is too little to be seen in the time of such steps: it is measured on steps
that do nothing, and a look at the model by the steps that have one beside those that have none.
"""

import argparse
import itertools
import statistics
import time
from typing import Any

import torch
from measure import emit, line
from torch import nn
from torch.nn import functional as F

import stoker
from stoker.doctor.answers import EVERY

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


def seconds_of_steps(loader: Any, step: Any) -> list[float]:
    """Of each, from one batch to the next: with what is done between them."""
    times = [time.perf_counter()]
    for batch in loader:
        step(batch)
        times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--width", type=int, default=9000, help="of the model: how long a step takes")
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
    looks = []
    for _ in range(options.turns):
        for name, loader in ways.items():
            steps = seconds_of_steps(loader(), step)
            taken[name].append(1e3 * statistics.median(steps))
            nothing[name].append(1e6 * statistics.fmean(seconds_of_steps(loader(), lambda batch: None)))
            if name == "watched with its model":
                # The watch counts on from turn to turn, 640 steps each and as many that do nothing: a look every 64th.
                looks.append(1e3 * (statistics.median(steps[EVERY - 1 :: EVERY]) - statistics.median(steps)))
    for name, values in taken.items():
        emit(line(f"a step, {name}", values, "ms"))
    bare = statistics.median(taken["bare"])
    emit(line("a look at the model", looks, "ms", share_of_steps=statistics.median(looks) / EVERY / bare))
    for name in list(ways)[1:]:
        own = [value - other for value, other in zip(nothing[name], nothing["bare"], strict=True)]
        share = statistics.median(own) / 1e3 / bare
        emit(line(f"what {name} adds to a step that does nothing", own, "us", share_of_step=share))


if __name__ == "__main__":
    main()
