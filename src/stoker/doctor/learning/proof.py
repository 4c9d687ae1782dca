"""Whether a change of what is learnt does what it promised: the loss, before and after the change."""

import math
import time
from itertools import islice

import numpy as np

from stoker.doctor.learning.arms import Trainer, later_mean
from stoker.doctor.legs import on_device
from stoker.doctor.probe import Probe

SEEN, LATER, LEAST = 24, 24, 8  # batches that rates were tried on, and those after them


def compare_learning(old: Probe, new: Probe, seconds: float) -> tuple[float, float, int]:
    """How far the loss of the second lies below that of the first after as many steps, the error of that, and the steps.

    Both begin with the weights they are built with, and learn from batches that no look has seen.
    """
    losses = []
    steps = LATER
    for probe in (old, new):
        assert probe.loss is not None
        assert probe.model is not None
        batches = [on_device(batch, probe) for batch in islice(probe.loader, SEEN, SEEN + LATER)][:steps]
        trainer = Trainer(probe.model, probe.loss, probe.new_optimizer)
        probe.model.train()
        begin = time.perf_counter()
        with trainer.put_back():
            trainer.losses(batches[:1], probe.rate)
            each = time.perf_counter() - begin
            steps = min(steps, len(batches), max(LEAST, int(seconds / max(each, 1e-6))))
            losses.append(trainer.losses(batches[:steps], probe.rate)[0])
    count = min(map(len, losses))  # one that stops being finite stops
    if len(losses[1]) < len(losses[0]) or not math.isfinite(losses[1][-1]):
        return -math.inf, 0.0, count
    if len(losses[0]) < len(losses[1]) or not math.isfinite(losses[0][-1]):
        return math.inf, 0.0, count
    return (*later_mean(np.array(losses[0]) - np.array(losses[1])), count)
