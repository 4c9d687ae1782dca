"""What a run survives: kills at any moment, bad samples, damaged checkpoints, requests to stop."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import SMALL, Stoker, slow  # type: ignore[import-not-found]
from safetensors.torch import load_file

NUM_KILLS = 20 if os.environ.get("STOKER_SLOW") else 3


def events_of(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def assert_same_end(first: Path, second: Path) -> None:
    """The same losses at every step and the same final weights, bit for bit."""
    assert Stoker.losses(first) == Stoker.losses(second)
    ours, theirs = checkpoints(first)[-1], checkpoints(second)[-1]
    assert ours.name == theirs.name
    for name in ("model", "optimizer"):
        left, right = (load_file(path / f"{name}.safetensors") for path in (ours, theirs))
        assert left.keys() == right.keys()
        assert all((left[key] == right[key]).all() for key in left)


def own_recipe(folder: Path, name: str, losses: str) -> str:
    """A recipe of one's own in `folder`: IceCube's, with other losses; `usual` are its own."""
    (folder / f"{name}.py").write_text(
        "from dataclasses import replace\n"
        "import torch\n"
        "from stoker.recipes.icecube.recipe import RECIPE as ICECUBE\n"
        "def build_task(run, facts):\n"
        "    task = ICECUBE.build_task(run, facts)\n"
        "    usual = task.losses\n"
        "    def losses(prediction, batch):\n"
        f"        {losses}\n"
        "    task.losses = losses\n"
        "    return task\n"
        f"RECIPE = replace(ICECUBE, name={name!r}, build_task=build_task)\n"
    )
    return f"{name}:RECIPE"


def faulty_recipe(folder: Path, rows: range) -> str:
    """One whose loss is not a number for some rows of the table."""
    bad = f"torch.isin(batch.rows, torch.tensor({list(rows)}))"
    return own_recipe(folder, "faulty", f"return torch.where({bad}, float('nan'), usual(prediction, batch))")


def test_a_recipe_of_ones_own_trains_with_the_same_sums_every_time(stoker: Stoker, events_dir: Path) -> None:
    """Its operations may race where ours do not: a run on a CPU is inside `same_sums`, whatever it trains."""
    checked = "assert torch.are_deterministic_algorithms_enabled(); return usual(prediction, batch)"
    target = own_recipe(stoker.folder, "exact", checked)
    stoker("train", target, "--data.path", events_dir, *SMALL, "--train.steps", "2")


def test_kills_at_random_moments_change_nothing(another_stoker: Callable[[str], Stoker], events_dir: Path) -> None:
    whole, killed = another_stoker("whole"), another_stoker("killed")
    small = [
        *SMALL,
        "--train.epochs",
        "3",
        "--loader.batch_size",
        "16",
        "--train.save_every",
        "2",
        "--train.ema",
        "0.9",
    ]
    words = ["train", "icecube", "--data.path", events_dir, *small]
    whole(*words)
    total = max(whole.losses(whole.only_run()))
    dice = random.Random(1)
    run: Path | None = None
    for number in range(NUM_KILLS):
        # Every other resumed run reads with other threads and another look-ahead.
        changed = ["--loader.threads", "3", "--loader.look_ahead", "2"] if number % 2 else []
        process = killed.start(*words) if run is None else killed.start("resume", run, *changed)
        goal = dice.uniform(0, total * (number + 1) / (NUM_KILLS + 1))
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            run = killed.only_run()
            if len(killed.losses(run)) > goal:
                break
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.communicate()
        assert run is not None
    assert not [event for event in events_of(run, "end") if event["state"] == "finished"]  # type: ignore[arg-type]
    killed("resume", run)
    assert_same_end(whole.only_run(), run)  # type: ignore[arg-type]


def test_one_bad_sample_is_skipped_and_named(stoker: Stoker, own_events: Path) -> None:
    event = pq.read_table(own_events / "train_meta.parquet").column("event_id")[5].as_py()
    stoker("train", faulty_recipe(stoker.folder, range(5, 6)), "--data.path", own_events, *SMALL)
    run = stoker.only_run()
    bad = events_of(run, "bad_step")
    assert len(bad) == 2  # once an epoch
    for one in bad:
        assert event in one["samples"]
        bundle = run / "bad_steps" / one["bundle"]
        samples = load_file(bundle / "samples.safetensors")
        assert samples["ids"].tolist() == one["samples"]
        assert {path.stem for path in bundle.glob("*.safetensors")} >= {"model", "optimizer", "random", "samples"}
    weights = load_file(checkpoints(run)[-1] / "model.safetensors")
    assert all(value.isfinite().all() for value in weights.values())
    assert events_of(run, "end")[-1]["state"] == "finished"
    # The bundle holds the weights before the bad step: those of the checkpoint made just before it, if there is one.
    finite = [loss for loss in stoker.losses(run).values() if isinstance(loss, float)]
    assert finite[-1] < 4.1  # below what a model that knows nothing scores


def test_nothing_but_bad_batches_ends_the_run_within_the_limit(stoker: Stoker, own_events: Path) -> None:
    recipe = faulty_recipe(stoker.folder, range(600))
    process = stoker.start("train", recipe, "--data.path", own_events, *SMALL, "--train.bad_steps", "4")
    _, text = process.communicate()
    assert process.returncode == 1
    assert "4 steps in a row" in text
    run = stoker.only_run()
    assert len(events_of(run, "bad_step")) == 4
    assert str(events_of(run, "bad_step")[-1]["bundle"]) in text
    for path in checkpoints(run):
        assert all(value.isfinite().all() for value in load_file(path / "model.safetensors").values())


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=slow) for one in (signal.SIGINT, signal.SIGUSR1))]
)
def test_a_request_to_stop_saves_and_says_how_to_go_on(
    another_stoker: Callable[[str], Stoker], events_dir: Path, number: signal.Signals
) -> None:
    whole, asked = another_stoker("whole"), another_stoker("asked")
    small = [*SMALL, "--train.save_every", "1000"]
    whole("train", "icecube", "--data.path", events_dir, *small)
    process = asked.start("train", "icecube", "--data.path", events_dir, *small)
    deadline = time.monotonic() + 120
    while len(asked.losses(asked.only_run())) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    run = asked.only_run()
    assert process.returncode == 1
    assert f"stoker resume runs/{run.name}" in text
    assert number.name in text
    assert asked.json("runs")[0]["state"] == "stopped"
    asked("resume", run)
    assert_same_end(whole.only_run(), run)


def stopped_run(stoker: Stoker, events_dir: Path, *words: str) -> Path:
    """A run that was killed in the middle and has checkpoints."""
    run = stoker.kill_after(9, "train", "icecube", "--data.path", events_dir, *SMALL, *words)
    assert len(checkpoints(run)) >= 2
    return run


def fails(stoker: Stoker, *words: object) -> str:
    process = stoker.start(*words)
    _, text = process.communicate()
    assert process.returncode == 2, text
    return str(text)


def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(
    another_stoker: Callable[[str], Stoker], events_dir: Path
) -> None:
    whole, damaged = another_stoker("whole"), another_stoker("damaged")
    whole("train", "icecube", "--data.path", events_dir, *SMALL)
    run = stopped_run(damaged, events_dir)
    last = checkpoints(run)[-1] / "model.safetensors"
    last.write_bytes(last.read_bytes()[:-100])
    process = damaged.start("resume", run)
    _, text = process.communicate()
    assert process.returncode == 0, text
    assert "is damaged" in text
    assert "using the one before it" in text
    assert_same_end(whole.only_run(), run)


def test_what_cannot_be_resumed_is_named(stoker: Stoker, events_dir: Path, tmp_path: Path) -> None:
    run = stopped_run(stoker, events_dir)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lr: 0.001", "lr: 0.01"))
    assert "train.lr was 0.001 and is 0.01" in fails(stoker, "resume", run)
    (run / "config.yaml").write_text(text)
    assert "of another model" in fails(stoker, "resume", run, "--model.width", "32")
    assert "no config.yaml" in fails(stoker, "resume", tmp_path)
    for path in checkpoints(run)[:-1]:
        shutil.rmtree(path)
    kept = checkpoints(run)[0]
    (kept / "optimizer.safetensors").unlink()
    assert "is missing" in fails(stoker, "evaluate", run, "--checkpoint", str(kept))


def test_fork_keeps_weights_and_moments_and_draws_its_schedule(stoker: Stoker, events_dir: Path) -> None:
    run = stopped_run(stoker, events_dir)
    before = load_file(checkpoints(run)[-1] / "model.safetensors")
    process = stoker.start("fork", run, "--train.lr", "1e-9", "--train.weight_decay", "0", "--train.steps", "2",
                           "--train.warmup_steps", "1", "--json")  # fmt: skip
    out, text = process.communicate()
    assert process.returncode == 0, text
    assert "1.00e-09 |" in text
    forked = stoker.folder / json.loads(out)["run"]
    assert forked != run
    assert list(stoker.losses(forked)) == [1, 2]
    after = load_file(checkpoints(forked)[-1] / "model.safetensors")
    assert all((before[name] - after[name]).abs().max() < 1e-6 for name in before)
    counts = load_file(checkpoints(forked)[-1] / "optimizer.safetensors")
    step = next(value for name, value in counts.items() if name.startswith("step/"))
    assert step.item() == json.loads((checkpoints(run)[-1] / "state.json").read_text())["step"] + 2


def test_init_from_takes_weights_only_and_lists_what_does_not_fit(stoker: Stoker, events_dir: Path) -> None:
    run = stopped_run(stoker, events_dir)
    source = checkpoints(run)[-1]
    words = ["train", "icecube", "--data.path", events_dir, *SMALL, "--train.steps", "1"]
    result = stoker.json(*words, "--init-from", source)
    assert (stoker.folder / result["run"]).exists()
    bigger = [*words, "--model.dom_layers", "2", "--init-from", source]
    text = fails(stoker, *bigger)
    assert "missing 4" in text
    assert "dom_layers.1" in text
    process = stoker.start(*bigger, "--allow-partial")
    _, text = process.communicate()
    assert process.returncode == 0, text
    assert "Loading only a part" in text
    assert "no checkpoint" in fails(stoker, *words, "--init-from", "absent")


def test_evaluation_of_any_checkpoint_weights_and_data(stoker: Stoker, events_dir: Path, tmp_path: Path) -> None:
    words = ("--train.ema", "0.9", "--train.norms_every", "5")
    result = stoker.json("train", "icecube", "--data.path", events_dir, *SMALL, *words)
    run = stoker.folder / result["run"]
    norms = events_of(run, "norms")
    assert [event["step"] for event in norms] == list(range(5, len(stoker.losses(run)) + 1, 5))
    assert all(0 < value < 1 for value in norms[-1]["update_ratio"].values())
    assert norms[-1]["gradient"].keys() == norms[-1]["update_ratio"].keys()
    raw, ema = (
        stoker.json("evaluate", run, "--checkpoint", "last", "--weights", kind)["metrics"] for kind in ("raw", "ema")
    )
    assert raw["mean_error_rad"] == pytest.approx(result["metrics"]["mean_error_rad"])
    assert ema["mean_error_rad"] == pytest.approx(result["metrics"]["ema_mean_error_rad"])
    stoker("simulate", tmp_path / "other", "--events", "60", "--files", "2")
    assert "does not matter" in fails(stoker, "evaluate", run, "--train.lr", "1")
    path = checkpoints(run)[-1]
    other = stoker.json(
        "evaluate", run, "--checkpoint", path, "--data.path", tmp_path / "other", "--data.validation", "[2]"
    )
    assert other["metrics"]["line_fit_mean_rad"] != raw["line_fit_mean_rad"]


@pytest.mark.parametrize("small_disk", ["2m"], indirect=True)
def test_a_disk_that_fills_up_while_saving_loses_nothing(stoker: Stoker, events_dir: Path, small_disk: Path) -> None:
    words = [
        *SMALL,
        "--run.folder",
        str(small_disk),
        "--model.width",
        "64",
        "--train.save_every",
        "2",
        "--train.keep_best",
        "9",
    ]
    process = stoker.start("train", "icecube", "--data.path", events_dir, *words)
    _, text = process.communicate()
    assert process.returncode == 1, text
    assert "could not be written" in text or "disk is full" in text
    (run,) = small_disk.iterdir()
    assert all((path / "checksums.json").exists() for path in checkpoints(run))
    assert not list((run / "checkpoints").glob(".*"))
