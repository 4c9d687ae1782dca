"""A run is what it says: judged on its own data, trained by one process at a time, never half an answer, no code unasked."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from conftest import SMALL, Stoker, slow  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file

from stoker.train.checkpoint import _sha256, damage


def ends(stoker: Stoker, *words: object, code: int = 2) -> str:
    process = stoker.start(*words)
    _, text = process.communicate(timeout=200)
    assert process.returncode == code, text
    assert "Traceback" not in text
    return str(text)


def trained(stoker: Stoker, *words: object) -> Path:
    result = stoker.json("train", "icecube", *SMALL, "--train.steps", "6", "--train.warmup_steps", "2", *words)
    return stoker.folder / str(result["run"])


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        event for event in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if event["event"] == kind
    ]


def recheck(checkpoint: Path) -> None:
    """Checksums for what is there now, as someone who knows the format would write them."""
    names = [path.name for path in checkpoint.iterdir() if path.name not in ("checksums.json", "score.json")]
    (checkpoint / "checksums.json").write_text(json.dumps({name: _sha256(checkpoint / name) for name in names}))


def last_checkpoint(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("step-*"))[-1]


def test_a_relative_path_means_what_it_meant_and_other_data_must_be_named(stoker: Stoker, events_dir: Path) -> None:
    shutil.copytree(events_dir, stoker.folder / "set")
    run = trained(stoker, "--data.path", "set")
    assert f"path: {stoker.folder / 'set'}" in (run / "config.yaml").read_text()
    elsewhere = stoker.folder / "elsewhere"
    elsewhere.mkdir()
    stoker("simulate", elsewhere / "set", "--events", "60", "--files", "4")
    other = Stoker(elsewhere)
    here, there = stoker.json("evaluate", run), other.json("evaluate", run)
    assert here["metrics"] == there["metrics"]
    assert there["data"] == str(stoker.folder / "set")
    assert there["checkpoint"] == last_checkpoint(run).name
    report = json.loads(sorted((run / "evaluation").glob("*/report.json"))[-1].read_text())
    assert report["about"]["fingerprint"] == there["fingerprint"]
    assert set(report["about"]) == {"run", "checkpoint", "weights", "data", "fingerprint"}
    shutil.rmtree(stoker.folder / "set")
    (elsewhere / "set").rename(stoker.folder / "set")
    assert "are not those that" in ends(stoker, "evaluate", run)
    assert stoker.json("evaluate", run, "--data.path", stoker.folder / "set")["metrics"] != here["metrics"]


def test_first_runs_at_the_same_time_share_one_set_and_can_all_be_resumed(stoker: Stoker) -> None:
    words = ["train", "icecube", *SMALL, "--data.simulate_events", "200", "--data.simulate_files", "4"]
    processes = [stoker.start(*words, "--train.steps", "8", "--run.name", f"r{number}") for number in range(3)]
    for process in processes:
        _, text = process.communicate(timeout=300)
        assert process.returncode == 0, text
    cache = Path(os.environ["STOKER_CACHE"])
    assert len([path for path in (cache / "simulated").iterdir() if path.is_dir()]) == 1
    assert len([path for path in (cache / "packed").iterdir() if path.is_dir()]) == 1
    prints = {events_of(run, "start")[0]["data"]["fingerprint"] for run in (stoker.folder / "runs").iterdir()}
    assert len(prints) == 1


def test_one_process_at_a_time_trains_a_run(stoker: Stoker, events_dir: Path) -> None:
    words = ["train", "icecube", "--data.path", events_dir, *SMALL, "--train.epochs", "60"]
    process = stoker.start(*words)
    while len(stoker.losses(stoker.only_run())) < 4 and process.poll() is None:
        time.sleep(0.02)
    run = stoker.only_run()
    assert f"another process (process {process.pid} on" in ends(stoker, "resume", run)
    process.kill()
    process.communicate()
    resumed = stoker.start("resume", run)
    before = len(stoker.losses(run))
    while len(stoker.losses(run)) <= before and resumed.poll() is None:
        time.sleep(0.02)
    assert resumed.poll() is None, resumed.communicate()
    resumed.kill()
    resumed.communicate()


def test_checkpoints_can_be_read_while_the_run_removes_them(stoker: Stoker, events_dir: Path) -> None:
    words = ["train", "icecube", "--data.path", events_dir, *SMALL, "--train.epochs", "200", "--train.save_every", "1"]
    process = stoker.start(*words)
    while len(stoker.losses(stoker.only_run())) < 4 and process.poll() is None:
        time.sleep(0.02)
    run = stoker.only_run()
    from stoker.launch.build import read_one
    from stoker.runs.folder import RunFolder

    for _ in range(60):
        read_one(RunFolder(run), "last", "min")
    process.kill()
    process.communicate()


def test_a_metric_that_is_not_a_number_is_one_and_loses_nothing(stoker: Stoker, events_dir: Path) -> None:
    (stoker.folder / "own.py").write_text(
        "from dataclasses import replace\n"
        "from stoker.recipes.icecube.recipe import RECIPE as ICECUBE\n"
        "def build_task(run, facts):\n"
        "    task = ICECUBE.build_task(run, facts)\n"
        "    summarise = task.summarise\n"
        "    task.summarise = lambda scores: {**summarise(scores), 'mean_error_rad': float('nan')}\n"
        "    return task\n"
        "RECIPE = replace(ICECUBE, name='own', build_task=build_task)\n"
    )
    words = ["--data.path", events_dir, *SMALL, "--train.steps", "8", "--train.evaluate_every", "4"]
    result = stoker.json("train", "own:RECIPE", *words)
    run = stoker.folder / result["run"]
    assert result["metrics"]["mean_error_rad"] == "nan"
    assert last_checkpoint(run).name == "step-00000008"
    assert json.loads((last_checkpoint(run) / "score.json").read_text()) == {"score": "nan"}
    (listed,) = stoker.json("runs")
    assert (listed["state"], listed["best"]) == ("finished", None)
    assert "nan" in stoker("evaluate", run)
    weights = load_file(last_checkpoint(run) / "model.safetensors")
    spoilt = {name: torch.full_like(value, float("nan")) for name, value in weights.items()}
    save_file(spoilt, last_checkpoint(run) / "model.safetensors")
    recheck(last_checkpoint(run))
    assert "nan" in stoker("evaluate", run, "--checkpoint", "last")


def test_a_run_killed_while_it_is_judged_is_judged_when_it_goes_on(
    another_stoker: Callable[[str], Stoker], events_dir: Path
) -> None:
    slow = (
        "import os, signal, time\n"
        "from dataclasses import replace\n"
        "from stoker.recipes.icecube.recipe import RECIPE as ICECUBE\n"
        "def build_task(run, facts):\n"
        "    task = ICECUBE.build_task(run, facts)\n"
        "    summarise = task.summarise\n"
        "    def killed(scores):\n"
        "        rehearsed = len(scores['error_rad']) == 2\n"
        "        if os.environ.get('DIE') and not rehearsed: time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return summarise(scores)\n"
        "    task.summarise = killed\n"
        "    return task\n"
        "RECIPE = replace(ICECUBE, name='own', build_task=build_task)\n"
    )
    whole, cut = another_stoker("whole"), another_stoker("cut")
    for stoker in (whole, cut):
        (stoker.folder / "own.py").write_text(slow)
    words = ["train", "own:RECIPE", "--data.path", str(events_dir), *SMALL, "--train.evaluate_every", "4"]
    words += ["--train.steps", "8"]
    whole(*words)
    died = subprocess.run(
        [sys.executable, "-m", "stoker", *words],
        cwd=cut.folder,
        env=cut.environment | {"DIE": "1"},
        capture_output=True,
    )
    assert died.returncode == -signal.SIGKILL
    run = cut.only_run()
    assert last_checkpoint(run).name == "step-00000004"
    cut("resume", run)
    assert cut.losses(run) == whole.losses(whole.only_run())
    ours, theirs = (
        [(event["step"], event["score"]) for event in events_of(one, "evaluation")] for one in (run, whole.only_run())
    )
    assert ours == theirs


def test_an_evaluation_that_is_killed_leaves_no_folder(stoker: Stoker, events_dir: Path) -> None:
    run = trained(stoker, "--data.path", events_dir)
    process = stoker.start("evaluate", run)
    folder = run / "evaluation"
    while not (folder.exists() and any(folder.iterdir())) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert not [path for path in folder.iterdir() if not path.name.startswith(".")]
    stoker("evaluate", run)
    (whole,) = (path for path in folder.iterdir() if not path.name.startswith("."))
    assert (whole / "report.md").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["position"].update(consumed=-7), "consumed"),
        (lambda state: state.update(step=10**12), "cannot be"),
        pytest.param(lambda state: state["position"].update(consumed=10**6), "cannot be", marks=slow),
        pytest.param(lambda state: state.update(meter={"results": [[1.0]], "samples": []}), "meter", marks=slow),
        pytest.param(lambda state: state.pop("position"), "position", marks=slow),
    ],
)
def test_a_state_that_cannot_be_is_refused_though_its_checksums_are_right(
    kept: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    for checkpoint in (run / "checkpoints").glob("step-*"):
        state = json.loads((checkpoint / "state.json").read_text())
        change(state)
        (checkpoint / "state.json").write_text(json.dumps(state))
        recheck(checkpoint)
    process = Stoker(tmp_path).start("resume", run)
    _, text = process.communicate(timeout=100)
    assert words in text, text
    assert "Traceback" not in text
    if process.returncode == 0:  # no checkpoint is left that could be used: from the beginning, and said so
        assert "starting it from the beginning" in text
    else:
        assert process.returncode == 2


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, events_dir: Path) -> Path:
    """A run that was killed in the middle; read only."""
    folder = tmp_path_factory.mktemp("kept")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    return Stoker(folder).kill_after(6, "train", "icecube", "--data.path", events_dir, *SMALL)


def test_checksums_that_are_none_mark_a_checkpoint_as_damaged(kept: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    last = last_checkpoint(run)
    assert damage(last) is None
    for content in ("[]", "{}", '"text"', '{"model.safetensors": 3}', "not json"):
        (last / "checksums.json").write_text(content)
        assert damage(last), content
    text = ends(Stoker(tmp_path), "resume", run, code=0)
    assert "is damaged" in text


BAD_LINES = (b"null", b"{}", b"[1]", b"\xff\xfe", b'{"event": "step"}', b'{"event": 3}', b'{"event": "end"}',
             b'{"event": "evaluation", "metric": 7, "score": "nan"}', b'{"event": "start", "data": 5}')  # fmt: skip


def test_bad_lines_hide_no_run_and_keep_none_from_going_on(kept: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(kept, tmp_path / "runs" / "spoilt"))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"".join(b"\n" + line + b"\n" for line in BAD_LINES))
    stoker = Stoker(tmp_path)
    assert [one["name"] for one in stoker.json("runs")] == ["spoilt"]
    stoker("resume", run)


OWN = "from stoker.recipes.icecube.recipe import RECIPE\nopen('executed', 'w').close()\n"


def test_code_that_a_run_names_is_not_executed_unasked(stoker: Stoker, events_dir: Path, tmp_path: Path) -> None:
    mine = stoker.folder / "mine"
    mine.mkdir()
    (mine / "own.py").write_text(OWN)
    author = Stoker(mine)
    result = author.json("train", "own:RECIPE", "--data.path", events_dir, *SMALL, "--train.steps", "3")
    run = mine / result["run"]
    # From another directory, with what the same user ran before: found and used.
    stoker("evaluate", run)
    # Changed code, and the same run at a stranger's: named, and not executed.
    (mine / "own.py").write_text(OWN + "# changed\n")
    (mine / "executed").unlink()
    text = ends(author, "evaluate", run)
    assert str(mine / "own.py") in text
    assert "--trust" in text
    (mine / "own.py").write_text(OWN)
    os.environ["XDG_STATE_HOME"] = str(tmp_path / "stranger")
    for words in (["evaluate", run], ["resume", run], ["train", run / "config.yaml"], ["config", run / "config.yaml"]):
        assert "--trust" in ends(author, *words)
    assert not (mine / "executed").exists()
    author("evaluate", run, "--trust")
    author("evaluate", run)  # remembered


def test_secrets_are_used_and_not_written_down(stoker: Stoker, events_dir: Path) -> None:
    (stoker.folder / "own.py").write_text(
        "from dataclasses import replace\n"
        "from stoker.settings import config\n"
        "from stoker.recipes.icecube.data import IceCubeData\n"
        "from stoker.recipes.icecube.recipe import RECIPE as ICECUBE, demo\n"
        "@config\n"
        "class Data(IceCubeData):\n"
        "    api_key: str = ''\n"
        "def own():\n"
        "    return replace(demo(), data=Data())\n"
        "def open_data(run, device):\n"
        "    assert run.data.api_key == 'hunter2', run.data.api_key\n"
        "    return ICECUBE.open_data(run, device)\n"
        "RECIPE = replace(ICECUBE, name='own', presets={'own': own}, open_data=open_data)\n"
    )
    words = ["--data.path", events_dir, *SMALL, "--train.steps", "3"]
    for secret in (["--data.api_key", "hunter2"], ["--data.api_key=hunter2"]):
        result = stoker.json("train", "own:RECIPE", *words, *secret)
    run = stoker.folder / result["run"]
    for path in run.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes(), path
    assert "data.api_key is a secret" in ends(stoker, "evaluate", run)
    stoker("evaluate", run, "--data.api_key", "hunter2")


def test_places_that_cannot_be_used_get_a_sentence(stoker: Stoker, events_dir: Path, tmp_path: Path) -> None:
    run = trained(stoker, "--data.path", events_dir)
    (tmp_path / "file").write_text("")
    assert "is a file" in ends(stoker, "train", "icecube", "--run.folder", tmp_path / "file")
    out = tmp_path / "file" / "out.csv"
    assert "file" in ends(stoker, "predict", run, "--data", events_dir, "--out", out, code=1)
    for text, words in (("recipe: ':'\n", "no recipe"), ("a: &x [*x]\nrecipe: icecube\n", "refers to itself"),
                        ("recipe: icecube\nx: " + "[" * 3000 + "]" * 3000, "deeply"), ("train: {lr: .inf}\nrecipe: icecube",
                        "finite")):  # fmt: skip
        (tmp_path / "bad.yaml").write_text(text)
        assert words in ends(stoker, "train", tmp_path / "bad.yaml")


def test_a_closed_pipe_is_no_error(stoker: Stoker) -> None:
    done = subprocess.run(
        f"{sys.executable} -m stoker config icecube | head -1; exit ${{PIPESTATUS[0]}}", shell=True,
        executable="/bin/bash", cwd=stoker.folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_a_read_only_run_is_evaluated_and_what_cannot_be_written_is_said(
    stoker: Stoker, events_dir: Path, tmp_path: Path
) -> None:
    run = trained(stoker, "--data.path", events_dir)
    place = tmp_path / "readonly"
    place.mkdir()
    mounted = subprocess.run(["mount", "--bind", run.parent, place], capture_output=True)
    if mounted.returncode or subprocess.run(["mount", "-o", "remount,ro,bind", place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        process = stoker.start("evaluate", place / run.name, "--json")
        out, text = process.communicate(timeout=100)
        assert process.returncode == 0, text
        assert json.loads(out)["metrics"]["mean_error_rad"] > 0
        assert "cannot be written" in text
        assert "Nothing can be written" in ends(stoker, "resume", place / run.name)
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_runs_are_judged_by_the_weights_that_their_tables_name(stoker: Stoker, events_dir: Path) -> None:
    words = [
        "--data.path",
        events_dir,
        *SMALL,
        "--train.steps",
        "8",
        "--train.ema",
        "0.9",
        "--train.evaluate_every",
        "4",
    ]
    text = stoker("train", "icecube", *words)
    run = stoker.only_run()
    assert "model, averaged weights" in text
    assert "model, raw weights" in text
    evaluations = events_of(run, "evaluation")
    (listed,) = stoker.json("runs")
    assert listed["best"] == min(event["metrics"]["ema_mean_error_rad"] for event in evaluations)
    assert "model, averaged weights" in stoker("evaluate", run)
    assert "model, raw weights" in stoker("evaluate", run, "--weights", "raw")


def test_moments_of_adamw_are_not_taken_for_those_of_lamb(stoker: Stoker, events_dir: Path) -> None:
    run = trained(stoker, "--data.path", events_dir)
    words = ["--train.optimizer", "lamb", "--train.steps", "2", "--train.warmup_steps", "1"]
    result = stoker.json("fork", run, *words)
    forked = stoker.folder / result["run"]
    assert "(AdamW) are of another optimizer: those of Lamb start anew" in (forked / "log.txt").read_text()
    moments = load_file(last_checkpoint(forked) / "optimizer.safetensors")
    assert next(value for name, value in moments.items() if name.startswith("step/")).item() == 2


def test_what_settings_cannot_mean_together_is_said(stoker: Stoker, events_dir: Path) -> None:
    words = ["train", "icecube", "--data.path", events_dir, *SMALL, "--train.epochs", "1"]
    process = stoker.start(*words, "--train.steps", "900", "--train.warmup_steps", "50", "--loader.batch_size", "1000")
    text = process.communicate(timeout=100)[1]
    assert "train.steps is 900, and 1 epoch(s) have about 1" in text
    assert "A step would take 1,000 samples, and there are 450" in text
    process = stoker.start(*words, "--train.warmup_steps", "50")
    assert "The warm-up of 50 steps is as long as the run" in process.communicate(timeout=100)[1]


def test_a_meta_column_of_words_is_named(stoker: Stoker, events_dir: Path) -> None:
    shutil.copytree(events_dir, stoker.folder / "set")
    meta = stoker.folder / "set" / "train_meta.parquet"
    table = pq.read_table(meta)
    names = table.column("batch_id").cast("string")
    pq.write_table(table.set_column(table.schema.get_field_index("batch_id"), "batch_id", names), meta)
    assert "batch_id" in ends(stoker, "train", "icecube", "--data.path", stoker.folder / "set")


def test_the_code_that_was_looked_at_is_the_code_that_runs(stoker: Stoker, events_dir: Path) -> None:
    """Also where the trusted folder stands on Python's path already, behind a stranger's directory."""
    mine, theirs = stoker.folder / "mine", stoker.folder / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
    (mine / "own.py").write_text("from stoker.recipes.icecube.recipe import RECIPE\n")
    (theirs / "own.py").write_text(OWN)
    run = (
        mine / Stoker(mine).json("train", "own:RECIPE", "--data.path", events_dir, *SMALL, "--train.steps", "3")["run"]
    )
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(mine)]))
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "evaluate", str(run)], cwd=theirs, env=stoker.environment | {"PYTHONPATH": path},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (theirs / "executed").exists()


def test_training_goes_on_when_nobody_reads_what_it_says(stoker: Stoker, events_dir: Path) -> None:
    words = " ".join(map(str, ["train", "icecube", "--data.path", events_dir, *SMALL, "--train.steps", "8"]))
    done = subprocess.run(
        f"({sys.executable} -m stoker {words.replace('[4]', chr(39) + '[4]' + chr(39))} 2>&1; echo $? > code) | head -2",
        shell=True, cwd=stoker.folder, env=stoker.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert (stoker.folder / "code").read_text().strip() == "0"
    assert events_of(stoker.only_run(), "end")[-1]["state"] == "finished"


def test_closed_streams_and_terminals_without_letters_are_no_errors(stoker: Stoker) -> None:
    for command, code in (
        ("runs >&-", 0),
        ("config icecube 2>&-", 0),
        ("config nosuch >&-", 2),
        ("config nosuch 2>&-", 2),
    ):
        done = subprocess.run(
            f"{sys.executable} -m stoker {command}", shell=True, cwd=stoker.folder, capture_output=True, text=True
        )
        assert done.returncode == code, (command, done.stderr)
        assert "Traceback" not in done.stderr
        if command == "config nosuch 2>&-":
            assert done.stdout == ""
    (stoker.folder / "rü").mkdir()
    ascii_only = stoker.environment | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "stoker", "runs", "rü"],
        cwd=stoker.folder,
        env=ascii_only,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_no_validation_sample_left_is_said_and_a_late_quarantine_is_written_down(
    stoker: Stoker, own_events: Path
) -> None:
    path = own_events / "train" / "batch_2.parquet"
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half : half + 200] = bytes(byte ^ 0xFF for byte in content[half : half + 200])
    path.write_bytes(content)
    small = [word for word in SMALL if word not in ("--data.validation", "[4]")]
    words = ["train", "icecube", "--data.path", own_events, *small, "--data.mode", "direct", "--train.steps", "4"]
    words += ["--loader.bad_shards", "quarantine", "--data.validation"]
    text = ends(stoker, *words, "[2]")
    assert "Not one of the 150 samples to judge could be read" in text
    result = stoker.json(*words, "[2, 4]", "--run.name", "second")
    run = stoker.folder / result["run"]
    assert [event["name"] for event in events_of(run, "left_out")] == ["train/batch_2.parquet"]
    assert result["metrics"]["samples"] == 150


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "icecube", "--run.seed", str(2**64)], "run.seed"),
        (["train", "icecube", "--init-from", "."], "is no checkpoint"),
        (["train", "date.yaml"], "put it in quotes"),
    ],
)
def test_odd_values_get_a_sentence(stoker: Stoker, words: list[str], part: str) -> None:
    (stoker.folder / "date.yaml").write_text("recipe: icecube\nrun: {name: 2024-01-01}\n")
    assert part in ends(stoker, *words)


def test_bad_numbers_in_the_environment_and_a_cache_that_is_none_are_named(
    stoker: Stoker, events_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["pack", "icecube", events_dir, stoker.folder / "out"]
    monkeypatch.setenv("STOKER_CACHE", "/dev/null")
    assert "STOKER_CACHE is /dev/null" in ends(stoker, *words)
    monkeypatch.setenv("STOKER_CACHE", str(stoker.folder / "cache"))
    for name, value in (("ID", "x"), ("COUNT", "2"), ("MIN", "3")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert "SLURM_ARRAY_TASK_ID is 'x'" in ends(stoker, *words)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert "number 4 of 2" in ends(stoker, *words)
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert stoker.json(*words)["state"].startswith("other ranks")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert stoker.json(*words)["samples"] == 600
