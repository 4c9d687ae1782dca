import json
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.runs.events import EventLog, read_events
from stoker.runs.folder import create_run, list_runs, open_run


def test_events_survive_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("step", step=1)
    with path.open("a") as file:
        file.write('{"event": "st')
    with EventLog(path) as log:
        log.write("step", step=2)
    assert [event["step"] for event in read_events(path, "step")] == [1, 2]


def test_non_finite_numbers_are_kept_as_words_in_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write("step", loss=float("nan"), norms=[1.0, float("inf")])
    event = json.loads(path.read_text(), parse_constant=lambda _: pytest.fail("a constant that is no JSON"))
    assert (event["loss"], event["norms"]) == ("nan", [1.0, "inf"])


def test_two_runs_in_one_second_get_different_folders(tmp_path: Path) -> None:
    names = {create_run(tmp_path, "icecube", "twin", "recipe: icecube\n").path.name for _ in range(3)}
    assert len(names) == 3
    assert all("icecube-" in name and "twin" in name for name in names)


def test_runs_are_listed_with_state_best_metric_and_rate(tmp_path: Path) -> None:
    run = create_run(tmp_path, "icecube", None, "recipe: icecube\n")
    with EventLog(run.events) as log:
        log.write("start")
        log.write("step", step=10, samples_per_s=100.0)
        log.write("evaluation", step=10, metric="error", goal="min", error=0.7)
        log.write("evaluation", step=20, metric="error", goal="min", error=0.9)
        assert list_runs(tmp_path)[0].state == "running"
        log.write("end", state="finished")
    (summary,) = list_runs(tmp_path)
    assert (summary.state, summary.best, summary.samples_per_s, summary.step) == ("finished", 0.7, 100.0, 10)


def test_a_run_whose_process_is_gone_is_listed_as_killed(tmp_path: Path) -> None:
    run = create_run(tmp_path, "icecube", None, "recipe: icecube\n")
    written = json.loads(run.environment.read_text())
    run.environment.write_text(json.dumps(written | {"started": 1.0}))
    with EventLog(run.events) as log:
        log.write("start")
    assert list_runs(tmp_path)[0].state == "killed"


def test_a_bad_name_or_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.name"):
        create_run(tmp_path, "icecube", "a/b", "")
    with pytest.raises(UserError, match="no run folder"):
        open_run(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config\.yaml"):
        open_run(tmp_path)
