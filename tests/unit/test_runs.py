import json
import math
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.runs import schema
from stoker.runs.events import EventLog, read_events
from stoker.runs.folder import RunFolder, create_run, list_runs, open_run


def step(number: int, **values: Any) -> schema.Step:
    place = {"epoch": 0, "consumed": 9, "samples_crc32": 1, "lr": 0.1, "grad_norm": 1.0, "bad": 0, "wait_share": 0.0}
    return schema.Step(**{"step": number, "loss": 1.0, "samples_per_s": 100.0} | place | values)


def test_events_survive_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(1))
    with path.open("a") as file:
        file.write('{"event": "st')
    with EventLog(path) as log:
        log.write(step(2))
    assert [event.step for event in read_events(path, schema.Step)] == [1, 2]


def test_non_finite_numbers_are_kept_as_words_in_valid_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.write(step(1, loss=float("nan"), step_ms=[1.0, float("inf")]))
    event = json.loads(path.read_text(), parse_constant=lambda _: pytest.fail("a constant that is no JSON"))
    assert (event["loss"], event["step_ms"]) == ("nan", [1.0, "inf"])
    (read,) = read_events(path, schema.Step)
    assert math.isnan(read.loss)
    assert read.step_ms == [1.0, math.inf]


def test_events_of_the_first_version_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        {"event": "evaluation", "time": 1.0, "step": 5, "metric": "error", "goal": "min", "error": 0.5, "samples": 9.0},
        {"event": "quarantine", "time": 2.0, "step": 6, "file": "a.parquet", "samples": 7, "reason": "cut"},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    judged, left_out = read_events(path, schema.Evaluation, schema.LeftOut)
    assert isinstance(judged, schema.Evaluation)
    assert (judged.score, judged.metrics) == (0.5, {"error": 0.5, "samples": 9.0})
    assert isinstance(left_out, schema.LeftOut)
    assert (left_out.what, left_out.name, left_out.samples) == ("shard", "a.parquet", 7)


def test_the_page_on_events_lists_every_kind_and_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    for kind, event in schema.KINDS.items():
        section = page.partition(f"\n## `{kind}`\n")[2].partition("\n## ")[0]
        assert section, kind
        told = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        assert told == {field.name for field in fields(event)} - {"time"}, kind


def test_two_runs_in_one_second_get_different_folders(tmp_path: Path) -> None:
    names = {create_run(tmp_path, "icecube", "twin", "recipe: icecube\n").path.name for _ in range(3)}
    assert len(names) == 3
    assert all("icecube-" in name and "twin" in name for name in names)


def test_runs_are_listed_with_state_best_metric_and_rate(tmp_path: Path) -> None:
    run = create_run(tmp_path, "icecube", None, "recipe: icecube\n")
    with EventLog(run.events) as log:
        log.write(schema.Start())
        log.write(step(10))
        log.write(schema.Evaluation(step=10, metric="error", goal="min", score=0.7))
        log.write(schema.Evaluation(step=20, metric="error", goal="min", score=0.9))
        assert list_runs(tmp_path)[0].state == "running"
        log.write(schema.End(state="finished"))
    (summary,) = list_runs(tmp_path)
    assert (summary.state, summary.best, summary.samples_per_s, summary.step) == ("finished", 0.7, 100.0, 10)


def test_a_run_whose_process_is_gone_is_listed_as_killed(tmp_path: Path) -> None:
    run = create_run(tmp_path, "icecube", None, "recipe: icecube\n")
    written = json.loads(run.environment.read_text())
    run.environment.write_text(json.dumps(written | {"started": 1.0}))
    with EventLog(run.events) as log:
        log.write(schema.Start())
    assert list_runs(tmp_path)[0].state == "killed"


def test_a_bad_name_or_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.name"):
        create_run(tmp_path, "icecube", "a/b", "")
    with pytest.raises(UserError, match="no run folder"):
        open_run(tmp_path / "absent")
    with pytest.raises(UserError, match=r"config\.yaml"):
        open_run(tmp_path)


def test_a_key_that_came_later_stands_for_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of earlier versions go on."""
    from stoker import settings
    from stoker.launch import checks
    from stoker.launch.targets import resolve_target

    saved = settings.kept_values(resolve_target("icecube", []).config)
    for key in ("model.energy", "train.patience", "data.truth"):
        del saved[key]
    snapshot = SimpleNamespace(state={"settings": json.loads(json.dumps(saved))})
    monkeypatch.setattr(checks.checkpoint, "read_checkpoint", lambda path: snapshot)
    checks.check_unchanged(RunFolder(tmp_path), tmp_path, resolve_target("icecube", []), ())
    for words in (["--model.energy", "true"], ["--train.lr", "0.5"]):
        with pytest.raises(UserError, match=words[0][2:]):
            checks.check_unchanged(RunFolder(tmp_path), tmp_path, resolve_target("icecube", words), ())
