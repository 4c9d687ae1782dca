"""Data that several tests read: a small simulated set, made once a test process and never written to."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # read when Triton is imported, which any test may be the first to do

from stoker.recipes.icecube.simulate import simulate


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or leaves anything in the cache or the records of the person who runs it."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("STOKER_CACHE", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A disk of the size that the test's parameter names, to be filled up; needs the right to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def events_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 events in four files; read only."""
    folder = tmp_path_factory.mktemp("events") / "set"
    simulate(folder, num_events=600, num_files=4, seed=7)
    return folder


@pytest.fixture
def own_events(events_dir: Path, tmp_path: Path) -> Path:
    """A copy of the events that a test may damage."""
    return Path(shutil.copytree(events_dir, tmp_path / "own"))
