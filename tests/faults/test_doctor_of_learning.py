"""The doctor on planted faults of learning: what keeps a loss from falling is named first; what learns is left alone."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from stoker.cli import run as cli
from stoker.cli.doctor import stop_if_it_cannot_learn
from stoker.doctor import ledger
from stoker.doctor.commands import Diagnosis, further
from stoker.doctor.learning.arms import Trainer, try_rates
from stoker.doctor.learning.facts import Arm, Learning
from stoker.doctor.learning.labels import labels_of, with_others_labels
from stoker.doctor.measure import measure
from stoker.doctor.measured import Measured
from stoker.doctor.rules import diagnose
from stoker.errors import UserError
from stoker.recipes.icecube.table import open_events
from stoker.train.optim import Lamb

sys.path.insert(0, str(Path(__file__).parent))
from planted import habits, learning
from planted.table import LESSONS

SEEN = [case for case in LESSONS if case.tuned]  # the others are for benchmarks/doctor.py --learning


def findings(probe: Any) -> list[Any]:
    found = measure(probe, 1.0, "learning")
    assert not found.troubles
    return diagnose(found)


@pytest.mark.parametrize("case", SEEN, ids=[case.name for case in SEEN])
def test_a_planted_fault_of_learning_is_named(case: Any) -> None:
    """How many batches a look has time for depends on the machine: one that is busy with something else gets more tries."""
    torch.set_num_threads(1)
    for _ in range(3):
        told = findings(case.make(True))
        rules = [one.rule for one in told if case.rule is not None or one.severity != "notice"]
        if rules[:1] == ([] if case.rule is None else [case.rule]):
            break
    assert rules[:1] == ([] if case.rule is None else [case.rule])
    assert case.rule is None or told[0].change


def test_everything_is_put_back() -> None:
    probe = habits.averaging("both")
    model, optimizer, average = probe.model, probe.optimizer, probe.average
    assert isinstance(model, torch.nn.Sequential)
    assert optimizer is not None
    assert average is not None
    for one in (model, average.module):
        one.register_buffer("calls", torch.zeros(()), persistent=False)

    def count(module: Any, inputs: Any, answer: Any) -> None:
        module.calls.add_(1)

    model.register_forward_hook(count)
    probe.step(next(iter(probe.loader)))
    model[1].eval()
    group = optimizer.param_groups[0]

    def state() -> list[Any]:
        numbers = [*model.state_dict().values(), *average.state_dict().values(), model.calls]
        numbers += [one.grad for one in model.parameters()]
        numbers += [value for one in optimizer.state.values() for value in one.values()]
        draws = [torch.random.get_rng_state(), torch.from_numpy(np.random.get_state()[1].copy())]  # noqa: NPY002
        return [*(one.detach().clone() for one in (*numbers, *draws)), random.getstate()]

    before = state()
    findings(probe)
    for one, other in zip(state(), before, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert [one.training for one in model] == [True, False, True, True, True]
    assert optimizer.param_groups[0] is group
    assert len(model._forward_hooks) == 1


def test_a_step_that_raises_is_named() -> None:
    def step(batch: Any) -> None:
        raise ValueError("no such thing")

    found = measure(replace(learning.learns_classes(True), step=step), 1.0, "learning")
    assert found.troubles == ["the step itself: ValueError: no such thing"]


def test_a_loss_that_is_none_is_named() -> None:
    found = measure(replace(learning.learns_classes(True), loss=lambda batch: None), 1.0, "learning")  # type: ignore[arg-type]
    assert "must be one number" in found.troubles[0]


def test_a_batch_without_samples_is_passed_over() -> None:
    probe = learning.learns_classes(True)
    empty = [torch.zeros(0, learning.COLUMNS), torch.zeros(0, dtype=torch.long)]
    found = measure(replace(probe, loader=[empty, *probe.loader]), 1.0, "learning")
    assert found.troubles == []
    assert diagnose(found) == []


def test_rates_are_compared_on_the_same_batches_and_the_range_is_extended() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    batches = [(inputs, inputs.sum(1, keepdim=True)) for inputs in torch.randn(12, 32, 4)]

    def loss(batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(model, loss, lambda parameters, rate: torch.optim.SGD(parameters, lr=rate))
    arms, best, present = try_rates(trainer, batches, 1e-4, rates=(1e-4, 1e-3, 1e-2))
    assert len(arms) > 3  # the loss still fell at the highest rate
    assert best is not None
    assert best.rate > 1e-2
    assert present is not None
    assert present.gain == arms[0].gain  # the same weights, batches and draws
    assert arms[-1].gain < best.gain or arms[-1].is_bad
    noise = [(inputs, torch.randn(32, 1)) for inputs in torch.randn(12, 32, 4)]
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    trainer = Trainer(model, loss, lambda parameters, rate: torch.optim.SGD(parameters, lr=rate))
    assert try_rates(trainer, noise, None)[1] is None  # no decision


def test_rates_of_layers_and_optimizers_of_ours_are_tried_as_they_are() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    made: list[torch.optim.Optimizer] = []

    def loss(batch: Any) -> torch.Tensor:
        return model(batch).square().mean()

    def make(parameters: list[torch.nn.Parameter], rate: float) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:2], "lr": rate / 2}, {"params": parameters[2:], "lr": rate}]
        made.append(Lamb(groups, rate, (0.9, 0.999)))
        return made[-1]

    trainer = Trainer(model, loss, make, clip_norm=0.1)
    losses = trainer.sweep([torch.randn(16, 4)] * 20, [1e-2] * 10 + [2e-2] * 10)
    assert losses[-1] < losses[0]
    assert [group["lr"] for group in made[-1].param_groups] == [1e-2, 2e-2]
    norms = [one.grad.norm() for one in model.parameters() if one.grad is not None]
    assert torch.stack(norms).norm() <= 0.101


def test_a_rate_that_explodes_names_the_layer() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def loss(batch: Any) -> torch.Tensor:
        return (model(batch) ** 4).mean()

    trainer = Trainer(model, loss, lambda parameters, rate: torch.optim.SGD(parameters, lr=rate))
    losses, _, bad = trainer.losses([torch.randn(16, 4)] * 30, 1e3)
    assert bad in dict(model.named_parameters())
    assert len(losses) < 30


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(3, 2), torch.arange(3)),
        [torch.zeros(3, 2), torch.arange(3)],
        {"x": torch.zeros(3, 2), "labels": torch.arange(3)},
        {"inputs": {"a": torch.zeros(3)}, "target": torch.arange(3)},
    ],
)
def test_labels_are_found_and_given_to_others(batch: Any) -> None:
    labels = labels_of(batch)
    assert labels is not None
    assert labels.tolist() == [0, 1, 2]
    other = labels_of(with_others_labels(batch, 1))
    assert other is not None
    assert sorted(other.tolist()) == [0, 1, 2]
    assert type(with_others_labels(batch, 1)) is type(batch)


def test_a_batch_without_labels_is_left_alone() -> None:
    assert labels_of(torch.zeros(3)) is None
    assert with_others_labels({"x": torch.zeros(3)}, 0) is None


def test_a_recipe_is_looked_at_before_it_trains(
    events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["doctor", "icecube", "--only", "learning", "--seconds", "0.2", "--data.path", str(events_dir),
             "--run.device", "cpu", "--model.width", "16", "--model.heads", "2", "--loader.batch_size", "8"]  # fmt: skip
    assert cli([*words, "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert not told["troubles"]
    assert told["learning"]["arms"]
    assert told["learning"]["know_nothing"] > 0
    assert told["learning"]["contents"]["seen"] > 0
    assert told["learning"]["contents"]["twice"] == []
    assert told["samples_per_s"] is None
    assert not (tmp_path / "runs").exists()
    (tmp_path / "bare.py").write_text("import torch, stoker\nprobe = stoker.Probe([torch.ones(4)], print)\n")
    assert cli(["doctor", "bare:probe", "--only", "learning"]) == 2
    assert "has no loss" in capsys.readouterr().err


def test_a_better_rate_is_verified_and_rates_are_drawn(
    events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    words = ["--data.path", str(events_dir), "--run.device", "cpu", "--model.width", "16", "--model.heads", "2",
             "--loader.batch_size", "8", "--train.lr", "1e-7"]  # fmt: skip
    arms = [Arm(rate, gain, 0.01, (1.0, 2.0, 3.0)) for rate, gain in ((1e-3, 0.1), (1e-2, 0.4), (1e-1, 0.2))]
    bad = Arm(1.0, -math.inf, 0.0, (1.0, 2.0, 3.0), "head")
    learnt = Learning(arms=[*arms, bad], best=arms[1], present=Arm(1e-7, 0.0, 0.01, (1.0, 2.0, 3.0)))
    learnt.rate = learnt.configured = 1e-7
    found = Measured(name="icecube", learning=learnt)
    diagnosis = Diagnosis(found, diagnose(found), [])
    assert diagnosis.findings[0].rule == "rate-low"
    assert diagnosis.findings[0].keys == {"train.lr": "0.005"}
    told, refused = further(
        "icecube", words, diagnosis, tmp_path / "new.yaml", 20.0, trusted=False, picture=tmp_path / "a.svg"
    )
    assert refused is None
    assert "train.lr: 1e-07 -> 0.005" in told[1]
    assert told[2].endswith("right.")
    assert [(one.rule, one.measured) for one in ledger.entries()] == [("rate-low", 1.0)]
    assert "there is no folder" in str(further("icecube", [], diagnosis, tmp_path / "no" / "a", None, trusted=False)[1])
    drawn = ElementTree.parse(tmp_path / "a.svg").getroot()
    words_in_it = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"best", "as it is", "x"} <= set(words_in_it)


def picture(seed: int, side: int = 48) -> Any:
    """Soft shapes, as a photograph has them."""
    noise = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(noise, (side, side), mode="bicubic", align_corners=False)
    return (smooth[0].clamp(0, 1) * 255).byte().permute(1, 2, 0).contiguous().numpy()


def test_images_that_are_there_twice_or_cut_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simplejpeg = pytest.importorskip("simplejpeg")
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "set"
    for part, first, count in (("train", 0, 60), ("val", 1000, 20)):
        for number in range(count):
            folder = root / part / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.jpg").write_bytes(simplejpeg.encode_jpeg(picture(first + number), 92))
    (root / "train/class0/copy.jpg").write_bytes((root / "val/class0/4.jpg").read_bytes())
    (root / "train/class1/again.jpg").write_bytes(simplejpeg.encode_jpeg(picture(1007), 70))  # of val/class1/7.jpg
    whole = (root / "train/class0/10.jpg").read_bytes()
    (root / "train/class0/10.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    words = ["doctor", "imagenet:demo", "--only", "learning", "--seconds", "0.1", "--data.path", str(root), "--json",
             "--run.device", "cpu", "--loader.batch_size", "8", "--data.check_labels", "false"]  # fmt: skip
    assert cli(words) == 1
    told = json.loads(capsys.readouterr().out)
    contents = told["learning"]["contents"]
    assert [pair[0].endswith("val/class0/4.jpg") for pair in contents["in_validation"]] == [True]
    assert [[Path(name).name for name in pair] for pair in contents["alike"]] == [["7.jpg", "again.jpg"]]
    assert [Path(name).name for name, _ in contents["broken"]] == ["10.jpg"]
    rules = {one["rule"]: one for one in told["findings"]}
    assert "copy.jpg" in rules["validation-seen"]["evidence"][0]
    assert "10.jpg" in rules["broken"]["evidence"][0]


EDGE = """
from dataclasses import replace
import torch
from stoker.recipes.icecube.recipe import RECIPE as ICECUBE

def build_task(run, facts):
    task = ICECUBE.build_task(run, facts)
    def losses(prediction, batch):
        value, bad = prediction[:, 0], torch.isin(batch.rows, torch.tensor([37, 41]))
        if {forward}:
            return torch.log(torch.where(bad, -1.0 - 0 * value, 2.0 + value))
        return torch.arccos(torch.where(bad, 1.0 + 0 * value, 0.1 * value))  # of one
    task.losses = losses
    return task

RECIPE = replace(ICECUBE, name="edge", build_task=build_task)
"""


@pytest.mark.parametrize(
    ("forward", "operation", "cure"), [(True, "log", "clamp_min"), (False, "Acos", "clamp cosines")]
)
def test_a_bad_step_is_replayed_to_its_samples_and_its_operation(
    events_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    forward: bool,
    operation: str,
    cure: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"edge_{operation.lower()}"
    (tmp_path / f"{name}.py").write_text(EDGE.replace("{forward}", str(forward)))
    small = ["--data.path", str(events_dir), "--run.device", "cpu", "--model.width", "16", "--model.heads", "2",
             "--loader.batch_size", "64", "--train.epochs", "1", "--train.compile", "false"]  # fmt: skip
    assert cli(["train", f"{name}:RECIPE", *small]) == 0
    run = next((tmp_path / "runs").iterdir())
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    capsys.readouterr()
    assert cli(["doctor", str(run), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    one = told["findings"][0]
    bad = [
        event for event in map(json.loads, before[run / "events.jsonl"].splitlines()) if event["event"] == "bad_step"
    ]
    table = open_events(events_dir).columns["id"]
    expected = sorted({int(table[37]), int(table[41])} & set(bad[0]["samples"]))
    assert one["rule"] == "bad-step"
    assert f"sample {', '.join(map(str, expected))} (" in one["sentence"]
    assert any(operation in line for line in one["evidence"])
    assert cure in one["change"]
    if forward:
        assert any(f"{name}.py" in line and "torch.log" in line for line in one["evidence"])
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before


def test_a_run_is_checked_before_it_trains(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[list[str]] = []
    bad = {"rule": "inputs-raw", "of": "learning", "severity": "critical", "sentence": "Raw.", "evidence": ["77,000"],
           "change": "normalise"}  # fmt: skip
    answer = {"findings": [bad], "verdict": "Raw."}

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        return subprocess.CompletedProcess(words, 1, stdout=json.dumps(answer))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UserError, match=r"Not trained: Raw\."):
        stop_if_it_cannot_learn("icecube", ["--train.lr", "1"], trusted=True)
    assert "77,000" in capsys.readouterr().err
    assert asked[0][3:] == [
        "doctor",
        "icecube",
        "--only",
        "learning",
        "--seconds",
        "1",
        "--json",
        "--train.lr",
        "1",
        "--trust",
    ]
    answer["findings"] = [{**bad, "severity": "warning"}, {**bad, "of": "speed"}]
    stop_if_it_cannot_learn("icecube", [], trusted=False)
    monkeypatch.setenv("RANK", "1")
    stop_if_it_cannot_learn("icecube", [], trusted=False)
    assert len(asked) == 2
