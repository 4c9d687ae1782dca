"""Steps, optimizers, averages, schedules and guards, each against the plainest code that does the same."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.data.plan import Position, Step
from stoker.runs.events import EventLog, read_events
from stoker.runs.schema import Spike, Stuck
from stoker.train.config import TrainConfig
from stoker.train.ema import Average
from stoker.train.guards import LossWatch
from stoker.train.optim import build_optimizer, parameter_groups, step_unless
from stoker.train.precision import LossScale, same_sums
from stoker.train.schedule import chart, lr_at
from stoker.train.step import Stepper

CPU = torch.device("cpu")


@dataclass
class Points:
    x: Tensor
    y: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.x)


class Regression:
    """A small task with a norm layer that keeps statistics."""

    metric, goal, know_nothing_loss = "error", "min", 1.0

    def __init__(self, batch_norm: bool = False) -> None:
        torch.manual_seed(0)
        middle: nn.Module = nn.BatchNorm1d(8) if batch_norm else nn.LayerNorm(8)
        self.model: nn.Module = nn.Sequential(nn.Linear(3, 8), middle, nn.Tanh(), nn.Linear(8, 1))

    def predict(self, batch: Points) -> Tensor:
        return self.model(batch.x)  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: Points) -> Tensor:
        return (prediction.squeeze(1) - batch.y).square()

    def scores(self, prediction: Tensor, batch: Points) -> dict[str, Tensor]:
        return {"error": self.losses(prediction, batch)}

    def summarise(self, scores: Mapping[str, Any]) -> dict[str, float]:
        return {"error": float(np.mean(scores["error"]))}


def points(count: int, seed: int = 0) -> Points:
    generator = torch.Generator().manual_seed(seed)
    return Points(torch.randn(count, 3, generator=generator), torch.randn(count, generator=generator))


def as_step(*batches: Points) -> Step:
    rows = np.arange(sum(batch.num_samples for batch in batches))
    return Step(rows, Position(0), Position(0), batches=batches)


def stepper(task: Regression, **options: Any) -> Stepper:
    config = TrainConfig(**options)
    return Stepper(task, build_optimizer(task.model, config), config, "fp32", CPU)


def cut(batch: Points, *sizes: int) -> list[Points]:
    return [Points(x, y) for x, y in zip(batch.x.split(list(sizes)), batch.y.split(list(sizes)), strict=True)]


@pytest.mark.parametrize("sizes", [(10, 10), (1, 19), (7, 0, 13), (5, 5, 5, 5)])
def test_micro_batches_of_any_size_equal_the_one_big_batch(sizes: tuple[int, ...]) -> None:
    whole, parts = stepper(Regression()), stepper(Regression())
    for seed in range(5):
        batch = points(20, seed)
        results = [one.compute(as_step(*b)) for one, b in ((whole, [batch]), (parts, cut(batch, *sizes)))]
        for one, result in zip((whole, parts), results, strict=True):
            one.update(result, 1e-2)
        torch.testing.assert_close(results[0].loss, results[1].loss)
        torch.testing.assert_close(results[0].norm, results[1].norm)
    for ours, theirs in zip(whole.parameters, parts.parameters, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_fused_optimizers_equal_plain_formulas(optimizer: Any) -> None:
    config = TrainConfig(optimizer=optimizer, weight_decay=0.1, momentum=0.9, clip_norm=None)
    task = Regression()
    engine = Stepper(task, build_optimizer(task.model, config), config, "fp32", CPU)
    decayed = {id(parameter) for parameter in parameter_groups(task.model)[0]}
    weights = [parameter.detach().clone().double() for parameter in engine.parameters]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, 6):
        lr = 1e-2 / step
        result = engine.compute(as_step(points(16, step)))
        gradients = [parameter.grad.double().clone() for parameter in engine.parameters]  # type: ignore[union-attr]
        engine.update(result, lr)
        for number, (parameter, g) in enumerate(zip(engine.parameters, gradients, strict=True)):
            decay = 0.1 if id(parameter) in decayed else 0.0
            if optimizer == "adamw":
                weights[number] *= 1 - lr * decay
                first[number] = 0.9 * first[number] + 0.1 * g
                second[number] = 0.999 * second[number] + 0.001 * g * g
                scaled = (second[number] / (1 - 0.999**step)).sqrt() + 1e-8
                weights[number] -= lr * first[number] / (1 - 0.9**step) / scaled
            else:
                g = g + decay * weights[number]
                first[number] = 0.9 * first[number] + g
                weights[number] -= lr * (g + 0.9 * first[number])
    for parameter, expected in zip(engine.parameters, weights, strict=True):
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-4, atol=1e-6)


def test_norms_biases_and_embeddings_are_not_decayed_whatever_they_are_called() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_like_name = nn.Linear(4, 4)
            self.plain = nn.LayerNorm(4)
            self.table = nn.Embedding(5, 4)
            self.conv = nn.Conv2d(1, 2, 3)
            self.batch = nn.BatchNorm2d(2)

    model = Odd()
    decayed, plain = parameter_groups(model)
    assert {id(p) for p in decayed} == {id(model.norm_like_name.weight), id(model.conv.weight)}
    assert len(plain) == 7


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("bad_first", [True, False])
def test_a_step_that_is_not_finite_touches_neither_weights_nor_moments(optimizer: Any, bad_first: bool) -> None:
    clean, hit = Regression(batch_norm=True), Regression(batch_norm=True)
    first, second = stepper(clean, optimizer=optimizer, ema=0.9), stepper(hit, optimizer=optimizer, ema=0.9)
    poison = points(8, 99)
    poison.x[3, 1] = float("nan")
    for seed in range(4):
        if bad_first == (seed == 0):
            before = copy.deepcopy(hit.model.state_dict())
            result = second.compute(as_step(poison))
            assert result.bad.item() == 1
            second.update(result, 1e-2)
            for name, value in hit.model.state_dict().items():
                if value.is_floating_point():
                    assert torch.equal(value, before[name]), name
        for one in (first, second):
            one.update(one.compute(as_step(points(8, seed))), 1e-2)
    for ours, theirs in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(ours, theirs)
    assert first.average is not None
    assert second.average is not None
    for name, value in first.average.weights.items():
        if value.is_floating_point():
            assert torch.equal(value, second.average.weights[name])


def test_clipping_bounds_the_update_and_reports_the_norm_before_it() -> None:
    task = Regression()
    one = stepper(task, optimizer="sgd", momentum=0.0, clip_norm=0.01, weight_decay=0.0)
    before = [parameter.detach().clone() for parameter in one.parameters]
    result = one.compute(as_step(points(16)))
    one.update(result, 1.0)
    moved = math.sqrt(sum((p.detach() - b).square().sum().item() for p, b in zip(one.parameters, before, strict=True)))
    assert result.norm.item() > 0.01
    assert abs(moved - 0.01) < 1e-5


def test_the_average_follows_its_formula() -> None:
    model = nn.Linear(2, 1, bias=False)
    average = Average(model, 0.9)
    expected = model.weight.detach().clone()
    for number in range(1, 30):
        with torch.no_grad():
            model.weight += 0.1
        average.update(torch.zeros(()))
        decay = min(0.9, (1 + number) / (10 + number))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    torch.testing.assert_close(average.weights["weight"], expected)
    raw = model.weight.detach().clone()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight.detach(), raw)


def test_step_unless_updates_when_all_is_well() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=True)
    parameter.grad = torch.ones(2)
    step_unless(optimizer, torch.zeros(()))
    assert parameter.tolist() == [0.5, 0.5]


def test_the_loss_scale_halves_on_overflow_and_grows_when_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.train.precision.GROW_AFTER", 3)
    scale = LossScale(CPU, 1024.0)
    scale.update(torch.ones(()))
    assert scale.scale.item() == 512
    for _ in range(3):
        scale.update(torch.zeros(()))
    assert scale.scale.item() == 1024


def test_schedules_are_what_their_names_say() -> None:
    cosine = TrainConfig(lr=2.0, warmup_steps=10, final_share=0.1)
    rates = [lr_at(cosine, step, 110) for step in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == pytest.approx(2.0)
    assert rates[60] == pytest.approx(0.2 + 1.8 * 0.5)
    assert rates[-1] == pytest.approx(0.2, rel=0.01)
    constant = TrainConfig(lr=2.0, warmup_steps=0, schedule="constant")
    assert {lr_at(constant, step, 50) for step in range(50)} == {2.0}
    steps = TrainConfig(lr=1.0, warmup_steps=0, schedule="step", decay_every=20, decay_by=0.5)
    assert [lr_at(steps, step, 60) for step in (0, 19, 20, 40)] == [1.0, 1.0, 0.5, 0.25]
    cycle = TrainConfig(lr=0.1, schedule="onecycle", final_share=1e-5 / 25)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    reference = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100, final_div_factor=1e5)
    for step in range(100):
        assert lr_at(cycle, step, 100) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6)
        optimizer.step()
        if step < 99:
            reference.step()


@pytest.mark.parametrize("schedule", ["cosine", "onecycle", "constant", "step"])
def test_a_chart_shows_the_highest_rate_and_the_number_of_steps(schedule: Any) -> None:
    drawn = chart(TrainConfig(lr=3e-4, schedule=schedule), 1234)
    assert "3.00e-04" in drawn
    assert "1,234 steps" in drawn
    assert "#" in drawn


def test_spikes_and_a_loss_at_chance_become_events(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        watch = LossWatch(TrainConfig(baseline_after=150), know_nothing=1.0, log=log)
        noise = np.random.default_rng(0).normal(1.0, 0.01, 200)
        for step, loss in enumerate(noise, start=1):
            watch.look_at(step, 2.0 if step == 120 else float(loss))
    events = list(read_events(tmp_path / "events.jsonl", Spike, Stuck))
    assert [(event.kind, event.step) for event in events] == [("spike", 120), ("stuck", 150)]


def test_time_that_was_no_training_is_not_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.train import meter as module
    from stoker.train.step import StepResult

    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    meter = module.Meter()
    zero = torch.zeros(())
    for _ in range(4):
        now[0] += 0.5
        meter.add(as_step(points(100)), StepResult(zero, zero, zero, zero, zero, zero))
    now[0] += 18.0
    meter.leave_out(18.0)  # an evaluation
    now[0] += 0.25
    meter.add(as_step(points(50)), StepResult(zero, zero, zero, zero, zero, zero))
    reading = meter.read()
    assert reading.samples_per_s == pytest.approx(200)
    assert reading.step_ms == [500.0] * 4 + [250.0]


def test_what_is_being_saved_does_not_change_with_the_next_step() -> None:
    """A snapshot is written in the background while the run trains on."""
    from stoker.train.meter import Meter
    from stoker.train.step import StepResult

    meter, zero = Meter(), torch.zeros(())
    meter.add(as_step(points(100)), StepResult(zero, zero, zero, zero, zero, zero))
    state = meter.state()
    meter.add(as_step(points(50)), StepResult(zero, zero, zero, zero, zero, zero))
    assert state["samples"] == [100]
    assert len(state["results"]) == 1


def test_rows_that_were_taken_often_get_the_same_gradient_every_time() -> None:
    """Threads add to one row at the same time. Without `same_sums` nearly every try differs in its last bits."""
    torch.manual_seed(0)
    taken, upstream = torch.randint(0, 50, (8000,)), torch.randn(8000, 64)

    def gradient() -> Tensor:
        rows = torch.zeros(50, 64, requires_grad=True)
        rows[taken].backward(upstream)
        assert rows.grad is not None
        return rows.grad

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with same_sums(CPU):
            first = gradient()
            assert all(torch.equal(first, gradient()) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()
