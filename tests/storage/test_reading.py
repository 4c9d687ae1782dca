"""Every kind of data set read from a real S3 server gives the batches of the local one, whatever happens to the requests."""

import asyncio
import os
import threading
import time
import zlib
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest
import torch
from proxy import KINDS, Faults
from servers import Bucket, write_tars

from stoker.cli import run as cli
from stoker.data.batch import tensors_in
from stoker.data.locations import read
from stoker.data.plan import Position
from stoker.data.storage import objects, pieces, requests
from stoker.data.storage.urls import Url
from stoker.doctor.ceilings import ceilings, network
from stoker.errors import MachineError, UserError
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.recipes.imagenet.draw import draw_set
from stoker.train.parallel import Ranks

SLOW = bool(os.environ.get("STOKER_SLOW"))
SEEDS = range(50) if SLOW else range(1)
# The gate has two kinds and the mixture, which has them all.
FAULTS = [*((kind,) for kind in (KINDS if SLOW else ("reset", "wrong range"))), KINDS]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small set has many."""
    monkeypatch.setenv("STOKER_BLOCK_BYTES", str(64 << 10))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    draw_set(folder / "folders", 12, 4, 3)
    assert cli(["pack", "imagenet", str(folder / "folders"), str(folder / "packed")]) == 0
    write_tars(folder / "folders", folder / "tars")
    return folder


def batches(target: str, path: str, *words: str, epochs: int = 2, judged: bool = False) -> list[tuple[list[int], int]]:
    """Rows of each step, and a checksum of all tensors of its batches; `judged`: of validation after training."""
    found = resolve_target(target, ["--data.path", path, "--run.device", "cpu", *words])
    run = build_run(found.recipe, found.config, Ranks())
    seen = []
    validation = run.validation.steps(Position(1), 1) if judged else ()
    for step in chain(run.training.steps(Position(1), epochs), validation):
        crc = 0
        for batch in step.batches:
            for tensor in tensors_in(batch):
                crc = zlib.crc32(np.ascontiguousarray(tensor.numpy()).tobytes(), crc)
        seen.append((step.rows.tolist(), crc))
    return seen


def test_events_are_the_same_from_afar(bucket: Bucket, events: Path) -> None:
    packed, files = bucket.upload(events / "packed", "same/packed"), bucket.upload(events / "files", "same/files")
    for order in ("exact", "window", "window-first"):
        words = ("--loader.order", order, "--loader.window", "300")
        assert batches("icecube:demo", packed, *words) == batches("icecube:demo", str(events / "packed"), *words)
    direct = batches("icecube:demo", str(events / "files"), "--data.mode", "direct", "--loader.window", "300")
    assert batches("icecube:demo", files, "--loader.window", "300") == direct


@pytest.mark.parametrize("kind", ["folders", "tars", "packed"])
@pytest.mark.parametrize("processes", [0, 2])
def test_images_are_the_same_from_afar(bucket: Bucket, images: Path, kind: str, processes: int) -> None:
    url = bucket.upload(images / kind, f"images-{processes}/{kind}")
    words = ("--data.processes", str(processes), "--data.check_labels", "false")
    local = batches("imagenet:demo", str(images / kind), *words, "--loader.order", "exact")
    assert batches("imagenet:demo", url, *words, "--loader.order", "exact") == local
    if kind != "folders":
        words = (*words, "--loader.order", "window", "--loader.window", "50")
        assert batches("imagenet:demo", url, *words) == batches("imagenet:demo", str(images / kind), *words)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kinds", FAULTS, ids=[kinds[0] if len(kinds) == 1 else "mixed" for kinds in FAULTS])
def test_faults_change_no_byte(
    bucket: Bucket, events: Path, kinds: tuple[str, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a share of requests that a small set meets several times; 5 % over 50 seeds behind the flag."""
    monkeypatch.setattr(requests, "BACK_OFF_S", (0.01, 0.1))
    url = bucket.upload(events / "packed", "faults/packed")
    bucket.proxy.random.seed(seed)
    bucket.proxy.faults = Faults(share=0.05 if SLOW else 0.2, kinds=kinds, stall_s=0.3)
    words = ("--loader.window", "300", "--loader.order", "window")
    local = batches("icecube:demo", str(events / "packed"), *words, epochs=1)
    assert batches("icecube:demo", url, *words, epochs=1) == local
    told = pieces.telemetry()
    assert told is not None
    assert SLOW or (bucket.proxy.counts and told["retries"] > 0)


def test_a_server_that_is_gone_for_a_while(bucket: Bucket, events: Path) -> None:
    url = bucket.upload(events / "packed", "gone/packed")
    local = batches("icecube:demo", str(events / "packed"), "--loader.order", "exact")
    bucket.proxy.faults.down = True
    threading.Timer(20.0 if SLOW else 1.5, setattr, (bucket.proxy.faults, "down", False)).start()
    assert batches("icecube:demo", url, "--loader.order", "exact") == local


def test_a_server_that_is_gone_for_good(bucket: Bucket, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_STORAGE_WAIT_S", "1")
    url = bucket.upload(events / "packed", "lost/packed")
    found = resolve_target("icecube:demo", ["--data.path", url, "--run.device", "cpu"])
    run = build_run(found.recipe, found.config, Ranks())
    bucket.proxy.faults.down = True
    with pytest.raises(MachineError, match=r"does not answer.*tried for.*resume"):
        list(run.training.steps(Position(1), 1))


def test_a_damaged_piece_is_fetched_again(bucket: Bucket, events: Path, own_cache: Path) -> None:
    url = bucket.upload(events / "packed", "damaged/packed")
    first = batches("icecube:demo", url, "--loader.order", "exact")
    files = [path for path in (own_cache / "blocks").glob("??/*") if path.stat().st_size == 64 << 10]
    for path in files[:3]:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    files[3].unlink()
    assert cli(["cache", "verify"]) == 1  # and removes them: so once more, this time unseen until they are used
    _forget_open_files()
    assert batches("icecube:demo", url, "--loader.order", "exact") == first
    for path in files[:3]:
        path.write_bytes(b"x" * path.stat().st_size)
    _forget_open_files()
    assert batches("icecube:demo", url, "--loader.order", "exact") == first
    assert pieces.pieces().num_damaged == 3


def _forget_open_files() -> None:
    """As a new process would begin."""
    from stoker.data.storage import files

    for file in files._files.values():
        file.let_go()
    files._files.clear()
    pieces.pieces()._pool.submit(lambda: None).result()


def test_many_folders_are_listed_side_by_side(bucket: Bucket) -> None:
    names = [f"train/class {one}/deep/{two} #ü%20.jpg" for one in range(40) for two in range(3)] + [
        "a",
        "train/b",
        "val/x/y",
    ]
    for name in names:
        obstore.put(bucket.store, f"listed/{name}", b"x" * len(name))
    found = list(objects.list_all(Url.parse("s3://bucket/listed")))
    assert sorted(one.name for one in found) == sorted(names)
    assert all(one.size == len(one.name) for one in found)
    assert bucket.proxy.most_at_once > 4
    for name in names[:2]:
        assert read(Url.parse("s3://bucket/listed") / name) == b"x" * len(name)


def test_a_store_larger_than_the_cache(
    bucket: Bucket, events: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    url = bucket.upload(events / "packed", "large/packed")
    size = sum(path.stat().st_size for path in (events / "packed").rglob("*") if path.is_file())
    monkeypatch.setenv("STOKER_CACHE_BYTES", "1500000")
    assert size > 2_000_000
    with pytest.raises(UserError, match=r"STOKER_CACHE_BYTES=\d+ would do"):
        batches("icecube:demo", url)
    monkeypatch.setattr("stoker.data.storage.orders.AT_LEAST", 0)
    words = ("--loader.window", "100", "--loader.batch_size", "16")
    local = batches("icecube:demo", str(events / "packed"), *words, "--loader.order", "window")
    assert batches("icecube:demo", url, *words) == local
    told = pieces.telemetry()
    assert told is not None
    assert told["cache_bytes"] <= 1_500_000
    assert sum(path.stat().st_size for path in (own_cache / "blocks").rglob("*") if path.is_file()) <= 1_500_000


def test_the_pace_falls_and_recovers() -> None:
    pace = requests.Pace()
    before = pace.limit
    pace.told_off()
    assert pace.limit == before / 2
    pace.told_off()  # the same moment: what was already asked
    assert pace.limit == before / 2
    for _ in range(200):
        pace.answered(1 << 20, 0.1)
    assert pace.limit == before / 2  # nobody asked for as many: that says nothing about more
    pace._in_flight = 1000
    for _ in range(200):  # one more a round now
        pace.answered(1 << 20, 0.1)
    assert pace.limit > before
    quick = pace.limit
    for _ in range(500):
        pace.answered(1 << 20, 2.0)  # every one waits for the others
    assert pace.limit < quick


def test_who_asks_first_is_served_first() -> None:
    """And as many at a time as the limit says, also while it rises."""
    pace, order, most = requests.Pace(), [], 0

    async def ask(number: int) -> None:
        nonlocal most
        async with pace:
            order.append(number)
            most = max(most, pace._in_flight)
            await asyncio.sleep(0.001)
            pace.answered(1 << 20, 0.1)

    async def ask_all() -> None:
        await asyncio.gather(*(ask(number) for number in range(100)))

    asyncio.run(ask_all())
    assert order == list(range(100))
    assert pace._in_flight == 0
    assert 2 * requests.FIRST < most <= pace.limit


@pytest.mark.parametrize("block", [64 << 10, 4 << 20], ids=["many blocks", "one block"])
def test_bytes_that_were_damaged_in_the_store_are_noticed(
    bucket: Bucket, events: Path, images: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Of the right size, and whole by all that a server says: only the checksums of the packed set tell."""
    monkeypatch.setenv("STOKER_BLOCK_BYTES", str(block))
    for number, (target, folder, name) in enumerate(
        [("icecube:demo", events, "columns/charge.bin"), ("icecube:demo", events, "table/first.npy"),
         ("imagenet:demo", images, "train-00000.bin")]
    ):  # fmt: skip
        found = next((folder / "packed").rglob(Path(name).name))
        url = bucket.upload(folder / "packed", f"damaged/{block}/{number}")
        content = bytearray(found.read_bytes())
        content[len(content) // 2] ^= 1
        obstore.put(bucket.store, f"damaged/{block}/{number}/{found.relative_to(folder / 'packed')}", bytes(content))
        with pytest.raises(UserError, match=f"{Path(name).name} is not what was packed|sample table .* damaged"):
            batches(target, url, judged=True)
        for _ in range(100):  # they are dropped by a thread
            kept = {row[1].split(" ")[1] for row in pieces.pieces().index.all_pieces()}
            wrong = [place for place in kept if place.endswith(Path(name).name) and f"/{number}/" in place]
            if not wrong:
                break
            time.sleep(0.1)
        assert not wrong


def test_the_order_of_a_run_is_kept(
    bucket: Bucket, events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has become larger must not change which samples come next."""
    from stoker.launch.checks import with_order
    from stoker.runs.folder import RunFolder

    url = bucket.upload(events / "packed", "kept/packed")
    words = ["--data.path", url, "--run.device", "cpu", "--run.folder", str(tmp_path / "runs"), "--train.steps", "2",
             "--loader.window", "100"]  # fmt: skip
    assert cli(["train", "icecube:demo", *words]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    config = resolve_target(str(folder / "config.yaml"), []).config
    assert config.loader.order == "auto"
    assert with_order(RunFolder(folder), config).loader.order == "window-first"
    text = (folder / "events.jsonl").read_text()
    assert '"latency_p99_ms"' in text
    assert '"fetch"' in text


def test_secrets_stay_in_the_environment(bucket: Bucket, events: Path, tmp_path: Path, capfd: Any) -> None:
    url = bucket.upload(events / "packed", "secrets/packed")
    words = ["--data.path", url, "--run.device", "cpu", "--run.folder", str(tmp_path / "runs"), "--train.steps", "2"]
    assert cli(["train", "icecube:demo", *words]) == 0
    assert cli(["train", "icecube:demo", "--data.path", "s3://nowhere-at-all/x", "--run.device", "cpu"]) == 2
    bucket.proxy.faults = Faults(share=1.0, kinds=("503",))
    os.environ["STOKER_STORAGE_WAIT_S"] = "1"
    try:
        assert cli(["train", "icecube:demo", "--data.path", url + "-gone", "--run.device", "cpu"]) == 1
    finally:
        del os.environ["STOKER_STORAGE_WAIT_S"]
    out, err = capfd.readouterr()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in (os.environ["AWS_SECRET_ACCESS_KEY"], os.environ["AWS_ACCESS_KEY_ID"]):
        assert secret not in out + err
        assert secret.encode() not in written
    assert torch.is_grad_enabled()


def test_the_doctor_knows_what_a_store_gives(bucket: Bucket, own_cache: Path) -> None:
    """Measured once a machine and a store; a store of small files says nothing."""
    obstore.put(bucket.store, "speed/columns/charge.bin", bytes(20 << 20))
    obstore.put(bucket.store, "slow/columns/charge.bin", bytes(1 << 20))
    place = Url.parse("s3://bucket/speed")
    assert network(Url.parse("s3://bucket/slow")) is None
    first = network(place)
    assert first is not None
    assert first > 0
    obstore.delete(bucket.store, "speed/columns/charge.bin")
    assert network(place) == first
    assert ceilings(torch.device("cpu")).products["fp32"] > 0
    assert network(place) == first  # neither is lost by the other
