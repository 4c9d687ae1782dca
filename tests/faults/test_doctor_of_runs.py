"""The doctor on finished runs: spikes are traced to samples or to weights, a bad sample is named whatever the seed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.cli import run as cli
from stoker.doctor.spikes import step_of
from stoker.launch.commands import rebuild_run
from stoker.recipes.icecube.table import open_events
from stoker.runs.events import EventLog
from stoker.runs.folder import open_run
from stoker.runs.schema import Spike

SEEDS = range(20) if os.environ.get("STOKER_SLOW") else range(1)
SMALL = ["--run.device", "cpu", "--model.width", "16", "--model.heads", "2", "--train.epochs", "1", "--train.compile",
         "false", "--loader.batch_size", "64"]  # fmt: skip

ODD = """
from dataclasses import replace
import os
import torch
from stoker.recipes.icecube.recipe import RECIPE as ICECUBE

def build_task(run, facts):
    task = ICECUBE.build_task(run, facts)
    usual = task.losses
    def losses(prediction, batch):
        odd = batch.rows == int(os.environ.get("ODD", -1))
        return torch.where(odd, 1e4, 1.0) * usual(prediction, batch)
    task.losses = losses
    return task

RECIPE = replace(ICECUBE, name="spiky", build_task=build_task)
"""


@pytest.fixture
def odd_run(
    events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """With checkpoints of steps 6 and 7, and step 5, which is said to have been a spike."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("spiky", None)
    (tmp_path / "spiky.py").write_text(ODD)
    words = ["train", "spiky:RECIPE", "--data.path", str(events_dir), "--train.save_every", "3"]
    assert cli([*words, "--train.log_every", "2", *SMALL]) == 0
    run = next((tmp_path / "runs").iterdir())
    with EventLog(run / "events.jsonl") as log:
        log.write(Spike(step=5, loss=9.0, mean=1.0, sigma=0.1))
    capsys.readouterr()
    return run


def spike_of(run: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    assert cli(["doctor", str(run), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    return next(one for one in told["findings"] if one["rule"] == "spike")


def test_a_spike_names_the_sample_that_makes_it(
    odd_run: Path, events_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = step_of(rebuild_run(open_run(odd_run)), open_run(odd_run), 5).rows
    monkeypatch.setenv("ODD", str(rows[17]))
    one = spike_of(odd_run, capsys)
    name = int(open_events(events_dir).columns["id"][rows[17]])
    assert "once, most at step 5" in one["sentence"]
    assert "weights of step 6" in one["evidence"][0]
    assert one["evidence"][1].startswith(f"sample {name}:")
    assert any("gradient of" in line for line in one["evidence"])


def test_a_spike_of_usual_samples_is_one_of_weights(odd_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(odd_run / "events.jsonl") as log:
        log.write(Spike(step=6, loss=5.0, mean=1.0, sigma=0.1))
    one = spike_of(odd_run, capsys)
    assert "2 times" in one["sentence"]
    assert "the weights were thrown off" in one["change"]


def test_a_spike_without_a_checkpoint_names_its_samples(odd_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(odd_run / "checkpoints")
    one = spike_of(odd_run, capsys)
    assert one["evidence"][0].startswith("its samples: ")
    assert "save_every" in one["change"]


def test_a_spike_that_no_step_can_have_is_said(odd_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventLog(odd_run / "events.jsonl") as log:
        log.write(Spike(step=99, loss=1e6, mean=1.0, sigma=0.1))
    assert cli(["doctor", str(odd_run), "--json"]) in (0, 1)
    assert "has no step 99" in json.loads(capsys.readouterr().out)["notes"][-1]


NOT_A_NUMBER = """
from dataclasses import replace
import os
import torch
from stoker.recipes.icecube.recipe import RECIPE as ICECUBE

def build_task(run, facts):
    task = ICECUBE.build_task(run, facts)
    usual = task.losses
    def losses(prediction, batch):
        bad = batch.rows == int(os.environ["BAD"])
        return usual(prediction, batch) + torch.sqrt(torch.where(bad, -1.0, 1.0))
    task.losses = losses
    return task

RECIPE = replace(ICECUBE, name="hole", build_task=build_task)
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_sample_that_is_not_finite_is_named(
    events_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seed: int,
    ranks: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("hole", None)
    (tmp_path / "hole.py").write_text(NOT_A_NUMBER)
    row = int(np.random.default_rng(seed).integers(0, 300))
    monkeypatch.setenv("BAD", str(row))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    words = ["train", "hole:RECIPE", "--data.path", str(events_dir), "--run.seed", str(seed), *SMALL]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "stoker"]
    done = subprocess.run([*start, *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    run = next((tmp_path / "runs").iterdir())
    capsys.readouterr()
    assert cli(["doctor", str(run), "--json"]) == 1
    one = json.loads(capsys.readouterr().out)["findings"][0]
    name = int(open_events(events_dir).columns["id"][row])
    assert one["rule"] == "bad-step"
    assert f"the loss of sample {name} (1 of 64)" in one["sentence"]
    assert any("sqrt" in line for line in one["evidence"])
