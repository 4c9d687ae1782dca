"""Memory is what the limit says, and stays there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.recipes.icecube.simulate import simulate

PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import torch
from stoker.data.device import feed
from stoker.data.plan import Position
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.train.parallel import Ranks

def anonymous():  # bytes of our own; pages of mapped files are the system's to take back
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('RssAnon'))

target = resolve_target('icecube', sys.argv[1:])
parts = build_run(target.recipe, target.config, Ranks())
start, peaks = anonymous(), []
for epoch in range(4):
    peak = 0
    for step in feed(parts.training.steps(Position(0, epoch), epoch + 1), torch.device('cpu')):
        peak = max(peak, anonymous() - start)
    peaks.append(peak)
print(json.dumps(peaks))
"""


@pytest.fixture(scope="module")
def set_of_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "set"
    simulate(folder, num_events=8000, num_files=4, seed=3)
    return folder


@pytest.mark.parametrize(
    ("mode", "limit", "words"),
    [("packed", 60_000_000, ["--loader.batch_size", "512"]), ("direct", 80_000_000, ["--loader.window", "1000"])],
)
def test_a_loader_takes_no_more_than_its_limit_in_any_epoch(
    set_of_events: Path, mode: str, limit: int, words: list[str]
) -> None:
    words = ["--data.path", str(set_of_events), "--data.mode", mode, "--run.device", "cpu", "--loader.threads", "2",
             "--loader.ram_bytes", str(limit), *words]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert max(peaks) < 1.1 * limit


def test_training_takes_as_much_memory_in_later_epochs_as_in_the_first(set_of_events: Path, tmp_path: Path) -> None:
    words = ["train", "icecube", "--data.path", str(set_of_events), "--run.device", "cpu", "--train.epochs", "4",
             "--train.log_every", "5", "--model.width", "16", "--model.heads", "2", "--data.mode", "packed",
             "--model.pulse_layers", "0", "--model.dom_layers", "1", "--loader.batch_size", "256"]  # fmt: skip
    # Two threads of a model this small wait for each other most of the time, beside another test that does the same.
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "stoker", *words], cwd=tmp_path, capture_output=True, text=True, env=alone
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    ends = [event["host_bytes"] for event in events if event["event"] == "evaluation"]
    assert len(ends) == 4
    assert max(ends[1:]) < 1.1 * ends[0]
