"""Values that a conversion would change, rows that moved, files that are not there: noticed where they are read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker import cli
from stoker.data.plan import MicroBatch
from stoker.errors import UserError
from stoker.recipe import RunConfig
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.model import TwoStageConfig

Run = Callable[..., tuple[int, str]]
WORDS = ("train", "icecube", "--run.device", "cpu", "--train.steps", "30", "--train.log_every", "1", "--model.width", "8",
         "--model.heads", "1", "--model.dom_layers", "1", "--model.pulse_layers", "0", "--data.validation", "[4]",
         "--loader.batch_size", "20", "--train.warmup_steps", "2")  # fmt: skip


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        code = cli.run([str(word) for word in (*WORDS, *words)])
        return code, capsys.readouterr().err

    return run


def change(path: Path, name: str, values: Any, kind: pa.DataType | None = None) -> None:
    table = pq.read_table(path)
    at = table.schema.get_field_index(name)
    pq.write_table(table.set_column(at, name, pa.array(values, kind)), path)


def with_value(path: Path, name: str, value: Any, kind: pa.DataType) -> None:
    values = pq.read_table(path).column(name).to_pylist()
    values[40] = value
    change(path, name, values, kind)


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        ("sensor_id", 70_000, pa.int64(), "70000"),
        ("time", 2**40, pa.int64(), "1099511627776"),
        ("time", float("nan"), pa.float64(), "time"),
        ("time", 3.5, pa.float64(), "fractions"),
        ("time", None, pa.int64(), "empty"),
        ("auxiliary", None, pa.bool_(), "empty"),
        ("charge", "much", pa.string(), "charge"),
        ("charge", 1e300, pa.float64(), "beyond all bounds"),
    ],
)
def test_a_value_that_would_be_converted_into_another_is_named(
    train: Run, own_events: Path, mode: str, name: str, value: Any, kind: pa.DataType, words: str
) -> None:
    path = own_events / "train" / "batch_1.parquet"
    if kind == pa.string():
        change(path, name, [str(one) for one in pq.read_table(path).column(name).to_pylist()], kind)
    else:
        with_value(path, name, value, kind)
    code, text = train("--data.path", own_events, "--data.mode", mode)
    assert code == 2, text
    assert words in text
    assert "batch_1.parquet" in text


@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_pulses_that_were_shuffled_inside_their_file_are_noticed(train: Run, own_events: Path, mode: str) -> None:
    path = own_events / "train" / "batch_2.parquet"
    table = pq.read_table(path)
    pq.write_table(table.take(np.random.default_rng(0).permutation(len(table))), path)
    code, text = train("--data.path", own_events, "--data.mode", mode)
    assert code == 2, text
    assert "do not belong together" in text
    assert "batch_2.parquet" in text


def test_a_table_that_names_other_events_is_noticed(train: Run, own_events: Path) -> None:
    meta = own_events / "train_meta.parquet"
    ids = pq.read_table(meta).column("event_id").to_pylist()
    ids[10] += 1_000_000_000
    change(meta, "event_id", ids)
    code, text = train("--data.path", own_events)
    assert code == 2
    assert str(ids[10]) in text


@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_a_table_in_another_order_gives_the_same_events(
    own_events: Path, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> dict[int, float]:
        run = RunConfig(
            recipe="icecube", data=IceCubeData(path=own_events, mode=mode, validation=(4,)), model=TwoStageConfig()
        )
        import torch

        data = open_data(run, torch.device("cpu"))
        value: Any = MicroBatch(np.arange(len(data.table)), 0, 0)
        for stage in data.stages:
            value = stage.run(value)
        batch = value.to(torch.device("cpu"))
        ids = np.asarray(data.table.columns["id"])[batch.rows.numpy()].tolist()
        sums = [
            float(batch.charge[batch.dom_offsets[low] : batch.dom_offsets[high]].double().sum())
            for low, high in zip(batch.event_offsets[:-1], batch.event_offsets[1:], strict=True)
        ]
        return dict(zip(ids, sums, strict=True))

    before = read()
    meta = own_events / "train_meta.parquet"
    table = pq.read_table(meta)
    pq.write_table(table.take(np.random.default_rng(1).permutation(len(table))), meta)
    after = read()
    assert before.keys() == after.keys()
    assert all(after[event] == pytest.approx(total) for event, total in before.items())


def test_a_part_of_the_files_is_named_and_offered(train: Run, own_events: Path, tmp_path: Path, capsys: Any) -> None:
    for number in (2, 3):
        (own_events / "train" / f"batch_{number}.parquet").unlink()
    code, text = train("--data.path", own_events)
    assert code == 2
    assert "lists 4 pulse files, and 2 of them are missing: batch_2.parquet, batch_3.parquet" in text
    assert "hold 300 events" in text
    assert "--data.only_present true" in text
    code, text = train("--data.path", own_events, "--data.only_present", "true", "--data.validation", "[2]")
    assert code == 0, text
    assert cli.run(["pack", "icecube", str(own_events), str(tmp_path / "out")]) == 2
    assert "--only-present" in capsys.readouterr().err
    assert cli.run(["pack", "icecube", str(own_events), str(tmp_path / "out"), "--only-present"]) == 0


def test_bad_pages_behind_an_intact_footer_are_left_out_and_do_not_loop(
    train: Run, own_events: Path, tmp_path: Path
) -> None:
    """A row group that is only read ahead must not be tried for ever."""
    from test_bad_shards import damage_inside  # type: ignore[import-not-found]

    for number in (1, 2):
        damage_inside(own_events / "train" / f"batch_{number}.parquet")
    words = (
        "--data.mode",
        "direct",
        "--loader.bad_shards",
        "quarantine",
        "--loader.window",
        "60",
        "--train.epochs",
        "2",
    )
    code, text = train("--data.path", own_events, *words, "--loader.stuck_after_s", "30")
    assert code == 0, text
    assert "SHARD LEFT OUT: train/batch_1.parquet (150 samples)" in text
    assert "SHARD LEFT OUT: train/batch_2.parquet (150 samples)" in text


def test_an_unwritable_cache_and_an_unreadable_file_are_named_as_what_they_are(
    train: Run, own_events: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the cache should be")
    monkeypatch.setenv("STOKER_CACHE", str(blocked / "cache"))
    code, text = train("--data.path", own_events)
    assert code in (1, 2)
    assert "blocked" in text
    assert "train_meta" not in text

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    from stoker.data.parquet import open_parquet

    with pytest.raises(UserError, match="may not be read: Permission denied"):
        open_parquet(own_events / "train_meta.parquet")


def test_what_is_no_plain_file_is_refused_and_not_waited_for(train: Run, own_events: Path, tmp_path: Path) -> None:
    import os

    path = own_events / "train" / "batch_2.parquet"
    path.unlink()
    os.mkfifo(path)
    code, text = train("--data.path", own_events)
    assert code == 2
    assert "no plain file" in text
    os.mkfifo(tmp_path / "pipe.yaml")
    assert cli.run(["train", str(tmp_path / "pipe.yaml")]) == 2
    (own_events / "sensor_geometry.csv").unlink()
    (own_events / "sensor_geometry.csv").symlink_to("/dev/zero")
    code, text = train("--data.path", own_events)
    assert code == 2
    assert "sensor_geometry.csv" in text


def test_cheap_checks_come_before_packing(train: Run, own_events: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "packed"
    code, text = train("--data.path", own_events, "--data.validation", "[9]")
    assert code == 2
    assert "data.validation" in text
    assert not cache.exists()
    code, text = train("--data.path", own_events, "--run.name", "a/b")
    assert code == 2
    assert "run.name" in text
    assert not cache.exists()
    (own_events / "sensor_geometry.csv").write_text("sensor_id,x,y,z\n")
    code, text = train("--data.path", own_events)
    assert code == 2
    assert "sensor_geometry" in text
    assert not cache.exists()
