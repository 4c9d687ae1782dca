"""Gathering, grouping by DOM and the line fit, each against the plainest code that does the same."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from stoker.recipes.icecube import events
from stoker.recipes.icecube.baselines import line_fit
from stoker.recipes.icecube.batch import EventBatch, collate
from stoker.recipes.icecube.model import TwoStageConfig, TwoStageModel


def load(folder: Path, rows: np.ndarray) -> EventBatch:
    table = events.open_events(folder)
    labels = {name: np.asarray(table.columns[name][rows]) for name in events.LABELS}
    return collate(events.open_pulses(folder, table).gather(rows), labels, rows)


def test_gather_equals_slicing_the_files(events_dir: Path) -> None:
    table = events.open_events(events_dir)
    rows = np.random.default_rng(0).permutation(len(table))[:97]
    pulses = events.open_pulses(events_dir, table).gather(rows)
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


def test_pulses_are_grouped_by_dom_and_stay_in_order_of_time(events_dir: Path) -> None:
    rows = np.arange(20, 60)
    table = events.open_events(events_dir)
    pulses = events.open_pulses(events_dir, table).gather(rows)
    batch = load(events_dir, rows)
    doms, dom_offsets = batch.sensor.tolist(), batch.dom_offsets.tolist()
    for event in range(len(rows)):
        begin, end = pulses.offsets[event], pulses.offsets[event + 1]
        sensors = pulses.columns["sensor_id"][begin:end]
        first, last = batch.event_offsets[event], batch.event_offsets[event + 1]
        assert doms[first:last] == sorted(set(sensors.tolist()))
        for dom in range(first, last):
            mine = pulses.columns["time"][begin:end][sensors == doms[dom]]
            assert batch.time[dom_offsets[dom] : dom_offsets[dom + 1]].tolist() == mine.tolist()


def test_the_line_fit_equals_least_squares(events_dir: Path) -> None:
    rows = np.arange(50)
    batch = load(events_dir, rows)
    xyz = torch.from_numpy(events.open_geometry(events_dir).xyz)
    table = events.open_events(events_dir)
    pulses = events.open_pulses(events_dir, table).gather(rows)
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
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(10))
