"""The same seed gives the same bits on a GPU, compiled: an unbroken run, and one that was killed and resumed."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

STEPS = 10
EVERY = ["--train.steps", str(STEPS), "--train.epochs", "50", "--train.log_every", "1", "--train.save_every", "3"]
EVENTS = [*EVERY, "--loader.batch_size", "64", "--data.validation", "[4]", "--data.mode", "packed"]
IMAGES = [*EVERY, "--data.draw_per_class", "24", "--data.draw_held_out", "4", "--data.check_labels", "false"]
# Every kind of layer that the preset has, fewer of each: compiling is what takes the time here.
CASES = {
    "icecube:seed": [*EVENTS, "--model.pulse_layers", "1", "--model.dom_layers", "1"],
    "icecube:flat-5m": [*EVENTS, "--model.layers", "2"],
    "icecube:deep": [*EVENTS, "--model.layers", "2", "--model.bias_layers", "1"],
    "imagenet:baseline": [*IMAGES, "--model.name", "resnet18", "--data.size", "64", "--loader.batch_size", "64"],
    "imagenet:cifar10": [*IMAGES, "--model.width", "16", "--loader.batch_size", "64"],
}


class Runs:
    def __init__(self, folder: Path, target: str, data: Path) -> None:
        path = ["--data.path", str(data)] if target.startswith("icecube") else []
        self.folder, self.words = folder, ["train", target, *CASES[target], *path]

    def start(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "stoker", *words]
        return subprocess.Popen(command, cwd=self.folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def finish(self, *words: str) -> None:
        process = self.start(*words)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]

    def named(self, name: str) -> list[str]:
        return [*self.words, "--run.name", name]

    def path(self, name: str) -> Path:
        return next((self.folder / "runs").glob(f"*{name}*"))

    def losses(self, name: str) -> dict[int, Any]:
        log = self.path(name) / "events.jsonl"
        events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
        return {one["step"]: (one["loss"], one["grad_norm"]) for one in events if one["event"] == "step"}

    def kept(self, name: str) -> dict[str, torch.Tensor]:
        """Weights, moments and averages of the last checkpoint."""
        last = sorted((self.path(name) / "checkpoints").glob("step-*"))[-1]
        assert int(last.name.removeprefix("step-")) == STEPS
        found = {}
        for file in last.glob("*.safetensors"):
            if file.stem != "random":
                found |= {f"{file.stem}/{key}": value for key, value in load_file(file).items()}
        return found


@pytest.mark.parametrize("target", CASES)
def test_a_killed_run_goes_on_with_the_same_bits(target: str, tmp_path: Path, events_dir: Path) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    runs = Runs(tmp_path, target, events_dir)
    runs.finish(*runs.named("unbroken"))
    process = runs.start(*runs.named("killed"))
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if (tmp_path / "runs").glob("*killed*") and _logged(runs) >= 5:
            break
        time.sleep(0.02)
    process.kill()
    process.communicate()
    runs.finish("resume", str(runs.path("killed")))
    assert runs.losses("killed") == runs.losses("unbroken")
    ours, theirs = runs.kept("killed"), runs.kept("unbroken")
    assert ours.keys() == theirs.keys()
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


def _logged(runs: Runs) -> int:
    try:
        return len(runs.losses("killed"))
    except (StopIteration, OSError, ValueError):
        return 0
