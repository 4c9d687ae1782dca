"""Packing to a store, runs that are kept there, and copying a set beforehand."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import obstore
import pytest
from conftest import Bucket, Faults

from stoker.cli import run as cli
from stoker.data.locations import open_local, read
from stoker.data.storage import objects, pieces, requests
from stoker.data.storage.upload import upload
from stoker.data.storage.urls import Url
from stoker.errors import UserError
from stoker.runs.events import read_events
from stoker.runs.schema import Step

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


def losses(path: Path) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in read_events(path, Step)]


def test_a_run_in_a_store_is_resumed_elsewhere(
    bucket: Bucket, events: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, and gone on with on a machine that has nothing of it: losses as those of the run that nobody killed."""
    data = bucket.upload(events / "packed", "runs-data/packed")
    words = ["--data.path", data, *TRAIN, "--train.steps", "24", "--train.save_every", "4"]
    assert cli(["train", "icecube:demo", *words, "--run.folder", str(tmp_path / "whole")]) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    code = "import stoker.launch.elsewhere as e; e.EVERY_S = 0.1; import stoker.cli; stoker.cli.main()"
    command = ["train", "icecube:demo", *words, "--run.folder", "s3://bucket/runs", "--run.name", "killed"]
    process = subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    for _ in range(600):
        if any("/checkpoints/step-" in name and name.endswith("checksums.json") for name in bucket.names("runs")):
            break
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (name,) = {path.split("/")[1] for path in bucket.names("runs")}
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "another machine"))
    assert cli(["resume", f"s3://bucket/runs/{name}"]) == 0
    content = tmp_path / "events.jsonl"
    content.write_bytes(bytes(obstore.get(bucket.store, f"runs/{name}/events.jsonl").bytes()))
    assert losses(content)[-4:] == losses(whole / "events.jsonl")[-4:]
    assert cli(["evaluate", f"s3://bucket/runs/{name}"]) == 0
    assert cli(["resume", f"s3://bucket/runs/{name}"]) == 2  # it is finished
    assert cli(["resume", "s3://bucket/runs/nothing"]) == 2


def test_images_train_from_a_store(bucket: Bucket, tmp_path: Path) -> None:
    from stoker.recipes.imagenet.draw import draw_set

    draw_set(tmp_path / "drawn", 12, 4, 3)
    folders = bucket.upload(tmp_path / "drawn", "trained/folders")
    assert cli(["pack", "imagenet", folders, "s3://bucket/trained/packed"]) == 0
    for url in (folders, "s3://bucket/trained/packed"):
        assert cli(["train", "imagenet:demo", "--data.path", url, "--run.device", "cpu", "--train.steps", "2",
                    "--run.folder", str(tmp_path / "runs")]) == 0  # fmt: skip


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
