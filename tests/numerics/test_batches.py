"""Gathering, grouping by DOM and the line fit, each against the plainest code that does the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from stoker.data.loader import LoaderConfig
from stoker.data.pack import pack
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Ragged
from stoker.data.store import open_store
from stoker.recipe import RunConfig
from stoker.recipes.icecube import events
from stoker.recipes.icecube.baselines import line_fit
from stoker.recipes.icecube.batch import EventBatch, collate
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.model import TwoStageConfig, TwoStageModel
from stoker.recipes.icecube.sources import ResidentEvents
from stoker.recipes.icecube.table import open_events

CPU = torch.device("cpu")


def read(folder: Path, rows: np.ndarray) -> Ragged:
    return events.open_pulses(folder, open_events(folder)).gather(MicroBatch(rows))


def load(folder: Path, rows: np.ndarray) -> EventBatch:
    table = open_events(folder)
    labels = {name: np.asarray(table.columns[name][rows]) for name in events.LABELS}
    return collate(events.stored_columns(read(folder, rows)), labels, None).to(CPU)


def through_stages(folder: Path, rows: np.ndarray, mode: Any, cap: int | None = None) -> EventBatch:
    run = RunConfig(
        recipe="icecube",
        data=IceCubeData(path=folder, mode=mode, validation=(4,)),
        model=TwoStageConfig(),
        loader=LoaderConfig(sample_cost=cap),
    )
    value: Any = MicroBatch(rows, seed=1, epoch=2)
    for stage in open_data(run, CPU).stages:
        value = stage.run(value)
    return value.to(CPU)


def assert_same_batch(first: EventBatch, second: EventBatch) -> None:
    for name, value in vars(first).items():
        other = getattr(second, name)
        assert (value is None and other is None) or torch.equal(value, other), name


def test_gather_equals_slicing_the_files(events_dir: Path) -> None:
    table = open_events(events_dir)
    rows = np.random.default_rng(0).permutation(len(table))[:97]
    pulses = read(events_dir, rows)
    meta = pq.read_table(events_dir / "train_meta.parquet").to_pylist()
    for number, row in enumerate(rows):
        event = meta[row]
        path = events_dir / "train" / f"batch_{event['batch_id']}.parquet"
        first, last = event["first_pulse_index"], event["last_pulse_index"]
        expected = pq.read_table(path).slice(first, last - first + 1)
        assert set(expected.column("event_id").to_pylist()) == {event["event_id"]}
        for name in events.PULSE_COLUMNS:
            ours = pulses.columns[name][pulses.offsets[number] : pulses.offsets[number + 1]]
            theirs = expected.column(name).to_numpy().astype(ours.dtype)
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("rows_per_group", [300, 1000])
def test_samples_across_row_groups_are_whole(own_events: Path, events_dir: Path, rows_per_group: int) -> None:
    rows = np.random.default_rng(1).permutation(450)[:200]
    expected = read(events_dir, rows)
    for path in (own_events / "train").glob("*.parquet"):
        pq.write_table(pq.read_table(path), path, row_group_size=rows_per_group)
    ours = read(own_events, rows)
    assert np.array_equal(ours.offsets, expected.offsets)
    for name, column in expected.columns.items():
        assert np.array_equal(ours.columns[name], column)
    in_order = np.sort(rows)
    assert np.array_equal(read(own_events, in_order).columns["time"], read(events_dir, in_order).columns["time"])


def test_pulses_are_grouped_by_dom_and_stay_in_order_of_time(events_dir: Path) -> None:
    rows = np.arange(20, 60)
    pulses, batch = read(events_dir, rows), load(events_dir, rows)
    doms, dom_offsets = batch.sensor.tolist(), batch.dom_offsets.tolist()
    for event in range(len(rows)):
        begin, end = pulses.offsets[event], pulses.offsets[event + 1]
        sensors = pulses.columns["sensor_id"][begin:end]
        first, last = batch.event_offsets[event], batch.event_offsets[event + 1]
        assert doms[first:last] == sorted(set(sensors.tolist()))
        for dom in range(first, last):
            mine = pulses.columns["time"][begin:end][sensors == doms[dom]]
            assert batch.time[dom_offsets[dom] : dom_offsets[dom + 1]].tolist() == mine.tolist()


def test_direct_and_packed_reading_give_the_same_batch(events_dir: Path) -> None:
    rows = np.sort(np.random.default_rng(2).permutation(450)[:64])
    assert_same_batch(through_stages(events_dir, rows, "direct"), through_stages(events_dir, rows, "packed"))


def test_direct_and_packed_thinning_keep_the_cap_and_coincident_pulses(events_dir: Path) -> None:
    rows = np.arange(64)
    whole = through_stages(events_dir, rows, "packed")
    for mode in ("direct", "packed"):
        batch = through_stages(events_dir, rows, mode, cap=40)
        pulses = np.diff(batch.dom_offsets[batch.event_offsets].numpy())
        full = np.diff(whole.dom_offsets[whole.event_offsets].numpy())
        assert np.array_equal(pulses, np.minimum(full, 40))
        assert int(batch.dom_offsets[-1]) == len(batch.time)


@pytest.mark.parametrize("cap", [None, 40])
def test_resident_events_give_the_same_batch_as_the_store(events_dir: Path, tmp_path: Path, cap: int | None) -> None:
    table = open_events(events_dir)
    pack(tmp_path / "store", events.packing(events_dir, table), threads=2)
    rows = np.sort(np.random.default_rng(3).permutation(450)[:50])
    resident = ResidentEvents(open_store(tmp_path / "store"), CPU)
    ours = resident.request(MicroBatch(rows, seed=1, epoch=2), cap).to(CPU)
    assert_same_batch(ours, through_stages(events_dir, rows, "packed", cap=cap))


def test_the_line_fit_equals_least_squares(events_dir: Path) -> None:
    rows = np.arange(50)
    batch, pulses = load(events_dir, rows), read(events_dir, rows)
    xyz = torch.from_numpy(events.open_geometry(events_dir).xyz)
    fitted = line_fit(batch, xyz).numpy()
    for event in range(50):
        part = slice(pulses.offsets[event], pulses.offsets[event + 1])
        kept = ~pulses.columns["auxiliary"][part]
        time = pulses.columns["time"][part][kept].astype(float)
        place = xyz.numpy()[pulses.columns["sensor_id"][part][kept]].astype(float)
        velocity = np.polyfit(time, place, 1)[0]
        np.testing.assert_allclose(fitted[event], -velocity / np.linalg.norm(velocity), atol=1e-5)


def test_an_event_gets_the_same_answer_alone_and_in_company(events_dir: Path) -> None:
    torch.manual_seed(0)
    geometry = events.open_geometry(events_dir)
    model = TwoStageModel(TwoStageConfig(width=16, heads=2, pulse_layers=1, dom_layers=2), geometry).eval()
    together = model(load(events_dir, np.arange(10)))
    alone = torch.cat([model(load(events_dir, np.array([row]))) for row in range(10)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[:, :3].norm(dim=-1), torch.ones(10))
