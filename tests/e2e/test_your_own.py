"""docs/your-own.md, followed to the letter: each example trains, is killed, and goes on as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import Stoker, slow  # type: ignore[import-not-found]

from stoker.recipes.imagenet.draw import draw_set
from stoker.runs.events import read_events
from stoker.runs.schema import Evaluation, OutOfPatience, Step

PAGE = Path(__file__).parents[2] / "docs" / "your-own.md"
BLOCKS = {
    re.match(r"# (\w+)\.py\n", block)[1]: block  # type: ignore[index]
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
}


def make_waves(folder: Path) -> None:
    dice = np.random.default_rng(0)
    (folder / "waves").mkdir()
    for number in range(2):
        sizes = dice.integers(1, 20, 150)
        lists = {name: [dice.normal(size=size).astype(np.float32) for size in sizes] for name in ("time", "height")}
        energy = np.array([np.square(height).sum() for height in lists["height"]], np.float32)
        pq.write_table(pa.table({**lists, "energy": energy}), folder / "waves" / f"{number}.parquet")


def make_pictures(folder: Path) -> None:
    draw_set(folder / "drawn", per_class=12, held_out=1, seed=0)
    (folder / "drawn" / "train").rename(folder / "pictures")


@pytest.mark.parametrize("name", ["waves", "pictures", "loop"])
def test_an_example_has_at_most_40_lines(name: str) -> None:
    assert len(BLOCKS[name].strip().splitlines()) <= 40


@pytest.mark.parametrize(
    ("name", "make", "ranks", "steps"),
    [
        ("waves", make_waves, 2, 120),
        pytest.param("pictures", make_pictures, 1, 12, marks=slow),
        pytest.param("waves", make_waves, 1, 120, marks=slow),
        pytest.param("pictures", make_pictures, 2, 12, marks=slow),
    ],
)
def test_a_recipe_of_one_s_own_survives_a_kill(
    another_stoker: Callable[[str], Stoker], name: str, make: Callable[[Path], None], ranks: int, steps: int
) -> None:
    whole, killed = another_stoker("whole"), another_stoker("killed")
    words = ["train", f"{name}:RECIPE", "--train.log_every", "1", "--train.save_every", "3", "--run.device", "cpu"]
    # Long enough that the kill comes before the end, however late this process looks.
    words += ["--train.steps", str(steps), "--train.epochs", "40", "--loader.batch_size", "30"]
    many = ["--gpus", str(ranks)] if ranks > 1 else []
    for stoker in (whole, killed):
        (stoker.folder / f"{name}.py").write_text(BLOCKS[name])
        make(stoker.folder)
    whole(*words, *many)
    expected = whole.losses(whole.only_run())
    assert list(expected) == list(range(1, steps + 1))
    run = killed.kill_after(5, *words, *many)
    elsewhere = killed.folder / "elsewhere"  # the module is found again from there
    elsewhere.mkdir()
    resumed = Stoker(elsewhere)
    resumed("resume", run.resolve(), *many)
    assert killed.losses(run) == expected


def test_an_own_optimizer_schedule_and_listener_survive_a_kill(another_stoker: Callable[[str], Stoker]) -> None:
    whole, killed = another_stoker("whole"), another_stoker("killed")
    words = ["train", "tuned:RECIPE", "--train.log_every", "1", "--train.save_every", "3", "--run.device", "cpu"]
    # A rate of nothing: no evaluation is better than the first, and nine more are allowed.
    words += ["--train.lr", "1e-30", "--train.epochs", "60", "--loader.batch_size", "30", "--train.patience", "9"]
    for stoker in (whole, killed):
        for name in ("waves", "tuned"):
            (stoker.folder / f"{name}.py").write_text(BLOCKS[name])
        make_waves(stoker.folder)
    heard = whole(*words)
    run = whole.only_run()
    assert run is not None
    judged = list(read_events(run / "events.jsonl", Evaluation))
    assert len(judged) == 10
    assert heard.startswith("".join(f"step {event.step}: {event.score:.4f}\n" for event in judged))
    rates = [event.lr for event in read_events(run / "events.jsonl", Step)]
    assert rates[0] == 1e-30
    assert rates[1] == 1e-30 * 0.1 ** (1 / 600)
    (end,) = read_events(run / "events.jsonl", OutOfPatience)
    assert (end.best_step, end.step) == (10, 100)
    cut = killed.kill_after(40, *words)
    Stoker(killed.folder)("resume", cut)
    assert killed.losses(cut) == whole.losses(run)
    assert list(killed.losses(cut)) == list(range(1, 101))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=slow)])
def test_a_loop_of_one_s_own_survives_a_kill(tmp_path: Path, ranks: int) -> None:
    start = (
        [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else [sys.executable]
    )

    def run(folder: Path, kill_after: int | None = None) -> list[str]:
        folder.mkdir(exist_ok=True)
        (folder / "loop.py").write_text(BLOCKS["loop"])
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*start, "loop.py"], cwd=folder, stdout=subprocess.PIPE, text=True, env=environment,
                                   stderr=subprocess.DEVNULL)  # fmt: skip
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if len(lines) == kill_after:
                for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                    one.send_signal(signal.SIGKILL)
                break
        process.communicate()
        return lines

    expected = run(tmp_path / "whole")
    assert len(expected) == 60
    before = run(tmp_path / "killed", kill_after=27)
    after = run(tmp_path / "killed")
    assert 0 < len(after) <= 34  # it went on a little before the signal reached it
    assert after == expected[-len(after) :]
    assert before == expected[: len(before)]
