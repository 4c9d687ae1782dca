"""Packing to a store, runs that are kept there, and copying a set beforehand."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import obstore
import pytest
from proxy import Faults
from servers import Bucket

from stoker.cli import run as cli
from stoker.data.locations import open_local, read
from stoker.data.storage import objects, pieces, requests
from stoker.data.storage.upload import upload
from stoker.data.storage.urls import Url
from stoker.errors import MachineError, UserError
from stoker.launch import claim, elsewhere
from stoker.runs.folder import RunFolder

TRAIN = ["--run.device", "cpu", "--train.log_every", "1", "--loader.batch_size", "64"]


def test_a_set_is_packed_into_a_store(bucket: Bucket, events: Path, own_cache: Path, capsys: Any) -> None:
    url = "s3://bucket/written/packed"
    assert cli(["pack", "icecube", str(events / "files"), url]) == 0
    assert url in capsys.readouterr().out
    for name in ("store.json", "columns/time.bin", "table/first.npy"):
        assert read(Url.parse(f"{url}/{name}")) == (events / "packed" / name).read_bytes()
    assert not list((own_cache / "packing").glob("*"))
    assert cli(["pack", "icecube", str(events / "files"), url]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_pack_that_was_killed_while_it_copied_goes_on(
    bucket: Bucket, events: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    url, put, left = "s3://bucket/halfway/packed", objects.put, [4]

    def failing(place: Any, content: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        put(place, content)

    monkeypatch.setattr(objects, "put", failing)
    assert cli(["pack", "icecube", str(events / "files"), url]) != 0
    assert len(bucket.names("halfway")) == 4
    monkeypatch.setattr(objects, "put", put)
    assert cli(["pack", "icecube", str(events / "files"), url]) == 0
    assert read(Url.parse(f"{url}/store.json")) == (events / "packed" / "store.json").read_bytes()
    assert cli(["cache", "clear", "--all"]) == 0
    assert not (own_cache / "packing").exists()


def test_a_checkpoint_that_is_pruned_while_it_is_copied(bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("x")
    upload(tmp_path, Url.parse("s3://bucket/pruned"), ["gone", "there"])
    assert bucket.names("pruned") == ["pruned/there"]
    with pytest.raises(UserError, match="no bucket"):
        objects.put(Url.parse("s3://no-such-bucket/x"), b"")


def test_a_large_file_comes_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LARGE", 1000)
    monkeypatch.setattr(requests, "PART", 700)
    content = os.urandom(10_123)
    obstore.put(bucket.store, "large/file", content)
    before = bucket.proxy.requests
    assert open_local(Url.parse("s3://bucket/large/file")).read_bytes() == content
    assert bucket.proxy.requests - before >= 15


def test_a_shard_that_is_cut_short_is_named(bucket: Bucket, tmp_path: Path, capsys: Any) -> None:
    from stoker.recipes.imagenet.draw import draw_set

    draw_set(tmp_path / "drawn", 12, 4, 3)
    assert cli(["pack", "imagenet", str(tmp_path / "drawn"), str(tmp_path / "packed")]) == 0
    shard = next((tmp_path / "packed").glob("*.bin"))
    shard.write_bytes(shard.read_bytes()[:1000])
    url = bucket.upload(tmp_path / "packed", "short/packed")
    assert cli(["train", "imagenet:demo", "--data.path", url, "--run.device", "cpu", "--train.steps", "2"]) == 2
    assert "it is cut short" in capsys.readouterr().err


def test_a_set_is_packed_from_a_store(bucket: Bucket, events: Path, tmp_path: Path) -> None:
    url = bucket.upload(events / "files", "source/files")
    assert cli(["pack", "icecube", url, str(tmp_path / "packed")]) == 0
    for path in (events / "packed" / "columns").iterdir():
        assert (tmp_path / "packed" / "columns" / path.name).read_bytes() == path.read_bytes()


def test_one_machine_at_a_time_trains_a_run(
    bucket: Bucket, events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Another one is refused while the claim changes, and takes over where it stands still; the first one hears of it."""
    monkeypatch.setattr(claim, "BEAT_S", 0.2)
    monkeypatch.setattr(claim, "WATCH_S", 3.0)
    place = Url.parse("s3://bucket/claims/run")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    with claim.claimed(here, place) as ours:
        with pytest.raises(UserError, match="is being trained by process"), claim.claimed(there, place):
            pass
        ours._ended.set()  # it died: nothing changes any more
        ours._thread.join()
        with claim.claimed(there, place) as theirs:
            assert not theirs.is_lost
            with pytest.raises(MachineError, match="went on with the run"):
                ours.check()  # it was only asleep
        ours.is_lost = False
        with pytest.raises(MachineError, match="went on with the run"):
            ours.check()  # the other one has ended meanwhile: what it left is not ours either
    assert claim.read_claim(place / claim.CLAIM) is None
    capsys.readouterr()
    with claim.claimed(here, place):  # nobody has it
        left_behind = claim.read_claim(place / claim.CLAIM)
    objects.put(place / claim.CLAIM, json.dumps(left_behind).encode())
    with claim.claimed(here, place):  # by a process of this machine, which is gone: it held the lock of the folder
        pass
    assert "waiting" not in capsys.readouterr().err


def test_a_run_that_went_on_elsewhere_meanwhile(bucket: Bucket, events: Path, tmp_path: Path) -> None:
    """Between fetching it and claiming it another machine may have trained it further."""
    url = bucket.upload(events / "packed", "meanwhile/packed")
    words = ["--data.path", url, *TRAIN, "--train.steps", "4", "--train.save_every", "2"]
    assert cli(["train", "icecube:demo", *words, "--run.folder", "s3://bucket/meanwhile/runs", "--run.name", "x"]) == 0
    (name,) = {path.split("/")[2] for path in bucket.names("meanwhile/runs")}
    assert not any(path.endswith(claim.CLAIM) for path in bucket.names("meanwhile/runs"))
    folder = RunFolder(elsewhere.here(f"s3://bucket/meanwhile/runs/{name}"))
    for path in folder.checkpoints.glob("*4"):
        shutil.rmtree(path)
    with pytest.raises(UserError, match="trained further on another machine"), elsewhere.mirrored(folder):
        pass
    assert elsewhere.latest(folder.path) == folder.path  # by the path that it was stopped with
    assert list(folder.checkpoints.glob("*4"))


def test_what_is_removed_here_is_removed_there(bucket: Bucket, events: Path, tmp_path: Path) -> None:
    """Also what another machine left; and what was fetched only to be looked at goes with the cache."""
    url = bucket.upload(events / "packed", "pruned/packed")
    words = ["--data.path", url, *TRAIN, "--train.save_every", "2", "--run.folder", "s3://bucket/pruned/runs"]
    assert cli(["train", "icecube:demo", *words, "--train.steps", "6"]) == 0
    (name,) = {path.split("/")[2] for path in bucket.names("pruned/runs")}
    old = {path.split("/")[4] for path in bucket.names(f"pruned/runs/{name}/checkpoints")}
    place = f"s3://bucket/pruned/runs/{name}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_CACHE", str(tmp_path / "another machine"))
        working = elsewhere.here(place)
        assert cli(["cache", "clear", "--all"]) == 0
        assert not working.exists()
        folder = RunFolder(elsewhere.here(place))
        with elsewhere.mirrored(folder):
            gone = sorted(folder.checkpoints.iterdir())[0]
            shutil.rmtree(gone)
    assert {path.split("/")[4] for path in bucket.names(f"pruned/runs/{name}/checkpoints")} == old - {gone.name}


def test_a_server_that_is_gone_at_the_end(
    bucket: Bucket, events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for once, and the claim is left to who comes next."""
    monkeypatch.setattr(elsewhere, "EVERY_S", 0.05)
    monkeypatch.setattr(claim, "BEAT_S", 0.05)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.config.write_text("x: 1")
    elsewhere.keep_elsewhere(folder, Url.parse("s3://bucket/gone"))
    monkeypatch.setenv("STOKER_STORAGE_WAIT_S", "2")
    copies: list[str] = []

    def lose_the_server() -> None:
        with elsewhere.mirrored(folder):
            bucket.proxy.faults = Faults(down=True)
            folder.config.write_text("x: 2")
            time.sleep(0.5)  # a copy has begun
            monkeypatch.setattr(elsewhere._Mirror, "_copy", lambda self: copies.append("again"))

    with pytest.raises(MachineError, match="The run is whole in"):
        lose_the_server()
    assert not copies


def test_a_set_is_copied_beforehand(bucket: Bucket, events: Path, tmp_path: Path, capsys: Any) -> None:
    url = bucket.upload(events / "files", "copied/files")
    out = tmp_path / "copy"
    bucket.proxy.faults = Faults(share=0.2, kinds=("503", "reset", "truncated"))
    assert cli(["fetch", url, str(out), "--subset", "train/*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == 4
    (out / "train" / "batch_2.parquet").write_bytes(b"cut short")
    assert cli(["fetch", url, str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["already"] == 3
    for path in (path for path in (events / "files").rglob("*") if path.is_file()):
        assert (out / path.relative_to(events / "files")).read_bytes() == path.read_bytes()
    assert cli(["fetch", str(events / "files")]) == 0  # a slow disk is read through
    assert cli(["fetch", url]) == 2
    assert cli(["fetch", "s3://bucket/nothing-here", str(out)]) == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sensor_geometry.csv").write_text("mine")
    assert cli(["fetch", url, str(tmp_path / "other")]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "other" / "sensor_geometry.csv").read_text() == "mine"


def test_another_server(other_bucket: Bucket, events: Path, tmp_path: Path) -> None:
    """s3rver, an implementation that has nothing in common with moto."""
    url = other_bucket.upload(events / "packed", "events/packed")
    assert cli(["train", "icecube:demo", "--data.path", url, *TRAIN, "--train.steps", "3", "--run.folder",
                str(tmp_path / "runs")]) == 0  # fmt: skip
    assert cli(["pack", "icecube", str(events / "files"), "s3://bucket/again"]) == 0
    shutil.rmtree(tmp_path / "runs")
    assert os.environ["AWS_ACCESS_KEY_ID"] == "S3RVER"
