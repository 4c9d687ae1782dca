"""Spikes of the loss are found by running sums as they are by looking at every loss of the window."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.runs.events import EventLog, read_events
from stoker.runs.schema import Spike
from stoker.train.config import TrainConfig
from stoker.train.guards import SPIKE_LEAST, SPIKE_SIGMAS, SPIKE_WINDOW, LossWatch


def spikes_of(losses: list[float]) -> list[int]:
    found: list[int] = []
    recent: list[float] = []
    for step, loss in enumerate(losses):
        if len(recent) >= SPIKE_LEAST:
            spread = float(np.std(recent))
            if spread > 0 and loss > float(np.mean(recent)) + SPIKE_SIGMAS * spread:
                found.append(step)
        recent = [*recent, loss][-SPIKE_WINDOW:]
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([1e-9, 1e-3, 1.0, 1e6]),
    offset=st.sampled_from([0.0, 1.0, 1e6]),
    sizes=st.lists(st.floats(3.0, 40.0), max_size=6),
)
def test_spikes_are_those_of_the_definition(
    tmp_path: Path, seed: int, scale: float, offset: float, sizes: list[float]
) -> None:
    draw = np.random.default_rng(seed)
    losses = draw.normal(size=500)
    losses[draw.integers(0, 500, len(sizes))] += sizes
    values = [float(value) for value in scale * (losses + offset)]
    path = tmp_path / f"events-{seed}-{scale}-{offset}-{len(sizes)}.jsonl"
    path.unlink(missing_ok=True)
    with EventLog(path) as log:
        watch = LossWatch(TrainConfig(baseline_after=None), 1.0, log)
        for step, value in enumerate(values):
            watch.look_at(step, value)
    assert [event.step for event in read_events(path, Spike)] == spikes_of(values)


@pytest.mark.parametrize("count", [10, SPIKE_WINDOW, 3 * SPIKE_WINDOW])
def test_a_restored_watch_goes_on_as_before(tmp_path: Path, count: int) -> None:
    losses = np.random.default_rng(1).normal(10, 1, count).tolist()
    with EventLog(tmp_path / "events.jsonl") as log:
        one, other = (LossWatch(TrainConfig(baseline_after=None), 1.0, log) for _ in range(2))
        for step, value in enumerate(losses):
            one.look_at(step, value)
        other.restore(one.state())
        assert other.state() == one.state()
        assert other._sum == pytest.approx(one._sum)
        assert other._squares == pytest.approx(one._squares)
