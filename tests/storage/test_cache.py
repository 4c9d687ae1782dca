"""The cache's promises: never above its budget, nothing half-written ever served, whoever is killed when."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from servers import Bucket

from stoker.cli import run as cli
from stoker.data.cache import budget_bytes
from stoker.data.storage.index import Index, Piece, State
from stoker.data.storage.keeping import make_room
from stoker.errors import UserError

SLOW = bool(os.environ.get("STOKER_SLOW"))
FILLER = Path(__file__).parent / "filler.py"
BUDGET = 2_000_000


@pytest.fixture
def packed(events: Path) -> Path:
    return events / "packed"


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_BLOCK_BYTES", str(64 << 10))
    monkeypatch.setenv("STOKER_CACHE_BYTES", str(BUDGET))


def filler(url: str, rank: int, num_ranks: int, *words: str) -> "subprocess.Popen[str]":
    # Below the least that the check asks for: the window of such a small set needs much less.
    code = f"""
import runpy
from stoker.data.storage import orders
orders.AT_LEAST = 0
runpy.run_path({str(FILLER)!r}, None, "__main__")
"""
    command = [sys.executable, "-c", code, url, str(rank), str(num_ranks), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Watched:
    """The bytes of a folder every 10 ms, and the most there ever were."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended, self.most, self.looks = folder, threading.Event(), 0, 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            total = 0
            for where, _, names in os.walk(self._folder):
                for name in names:
                    try:
                        total += (Path(where) / name).lstat().st_size
                    except OSError:
                        continue
            self.most, self.looks = max(self.most, total), self.looks + 1

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_several_ranks_never_exceed_the_budget(
    bucket: Bucket, packed: Path, own_cache: Path, small_budget: None
) -> None:
    ranks = 4 if SLOW else 2
    url = bucket.upload(packed, "budget/packed")
    local = [filler(str(packed), rank, ranks, "--loader.order", "window") for rank in range(ranks)]
    expected = [process.communicate()[0] for process in local]
    with Watched(own_cache) as seen:
        remote = [filler(url, rank, ranks) for rank in range(ranks)]
        answers = [process.communicate() for process in remote]
    assert [out for out, _ in answers] == expected, answers
    assert all("cannot hold" in err for _, err in answers)
    assert seen.looks > 20
    assert BUDGET / 3 < seen.most <= BUDGET


def test_kills_leave_nothing_that_is_not_whole(bucket: Bucket, packed: Path, small_budget: None, capsys: Any) -> None:
    url = bucket.upload(packed, "kills/packed")
    draw = random.Random(7)
    for _ in range(20 if SLOW else 4):
        process = filler(url, 0, 1)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        capsys.readouterr()
        assert cli(["cache", "verify", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["damaged"] == 0
    expected = filler(str(packed), 0, 1, "--loader.order", "window").communicate()[0]
    assert filler(url, 0, 1).communicate()[0] == expected


def test_room_is_made_for_what_is_needed_first(tmp_path: Path) -> None:
    with Index(tmp_path, 1_000_000) as index:
        old, soon, late = (Piece("o", number, 200_000) for number in range(3))
        for piece in (old, soon, late):
            assert index.take([piece]) == [(State.MINE, 0)]
            index.path(piece.name).parent.mkdir(exist_ok=True)
            index.path(piece.name).write_bytes(b"x")
            index.fetched(piece.name, 1)
        new = Piece("n", 0, 500_000)
        assert index.take([new]) == [(State.FULL, 0)]  # all of them are leased
        index.release([late.name], next_use=time.time() + 1000)
        index.release([soon.name], next_use=time.time() + 10)
        index.release([old.name])  # nobody knows when: gone first
        assert index.take([new]) == [(State.MINE, 0)]
        assert not index.path(old.name).exists()
        assert not index.path(late.name).exists()
        assert index.take([soon]) == [(State.HERE, 1)]


def test_two_processes_fetch_a_piece_once(tmp_path: Path) -> None:
    with Index(tmp_path, 10_000_000) as mine, Index(tmp_path, 10_000_000) as theirs:
        piece = Piece("o", 0, 1000)
        assert mine.take([piece]) == [(State.MINE, 0)]
        assert theirs.take([piece]) == [(State.THEIRS, 0)]
        mine.forget(piece.name)
        assert theirs.take([piece]) == [(State.MINE, 0)]
        theirs.close()  # it dies before it is whole
        assert mine.take([piece]) == [(State.MINE, 0)]


@pytest.mark.parametrize(
    ("text", "size"), [("200GB", 200 * 10**9), ("1.5 MiB", 3 << 19), ("5000", 5000), ("2t", 2 * 10**12)]
)
def test_budgets_are_read(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_BYTES", text)
    assert budget_bytes() == size


@pytest.mark.parametrize("text", ["much", "-5GB", "0", "5 apples"])
def test_budgets_that_are_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_BYTES", text)
    with pytest.raises(UserError, match="STOKER_CACHE_BYTES"):
        budget_bytes()


def test_the_cache_is_shown_and_cleared(bucket: Bucket, packed: Path, own_cache: Path, capsys: Any) -> None:
    url = bucket.upload(packed, "shown/packed")
    filler(url, 0, 1).communicate()
    assert cli(["cache"]) == 0
    told = capsys.readouterr().out
    assert f"{url}/columns" in told
    assert "splits" in told or "tables" in told or "MB in" in told
    assert cli(["cache", "clear"]) == 0
    assert not list((own_cache / "blocks").glob("??/*"))
    assert cli(["cache", "show", "--all"]) == 2


def test_what_would_exceed_the_budget_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Simulated events and drawn images live in the same cache."""
    monkeypatch.setenv("STOKER_CACHE_BYTES", "1MB")
    words = ["--run.device", "cpu", "--train.steps", "1", "--run.folder", str(tmp_path / "runs")]
    for target in ("icecube:demo", "imagenet:demo"):
        assert cli(["train", target, *words]) == 2
        told = capsys.readouterr().err
        assert "the budget of the cache leaves 1 MB" in told
        assert "STOKER_CACHE_BYTES=" in told


def test_pieces_make_room_for_what_is_made(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE_BYTES", "2MB")
    with Index(own_cache / "blocks", 2_000_000) as index:
        for number in range(10):
            piece = Piece("s3://bucket/x 1 2", number * 100_000, 100_000)
            assert index.take([piece])[0][0] is State.MINE
            index.path(piece.name).parent.mkdir(exist_ok=True)
            index.path(piece.name).write_bytes(bytes(100_000))
            index.fetched(piece.name, 0)
            index.release([piece.name])
        make_room(900_000, "Something", "leave it.")
        assert index.total() + 900_000 <= 2_000_000
        with pytest.raises(UserError, match="Something would take about 3 MB"):
            make_room(3_000_000, "Something", "leave it.")
