"""The image recipe as a user runs it: with no data at all, then with what the run left."""

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import onnx
import pytest
import torch
from conftest import Stoker, slow  # type: ignore[import-not-found]
from safetensors.torch import load_file

from stoker.files import file_lock, write_json
from stoker.recipes.imagenet.draw import CLASSES, draw_set

# The demo, half as large: it must learn all the same.
LESS = ("--data.draw_per_class", "250", "--data.draw_held_out", "30", "--train.epochs", "5", "--run.device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of the demo, and the images that it drew: one for all tests, whichever process they run in."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "imagenet"
    with file_lock(folder.with_name("imagenet.lock")):
        if not (folder / "result.json").exists():
            folder.mkdir()
            patch = pytest.MonkeyPatch()
            patch.setenv("STOKER_CACHE", str(folder / "cache"))
            write_json(folder / "result.json", Stoker(folder).json("train", "imagenet", *LESS))
            patch.undo()
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"]["top1"] > 0.8
    assert result["metrics"]["chance_top1"] == pytest.approx(0.1)
    (drawn,) = (folder / "cache" / "drawn").iterdir()
    return folder / result["run"], drawn


def test_the_run_keeps_its_classes_and_says_what_rate_it_used(trained: tuple[Path, Path]) -> None:
    run, _ = trained
    assert len(json.loads((run / "facts.json").read_text())["classes"]) == 10
    log = (run / "log.txt").read_text()
    assert "learning rate 0.1: 0.1 for 64 samples a step, linear to 64" in log


def test_predictions_of_a_folder_and_of_one_image(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    run, drawn = trained
    told = stoker.json("predict", run, drawn / "val" / "circle", "--out", "answers.csv")
    assert told["images"] == 30
    with (stoker.folder / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    right = sum(row["class_1"] == "circle" for row in rows)
    assert right > 20
    assert sum(float(rows[0][f"chance_{place}"]) for place in range(1, 6)) <= 1.001
    one = drawn / "val" / "circle" / "00000.jpg"
    assert "circle" in stoker("predict", run, one)
    again = stoker.start("predict", run, one, "--out", "answers.csv")
    assert "nothing is overwritten" in again.communicate()[1]
    nothing = stoker.start("predict", run, "absent.jpg")
    assert "no image and no folder" in nothing.communicate()[1]
    assert nothing.returncode == 2


def test_an_export_gives_the_same_answers(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    run, drawn = trained
    told = stoker.json("export", run, "--out", "model.onnx", "--data", drawn / "val")
    assert told["checked_on"] == 16
    assert told["largest_difference"] < 1e-3
    assert (stoker.folder / "model.onnx").stat().st_size > 10_000
    inside = {one.key: one.value for one in onnx.load(stoker.folder / "model.onnx").metadata_props}
    assert json.loads(inside["classes"]) == sorted(CLASSES)
    assert json.loads(inside["mean"]) == [0.485, 0.456, 0.406]
    assert inside["size"] == "48"
    wrong = stoker.start("export", run, "--out", "model.bin", "--data", drawn / "val")
    assert ".onnx" in wrong.communicate()[1]


def test_an_evaluation_names_the_classes_it_confuses(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    run, drawn = trained
    metrics = stoker.json("evaluate", run, "--data.path", drawn)["metrics"]
    (report,) = (run / "evaluation").glob("*/report.json")
    found = json.loads(report.read_text())
    assert found["top1"] == pytest.approx(metrics["top1"])
    assert sum(map(sum, found["confusion"])) == found["images"] == 300
    assert set(found["by_class"]) >= {"circle", "ring"}


def test_a_resumed_run_ends_with_the_same_weights(stoker: Stoker, trained: tuple[Path, Path], tmp_path: Path) -> None:
    """Channels-last weights and their moments, batch norm, averages: all as if nothing had happened."""
    _, drawn = trained
    words = (
        "--data.path",
        drawn,
        "--data.max_per_class",
        "40",
        "--run.device",
        "cpu",
        "--train.epochs",
        "3",
        "--train.ema",
        "0.9",
    )
    words = (
        *words,
        "--train.save_every",
        "4",
        "--data.mixup",
        "0.2",
        "--data.rand_augment",
        "1",
        "--train.log_every",
        "1",
    )
    whole = stoker.folder / stoker.json("train", "imagenet", *words, "--run.name", "whole")["run"]
    cut = stoker.start("train", "imagenet", *words, "--run.name", "cut")
    while not list(stoker.folder.glob("runs/*-cut/checkpoints/step-*")) and cut.poll() is None:
        time.sleep(0.05)
    cut.kill()
    cut.communicate()
    (run,) = stoker.folder.glob("runs/*-cut")
    stoker("resume", run)
    ends = [sorted((one / "checkpoints").glob("step-*"))[-1] for one in (whole, run)]
    for name in ("model", "optimizer", "average"):
        first, second = (load_file(end / f"{name}.safetensors") for end in ends)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    forked = stoker.json("fork", run, "--train.optimizer", "adamw", "--train.lr", "1e-3", "--train.epochs", "1")
    log = (stoker.folder / forked["run"] / "log.txt").read_text()
    assert "of another optimizer: those of AdamW start anew" in log


def test_data_that_changed_are_not_gone_on_with(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    _, drawn = trained
    own = stoker.folder / "own"
    shutil.copytree(drawn, own)
    words = ("--data.path", own, "--data.max_per_class", "20", "--run.device", "cpu", "--data.check_labels", "false")
    process = stoker.start("train", "imagenet", *words, "--train.epochs", "200", "--train.save_every", "1")
    while not list(stoker.folder.glob("runs/*/checkpoints/step-*")) and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    process.communicate()
    (own / "train" / "circle" / "00000.jpg").unlink()
    run = stoker.only_run()
    again = stoker.start("resume", run)
    assert "not those that" in again.communicate()[1]
    assert again.returncode == 2


def test_data_with_other_classes_are_refused(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    run, drawn = trained
    other = stoker.folder / "other"
    for part in ("train", "val"):
        for folder in (drawn / part).iterdir():
            name = "oval" if folder.name == "circle" else folder.name
            (other / part / name).mkdir(parents=True)
            for path in list(folder.iterdir())[:4]:
                (other / part / name / path.name).hardlink_to(path)
    process = stoker.start("evaluate", run, "--data.path", other, "--data.check_labels", "false")
    text = process.communicate()[1]
    assert process.returncode == 2
    assert "do not fit the run" in text
    assert "oval" in text


@slow
def test_two_ranks_judge_every_image_once(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    run, drawn = trained
    alone = stoker.json("evaluate", run, "--data.path", drawn)["metrics"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m"]
    words = ["stoker", "evaluate", str(run), "--data.path", str(drawn), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *words], cwd=stoker.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout[done.stdout.index("{") :])["metrics"]
    for name, value in alone.items():
        assert together[name] == pytest.approx(value, rel=1e-4)


def test_two_ranks_save_the_model_that_they_judged(stoker: Stoker, trained: tuple[Path, Path]) -> None:
    """Batch norm's statistics are of each rank's own images until they are shared."""
    _, drawn = trained
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m"]
    words = [
        "stoker",
        "train",
        "imagenet",
        "--data.path",
        str(drawn),
        "--run.device",
        "cpu",
        "--train.steps",
        "12",
        "--json",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, *words], cwd=stoker.folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    judged = stoker.json("evaluate", stoker.folder / told["run"], "--checkpoint", "last")["metrics"]
    assert judged["validation_loss"] == pytest.approx(told["metrics"]["validation_loss"], rel=1e-4)


def test_presets_say_where_their_accuracy_comes_from(stoker: Stoker) -> None:
    for preset in ("fast", "baseline", "rsb-a2", "cifar10"):
        text = stoker("config", f"imagenet:{preset}")
        assert "# Expected: " in text
        assert "# Departures" in text
    assert "lr_batch: 2048" in stoker("config", "imagenet:rsb-a2")


def test_mistakes_are_named(stoker: Stoker) -> None:
    for words, part in (
        (("train", "imagenet", "--model.name", "resnet5000"), "timm has no model"),
        (("train", "imagenet", "--data.path", "absent"), "does not exist"),
        (("pack", "icecube", "absent", "out", "--short-side", "64"), "Unrecognized options: --short-side"),
        (("pack", "imagenet", "absent", "out", "--keep", "--short-side", "64"), "Use one or the other"),
        (("pack", "imagenet", "absent", "out", "--threads", "0"), "at least one is needed"),
        (("predict", "absent"), "absent"),
    ):
        process = stoker.start(*words)
        _, text = process.communicate()
        assert process.returncode == 2, text
        assert part in text


@slow
def test_fine_tuning_beats_a_beginning_from_nothing(stoker: Stoker) -> None:
    """ResNet-50 that has seen five kinds of pictures learns five others in fewer steps than one that has seen none."""
    draw_set(stoker.folder / "all", per_class=150, held_out=30, seed=3)
    for number, name in enumerate(sorted(CLASSES)):
        for part in ("train", "val"):
            target = stoker.folder / ("first" if number % 2 else "second") / part
            target.mkdir(parents=True, exist_ok=True)
            (stoker.folder / "all" / part / name).rename(target / name)
    words = ["train", "imagenet", "--model.name", "resnet50", "--data.size", "48", "--run.device", "cpu",
             "--loader.batch_size", "32", "--train.optimizer", "adamw", "--train.lr", "1e-3",
             "--train.schedule", "cosine"]  # fmt: skip
    stoker(*words, "--data.path", "first", "--train.epochs", "15", "--run.name", "first")
    (first,) = (stoker.folder / "runs").glob("*-first")
    weights = sorted((first / "checkpoints").iterdir())[-1] / "model.safetensors"
    few = [*words, "--data.path", "second", "--train.epochs", "3", "--train.warmup_steps", "10"]
    scratch = stoker.json(*few, "--run.name", "scratch")["metrics"]["top1"]
    tuned = stoker.json(*few, "--run.name", "tuned", "--model.pretrained", weights)["metrics"]["top1"]
    head = [*few, "--run.name", "head", "--model.pretrained", weights, "--train.freeze", '["!fc"]']
    only_head = stoker.json(*head)["metrics"]["top1"]
    print(f"from nothing {scratch:.3f}, fine-tuned {tuned:.3f}, only the head {only_head:.3f}")
    assert tuned > scratch
    assert only_head > 0.25
