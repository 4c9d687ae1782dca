"""The installed command as a user runs it: in a process of its own, in a directory of its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from stoker.runs.events import read_events
from stoker.runs.schema import Step

SMALL = [
    "--model.width",
    "16",
    "--model.heads",
    "2",
    "--model.dom_layers",
    "1",
    "--loader.batch_size",
    "32",
    "--train.epochs",
    "2",
    "--train.log_every",
    "1",
    "--train.save_every",
    "3",
    "--train.warmup_steps",
    "5",
    "--data.validation",
    "[4]",
    "--run.device",
    "cpu",
]


SLOW = bool(os.environ.get("STOKER_SLOW"))
# What would take the gate beyond its twenty minutes: mostly further cases of what it tries once, on more ranks or with other
# data, and trainings of minutes. `make test-slow` runs them.
slow = pytest.mark.skipif(not SLOW, reason="takes longer than the gate has; make test-slow runs it")


@dataclass(frozen=True)
class Stoker:
    """Runs `stoker` and reads what it leaves."""

    folder: Path

    def start(self, *words: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "stoker", *map(str, words)]
        return subprocess.Popen(
            command, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment
        )

    def __call__(self, *words: object) -> str:
        process = self.start(*words)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1"}

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json"))

    def kill_after(self, events: int, *words: object) -> Path:
        """Starts a run and kills all of it (-9) once it has logged that many steps; returns its folder."""
        process = self.start(*words)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            if len(self.losses(self.only_run())) >= events:
                break
            time.sleep(0.01)
        assert process.poll() is None, process.communicate()
        for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with suppress(psutil.NoSuchProcess):  # a rank ended by itself, or another one was its parent
                one.kill()
        process.communicate()
        run = self.only_run()
        assert run is not None
        return run

    def only_run(self) -> Path | None:
        return next(iter((self.folder / "runs").glob("*")), None) if (self.folder / "runs").exists() else None

    @staticmethod
    def losses(run: Path | None) -> dict[int, float]:
        """The loss of every step; of a step that was repeated after a restart, the later one."""
        if run is None or not (run / "events.jsonl").exists():
            return {}
        return {event.step: event.loss for event in read_events(run / "events.jsonl", Step)}


@pytest.fixture
def stoker(tmp_path: Path) -> Stoker:
    return Stoker(tmp_path)


@pytest.fixture
def another_stoker(tmp_path: Path) -> Callable[[str], Stoker]:
    def make(name: str) -> Stoker:
        (tmp_path / name).mkdir()
        return Stoker(tmp_path / name)

    return make
