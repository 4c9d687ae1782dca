"""Shards that are cut, missing or damaged inside: named, and left out only when asked to, and never silently."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker import cli

Run = Callable[..., tuple[int, str]]
WORDS = ("train", "icecube", "--run.device", "cpu", "--train.steps", "30", "--train.log_every", "1", "--model.width", "8",
         "--model.heads", "1", "--model.dom_layers", "1", "--model.pulse_layers", "0", "--data.validation", "[4]",
         "--loader.batch_size", "20")  # fmt: skip


@pytest.fixture
def train(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        code = cli.run([str(word) for word in (*WORDS, *words)])
        return code, capsys.readouterr().err

    return run


def events_of(tmp_path: Path, kind: str) -> list[dict[str, object]]:
    (run,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == kind]


def damage_inside(path: Path) -> None:
    """Spoils the data of one row group and leaves the footer whole: only reading it can tell."""
    pq.write_table(pq.read_table(path), path, row_group_size=2000, compression="gzip")
    group = pq.ParquetFile(path).metadata.row_group(2).column(1)
    content = bytearray(path.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + group.total_compressed_size] = b"\xff" * group.total_compressed_size
    path.write_bytes(content)


def test_a_cut_shard_stops_the_run_and_is_left_out_when_asked(train: Run, own_events: Path, tmp_path: Path) -> None:
    path = own_events / "train" / "batch_2.parquet"
    path.write_bytes(path.read_bytes()[:5000])
    code, text = train("--data.path", own_events)
    assert code == 2
    assert "batch_2.parquet" in text
    code, text = train("--data.path", own_events, "--loader.bad_shards", "quarantine")
    assert code == 0
    assert "SHARD LEFT OUT: train/batch_2.parquet (150 samples)" in text
    (start,) = events_of(tmp_path, "start")
    assert "train/batch_2.parquet" in start["data"]["left_out"]  # type: ignore[index]
    assert start["data"]["training"] == 300  # type: ignore[index]
    code, text = train("--data.path", own_events)  # the table in the cache does not hide it
    assert code == 2


def test_damage_that_only_reading_finds(train: Run, own_events: Path, tmp_path: Path) -> None:
    damage_inside(own_events / "train" / "batch_1.parquet")
    code, text = train("--data.path", own_events, "--data.mode", "direct")
    assert code == 2
    assert "batch_1.parquet" in text
    assert "samples" in text
    code, text = train("--data.path", own_events, "--data.mode", "packed")
    assert code == 2
    assert "batch_1.parquet" in text
    for run in (tmp_path / "runs").iterdir():
        for path in sorted(run.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        run.rmdir()
    code, text = train("--data.path", own_events, "--data.mode", "direct", "--loader.bad_shards", "quarantine")
    assert code == 0
    (news,) = events_of(tmp_path, "left_out")
    assert news["samples"] == 150
    assert news["name"] == "train/batch_1.parquet"


def test_a_window_too_large_for_the_memory_is_refused(train: Run, own_events: Path) -> None:
    code, text = train("--data.path", own_events, "--data.mode", "direct", "--loader.ram_bytes", str(1 << 20))
    assert code == 2
    assert "loader.window" in text


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("--data.mode", "resident"), "GPU"),
        (("--data.split", "hash", "--data.validation", "[1]"), "share"),
        (("--loader.micro_cost", "100"), "sample_cost"),
    ],
)
def test_impossible_combinations_are_named(train: Run, own_events: Path, words: tuple[str, ...], part: str) -> None:
    code, text = train("--data.path", own_events, *words)
    assert code == 2
    assert part in text


def test_a_bad_pulse_is_named_with_its_event(train: Run, own_events: Path) -> None:
    path = own_events / "train" / "batch_3.parquet"
    table = pq.read_table(path)
    charge = table.column("charge").to_numpy().copy()
    charge[42] = -1.0
    pq.write_table(table.set_column(2, "charge", [charge]), path)
    event = table.column("event_id")[42].as_py()
    code, text = train("--data.path", own_events)
    assert code == 2
    assert f"Event {event}" in text
    assert "charge" in text


@pytest.mark.parametrize(
    ("column", "value", "words"), [("sensor_id", 5160, "sensor id outside"), ("charge", -1.0, "negative")]
)
def test_a_bad_pulse_is_named_when_files_are_read_directly(
    train: Run, own_events: Path, column: str, value: float, words: str
) -> None:
    path = own_events / "train" / "batch_1.parquet"
    table = pq.read_table(path)
    values = table.column(column).to_numpy().copy()
    values[30] = value
    at = table.schema.get_field_index(column)
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type)), path)
    code, text = train("--data.mode", "direct", "--data.path", own_events)
    event = pq.read_table(own_events / "train_meta.parquet").column("event_id")[0].as_py()
    assert code == 2
    assert words in text
    assert f"Event {event} in" in text
    assert "batch_1.parquet" in text
