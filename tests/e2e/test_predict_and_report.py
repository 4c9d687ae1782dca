"""From a trained run to answers: the evaluation in depth, and predictions in the competition's format."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import SMALL, Stoker  # type: ignore[import-not-found]

from stoker.recipes.icecube import predict as prediction


@pytest.fixture
def run(stoker: Stoker, events_dir: Path) -> Path:
    result = stoker.json("train", "icecube", "--data.path", events_dir, *SMALL, "--train.steps", "4")
    return stoker.folder / str(result["run"])


def make_test_set(events_dir: Path, folder: Path) -> Path:
    """The same events as the competition's test set: other names, no targets."""
    shutil.copytree(events_dir, folder)
    meta = pq.read_table(folder / "train_meta.parquet").drop_columns(["azimuth", "zenith"])
    pq.write_table(meta, folder / "test_meta.parquet")
    (folder / "train").rename(folder / "test")
    for name in ("train_meta.parquet", "truth.parquet"):
        (folder / name).unlink()
    return folder


def test_an_evaluation_leaves_tables_numbers_and_plots(stoker: Stoker, run: Path) -> None:
    first = stoker("evaluate", run)
    second = stoker("evaluate", run)
    assert "angular error" in first + second
    folders = sorted((run / "evaluation").iterdir())
    assert len(folders) == 2  # nothing is replaced
    names = {path.name for path in folders[0].iterdir()}
    plots = {"errors", "by_pulses", "by_zenith", "by_energy", "bias", "calibration"}
    assert names == {"report.json", "report.md", "page.json", *(f"{name}.png" for name in plots)}
    report = json.loads((folders[0] / "report.json").read_text())
    assert report["events"] == 150
    assert set(report["by_kind"]) == {"track", "cascade"}
    assert sum(part["events"] for part in report["by_pulses"].values()) == 150
    assert 0 < report["tracks"]["likelihood fit"]["p50"] < 1.0
    assert len(report["robustness_rad"]) == 5
    for path in folders[0].glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "likelihood fit" in (folders[0] / "report.md").read_text()


def test_predictions_of_a_set_without_targets(stoker: Stoker, run: Path, events_dir: Path) -> None:
    unseen = make_test_set(events_dir, stoker.folder / "unseen")
    told = stoker.json("predict", run, "--data", unseen, "--out", "submission.csv")
    assert (told["events"], told["predicted_now"]) == (600, 600)
    with (stoker.folder / "submission.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["event_id", "azimuth", "zenith"]
    ids = pq.read_table(unseen / "test_meta.parquet").column("event_id").to_pylist()
    assert [int(row["event_id"]) for row in rows] == ids
    zenith = np.array([float(row["zenith"]) for row in rows])
    assert ((zenith >= 0) & (zenith <= np.pi)).all()
    again = stoker.start("predict", run, "--data", unseen, "--out", "submission.csv")
    assert "nothing is overwritten" in again.communicate()[1]
    assert again.returncode == 2
    # As Parquet, packed or not, on two processes or one: the same directions, and kappa beside them.
    stoker("pack", "icecube", events_dir, "packed")
    stoker("predict", run, "--data", "packed", "--out", "one.parquet")
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "stoker",
        "predict",
        str(run),
        "--data",
        str(unseen),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words, "--out", "two.parquet"], check=True, cwd=stoker.folder, env=environment)
    one, two = (pq.read_table(stoker.folder / name) for name in ("one.parquet", "two.parquet"))
    for name in ("event_id", "azimuth", "zenith", "kappa"):
        np.testing.assert_allclose(one.column(name).to_numpy(), two.column(name).to_numpy(), rtol=1e-3)
    np.testing.assert_allclose(one.column("zenith").to_numpy(), zenith, rtol=1e-3)
    assert not list(stoker.folder.glob("*.parts"))


def test_a_prediction_that_was_stopped_goes_on(run: Path, events_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.launch import commands

    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(prediction, "PART_EVENTS", 100)
    whole = prediction._directions
    done: list[int] = []

    def stops_at_three(model: Any, data: Any, first: int, *rest: Any) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(first)
        return whole(model, data, first, *rest)

    monkeypatch.setattr(prediction, "_directions", stops_at_three)
    words = (run, events_dir, Path("out.csv"), "last", "auto", ["--run.device", "cpu"])
    with pytest.raises(KeyboardInterrupt):
        commands.predict(*words)
    assert not Path("out.csv").exists()
    monkeypatch.setattr(prediction, "_directions", whole)
    assert commands.predict(*words)["predicted_now"] == 300
    assert len(Path("out.csv").read_text().splitlines()) == 601


def test_another_detector_is_not_predicted_for(run: Path, own_events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.errors import UserError
    from stoker.launch import commands

    monkeypatch.chdir(run.parent)
    geometry = own_events / "sensor_geometry.csv"
    lines = geometry.read_text().splitlines()
    sensor, x, y, z = lines[7].split(",")
    geometry.write_text("\n".join([*lines[:7], f"{sensor},{float(x) + 300},{y},{z}", *lines[8:]]) + "\n")
    with pytest.raises(UserError, match="not the one that the run was trained for"):
        commands.predict(run, own_events, Path("moved.csv"), "last", "auto", ["--run.device", "cpu"])
