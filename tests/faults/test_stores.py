"""A packed set that is not what was packed is named before its values are used."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from stoker import cli
from stoker.data import checksums
from stoker.data.pack import pack
from stoker.data.plan import MicroBatch
from stoker.data.store import PackedStore, open_store
from stoker.errors import UserError
from stoker.recipes.icecube import events
from stoker.recipes.icecube.table import open_events


@pytest.fixture(scope="session")
def packed(events_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only."""
    folder = tmp_path_factory.mktemp("packed")
    before = os.environ.get("STOKER_CACHE")
    os.environ["STOKER_CACHE"] = str(folder / "cache")
    pack(folder / "store", events.packing(events_dir, open_events(events_dir)), threads=2)
    if before is not None:
        os.environ["STOKER_CACHE"] = before
    return folder / "store"


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "store"))


def flip(path: Path, at: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(at * len(content))] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["columns/time.bin", "columns/flags.bin", "table/first.npy", "table/doms.npy",
                                  "table/samples.json", "store.json", "sensor_geometry.csv"])  # fmt: skip
@pytest.mark.parametrize("at", [0.3, 0.9])
def test_a_flipped_bit_is_named_with_its_file(store: Path, name: str, at: float) -> None:
    flip(store / name, at)
    with pytest.raises(UserError, match=name):
        open_store(store)


def test_a_large_store_is_checked_in_the_background_and_its_bounds_at_every_batch(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "AT_ONCE", 0)
    flip(store / "columns" / "charge.bin", 0.5)
    opened = open_store(store)

    def read_until_named(opened: PackedStore) -> None:
        for _ in range(10_000):
            opened.gather(MicroBatch(np.arange(5)))

    with pytest.raises(UserError, match=r"charge\.bin"):
        read_until_named(opened)

    monkeypatch.setattr(checksums.Verification, "_run", lambda self: None)
    first = np.load(store / "table" / "first.npy", mmap_mode="r+")
    first[3] = 10**9
    first.flush()
    opened = open_store(store)
    with pytest.raises(UserError, match="beyond the end"):
        opened.gather(MicroBatch(np.arange(5)))


def test_a_store_that_was_found_whole_is_not_read_again_until_it_changes(store: Path, own_cache: Path) -> None:
    open_store(store)
    (mark,) = (own_cache / "verified").iterdir()
    before = mark.stat().st_mtime_ns
    open_store(store)
    assert mark.stat().st_mtime_ns == before
    flip(store / "columns" / "time.bin", 0.5)
    with pytest.raises(UserError, match=r"time\.bin"):
        open_store(store)


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
def test_a_full_disk_says_what_stays_of_a_pack_and_that_it_is_used(
    small_disk: Path, events_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (small_disk / "ballast").write_bytes(b"x" * 600_000)
    code = cli.run(["pack", "icecube", str(events_dir), str(small_disk / "out")])
    text = capsys.readouterr().err
    assert code == 1
    assert "disk is full" in text or "The disk is full" in text
    assert ".out.packing stays" in text
    assert "will be used" in text


def test_a_packed_set_of_images_notices_a_flipped_bit_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stoker.recipes.imagenet.draw import draw_set
    from stoker.recipes.imagenet.sources import open_images

    draw_set(tmp_path / "drawn", 4, 2, 0)
    assert cli.run(["pack", "imagenet", str(tmp_path / "drawn"), str(tmp_path / "packed")]) == 0
    assert len(open_images(tmp_path / "packed").table) == 60
    manifest = json.loads((tmp_path / "packed" / "images.json").read_text())
    assert any(name.endswith(".bin") for name in manifest["files"])
    shard = next((tmp_path / "packed").glob("train-*.bin"))
    flip(shard, 0.5)
    with pytest.raises(UserError, match=shard.name):
        open_images(tmp_path / "packed")
