"""`stoker pack` as a user runs it, and as an unkind machine kills it."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from conftest import SMALL, Stoker  # type: ignore[import-not-found]

from stoker.recipes.icecube.simulate import simulate


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_pack_killed_at_random_moments_is_the_same_byte_for_byte(stoker: Stoker, tmp_path: Path) -> None:
    source = tmp_path / "many"
    simulate(source, num_events=1500, num_files=30, seed=1)
    stoker("pack", "icecube", source, "whole", "--threads", "1")
    begin = time.monotonic()
    shutil.copytree(tmp_path / "whole", tmp_path / "kept")
    shutil.rmtree(tmp_path / "whole")
    stoker("pack", "icecube", source, "whole", "--threads", "1")
    usual_s = time.monotonic() - begin
    dice = random.Random(0)
    for _ in range(10 if os.environ.get("STOKER_SLOW") else 3):
        process = stoker.start("pack", "icecube", source, "killed", "--threads", "1")
        time.sleep(usual_s * dice.uniform(0.4, 1.0))
        process.kill()
        process.communicate()
        if (tmp_path / "killed").exists():  # finished before the kill: begin again, kills must count
            shutil.rmtree(tmp_path / "killed")
    stoker("pack", "icecube", source, "killed", "--threads", "1")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "kept")
    assert not list(tmp_path.glob(".killed*"))


def test_a_packed_set_trains_to_the_same_losses_as_the_cache_s_own(
    another_stoker: Callable[[str], Stoker], events_dir: Path, tmp_path: Path
) -> None:
    first, second = another_stoker("first"), another_stoker("second")
    result = first.json("pack", "icecube", events_dir, tmp_path / "store", "--verify")
    assert result["samples"] == 600
    assert result["values_verified"] == 4 * result["rows"]
    first("train", "icecube", "--data.path", tmp_path / "store", *SMALL)
    second("train", "icecube", "--data.path", events_dir, *SMALL, "--loader.threads", "4", "--loader.look_ahead", "2")
    assert first.losses(first.only_run()) == second.losses(second.only_run())


def test_steps_by_cost_see_every_sample_and_end_with_an_evaluation(stoker: Stoker, events_dir: Path) -> None:
    words = ["--loader.batch_size", "null", "--loader.batch_cost", "4000", "--loader.sample_cost", "300"]
    result = stoker.json(
        "train", "icecube", "--data.path", events_dir, *SMALL, *words, "--train.evaluate_every", "1000"
    )
    run = stoker.folder / result["run"]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    last = [event for event in events if event["event"] == "step"][-1]
    assert (last["epoch"], last["consumed"]) == (1, 450)
    assert result["metrics"]["mean_error_rad"] > 0


def test_micro_batches_by_cost_give_the_same_losses(another_stoker: Callable[[str], Stoker], events_dir: Path) -> None:
    whole, cut = another_stoker("whole"), another_stoker("cut")
    words = ("train", "icecube", "--data.path", events_dir, *SMALL, "--loader.sample_cost", "400", "--train.steps", "4")
    whole(*words)
    cut(*words, "--loader.micro_cost", "1500")
    ours, theirs = cut.losses(cut.only_run()), whole.losses(whole.only_run())
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[step] - theirs[step]) < 1e-4 for step in ours)
