"""Training from, and into, an object store: what a user types, against a real server on the loopback."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
from servers import Bucket, bucket, moto_port, write_tars

from stoker.cli import run as cli
from stoker.launch import claim
from stoker.recipes.imagenet.draw import draw_set
from stoker.runs.events import read_events
from stoker.runs.schema import Step

__all__ = ["bucket", "moto_port"]  # fixtures
SMALL = ["--model.width", "16", "--model.heads", "2", "--model.dom_layers", "1"]
TRAIN = ["--run.device", "cpu", "--train.log_every", "1", "--loader.batch_size", "64"]


def losses(path: Path) -> list[tuple[int, float]]:
    return [(event.step, event.loss) for event in read_events(path, Step)]


def trained(target: str, url: str, folder: Path, *words: str) -> list[tuple[int, float]]:
    """Losses of a few steps."""
    assert (
        cli(["train", target, "--data.path", url, *TRAIN, "--train.steps", "3", "--run.folder", str(folder), *words])
        == 0
    )
    (run,) = folder.iterdir()
    return losses(run / "events.jsonl")


@pytest.mark.parametrize("kind", ["packed", "files"])
def test_events_train_from_a_store(bucket: Bucket, events_dir: Path, tmp_path: Path, kind: str) -> None:
    folder, words = events_dir, ["--data.mode", "direct", "--loader.window", "200"]
    if kind == "packed":
        folder, words = tmp_path / "packed", ["--loader.order", "exact"]
        assert cli(["pack", "icecube", str(events_dir), str(folder)]) == 0
    url = bucket.upload(folder, f"events/{kind}")
    local = trained("icecube:demo", str(folder), tmp_path / "local", *words)
    assert trained("icecube:demo", url, tmp_path / "remote", *words) == local


@pytest.mark.parametrize("kind", ["folders", "packed", "tars"])
def test_images_train_from_a_store(bucket: Bucket, tmp_path: Path, kind: str) -> None:
    draw_set(tmp_path / "folders", 12, 4, 3)
    if kind == "packed":
        assert cli(["pack", "imagenet", str(tmp_path / "folders"), str(tmp_path / "packed")]) == 0
    elif kind == "tars":
        write_tars(tmp_path / "folders", tmp_path / "tars")
    url = bucket.upload(tmp_path / kind, f"images/{kind}")
    words = ["--loader.order", "exact"] if kind != "folders" else []
    local = trained("imagenet:demo", str(tmp_path / kind), tmp_path / "local", *words)
    assert trained("imagenet:demo", url, tmp_path / "remote", *words) == local


QUICK = "import stoker.launch.elsewhere as e, stoker.launch.claim as c; e.EVERY_S, c.WATCH_S = 0.1, 1.0; "


def killed(bucket: Bucket, words: list[str], cache: Path) -> int:
    """Starts a command on a machine with a cache of its own, and kills it when the store has a new checkpoint: which."""
    before = last_step(bucket)
    process = subprocess.Popen(
        [sys.executable, "-c", QUICK + "import stoker.cli; stoker.cli.main()", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "STOKER_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    for _ in range(3000):
        if last_step(bucket) > before:
            break
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return last_step(bucket)


def last_step(bucket: Bucket) -> int:
    names = [name for name in bucket.names("runs") if name.endswith("checksums.json")]
    return max((int(name.split("step-")[1].split("/")[0]) for name in names), default=0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small operations of two threads wait for each other most of the time, beside another test that does the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_run_in_a_store_is_resumed_elsewhere(
    bucket: Bucket, events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed twice, and gone on with on machines that have nothing of it: losses as those of a run that nobody killed."""
    assert cli(["pack", "icecube", str(events_dir), str(tmp_path / "packed")]) == 0
    data = bucket.upload(tmp_path / "packed", "runs-data/packed")
    words = ["--data.path", data, *TRAIN, *SMALL, "--train.steps", "150", "--train.epochs", "100",
             "--train.save_every", "10", "--train.evaluate_every", "1000"]  # fmt: skip
    assert cli(["train", "icecube:demo", *words, "--run.folder", str(tmp_path / "whole")]) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    kept = ["--run.folder", "s3://bucket/runs", "--run.name", "killed"]
    first = killed(bucket, ["train", "icecube:demo", *words, *kept], tmp_path / "one")
    (name,) = {path.split("/")[1] for path in bucket.names("runs")}
    assert first < killed(bucket, ["resume", f"s3://bucket/runs/{name}"], tmp_path / "two") < 150
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "three"))
    monkeypatch.setattr(claim, "WATCH_S", 1.0)
    assert cli(["resume", f"s3://bucket/runs/{name}"]) == 0
    content = tmp_path / "events.jsonl"
    content.write_bytes(bytes(obstore.get(bucket.store, f"runs/{name}/events.jsonl").bytes()))
    assert losses(content)[-4:] == losses(whole / "events.jsonl")[-4:]
    assert cli(["evaluate", f"s3://bucket/runs/{name}"]) == 0
    assert cli(["resume", f"s3://bucket/runs/{name}"]) == 2  # it is finished
    assert cli(["resume", "s3://bucket/runs/nothing"]) == 2
