from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stoker.recipes.icecube.check import check_events
from stoker.recipes.icecube.geometry import NUM_SENSORS, read_geometry, standard_geometry, write_geometry
from stoker.recipes.icecube.ice import ice_lengths
from stoker.recipes.icecube.light import LIGHT_SPEED, Detector, Points, Tracks, point_light, track_light
from stoker.recipes.icecube.simulate import simulate, simulate_events

DETECTOR = Detector(standard_geometry(), torch.device("cpu"))


def test_the_layout_is_the_competition_s(events_dir: Path) -> None:
    pulses = pq.read_table(events_dir / "train" / "batch_1.parquet")
    assert pulses.schema.remove_metadata() == pa.schema(
        {
            "sensor_id": pa.int16(),
            "time": pa.int64(),
            "charge": pa.float64(),
            "auxiliary": pa.bool_(),
            "event_id": pa.int64(),
        }
    )
    meta = pq.read_table(events_dir / "train_meta.parquet")
    assert meta.column_names == [
        "batch_id",
        "event_id",
        "first_pulse_index",
        "last_pulse_index",
        "azimuth",
        "zenith",
    ]
    assert pq.read_table(events_dir / "truth.parquet").num_rows == meta.num_rows == 600
    event, time = pulses["event_id"].to_numpy(), pulses["time"].to_numpy()
    assert ((np.diff(event) > 0) | (np.diff(time) >= 0)).all()
    assert read_geometry(events_dir / "sensor_geometry.csv").xyz.shape == (NUM_SENSORS, 3)


def test_the_same_seed_gives_the_same_files_for_any_number_of_threads(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        for name, count in (("one", 1), ("many", 4)):
            torch.set_num_threads(count)
            simulate(tmp_path / name, num_events=300, num_files=2, seed=3)
    finally:
        torch.set_num_threads(threads)
    for file in ("train/batch_1.parquet", "train/batch_2.parquet", "train_meta.parquet", "truth.parquet"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "many" / file).read_bytes()


def test_another_seed_gives_other_events() -> None:
    first, second = (simulate_events(DETECTOR, 50, (seed,)) for seed in (0, 1))
    assert not np.array_equal(first.azimuth, second.azimuth)


def test_every_event_has_a_trigger_and_noise_before_it() -> None:
    events = simulate_events(DETECTOR, 200, (5,))
    offsets = np.concatenate([[0], np.cumsum(events.count)])
    for number in range(200):
        part = slice(offsets[number], offsets[number + 1])
        coincident = events.time[part][~events.auxiliary[part]]
        assert len(np.unique(events.sensor[part][~events.auxiliary[part]])) >= 8
        assert ((coincident >= 10_000) & (coincident <= 15_000)).sum() >= 8
    assert events.time.min() < 6_500


def test_the_dust_layer_is_where_the_ice_says_it_is() -> None:
    heights = np.arange(-500.0, 500.0, 5.0)
    scattering, absorption = ice_lengths(heights)
    assert -150 < heights[scattering.argmin()] < -50
    assert -150 < heights[absorption.argmin()] < -50
    assert scattering[heights < -300].mean() > scattering[heights > 300].mean()


def test_light_falls_with_distance_and_arrives_no_sooner_than_it_can() -> None:
    zero = torch.zeros(1)
    points = Points(
        event=torch.zeros(1, dtype=torch.long),
        position=torch.tensor([[20.0, -20.0, -350.0]]),
        direction=torch.tensor([[0.0, 0.0, 1.0]]),
        time=zero,
        photons=torch.tensor([1e9]),
    )
    light = point_light(DETECTOR, points)
    distance = (DETECTOR.xyz.view(-1, 3)[light.dom] - points.position).norm(dim=-1)
    assert torch.allclose(light.time, distance.clamp_min(1) * 1.356 / LIGHT_SPEED, rtol=1e-4)
    rank = torch.corrcoef(torch.stack([distance.argsort().argsort().float(), light.mean.argsort().argsort().float()]))
    assert rank[0, 1] < -0.9


def test_a_finite_track_lights_only_what_lies_beside_it() -> None:
    tracks = Tracks(
        event=torch.zeros(1, dtype=torch.long),
        position=torch.tensor([[0.0, 0.0, 0.0]]),
        direction=torch.tensor([[0.0, 0.0, -1.0]]),
        start=torch.tensor([0.0]),
        stop=torch.tensor([300.0]),
        photons_per_m=torch.tensor([1e5]),
    )
    light = track_light(DETECTOR, tracks)
    z = DETECTOR.xyz.view(-1, 3)[light.dom, 2]
    weight = light.mean / light.mean.sum()
    assert -350 < float((z * weight).sum()) < 0
    assert float(weight[z > 100].sum()) < 0.01


def test_a_geometry_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "sensor_geometry.csv"
    write_geometry(standard_geometry(), path)
    np.testing.assert_allclose(read_geometry(path).xyz, standard_geometry().xyz, atol=0.006)
    assert (standard_geometry().efficiency == 1.35).sum() == 8 * 60


def test_a_few_thousand_events_look_like_the_real_ones(tmp_path: Path) -> None:
    simulate(tmp_path / "set", num_events=4000, num_files=2, seed=11)
    figures = {figure.name: figure for figure in check_events(tmp_path / "set")}
    # The largest event and the 99th percentile swing too much in a set of this size to be bounded tightly.
    loose = {"pulses per event, largest", "pulses per event, 99 %", "DOMs per event, 99 %"}
    assert [figure for name, figure in figures.items() if name not in loose and not figure.ok] == []
