"""Events in columns, and columns as few points."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.report.series import in_order, thinned
from stoker.runs.events import EventLog
from stoker.runs.history import MOST_NORMS, read_history
from stoker.runs.schema import BadStep, End, Evaluation, Norms, Start, Step


def step_event(step: int, loss: float) -> Step:
    return Step(step=step, epoch=0, consumed=0, samples_crc32=0, lr=0.1, loss=loss, grad_norm=1.0, bad=0, samples_per_s=1.0,
                wait_share=0.5, step_ms=[1.0, 2.0])  # fmt: skip


def test_events_become_columns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(Start(steps=3))
        for step, loss in ((1, 3.0), (2, float("nan")), (3, 1.0)):
            log.write(step_event(step, loss))
        log.write(Evaluation(step=2, metric="m", goal="max", score=0.5, seconds=2.0))
        log.write(Evaluation(step=3, metric="m", goal="max", score=0.4, seconds=3.0))
        log.write(End(state="finished"))
    with path.open("a") as file:
        file.write('[1, 2]\n{"event": "step"\n{"event": "step", "step": "no number"}\n{"event": "later kind"}\n')
    found = read_history(path)
    assert found.steps["step"].tolist() == [1, 2, 3]
    assert np.isnan(found.steps["loss"][1])
    assert found.steps["step_s"].tolist() == [0.003] * 3
    assert (found.best or {})["score"] == 0.5
    assert (found.seconds["evaluation"], found.ended, found.torn) == (5.0, "finished", 3)
    assert len(found.steps) == len(found.steps["step_s"]) == 3


def test_norms_of_a_long_run_keep_the_largest(tmp_path: Path) -> None:
    path, count = tmp_path / "events.jsonl", 5 * MOST_NORMS + 3
    with EventLog(path) as log:
        for step in range(1, count + 1):
            size = 1e6 if step == 777 else float("nan") if step == 1234 else 1.0
            log.write(Norms(step=step, gradient={"w": size}, update_ratio={"w": 1.0}))
    norms = read_history(path).norms
    values = np.array([one["w"] for one in norms.gradient])
    assert len(norms.steps) < 2 * MOST_NORMS
    assert np.nanmax(values) == 1e6
    assert np.isnan(values).sum() == 1
    assert norms.steps == sorted(norms.steps)


def test_marks_are_few_and_all_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = json.dumps(
        {"event": "bad_step", "version": 2, "time": 0, **vars(BadStep(step=1, samples=[1], bundle="b", in_a_row=1))}
    )
    path.write_text(f"{line}\n" * 5000)
    found = read_history(path)
    assert len(found.marks["bad_step"]) <= 2000
    assert found.counts["bad_step"] == 5000


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80))
def test_what_was_written_again_counts_once(steps: list[int]) -> None:
    """Each step once, in order, by its last place."""
    kept = in_order(np.array(steps, float))
    chosen = [steps[place] for place in kept]
    assert chosen == sorted(set(chosen))
    assert chosen[-1] == steps[-1]
    for place in kept:
        assert all(later > steps[place] for later in steps[place + 1 :])


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=300), st.integers(4, 60))
def test_extremes_survive_thinning(values: list[float], most: int) -> None:
    column = np.array(values)
    kept = thinned([column], most)
    assert len(kept) <= max(most, 1.5 * most + 3)
    finite = column[np.isfinite(column)]
    if len(finite):
        assert {finite.min(), finite.max()} <= set(column[kept].tolist())
    if not np.isfinite(column).all():
        assert not np.isfinite(column[kept]).all()
