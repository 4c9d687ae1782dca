"""The packed store: equal to its source, general, and checked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.data.checksums import Verification
from stoker.data.pack import Packing, ShardContent, pack, verify
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Array, Indices, offsets_of
from stoker.data.samples import SampleTable, new_table, open_table, shard_rows, split_by_hash, split_by_shard
from stoker.data.store import open_store
from stoker.errors import UserError
from stoker.recipes.icecube import events
from stoker.recipes.icecube.table import open_events


def packed(folder: Path, out: Path, shuffled: int | None = None) -> tuple[Packing, Path]:
    packing = events.packing(folder, open_events(folder), shuffled)
    pack(out, packing, threads=2)
    return packing, out


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_nine_bytes_a_pulse_and_every_value_as_in_the_source(events_dir: Path, tmp_path: Path) -> None:
    packing, out = packed(events_dir, tmp_path / "store")
    store = open_store(out)
    assert store.num_bytes == 9 * store.num_elements
    assert verify(store, packing, threads=2) == 4 * store.num_elements
    # Against the file itself, decoded the plain way.
    file = pq.read_table(events_dir / "train" / "batch_2.parquet")
    rows = shard_rows(packing.table, 1)
    content = store.gather(MicroBatch(rows))
    charge = (25 + 50 * content.columns["charge"].astype(np.int64)) / 1000
    ours = sorted(
        zip(content.columns["time"].tolist(), content.columns["sensor"].tolist(), charge.tolist(), strict=True)
    )
    theirs = zip(*(file.column(name).to_pylist() for name in ("time", "sensor_id", "charge")), strict=True)
    assert ours == sorted(theirs)


def test_charges_off_the_grid_are_kept_exactly(own_events: Path, tmp_path: Path) -> None:
    path = own_events / "train" / "batch_1.parquet"
    table = pq.read_table(path)
    charge = table.column("charge").to_numpy().copy()
    for file in (own_events / "train").glob("*.parquet"):  # as if they had been float32 all along
        other = pq.read_table(file)
        narrow = other.column("charge").to_numpy().astype(np.float32).astype(np.float64)
        pq.write_table(other.set_column(2, "charge", pa.array(narrow)), file)
    packing, out = packed(own_events, tmp_path / "store")
    assert open_store(out).columns["charge"].dtype == np.float32
    assert verify(open_store(out), packing, threads=1) > 0
    charge[10] = 1 / 3
    pq.write_table(table.set_column(2, "charge", pa.array(charge)), path)
    packing, out = packed(own_events, tmp_path / "wider")
    assert open_store(out).columns["charge"].dtype == np.float64


def test_a_shuffled_store_holds_the_same_samples_in_a_random_order(events_dir: Path, tmp_path: Path) -> None:
    packing, out = packed(events_dir, tmp_path / "mixed", shuffled=5)
    store = open_store(out)
    assert verify(store, packing, threads=2) > 0
    ids = store.table.columns["id"]
    assert sorted(ids) == sorted(packing.table.columns["id"])
    assert not np.array_equal(ids, packing.table.columns["id"])
    assert np.array_equal(store.table.columns["first"], offsets_of(store.table.columns["count"])[:-1])
    split = split_by_shard(store.table, (4,), tmp_path / "splits")
    held = store.table.columns["shard"][split.validation.rows(np.arange(len(split.validation)))]
    assert set(held.tolist()) == {3}
    assert len(split.training) + len(split.validation) == 600


def test_ranks_share_the_files_and_the_last_one_completes_the_store(events_dir: Path, tmp_path: Path) -> None:
    packing = events.packing(events_dir, open_events(events_dir))
    assert pack(tmp_path / "shared", packing, threads=1, rank=0, num_ranks=2) is None
    assert not (tmp_path / "shared").exists()
    assert pack(tmp_path / "shared", packing, threads=1, rank=1, num_ranks=2) is not None
    pack(tmp_path / "alone", packing, threads=2)
    assert files_of(tmp_path / "shared") == files_of(tmp_path / "alone")


def test_a_damaged_store_is_noticed(events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packing, out = packed(events_dir, tmp_path / "store")
    column = out / "columns" / "time.bin"
    content = bytearray(column.read_bytes())
    content[1000] ^= 1
    column.write_bytes(content)
    with pytest.raises(UserError, match=r"time\.bin is not what was packed"):
        open_store(out)
    monkeypatch.setattr(Verification, "_run", lambda self: None)  # as where it was checked before
    with pytest.raises(UserError, match=r"differs from its source: time of sample \d+"):
        verify(open_store(out), packing, threads=1)
    column.write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"time\.bin has .* bytes"):
        open_store(out)
    column.unlink()
    with pytest.raises(UserError, match=r"lacks columns/time\.bin"):
        open_store(out)


def test_a_pack_begun_from_other_data_is_not_gone_on_with(own_events: Path, tmp_path: Path) -> None:
    packing = events.packing(own_events, open_events(own_events))
    pack(tmp_path / "store", packing, threads=1, rank=0, num_ranks=2)
    (own_events / "train" / "batch_1.parquet").touch()
    changed = events.packing(own_events, open_events(own_events))
    with pytest.raises(UserError, match="other data"):
        pack(tmp_path / "store", changed, threads=1, rank=1, num_ranks=2)


def make_own_table(folder: Path, counts: Array) -> SampleTable:
    with new_table(folder, len(counts), {"label": np.int8}, ["one", "two"], "mine") as writer:
        writer.append(
            {
                "shard": np.arange(len(counts)) // 50,
                "first": offsets_of(counts)[:-1],
                "count": counts,
                "id": np.arange(len(counts)) + 100,
                "label": np.arange(len(counts)) % 3,
            }
        )
    table = open_table(folder)
    assert table is not None
    return table


def test_any_ragged_columns_can_be_packed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, 100)
    words = rng.integers(0, 50_000, counts.sum())
    weights = rng.random(counts.sum())
    table = make_own_table(tmp_path / "table", counts)

    def read_shard(shard: int, rows: Indices) -> ShardContent:
        first = int(table.columns["first"][rows[0]])
        part = slice(first, first + int(counts[rows].sum()))
        return ShardContent({"word": words[part], "weight": weights[part]})

    store = pack(tmp_path / "own", Packing(table, {"word": np.uint16, "weight": np.float64}, read_shard), threads=2)
    assert store is not None
    got = store.gather(MicroBatch(np.array([7, 3, 99])))
    begin = offsets_of(counts)
    expected = np.concatenate([words[begin[row] : begin[row + 1]] for row in (7, 3, 99)])
    assert np.array_equal(got.columns["word"], expected)
    with pytest.raises(UserError, match="without loss"):
        pack(tmp_path / "narrow", Packing(table, {"word": np.uint8, "weight": np.float64}, read_shard), threads=1)


def test_a_split_by_hash_is_stable_and_disjoint(events_dir: Path, tmp_path: Path) -> None:
    table = open_events(events_dir)
    split = split_by_hash(table, 0.2, tmp_path)
    training = split.training.rows(np.arange(len(split.training)))
    held = split.validation.rows(np.arange(len(split.validation)))
    assert sorted([*training, *held]) == list(range(600))
    assert 80 < len(held) < 160
    again = split_by_hash(table, 0.2, tmp_path / "elsewhere")
    assert np.array_equal(held, again.validation.rows(np.arange(len(again.validation))))


def test_a_changed_source_makes_the_table_anew(own_events: Path) -> None:
    first = open_events(own_events).fingerprint
    assert open_events(own_events).fingerprint == first
    (own_events / "train" / "batch_1.parquet").touch()
    assert open_events(own_events).fingerprint != first


def test_the_manifest_names_every_shard_with_its_checksums(events_dir: Path, tmp_path: Path) -> None:
    _, out = packed(events_dir, tmp_path / "store")
    manifest = json.loads((out / "store.json").read_text())
    assert [shard["samples"] for shard in manifest["shards"]] == [150] * 4
    assert all(set(shard["crc32"]) == {"time", "charge", "sensor", "flags"} for shard in manifest["shards"])


def test_a_pack_killed_before_its_last_rename_is_finished_and_not_taken_for_another(
    events_dir: Path, own_events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.data.checksums import write_manifest

    def killed(*arguments: Any) -> None:
        write_manifest(*arguments)
        raise KeyboardInterrupt

    packing = events.packing(events_dir, open_events(events_dir))
    whole = pack(tmp_path / "whole", packing, threads=1)
    assert whole is not None
    with monkeypatch.context() as patch:
        patch.setattr("stoker.data.pack.write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            pack(tmp_path / "store", packing, threads=1)
    assert not (tmp_path / "store").exists()
    (own_events / "train" / "batch_1.parquet").touch()
    with pytest.raises(UserError, match="other data"):
        pack(tmp_path / "store", events.packing(own_events, open_events(own_events)), threads=1)
    pack(tmp_path / "store", packing, threads=1)
    files = [sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) for folder in
             (tmp_path / "whole", tmp_path / "store")]  # fmt: skip
    assert files[0] == files[1]
