"""`stoker tune` for real: trials in processes of their own, on loops whose best settings are known."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SMALL, Stoker, slow  # type: ignore[import-not-found]
from ruamel.yaml import YAML

from stoker.launch.targets import resolve_target
from stoker.tune.stored import Stored, keep

# A step sleeps for as long as its settings say, and does not fit above a size: what is best is known beforehand.
LOOP = """
import time
import torch
import stoker

print("imported")

model = torch.nn.Linear(4, 1)

def make(step_ms=20, size=4, kind=torch.float32):
    print("making", end="")

    def step(batch):
        if size > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        time.sleep(step_ms / 1e3)
        model(batch).sum().backward()

    return stoker.Probe([torch.ones(size, 4)] * 20, step, model)

loop = stoker.Tunable(make, {"step_ms": (20, 5, 40), "size": (4, 8, 16), "kind": (torch.float32,)}, name="sleeper")
"""


@pytest.fixture
def loop(tmp_path: Path) -> str:
    (tmp_path / "sleeper.py").write_text(LOOP)
    return "sleeper:loop"


def test_a_loop_of_ones_own_is_tuned_and_a_trial_without_memory_is_only_that(stoker: Stoker, loop: str) -> None:
    words = ["--out", "tuned.yaml", "--seconds", "0.3", "--budget", "200s"]
    found = stoker.json("tune", loop, *words)
    assert found["chosen"] == {"step_ms": 5, "size": 8}
    assert found["samples_per_s"]["ratio"] > 2
    tried = {tuple(one) for decision in found["decisions"] for one in decision["tried"]}
    assert (16, "out of memory") in tried
    assert dict(YAML(typ="safe").load((stoker.folder / "tuned.yaml").read_text())) == found["chosen"]
    record = stoker.json("doctor", "--record")
    assert any(row[0] == "tune" for row in record)


def test_what_exists_and_what_makes_no_sense_is_refused(stoker: Stoker, loop: str) -> None:
    (stoker.folder / "there.yaml").write_text("mine")
    for words, said in (
        (["--out", "there.yaml"], "nothing is overwritten"),
        (["--out", "a.yaml", "--budget", "soon"], "--budget"),
        (["--out", "a.yaml", "--budget", "2s"], "not enough"),
        (["--out", "a.yaml", "--only", "stepp"], "stages"),
        (["--out", "a.yaml", "--train.lr", "1"], "has no key"),
        (["--out", "a.yaml", "--only", "batch"], "is a probe"),
        (["--out", "a.yaml", "--picture", "a.yaml"], "a file of its own"),
        (["--out", "a.yaml", "--picture", "a.png", "--only", "step"], "let --only name lr"),
    ):
        process = stoker.start("tune", loop, *words)
        _, err = process.communicate(timeout=100)
        assert (process.returncode, said in err) == (2, True), err
    assert (stoker.folder / "there.yaml").read_text() == "mine"


def test_rates_of_a_recipe_are_compared_and_written(stoker: Stoker, events_dir: Path) -> None:
    words = [*SMALL, "--data.path", events_dir, "--train.steps", "4"]
    found = stoker.json(
        "tune",
        "icecube",
        *words,
        "--out",
        "tuned.yaml",
        "--only",
        "lr",
        "--seconds",
        "0.5",
        "--picture",
        "rates.png",
        "--budget",
        "40s",
    )
    assert found["rates"]["batches"] >= 8
    config = YAML(typ="safe").load((stoker.folder / "tuned.yaml").read_text())
    assert config["train"]["lr"] == found["chosen"].get("train.lr", 1e-3)
    assert (stoker.folder / "rates.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_found_is_told_and_used_on_request(stoker: Stoker, events_dir: Path) -> None:
    words = [*SMALL, "--data.path", str(events_dir), "--train.steps", "2"]
    config = resolve_target("icecube", words).config

    def train(*more: str) -> tuple[int, str]:
        process = stoker.start("train", "icecube", *words, *more)
        _, err = process.communicate(timeout=200)
        return process.returncode, err

    assert train("--tuned")[0] == 2  # nothing was tuned
    keep(config, Stored({"train.lr": 5e-4, "loader.look_ahead": 4}, "", 2.0, 1.0))
    code, err = train("--run.name", "hinted")
    assert (code, "--tuned takes them" in err) == (0, True), err
    code, err = train("--run.name", "used", "--tuned", "--loader.look_ahead", "2")
    assert (code, "tuned: train.lr=0.0005" in err, "look_ahead=4" in err) == (0, True, False), err
    assert train("--run.name", "another", "--tuned", "--train.optimizer", "sgd")[0] == 2  # another training
    keep(config, Stored({"train.lr": 5e-4}, "of other data", 2.0, 1.0))
    code, err = train("--run.name", "changed", "--tuned")
    assert (code, "data have changed" in err) == (2, True), err


# Memory grows with the square of a sample's length, and the machine has less than the longest take in large pieces: usual
# steps never notice. A piece takes time of its own, so that large ones are worth having.
HUNGRY = """
import time
import torch
from torch import nn

import stoker


@stoker.config
class Data:
    path: str = "walks"


@stoker.config
class Model:
    width: int = 8


class Length(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(1, width)

    def forward(self, batch):
        time.sleep(0.01)
        if batch["offsets"].diff().square().sum() > 250_000:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return torch.segment_reduce(self.layer(batch["x"][:, None]), "sum", offsets=batch["offsets"]).mean(1)


RECIPE = stoker.Recipe(
    name="hungry",
    presets={"small": lambda: stoker.RunConfig(data=Data(), model=Model(), train=stoker.TrainConfig(epochs=1))},
    open_data=lambda run, device: stoker.from_parquet(run.data.path).run_data(validation=0.1),
    build_task=lambda run, facts: stoker.Supervised(
        Length(run.model.width), nn.SmoothL1Loss(reduction="none"), inputs=lambda batch: batch, target="y"
    ),
    result_table=stoker.metrics_table,
)
"""


@slow
def test_pieces_that_only_the_largest_samples_do_not_fit_are_cut_and_survive_an_epoch(stoker: Stoker) -> None:
    (stoker.folder / "hungry.py").write_text(HUNGRY)
    (stoker.folder / "walks").mkdir()
    sizes = np.where(np.arange(2000) % 60 == 0, 200, np.random.default_rng(0).integers(5, 20, 2000))
    table = pa.table({"x": [np.ones(size, np.float32) for size in sizes], "y": sizes.astype(np.float32)})
    pq.write_table(table, stoker.folder / "walks" / "0.parquet")
    words = ["--loader.batch_size", "100", "--loader.micro_cost", "600", "--run.device", "cpu"]
    found = stoker.json(
        "tune", "hungry:RECIPE", *words, "--only", "batch", "--out", "tuned.yaml", "--seconds", "0.5", "--budget", "8m"
    )
    (pieces,) = (one for one in found["decisions"] if one["knob"] == "loader.micro_cost")
    tried = [(size, said) for size, said in pieces["tried"] if "largest" in said]
    assert tried[0] == (2400, "largest samples: out of memory")
    chosen = found["chosen"]["loader.micro_cost"]
    assert 600 < chosen < 2400
    stoker("train", "tuned.yaml", "--trust", "--train.log_every", "1")
    steps = stoker.losses(stoker.only_run())
    assert max(steps) == 18  # of 1,800 samples


@slow
def test_an_interrupt_leaves_the_best_so_far(stoker: Stoker, loop: str) -> None:
    process = stoker.start("tune", loop, "--out", "tuned.yaml", "--seconds", "0.3", "--json")
    deadline = time.monotonic() + 100
    assert process.stderr is not None
    while time.monotonic() < deadline and "step_ms=40" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    assert json.loads(out)["ended"].startswith("Interrupted")
    assert YAML(typ="safe").load((stoker.folder / "tuned.yaml").read_text())["step_ms"] == 5
