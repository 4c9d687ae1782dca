"""Every mistake a user can make gets one paragraph and an exit code, and leaves nothing behind that looks complete."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker import cli

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def stoker(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str]:
        try:
            code = cli.run([str(word) for word in words])
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err

    return run


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def test_a_missing_directory(stoker: Run, tmp_path: Path) -> None:
    code, text = stoker("train", "icecube", "--data.path", tmp_path / "absent")
    assert code == 2
    assert "absent does not exist" in text


def test_a_directory_without_the_expected_files(stoker: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, text = stoker("train", "icecube", "--data.path", tmp_path / "empty")
    assert code == 2
    assert "train_meta.parquet" in text


def test_a_parquet_file_cut_in_half(stoker: Run, own_events: Path) -> None:
    path = own_events / "train" / "batch_2.parquet"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert "batch_2.parquet" in text
    assert "complete" in text


def test_a_missing_pulse_file(stoker: Run, own_events: Path) -> None:
    (own_events / "train" / "batch_3.parquet").unlink()
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert "batch_3.parquet" in text


def test_a_missing_column(stoker: Run, own_events: Path) -> None:
    rewrite(own_events / "train" / "batch_1.parquet", lambda table: table.drop_columns(["charge"]))
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert "charge" in text
    assert "batch_1.parquet" in text


def test_a_meta_row_that_points_past_the_end_of_its_file(stoker: Run, own_events: Path) -> None:
    def far(table: pa.Table) -> pa.Table:
        last = table.column("last_pulse_index").to_numpy().copy()
        last[5] += 10_000_000
        return table.set_column(3, "last_pulse_index", pa.array(last))

    rewrite(own_events / "train_meta.parquet", far)
    event = pq.read_table(own_events / "train_meta.parquet").column("event_id")[5].as_py()
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert f"Event {event}" in text
    assert "past the end" in text


@pytest.mark.parametrize(("column", "value", "words"), [(5, 4.0, "zenith"), (4, float("nan"), "azimuth")])
def test_labels_outside_their_range(stoker: Run, own_events: Path, column: int, value: float, words: str) -> None:
    def spoil(table: pa.Table) -> pa.Table:
        values = table.column(column).to_numpy().copy()
        values[7] = value
        return table.set_column(column, table.column_names[column], pa.array(values))

    rewrite(own_events / "train_meta.parquet", spoil)
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert words in text


def test_repeated_event_ids_and_overlapping_events(stoker: Run, own_events: Path) -> None:
    meta = own_events / "train_meta.parquet"
    rewrite(meta, lambda table: pa.concat_tables([table, table.slice(3, 1)]))
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert "more than once" in text


def test_a_geometry_with_a_missing_sensor(stoker: Run, own_events: Path, tmp_path: Path) -> None:
    path = own_events / "sensor_geometry.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:100] + lines[101:]))
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert "sensor 99" in text
    code, text = stoker("simulate", tmp_path / "new", "--geometry", path)
    assert code == 2
    assert "sensor 99" in text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "icecube", "--train.learning_rat", "1"], "train.lr"),
        (["train", "icecube", "--train.lr", "fast"], "train.lr"),
        (["train", "icecube", "--train.epochs", "-1"], "train.epochs"),
        (["train", "icecube", "--model.heads", "7"], "not a multiple"),
        (["train", "icecube:large"], "demo"),
        (["train", "nothing"], "icecube"),
        (["train", "no_such_module:RECIPE"], "no_such_module"),
        (["train", "json:dumps"], "Recipe"),
        (["train", "absent.yaml"], "absent.yaml"),
        (["resume", "absent"], "absent"),
        (["resume", "absent", "--train.lr", "1"], "no run folder"),
        (["runs", "--train.lr", "1"], "--train.lr"),
        (
            ["train", "icecube", "--init-from", "absent", "--data.simulate_events", "20", "--data.simulate_files", "2"],
            "absent",
        ),
        (["simulate", "new", "--events", "-5"], "-5"),
        (["simulate", "new", "--events", "3"], "10 files"),
        (["simulate", "new", "--device", "tpu"], "tpu"),
        (["simulate", "new", "--evnts", "5"], "--events"),
        (["simulate", "absent", "--check"], "absent"),
        (["simulate", "absent", "--check", "--events", "5"], "no other option"),
    ],
)
def test_a_wrong_word_is_named(stoker: Run, words: list[str], part: str) -> None:
    code, text = stoker(*words)
    assert code == 2
    assert part in text
    assert not Path("new").exists()


def test_an_existing_output_directory_is_kept(stoker: Run, own_events: Path) -> None:
    before = (own_events / "train_meta.parquet").read_bytes()
    code, text = stoker("simulate", own_events, "--events", "50", "--files", "2")
    assert code == 2
    assert "--force" in text
    assert (own_events / "train_meta.parquet").read_bytes() == before
    assert stoker("simulate", own_events, "--events", "50", "--files", "2", "--force")[0] == 0
    assert pq.read_metadata(own_events / "train_meta.parquet").num_rows == 50


def test_a_share_that_holds_out_every_file(stoker: Run, own_events: Path) -> None:
    code, text = stoker("train", "icecube", "--data.path", own_events, "--data.validation", "[1, 2, 3, 4]")
    assert code == 2
    assert "data.validation" in text


@pytest.mark.parametrize("small_disk", ["400k"], indirect=True)
def test_a_full_disk_while_simulating(stoker: Run, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("simulate", small_disk / "new", "--events", "500", "--files", "2")
    code, text = stoker(*words)
    assert code == 1
    assert "GB" in text
    # Past the estimate too: the disk fills up while files are being written.
    monkeypatch.setattr("stoker.recipes.icecube.simulate.BYTES_PER_EVENT", 1)
    code, text = stoker(*words)
    assert code == 1
    assert "disk is full" in text
    assert list(small_disk.iterdir()) == []


def test_a_target_that_is_missing_is_named_with_its_event(stoker: Run, own_events: Path) -> None:
    path = own_events / "train_meta.parquet"
    table = pq.read_table(path)
    angles = table.column("zenith").to_pylist()
    angles[5] = None
    at = table.schema.get_field_index("zenith")
    pq.write_table(table.set_column(at, "zenith", pa.array(angles, pa.float64())), path)
    code, text = stoker("train", "icecube", "--data.path", own_events)
    assert code == 2
    assert f"Event {table.column('event_id')[5].as_py()} in" in text
    assert "has no zenith" in text
