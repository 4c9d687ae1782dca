"""What recipes and the doctor show: real runs, evaluated, in a browser."""

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import run as cli
from stoker.recipes.imagenet.draw import draw_set

QUICK = ["--run.device", "cpu", "--train.log_every", "1", "--train.norms_every", "2", "--loader.batch_size", "32"]
SMALL = ["--model.width", "16", "--model.heads", "2", "--model.dom_layers", "1", *QUICK]


def only(folder: Path) -> Path:
    (run,) = folder.iterdir()
    return run


@pytest.fixture(scope="module")
def events_run(events_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("icecube")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CACHE", str(folder / "cache"))
        words = ["--data.path", str(events_dir), *SMALL, "--train.steps", "8", "--run.folder", str(folder / "runs")]
        assert cli(["train", "icecube", *words]) == 0
        assert cli(["evaluate", str(only(folder / "runs"))]) == 0
    return only(folder / "runs")


def test_events_turn_and_play(look: Any, events_run: Path) -> None:
    assert cli(["report", str(events_run)]) == 0
    seen = look(events_run / "report.html")
    seen.is_fine()
    assert len((events_run / "report.html").read_bytes()) < 3_000_000
    told = seen.page.inner_text("#evaluation-1")
    for title in (
        "against energy",
        "against number of pulses",
        "against cosine of the true zenith",
        "Calibration",
        "Sky: median error",
    ):
        assert title in told
    assert "guessing" in told
    canvas = seen.page.locator("canvas.display")
    canvas.scroll_into_view_if_needed()
    box, before = canvas.bounding_box(), canvas.get_attribute("data-turn")
    seen.page.mouse.move(box["x"] + 200, box["y"] + 200)
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + 320, box["y"] + 230, steps=4)
    seen.page.mouse.up()
    assert canvas.get_attribute("data-turn") != before
    whole = int(canvas.get_attribute("data-points"))
    seen.page.click("text=play")
    seen.page.wait_for_timeout(700)
    assert int(canvas.get_attribute("data-points")) < whole
    canvas.focus()
    seen.page.keyboard.press(" ")  # stops it
    first = seen.page.inner_text(".panel:has(canvas.display) .note >> nth=0")
    seen.page.keyboard.press("n")
    assert seen.page.inner_text(".panel:has(canvas.display) .note >> nth=0") != first
    options = seen.page.eval_on_selector_all("select option", "all => all.map(one => one.textContent.split(' ')[0])")
    assert {"largest", "best", "worst", "random"} <= set(options)
    assert seen.errors == []


@pytest.mark.parametrize("packed", [False, True])
def test_events_of_a_data_set_are_shown_without_a_run(
    look: Any, events_dir: Path, tmp_path: Path, packed: bool
) -> None:
    source, out = events_dir, tmp_path / "events.html"
    if packed:
        source = tmp_path / "packed"
        assert cli(["pack", "icecube", str(events_dir), str(source)]) == 0
    import pyarrow.parquet as pq

    ids = pq.read_table(events_dir / "train_meta.parquet").column("event_id")
    event, other = ids[5].as_py(), ids[2].as_py()
    asked = ["--event", str(event), "--event", str(other), "--event", str(event)]
    assert cli(["show", str(source), *asked, "--out", str(out)]) == 0
    seen = look(out)
    seen.is_fine()
    options = seen.page.eval_on_selector_all("main option", "all => all.map(one => one.textContent.split(',')[0])")
    assert options == [f"event {event}", f"event {other}"]  # as asked, and each once
    assert cli(["show", str(source), "--event", "-5", "--out", str(tmp_path / "none.html")]) == 2
    out.write_text("mine")
    assert cli(["show", str(source), "--event", str(event), "--out", str(out)]) == 2
    assert out.read_text() == "mine"  # nothing is overwritten but pages of ours


def test_images_are_shown(look: Any, tmp_path: Path) -> None:
    draw_set(tmp_path / "images", 12, 4, 3)
    words = [
        "--data.path",
        str(tmp_path / "images"),
        *QUICK,
        "--train.steps",
        "3",
        "--run.folder",
        str(tmp_path / "runs"),
    ]
    assert cli(["train", "imagenet:demo", *words]) == 0
    run = only(tmp_path / "runs")
    assert cli(["evaluate", str(run)]) == 0
    assert cli(["report", str(run)]) == 0
    seen = look(run / "report.html")
    seen.is_fine()
    told = seen.page.inner_text("#evaluation-1")
    for title in (
        "Confusion",
        "Classes, the worst first",
        "Most confident mistakes",
        "Training samples as the model sees them",
    ):
        assert title in told
    for image in seen.page.query_selector_all("img"):
        image.scroll_into_view_if_needed()
    assert all(seen.page.eval_on_selector_all("img", "all => all.map(one => one.complete && one.naturalWidth > 0)"))
    assert seen.page.locator("img").count() >= 24


def test_a_diagnosis_has_a_page(look: Any, events_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "doctor.html"
    words = ["--data.path", str(events_dir), *SMALL, "--seconds", "0.1", "--only", "speed", "--page", str(out)]
    assert cli(["doctor", "icecube", *words]) in (0, 1)
    seen = look(out)
    seen.is_fine()
    assert "diagnosis" in seen.chapters()
    assert cli(["doctor", "icecube", *words]) == 2  # nothing is overwritten


def test_an_evaluation_keeps_its_pictures_with_their_sizes(events_run: Path) -> None:
    (folder,) = (events_run / "evaluation").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {
        "errors.png",
        "by_pulses.png",
        "by_zenith.png",
        "by_energy.png",
        "bias.png",
        "calibration.png",
        "page.json",
    } <= names
    sections = json.loads((folder / "page.json").read_text())["sections"]
    for one in sections:
        if one["kind"] == "curve" and "error" in one["title"]:
            model = one["series"][0]
            assert all(
                low <= middle <= high for low, middle, high in zip(model["low"], model["y"], model["high"], strict=True)
            )
            assert sum(model["n"]) == 150
