"""GraphNeT's files as events, other detectors, energy and vertex beside the direction, and models for other programs."""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import stoker
from stoker.errors import UserError
from stoker.launch import commands
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.recipes.icecube import events
from stoker.recipes.icecube.data import load_rows
from stoker.recipes.icecube.graphnet import as_layout
from stoker.recipes.icecube.recipe import RECIPE
from stoker.recipes.icecube.table import open_events
from stoker.recipes.icecube.truth import read_truth
from stoker.train.parallel import Ranks

REAL = Path(__file__).parents[3] / "shared" / "data" / "icecube" / "graphnet_examples"
SMALL = {"run": {"device": "cpu"}, "train": {"epochs": 2, "steps": 3, "log_every": 1}, "loader": {"batch_size": 8}}
MODEL = {"width": 16, "heads": 2, "dom_layers": 1}


def tables(count: int = 30) -> dict[str, dict[str, Any]]:
    """Events of a detector of 40 sensors, with the columns that GraphNeT gives IceCube's."""
    dice = np.random.default_rng(1)
    sizes = dice.integers(3, 12, count)
    event = np.repeat(np.arange(count) * 7 + 3, sizes)
    shuffled = dice.permutation(len(event))
    places = np.round(dice.uniform(-200, 200, (40, 3)), 2)[dice.integers(0, 40, len(event))]
    pulses = {
        "event_no": event,
        "dom_x": places[:, 0],
        "dom_y": places[:, 1],
        "dom_z": places[:, 2],
        "dom_time": dice.uniform(9_000, 12_000, len(event)),
        "charge": dice.uniform(0.1, 5, len(event)),
        "hlc": dice.integers(0, 2, len(event)).astype(float),
        "rde": np.where(places[:, 2] > 0, 1.35, 1.0),
    }
    truth = {
        "event_no": np.unique(event),
        "azimuth": dice.uniform(0, 6.28, count),
        "zenith": dice.uniform(0, 3.14, count),
        "energy": 10 ** dice.uniform(1, 4, count),
        **{f"position_{axis}": dice.uniform(-100, 100, count) for axis in "xyz"},
    }
    return {"SRTInIcePulses": {name: values[shuffled] for name, values in pulses.items()}, "truth": truth}


def write_database(path: Path, content: dict[str, dict[str, Any]]) -> Path:
    with sqlite3.connect(path) as connection:
        for table, columns in content.items():
            connection.execute(f"CREATE TABLE {table} ({', '.join(columns)})")
            marks = ", ".join("?" for _ in columns)
            rows = zip(*(values.tolist() for values in columns.values()), strict=True)
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    connection.close()
    return path


def write_folder(path: Path, content: dict[str, dict[str, Any]]) -> Path:
    for table, columns in content.items():
        (path / table).mkdir(parents=True)
        early = columns["event_no"] < 100  # an event lies in one file
        for number, part in enumerate((early, ~early)):
            piece = pa.table({name: values[part] for name, values in columns.items()})
            pq.write_table(piece, path / table / f"{table}_{number}.parquet")
    return path


def read_back(path: Path) -> dict[int, dict[str, Any]]:
    """Pulses of each event as the recipe sees them, with their places."""
    root = as_layout(path)
    table, xyz = open_events(root), events.open_geometry(root).xyz
    found = {}
    for shard in table.shards:
        pulses = pq.read_table(root / shard).to_pydict()
        for number in dict.fromkeys(pulses["event_id"]):
            own = [at for at, event in enumerate(pulses["event_id"]) if event == number]
            found[number] = {name: np.array([values[at] for at in own]) for name, values in pulses.items()}
            found[number]["place"] = xyz[found[number]["sensor_id"]]
    return found


@pytest.mark.parametrize("kind", ["database", "folder"])
def test_every_pulse_arrives_where_it_was(tmp_path: Path, kind: str) -> None:
    content = tables()
    path = (
        write_database(tmp_path / "events.db", content) if kind == "database" else write_folder(tmp_path / "f", content)
    )
    pulses, truth, found = content["SRTInIcePulses"], content["truth"], read_back(path)
    assert sorted(found) == truth["event_no"].tolist()
    for number, event in found.items():
        own = pulses["event_no"] == number
        order = np.argsort(pulses["dom_time"][own], kind="stable")
        assert np.array_equal(event["time"], np.round(pulses["dom_time"][own][order]))
        assert np.array_equal(event["charge"], pulses["charge"][own][order])
        assert np.array_equal(event["auxiliary"], pulses["hlc"][own][order] == 0)
        places = np.stack([pulses[f"dom_{axis}"][own][order] for axis in "xyz"], -1)
        np.testing.assert_allclose(event["place"], places, atol=0.006)
    table = open_events(as_layout(path))
    order = np.argsort(table.columns["id"])
    for name in ("azimuth", "zenith"):
        np.testing.assert_allclose(np.asarray(table.columns[name])[order], truth[name], rtol=1e-6)
    assert set(events.open_geometry(as_layout(path)).efficiency) == {np.float32(1.0), np.float32(1.35)}


# Files of others, which lie beside the project and are not part of it; `test_every_pulse_arrives_where_it_was` compares the
# same with files of the same columns that are made here, everywhere.
@pytest.mark.skipif(not REAL.is_dir(), reason="real files of GraphNeT lie beside the project, and not here")
@pytest.mark.parametrize("name", ["prometheus-events.db", "oscNext_genie_level7_v02_first_5_frames.db",
                                  "upgrade_genie_step4_140028_000998_first_5_frames.db"])  # fmt: skip
def test_real_files_hold_what_sqlite_says(name: str) -> None:
    found = read_back(REAL / name)
    connection = sqlite3.connect(f"{(REAL / name).as_uri()}?mode=ro&immutable=1", uri=True)
    pulses = {"prom": ("total", "t", "1.0"), "oscN": ("SRTInIcePulses", "dom_time", "charge")}
    table, time, charge = pulses.get(name[:4], ("SplitInIcePulses", "dom_time", "charge"))
    query = f"SELECT event_no, count(*), sum({charge}), sum(round({time})) FROM {table} GROUP BY event_no"
    for event, count, total, times in connection.execute(query).fetchall():
        assert len(found[event]["time"]) == count
        assert found[event]["charge"].sum() == pytest.approx(total)
        assert found[event]["time"].sum() == pytest.approx(times, abs=0.5 * count)
    (number,) = connection.execute(f"SELECT count(DISTINCT event_no) FROM {table}").fetchone()
    assert len(found) == number
    connection.close()


def test_a_detector_of_others_is_trained_on_and_another_file_of_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_database(tmp_path / "events.db", tables())
    outcome = stoker.train(  # type: ignore[operator]
        "icecube", **SMALL, data={"path": str(path)}, model={**MODEL, "energy": True, "vertex": True}
    )
    assert {"energy_error_log10", "energy_guess_log10", "vertex_error_m", "vertex_guess_m"} <= outcome.metrics.keys()
    assert any("energy" in row[0] for row in outcome.table())
    other = tables(12)
    other.pop("truth")
    told = commands.predict(
        outcome.folder.path, write_database(tmp_path / "other.db", other), Path("out.parquet"), "best", "auto", []
    )
    assert told["events"] == 12
    answers = pq.read_table("out.parquet")
    assert sorted(answers.column("event_id").to_pylist()) == np.unique(other["SRTInIcePulses"]["event_no"]).tolist()
    for name in ("energy", "energy_sigma_log10", "vertex_x", "vertex_sigma", "kappa"):
        assert np.isfinite(answers.column(name).to_numpy()).all()
    judged = commands.evaluate_run(outcome.folder.path, "best", "auto", ["--run.device", "cpu"])
    assert judged.metrics["energy_error_log10"] == pytest.approx(outcome.metrics["energy_error_log10"], rel=1e-5)


def test_energy_and_vertex_are_learnt(events_dir: Path) -> None:
    """What the loss asks for is the truth of each event."""
    words = ["--data.path", str(events_dir), "--run.device", "cpu", "--model.width", "32", "--model.heads", "2"]
    words += ["--model.energy", "true", "--model.vertex", "true"]
    run = build_run(RECIPE, resolve_target("icecube", words).config, Ranks())
    batch = load_rows(run.data.stages, np.arange(48), torch.device("cpu"))
    assert batch.truth is not None
    truth = read_truth(events_dir, run.data.table, np.arange(48))
    torch.testing.assert_close(batch.truth[:, 0], torch.from_numpy(np.log10(truth["energy"])).float())
    # Answers that are free to become what the loss wants: the truth, in its own units.
    raw = torch.randn(48, run.task.answers.width, requires_grad=True)
    optimizer = torch.optim.Adam([raw], lr=0.05)
    for _ in range(400):
        answers = torch.cat([torch.nn.functional.normalize(raw[:, :3]), raw[:, 3:4].exp(), raw[:, 4:]], -1)
        loss = run.task.losses(answers, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = run.task.summarise({name: value.double().numpy() for name, value in
                                run.task.scores(answers.detach(), batch).items()})  # fmt: skip
    assert found["mean_error_rad"] < 0.1
    assert found["energy_error_log10"] < 0.1 * found["energy_guess_log10"]
    assert found["vertex_error_m"] < 0.1 * found["vertex_guess_m"]
    assert run.task.model(batch).shape == (48, 10)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["demo", "flat-0.5m", "deep"])
def test_an_exported_model_gives_the_same_answers(
    events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    monkeypatch.chdir(tmp_path)
    layers = {"demo": {"dom_layers": 1}, "flat-0.5m": {"layers": 1}, "deep": {"layers": 2, "bias_layers": 1}}[preset]
    outcome = stoker.train(  # type: ignore[operator]
        f"icecube:{preset}",
        data={"path": str(events_dir)},
        model={"width": 16, "heads": 2, **layers, "vertex": preset == "demo"},
        train={"steps": 2, "compile": False, "log_every": 1},
        loader={"batch_size": 8, "sample_cost": 64, "micro_cost": 2000},
        run={"device": "cpu"},
    )
    told = commands.export(outcome.folder.path, Path("model.onnx"), None, "best", "auto")
    assert told["checked_on"] == 16
    assert told["largest_difference"] < 1e-4
    inside = {one.key: one.value for one in onnx.load("model.onnx").metadata_props}
    assert len(json.loads(inside["answers"])) == (8 if preset == "demo" else 4)
    with pytest.raises(UserError, match="nothing is overwritten"):
        commands.export(outcome.folder.path, Path("model.onnx"), None, "best", "auto")


def test_an_import_is_told_by_its_content_wherever_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_database(tmp_path / "events.db", tables())
    first = open_events(as_layout(path)).fingerprint
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "elsewhere"))
    assert open_events(as_layout(path)).fingerprint == first
    path.touch()
    assert open_events(as_layout(path)).fingerprint == first
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode=wal")
    as_layout(path)
    connection.execute("UPDATE truth SET azimuth = 2.5")
    connection.commit()  # still in the journal: the connection is open
    table = open_events(as_layout(path))
    assert table.fingerprint != first
    assert set(np.asarray(table.columns["azimuth"]).tolist()) == {2.5}
    connection.close()


def test_a_changed_truth_is_noticed(events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path(shutil.copytree(events_dir, tmp_path / "own"))
    outcome = stoker.train("icecube", **SMALL, data={"path": str(own)}, model={**MODEL, "energy": True})  # type: ignore[operator]
    truth = pq.read_table(own / "truth.parquet")
    energy = truth.column_names.index("energy")
    changed = truth.set_column(energy, "energy", pa.array(truth.column("energy").to_numpy() * 1000))
    pq.write_table(changed, own / "truth.parquet")
    with pytest.raises(UserError, match="are not those that"):
        commands.evaluate_run(outcome.folder.path, "best", "auto", ["--run.device", "cpu"])
    pq.write_table(pa.concat_tables([truth, truth.slice(0, 1)]), own / "truth.parquet")
    with pytest.raises(UserError, match="more than once"):
        commands.evaluate_run(outcome.folder.path, "best", "auto", ["--run.device", "cpu"])


def wrong(content: dict[str, dict[str, Any]], how: str) -> None:
    pulses, truth = content["SRTInIcePulses"], content["truth"]
    if how == "several":
        content["SplitInIcePulses"] = pulses
    elif how == "none":
        del pulses["dom_x"]
    elif how == "text":
        pulses["charge"] = np.array(["much"] * len(pulses["charge"]))
    elif how == "nan":
        pulses["dom_time"][3] = np.nan
    elif how == "twice":
        for name in truth:
            truth[name] = np.append(truth[name], truth[name][:1])
    elif how == "late":
        pulses["dom_time"][0] = 1e12
    elif how == "far":
        pulses["dom_x"][0] = 1e300
    elif how == "halves":
        pulses["event_no"] = pulses["event_no"] + 0.5
    elif how == "reconstruction":
        content["retro"] = content.pop("truth")
    elif how == "two truths":
        content["truth_2"] = truth
    elif how == "no truth in it":
        content["truth"] = {name: values[:0] for name, values in truth.items()}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("several", "several tables of pulses, SRTInIcePulses, SplitInIcePulses: choose one, --data.pulses NAME"),
        ("none", "holds no table of pulses"),
        ("text", "SRTInIcePulses.charge holds something that is no number"),
        ("nan", "has a time that is no number|holds something that is no number"),
        ("twice", "lists 1 events more than once"),
        ("late", "more than 32 bits hold"),
        ("far", "a place farther than"),
        ("halves", "an event needs a whole number"),
        ("reconstruction", "has directions in retro: say which are the true ones, --data.truth NAME"),
        ("two truths", "has directions in truth, truth_2"),
        ("no truth in it", "the table truth is empty"),
    ],
)
def test_what_is_wrong_with_a_database_is_said(tmp_path: Path, how: str, words: str) -> None:
    content = tables()
    wrong(content, how)
    with pytest.raises(UserError, match=words):
        as_layout(write_database(tmp_path / "events.db", content))


def test_other_files_are_named(tmp_path: Path, events_dir: Path) -> None:
    (tmp_path / "text.db").write_text("no database, but long enough to look like something" * 20)
    with pytest.raises(UserError, match="cannot be read as an SQLite database"):
        as_layout(tmp_path / "text.db")
    with pytest.raises(UserError, match="only IceCube's own icetray can read"):
        as_layout(tmp_path / "Level2.i3.zst")
    with pytest.raises(UserError, match=r"data\.pulses names a table"):
        as_layout(events_dir, "SRTInIcePulses")
    chosen = as_layout(write_database(tmp_path / "two.db", {**tables(), "Other": tables()["SRTInIcePulses"]}), "Other")
    assert len(open_events(chosen)) == 30
    with pytest.raises(UserError, match="has no table absent of pulses"):
        as_layout(tmp_path / "two.db", "absent")
