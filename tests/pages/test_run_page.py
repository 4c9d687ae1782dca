"""The page of a run, in a browser: drawn, without an error, without the network, whatever the run looks like."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from written_runs import loader_event, make_run, start_event, step_event, usual_run, write_lines

from stoker.cli import run as cli
from stoker.report import serve
from stoker.report.gather import run_data
from stoker.report.page import page, page_data
from stoker.report.serve import PageServer
from stoker.runs.events import EventLog
from stoker.runs.folder import RunFolder
from stoker.runs.schema import BadStep, Compilation, End, Evaluation, LeftOut, Norms

LINES = 1_000_000 if os.environ.get("STOKER_SLOW") else 100_000
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">&lt;\u2028]]>${x}`"
)


def test_every_chart_of_a_run_is_drawn(look: Any, tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run", changed={"train.lr": 0.01})
    assert cli(["report", str(run)]) == 0
    seen = look(run / "report.html")
    seen.is_fine()
    assert set(seen.chapters()) >= {
        "verdict",
        "learning",
        "metrics",
        "time-0",
        "speed",
        "loader",
        "norms",
        "events",
        "config",
        "environment",
    }
    drawn = seen.points()
    assert len(drawn) == 14, drawn  # 12 charts of lines, the bars, the heat map
    assert "Best error: 0.65 at step 40" in seen.page.inner_text("#verdict")
    assert "knowing nothing" in seen.page.inner_text("#verdict")
    assert seen.page.inner_text("tr.changed") == "train.lr\t0.001\t0.01"


def test_the_keyboard_zooms_and_the_theme_changes(look: Any, tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run")
    assert cli(["report", str(run)]) == 0
    seen = look(run / "report.html")
    chart = seen.page.locator(".chart").first
    before = chart.screenshot()
    chart.focus()
    seen.page.keyboard.press("+")
    seen.page.wait_for_timeout(100)
    assert chart.screenshot() != before
    seen.page.select_option("#smooth", "0.9")
    assert "training loss, smoothed" in seen.page.inner_text("#learning")
    seen.page.click("#theme")
    assert seen.page.get_attribute("html", "data-theme") == "dark"
    seen.is_fine()
    seen.page.locator("#norms canvas").focus()
    seen.page.keyboard.press("ArrowDown")
    assert "layer.1.weight, step 10" in seen.page.inner_text("#norms")


TOLD = {
    "empty": "no step was written down",
    "killed": "killed after step 7",
    "torn": "killed after step 7",
    "resumed": "resume from step-00000004",
    "not finite": "1 steps were not finite",
    "one step": "finished after step 1",
}


@pytest.mark.parametrize("kind", TOLD)
def test_a_run_of_any_shape_has_a_page(look: Any, tmp_path: Path, kind: str) -> None:
    events: list[Any] = [start_event()]
    if kind == "one step":
        events += [step_event(1, 2.0), loader_event(1), End(state="finished")]
    elif kind in ("killed", "torn"):
        events += [step_event(step, 2.0 / step) for step in range(1, 8)]
    elif kind == "resumed":
        events += [step_event(step, 2.0 / step) for step in range(1, 8)]
        events += [start_event(resumed_from="step-00000004"), *(step_event(step, 3.0 / step) for step in range(5, 12))]
    elif kind == "not finite":
        events += [step_event(1, 2.0), step_event(2, float("nan"), grad_norm=float("inf")), step_event(3, 1.0)]
        events += [BadStep(step=2, samples=[3, 4], bundle="step-2", in_a_row=1)]
    run = make_run(tmp_path / "run", events)
    if kind == "torn":
        with (run / "events.jsonl").open("a") as file:
            file.write('{"event": "step", "step": 8, "lo')
    assert cli(["report", str(run)]) == 0
    seen = look(run / "report.html")
    seen.is_fine()
    told = seen.page.inner_text("main")
    assert TOLD[kind] in told
    assert cli(["report", str(run), "--text"]) == 0


def test_a_long_run_keeps_its_extremes_on_a_small_page(look: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start_event(steps=LINES // 2)])
    write_lines(run / "events.jsonl", LINES)
    assert cli(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert len(text) < 3_000_000
    seen = look(run / "report.html")
    seen.is_fine()
    (loss,) = (one for one in run_data(RunFolder(run))["charts"] if one["id"] == "loss")
    assert loss["of"] == LINES // 2
    assert len(loss["x"]) < 3000
    assert max(loss["series"][0]["y"]) == 99.0
    assert loss["x"][loss["series"][0]["y"].index(99.0)] in (77_777, LINES // 4)


def test_hostile_words_stay_words(look: Any, tmp_path: Path) -> None:
    events = [
        start_event(data={"path": HOSTILE, "training": HOSTILE}, device=HOSTILE, changed={HOSTILE: HOSTILE}),
        step_event(1, 1.0),
        LeftOut(step=1, what="shard", name=HOSTILE, samples=1, reason=HOSTILE),
        Compilation(step=1, graphs=1, seconds=1.0),
        End(state="failed", reason=HOSTILE),
    ]
    run = make_run(tmp_path / "a<b>&'c\"", events, config=f"recipe: {json.dumps(HOSTILE)}\n")
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "evaluation" / "step-1").mkdir(parents=True)
    sections = [
        {"kind": HOSTILE},
        {"kind": "table", "title": HOSTILE, "heading": [HOSTILE], "rows": [[HOSTILE]]},
        {"kind": "pictures", "title": HOSTILE, "items": [{"jpeg": "", "text": HOSTILE}]},
        {"kind": "matrix", "title": HOSTILE, "label": HOSTILE, "names": [HOSTILE], "columns": [HOSTILE], "rows": [[1.0]]},
    ]  # fmt: skip
    (run / "evaluation" / "step-1" / "page.json").write_text(json.dumps({"sections": sections}))
    assert cli(["report", str(run)]) == 0
    seen = look(run / "report.html")
    seen.page.wait_for_timeout(200)
    seen.is_fine()
    assert seen.page.title() == "a<b>&'c\""
    assert seen.page.locator("script").count() == 2  # the values, and ours
    assert HOSTILE in seen.page.text_content("#environment")


def test_runs_lie_beside_each_other(look: Any, tmp_path: Path) -> None:
    first = usual_run(tmp_path / "first")
    second = usual_run(tmp_path / "second", num_steps=25, scale=1.5)
    (second / "config.yaml").write_text("recipe: icecube:demo\ntrain:\n  lr: 0.005\n")
    out = tmp_path / "both.html"
    assert cli(["report", str(first), str(second), "--out", str(out)]) == 0
    seen = look(out)
    seen.is_fine()
    told = seen.page.inner_text("#verdict")
    assert "train.lr\t0.001\t0.005" in told
    assert "first: training loss" in seen.page.inner_text("#learning")
    assert "second: training loss" in seen.page.inner_text("#learning")
    assert cli(["report", str(first), str(second), "--out", str(out)]) == 0  # a page of ours may be replaced
    assert cli(["report", str(first), str(second), "--text"]) == 0


BAD_SECTIONS: list[Any] = [
    None,
    {"kind": "curve", "title": "no series"},
    {"kind": "curve", "title": "empty", "x": "x", "series": []},
    {"kind": "curve", "title": "zeros", "x": "x", "log": True,
     "series": [{"name": "a", "x": [0, 1], "y": [1, None], "n": [None, 1]}]},
    {"kind": "curve", "title": "long", "x": "x",
     "series": [{"name": "a", "x": [*range(150_000)], "y": [1] * 150_000, "points": False}]},
    {"kind": "sky", "title": "no cells", "label": "", "cells": []},
    {"kind": "table", "title": "no rows"},
    {"kind": "table", "title": "not a number", "rows": [[float("nan"), float("inf")]]},
    {"kind": "matrix", "title": "wide", "label": "", "names": ["a"], "columns": ["a"], "rows": [[1, 2, 3]]},
    {"kind": "events", "title": "none", "detector": [], "items": []},
    {"kind": "__proto__", "title": "odd"},
]  # fmt: skip


def test_a_section_that_cannot_be_drawn_is_one_line(look: Any, tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run")
    (run / "evaluation" / "one").mkdir(parents=True)
    (run / "evaluation" / "one" / "page.json").write_text(json.dumps({"sections": BAD_SECTIONS}))
    assert cli(["report", str(run)]) == 0
    seen = look(run / "report.html")
    seen.is_fine()
    assert len(seen.points()) > 14
    told = seen.page.inner_text("#evaluation-1")
    assert '"no series" cannot be drawn' in told
    assert 'does not know how to draw "__proto__"' in told


DAMAGED = [
    {"event": "start", "know_nothing": "nan"},
    {"event": "start", "know_nothing": "inf", "data": [], "changed": 3, "steps": None},
    {"event": "step", "step": "inf", "loss": 1.0},
    {"event": "step", "step": None, "loss": 1.0},
    {"event": "step", "step": 10**400, "loss": 1.0},
    {"event": "step", "step": 5, "loss": 1e308, "step_ms": ["nan", "inf", 5]},
    {"event": "step", "step": 6, "loss": -1e308, "grad_norm": "nan"},
    {"event": "evaluation", "step": 10**400, "metric": "m", "goal": "min", "score": 1.0},
    {"event": "evaluation", "step": 4, "metric": "m", "goal": "min", "score": "nan", "seconds": "inf"},
    {"event": "checkpoint", "step": 4, "seconds": "nan"},
    {"event": "norms", "step": 3, "gradient": {"a": "nan", "b": None}, "update_ratio": {}},
    {"event": "norms", "step": 4, "gradient": {}, "update_ratio": {}},
    {"event": "loader", "step": 3, "stages": {"read": {"busy_s": "inf"}}},
    {"event": "bad_step", "step": 3, "samples": "all"},
    {"event": 5},
]


def test_damaged_values_leave_the_rest_of_a_page(look: Any, tmp_path: Path) -> None:
    run = usual_run(tmp_path / "run")
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({"version": 2, "time": 1.0, **one}) + "\n" for one in DAMAGED)
    (run / "environment.json").write_text('{"a":' * 100_000)
    assert cli(["report", str(run), "--text"]) == 0
    assert cli(["report", str(run)]) == 0
    look(run / "report.html").is_fine()


def test_figures_are_those_of_the_events(tmp_path: Path) -> None:
    slow = step_event(1, 1.0, step_ms=[9000.0], wait_share=0.0)
    quick = step_event(2, 1.0, step_ms=[1000.0], wait_share=1.0)
    data = run_data(RunFolder(make_run(tmp_path / "waits", [start_event(), slow, quick])))
    assert "10% of the time waiting" in data["verdict"]
    assert {one["name"]: one["seconds"] for one in data["bars"]} == {"computing": 9.0, "waiting for batches": 1.0}

    def judged(step: int, score: float) -> Evaluation:
        return Evaluation(step=step, metric="m", goal="max", score=score)

    events = [start_event(), *(step_event(step, 1.0) for step in range(1, 11)), judged(4, 0.2), judged(10, 0.9)]
    events += [
        start_event(resumed_from="step-00000005"),
        *(step_event(step, 1.0) for step in range(6, 9)),
        judged(8, 0.5),
    ]
    data = run_data(RunFolder(make_run(tmp_path / "resumed", events)))
    assert "after step 8." in data["verdict"]  # what came after the checkpoint was lost
    assert "Best m: 0.5 at step 8" in data["verdict"]


def test_norms_of_a_wide_model_fit_on_a_page(tmp_path: Path) -> None:
    events: list[Any] = [start_event(), step_event(1, 1.0)]
    for step in range(1, 200):
        sizes = {f"layer.{number}": 1e9 if number == 777 and step == 99 else 1.0 for number in range(800)}
        events.append(Norms(step=step, gradient=sizes, update_ratio=sizes))
    data = run_data(RunFolder(make_run(tmp_path / "run", events)))
    rows = data["norms"]["gradient"]
    assert len(rows) * len(rows[0]) <= 60_000
    assert max(rows[data["norms"]["names"].index("layer.777")]) == 1e9
    assert len(data["norms"]["steps"]) == len(rows[0])
    assert len(json.dumps(data)) < 1_000_000


@pytest.mark.parametrize(
    "words", [["--port", "5"], ["--serve", "--port", "70000"], ["--text", "--open"], ["--serve", "--out", "x"]]
)
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, words: list[str]) -> None:
    run = usual_run(tmp_path / "run")
    assert cli(["report", str(run), *words]) == 2


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = usual_run(tmp_path / "first"), usual_run(tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "report.html", first / "report.html"):
        path.write_text("mine")
    assert cli(["report", str(first), str(second)]) == 2
    assert cli(["report", str(first)]) == 2
    (second / "report.html").symlink_to(tmp_path / "nowhere")
    assert cli(["report", str(second)]) == 2
    assert (tmp_path / "report.html").read_text() == (first / "report.html").read_text() == "mine"
    monkeypatch.chdir(second)
    assert cli(["report", ".", "--out", "page.html"]) == 0
    assert "<title>second</title>" in (second / "page.html").read_text()


def test_a_page_follows_a_run(look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "EVERY_S", 0.2)
    run = make_run(tmp_path / "run", [start_event(), step_event(1, 2.0)])
    server = PageServer("live", lambda: [run_data(RunFolder(run))])
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        seen = look(server.address)
        assert "after step 1." in seen.page.inner_text("#verdict")
        with EventLog(run / "events.jsonl") as log:
            log.write(step_event(2, 1.0))
        seen.page.locator("#verdict", has_text="after step 2.").wait_for(timeout=20_000)
        assert seen.errors == []
        assert all(one.startswith(server.address) or one.startswith("data:") for one in seen.requests)
        for path in ("config.yaml", "../config.yaml", "%2e%2e/config.yaml", "data.json/../config.yaml"):
            assert seen.page.request.get(server.address + path).status == 404
        assert seen.page.request.post(server.address).status == 501
        assert seen.page.request.head(server.address).status == 200
        assert seen.page.request.get(server.address, headers={"Host": "somewhere.example"}).status == 403
    finally:
        server.close()


def test_a_page_of_nothing_but_a_title(look: Any, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    out.write_text(page("empty", page_data()))
    look(out).is_fine()


def test_norms_of_nothing_are_no_chart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start_event(), step_event(1, 1.0), Norms(step=1, gradient={}, update_ratio={})])
    assert run_data(RunFolder(run))["norms"] is None
