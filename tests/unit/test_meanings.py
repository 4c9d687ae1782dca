"""Words of the command line that people expect."""

import json
from pathlib import Path

import pytest

from stoker import cli
from stoker.launch.targets import resolve_target
from stoker.meanings import meanings
from stoker.runs.folder import create_run, open_run


@pytest.mark.parametrize("target", ["icecube:demo", "icecube:deep", "imagenet:rsb-a2"])
def test_nearly_every_key_says_what_it_means(target: str) -> None:
    told = meanings(resolve_target(target, []).config)
    silent = {key for key, words in told.items() if not words}
    assert silent <= {"log.project"}
    assert told["train.precision"] == "bf16 on a GPU; one of auto, bf16, fp16, fp32"
    assert told["train.beta2"] == "at least 0, below 1"
    assert told["train.ema"].endswith("above 0, below 1, or null")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.run(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_keys_and_their_meanings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "train", "icecube", "--help")
    assert code == 0
    assert "lr: 0.001" in out
    assert "highest rate of the schedule; above 0" in out
    _, out, _ = said(capsys, "config", "imagenet", "--json")
    assert json.loads(out)["data.crop"]["meaning"].endswith("one of random, shift")


@pytest.mark.parametrize(("word", "meant"), [("--lr", "train.lr"), ("--batch-size=3", "loader.batch_size"),
                                             ("--learning_rate", "train.lr"), ("--width", "model.width")])  # fmt: skip
def test_a_bare_key_is_answered_with_the_whole_one(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    code, _, err = said(capsys, "train", "icecube", word, "1")
    assert code == 2
    assert f"Did you mean {meant}?" in err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version")[:2] == (0, "stoker 0.1.0\n")


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = create_run(Path("runs"), "icecube", "mine", "recipe: icecube\n")
    assert open_run(Path(run.path.name)).path == run.path
