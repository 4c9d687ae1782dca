import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SMALL, Stoker  # type: ignore[import-not-found]


def test_help_lists_the_commands_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from stoker import cli\n"
        "try: cli.run(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'pyarrow', 'numpy'} & set(sys.modules), 'a heavy module was imported'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for command in ("simulate", "train", "resume", "evaluate", "runs", "config"):
        assert command in done.stdout


def test_runs_are_listed_without_importing_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from stoker import cli; cli.run(['runs']); assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_train_evaluate_and_list(stoker: Stoker, events_dir: Path) -> None:
    result = stoker.json("train", "icecube", "--data.path", events_dir, *SMALL, "--run.name", "first")
    run = stoker.folder / result["run"]
    assert run.name.startswith("icecube-")
    assert run.name.endswith("-first")
    assert {"config.yaml", "events.jsonl", "environment.json", "log.txt", "checkpoints"} <= {
        p.name for p in run.iterdir()
    }
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"]
    evaluated = stoker.json("evaluate", run, "--checkpoint", "last")
    assert evaluated["metrics"] == pytest.approx(result["metrics"])
    (listed,) = stoker.json("runs")
    assert (listed["state"], listed["name"]) == ("finished", run.name)
    assert "angular error" in stoker("evaluate", run)
    # The split follows files: no event of the held-out file was trained on.
    start = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    assert start["data"]["split"] == {"by": "files", "validation": ["train/batch_4.parquet"]}
    assert (start["data"]["training"], start["data"]["validation"]) == (450, 150)


def test_a_saved_configuration_is_a_target(stoker: Stoker, events_dir: Path) -> None:
    first = stoker.json("train", "icecube", "--data.path", events_dir, *SMALL, "--train.steps", "2")
    saved = stoker.folder / first["run"] / "config.yaml"
    again = stoker.json("train", saved)
    assert stoker.losses(stoker.folder / first["run"]) == stoker.losses(stoker.folder / again["run"])
    origins = stoker.json("config", saved, "--train.lr", "1e-4")
    assert (origins["train.lr"]["value"], origins["train.lr"]["origin"]) == (1e-4, "the command line")
    assert origins["train.steps"]["origin"].startswith("the file")


def test_a_killed_run_resumes_with_the_same_losses(another_stoker: Callable[[str], Stoker], events_dir: Path) -> None:
    whole, killed = another_stoker("whole"), another_stoker("killed")
    words = ("train", "icecube", "--data.path", events_dir, *SMALL)
    whole(*words)
    run = killed.kill_after(7, *words)
    assert killed.json("runs")[0]["state"] == "killed"
    killed("resume", run)
    assert killed.losses(run) == whole.losses(whole.only_run())
    assert killed.json("runs")[0]["state"] == "finished"
    process = killed.start("resume", run)
    assert "finished" in process.communicate()[1]
    assert process.returncode == 2


def test_a_recipe_of_the_user_s_own(stoker: Stoker, events_dir: Path) -> None:
    (stoker.folder / "mine.py").write_text(
        "import dataclasses\n"
        "from pathlib import Path\n"
        "from stoker.recipes.icecube.recipe import RECIPE, IceCubeData, demo\n"
        "def small():\n"
        f"    data = IceCubeData(path=Path({str(events_dir)!r}), validation=(4,))\n"
        "    return dataclasses.replace(demo(), recipe='mine:OWN', data=data)\n"
        "OWN = dataclasses.replace(RECIPE, name='mine:OWN', presets={'small': small})\n"
    )
    result = stoker.json("train", "mine:OWN:small", "--train.steps", "2", "--loader.batch_size", "16")
    assert stoker.json("evaluate", result["run"])["metrics"]["mean_error_rad"] > 0


def test_a_piped_command_prints_plain_lines(stoker: Stoker, tmp_path: Path) -> None:
    process = stoker.start("simulate", tmp_path / "set", "--events", "50", "--files", "1")
    out, err = process.communicate()
    assert process.returncode == 0
    assert "\x1b" not in out + err
