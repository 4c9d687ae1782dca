"""Models of directions: one event's answer does not depend on its company, inputs are sane, a batch can be learnt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.recipe import RunConfig
from stoker.recipes.icecube.baselines import line_fit
from stoker.recipes.icecube.batch import DOMS_STEP, PULSES_STEP, EventBatch
from stoker.recipes.icecube.data import IceCubeData, load_rows, open_data
from stoker.recipes.icecube.deep import DeepConfig
from stoker.recipes.icecube.flat import FlatConfig
from stoker.recipes.icecube.geometry import standard_geometry
from stoker.recipes.icecube.ice import ice_lengths
from stoker.recipes.icecube.inputs import DirectionConfig, InputLayer
from stoker.recipes.icecube.losses import angle_between
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.perturb import CHANGES, DEAD_SHARE
from stoker.recipes.icecube.recipe import RECIPE
from stoker.recipes.icecube.report import calibration, read_truth
from stoker.recipes.icecube.table import open_events
from stoker.recipes.icecube.task import DirectionTask, azimuth_zenith
from stoker.recipes.icecube.track_fit import track_fit

SMALL: list[DirectionConfig] = [
    TwoStageConfig(width=32, heads=2, pulse_layers=1, dom_layers=1),
    FlatConfig(width=32, heads=2, layers=2, first_pulses=3),
    DeepConfig(width=32, heads=2, layers=2, bias_layers=1, ice=True),
]
MODELS = pytest.mark.parametrize("config", SMALL, ids=lambda config: type(config).__name__)


def load(root: Path, rows: np.ndarray) -> EventBatch:
    run = RunConfig(recipe="icecube", data=IceCubeData(path=root, validation=(4,)), model=TwoStageConfig())
    return load_rows(open_data(run, torch.device("cpu")).stages, rows, torch.device("cpu"))


def small_task(config: DirectionConfig) -> DirectionTask:
    torch.manual_seed(0)
    task = DirectionTask(config, standard_geometry())
    for parameter in task.model.parameters():
        if not parameter.any():  # zeros, at the start of some layers, would hide what those layers do
            torch.nn.init.normal_(parameter, std=0.1)
    return task


@MODELS
def test_company_does_not_matter(events_dir: Path, config: DirectionConfig) -> None:
    task = small_task(config)
    together = task.predict(load(events_dir, np.arange(8)))
    alone = torch.cat([task.predict(load(events_dir, np.array([row]))) for row in range(8)])
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(together[:, :3].norm(dim=-1), torch.ones(8))
    assert (together[:, 3] > 0).all()


@MODELS
def test_rounded_numbers_of_tokens_change_no_answer_and_no_gradient(events_dir: Path, config: DirectionConfig) -> None:
    """A GPU gets batches with events behind those that were asked for."""
    batch, task = load(events_dir, np.arange(20)), small_task(config)
    whole = batch.rounded()
    assert (len(whole.time) % PULSES_STEP, len(whole.sensor) % DOMS_STEP) == (0, 0)
    assert int(whole.dom_offsets[-1]) == len(whole.time)
    assert int(whole.event_offsets[-1]) == len(whole.sensor)
    assert whole.dom_offsets.diff().min() >= 1
    model, found = task.model.double(), []
    for given in (batch, whole):
        wide = replace(given, **{name: getattr(given, name).double() for name in ("time", "charge", "auxiliary")})
        answer = model(wide)[: batch.num_samples]
        found.append([answer, *torch.autograd.grad(answer.square().sum(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@MODELS
def test_a_batch_is_learnt_by_heart(events_dir: Path, config: DirectionConfig) -> None:
    """A few steps on 16 events: enough to see that every model can learn; tests/gpu does 256 events."""
    task, batch = small_task(config), load(events_dir, np.arange(16))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    errors = []
    for _ in range(60):
        prediction = task.predict(batch)
        loss = task.losses(prediction, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        optimizer.step()
        errors.append(angle_between(prediction[:, :3], batch.direction).mean().item())
    assert errors[-1] < 0.5 * errors[0]


def test_presets_have_the_sizes_that_they_say() -> None:
    sizes = {}
    for name in ("seed", "flat-0.5m", "flat-5m", "flat-10m", "deep"):
        task = DirectionTask(RECIPE.presets[name]().model, standard_geometry())
        sizes[name] = sum(parameter.numel() for parameter in task.model.parameters()) / 1e6
    expected = {"seed": 1.6, "flat-0.5m": 0.5, "flat-5m": 5.0, "flat-10m": 10.0, "deep": 6.5}
    for name, size in sizes.items():
        assert abs(size / expected[name] - 1) < 0.1


def test_inputs_are_of_order_one_and_ice_is_the_right_way_up(events_dir: Path) -> None:
    inputs = InputLayer(DirectionConfig(ice=True), standard_geometry())(load(events_dir, np.arange(300)))
    for values in (inputs.doms, inputs.pulses):
        assert torch.isfinite(values).all()
        assert values.abs().max() < 20
        assert values.std(0).max() < 5
    dust, clear = (float(ice_lengths(np.array([z]))[1][0]) for z in (-100.0, -500.0))
    assert dust < 40 < 150 < clear  # the dust layer lies at z = -100, the clearest ice below it


@pytest.mark.parametrize("name", CHANGES)
def test_changed_batches_are_whole(events_dir: Path, name: str) -> None:
    batch = load(events_dir, np.arange(64))
    changed = CHANGES[name](batch, torch.Generator().manual_seed(0), 5160)
    assert changed.event_offsets[-1] == len(changed.sensor)
    assert changed.dom_offsets[-1] == len(changed.time)
    assert (changed.event_offsets.diff() > 0).all()
    assert (changed.dom_offsets.diff() > 0).all()
    for event in range(64):
        doms = changed.sensor[changed.event_offsets[event] : changed.event_offsets[event + 1]]
        assert (doms.diff() > 0).all()  # grouped: each DOM once
    before, after = len(batch.time), len(changed.time)
    if "noise" in name:
        assert 1.15 < after / before < 1.25
    elif "dead" in name:
        assert 1 - 3 * DEAD_SHARE < after / before < 1
    else:
        assert after == before
        assert 0 <= (changed.time - batch.time).abs().max() <= 5


def test_the_likelihood_fit_beats_the_line_fit_on_tracks(events_dir: Path) -> None:
    table = open_events(events_dir)
    truth = read_truth(events_dir, table, np.arange(len(table)))
    tracks = np.flatnonzero(truth["kind"] == "track")
    batch, xyz = load(events_dir, tracks), torch.from_numpy(standard_geometry().xyz)
    errors = {
        name: angle_between(found, batch.direction)
        for name, found in (("likelihood", track_fit(batch, xyz)), ("line", line_fit(batch, xyz)))
    }
    assert len(tracks) > 100
    assert errors["likelihood"].mean() < 0.9 * errors["line"].mean()
    assert errors["likelihood"].median() < errors["line"].median()


def test_calibration_sees_and_repairs_an_overconfident_model() -> None:
    generator = np.random.default_rng(0)
    kappa = np.exp(generator.uniform(0, 8, 40_000))
    distance = -np.log1p(generator.random(40_000) * np.expm1(-2 * kappa)) / kappa
    error = np.arccos(np.clip(1 - distance, -1, 1))
    honest, proud = calibration(kappa, error), calibration(4 * kappa, error)
    assert abs(honest["coverage"]["0.68"] - 0.68) < 0.01
    assert abs(honest["correction"]["log_kappa_slope"] - 1) < 0.05
    assert proud["coverage"]["0.68"] < 0.4
    assert abs(proud["coverage_corrected"]["0.68"] - 0.68) < 0.02


def test_angles_of_vectors() -> None:
    azimuth, zenith = azimuth_zenith(np.array([[0, 0, 1], [0, -1, 0], [-1, 0, 0], [0, 0, -2]]))
    np.testing.assert_allclose(azimuth, [0, 1.5 * np.pi, np.pi, 0])
    np.testing.assert_allclose(zenith, [0, np.pi / 2, np.pi / 2, np.pi])
