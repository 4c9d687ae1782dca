"""The compiled kernels, and whole models on them, against the plain path in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stoker.data.batch import map_tensors
from stoker.recipe import RunConfig
from stoker.recipes.icecube.attention import Bias, Segments, attend, segment_attention, segment_mean
from stoker.recipes.icecube.data import IceCubeData, load_rows, open_data
from stoker.recipes.icecube.deep import DeepConfig
from stoker.recipes.icecube.flat import FlatConfig
from stoker.recipes.icecube.geometry import standard_geometry
from stoker.recipes.icecube.inputs import DirectionConfig
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.task import DirectionTask

LAYOUTS = [[1] * 500, [0, 3, 0, 1, 1, 33, 2, 0], [70, 1, 2561], [466, 1, 1, 1, 5] * 7, [0, 0, 1]]
# Largest difference, relative to the largest number: rounding of the inputs, and of sums in another order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def assert_near(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    assert ours.shape == exact.shape
    assert torch.isfinite(ours).all()
    assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp_min(1e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [32, 64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_attention_equals_the_exact_reference(lengths: list[int], with_bias: bool, block: int, kind: Any) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float64)

    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    tokens = int(offsets[-1])
    segments = Segments.of(offsets, tokens, block)
    qkv, table, weight = random(tokens, 3, 4, 32), random(4, 17), random(tokens, 4, 32)
    where = 200 * random(tokens, 4)
    results = []
    for dtype in (kind, torch.float64):
        own, knots = (
            qkv.to(kind).to(dtype).requires_grad_(),
            table.float().to(dtype if dtype != kind else torch.float32),
        )
        knots.requires_grad_()
        bias = Bias(where.float().to(knots.dtype), knots, 1 / 50) if with_bias else None
        out = attend(own, segments, bias)
        (out.double() * weight).sum().backward()
        gradients = [own.grad, knots.grad if with_bias and max(lengths) > 1 else None]
        results.append([out.detach(), *[gradient for gradient in gradients if gradient is not None]])
    for ours, exact in zip(*results, strict=True):
        assert_near(ours, exact, TOLERANCE[kind])


def test_the_public_function_and_means() -> None:
    offsets = torch.tensor([0, 3, 3, 70, 71], device="cuda")
    query, key, value = (torch.randn(71, 4, 32, device="cuda") for _ in range(3))
    exact = segment_attention(query.double(), key.double(), value.double(), offsets)
    assert_near(segment_attention(query, key, value, offsets), exact, 2e-5)
    segments = Segments.of(offsets, 71)
    values = torch.randn(71, 96, device="cuda")
    assert_near(segment_mean(values, segments), segment_mean(values.double(), segments), 1e-6)


MODELS: list[DirectionConfig] = [
    TwoStageConfig(),
    FlatConfig(width=96, heads=3, layers=3),
    DeepConfig(width=64, heads=2, layers=3, bias_layers=2),
]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: type(config).__name__)
# In bf16 a gradient of all layers together is within 12 % of the exact one: 8.4 % were seen with the flat model, on an H200.
# Whether plain operations in bf16 would be nearer was not looked at.
@pytest.mark.parametrize(("kind", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 0.12)])
def test_fast_models_equal_the_plain_ones_in_float64(
    events_dir: Path, config: DirectionConfig, kind: Any, tolerance: float
) -> None:
    """Outputs and all gradients: TF32 off in float32, autocast in bf16."""
    device = torch.device("cuda")
    data_config = IceCubeData(path=events_dir, validation=(4,), mode="packed")
    data = open_data(RunConfig(recipe="icecube", data=data_config, model=TwoStageConfig()), device)
    batch = load_rows(data.stages, np.arange(100), device)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    results = []
    for dtype in (kind, torch.float64):
        torch.manual_seed(0)
        task = DirectionTask(config, standard_geometry())
        for parameter in task.model.parameters():  # zeros would hide their gradients' errors
            torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
        model = task.model.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        given = _as(batch, torch.float64) if dtype == torch.float64 else batch
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            prediction = model(given)
            task.losses(prediction, given).sum().backward()
        gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
        results.append((prediction.detach()[:, :3], gradient))
    (direction, gradient), (exact_direction, exact_gradient) = results
    assert_near(direction, exact_direction, tolerance)
    assert (gradient - exact_gradient).norm() <= tolerance * exact_gradient.norm()


def _as(batch: Any, kind: Any) -> Any:
    return map_tensors(batch, lambda tensor: tensor.to(kind) if tensor.is_floating_point() else tensor)


def test_one_event_of_150000_pulses_trains_within_24_gb() -> None:
    """The largest events known: 2,561 DOMs, some with hundreds of pulses."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    counts = torch.multinomial(torch.ones(2561), 150_000 - 2561, replacement=True, generator=generator)
    counts = torch.bincount(counts, minlength=2561) + 1
    batch = load_batch(counts, device)
    for config in (TwoStageConfig(), FlatConfig()):
        task = DirectionTask(config, standard_geometry())
        task.model.to(device)
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.losses(task.predict(batch), batch).sum()
        loss.backward()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            assert torch.isfinite(task.predict(batch)).all()
        assert torch.isfinite(loss)
        assert torch.cuda.max_memory_allocated() < 24e9


def load_batch(counts: Tensor, device: torch.device) -> Any:
    from stoker.recipes.icecube.batch import EventBatch

    total = int(counts.sum())
    return EventBatch(
        time=(torch.rand(total) * 1e4 + 6e3).to(device),
        charge=torch.ones(total, device=device),
        auxiliary=torch.zeros(total, device=device),
        dom_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).to(device),
        sensor=torch.randperm(5160)[: len(counts)].sort().values.to(device),
        event_offsets=torch.tensor([0, len(counts)], device=device),
        direction=torch.tensor([[0.0, 0.0, 1.0]], device=device),
        rows=torch.zeros(1, dtype=torch.int64, device=device),
    )


def test_one_batch_is_learnt_by_heart(events_dir: Path) -> None:
    """256 events, 300 steps: the loss falls below a tenth of its start."""
    device = torch.device("cuda")
    data_config = IceCubeData(path=events_dir, validation=(4,), mode="packed")
    data = open_data(RunConfig(recipe="icecube", data=data_config, model=TwoStageConfig()), device)
    batch = load_rows(data.stages, np.arange(256), device)
    torch.manual_seed(0)
    task = DirectionTask(TwoStageConfig(loss="angle"), standard_geometry())
    task.model.to(device)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3, fused=True)
    losses = []
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 20) * (1 - step / 300)
        with torch.autocast("cuda", torch.bfloat16):
            loss = task.losses(task.predict(batch), batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.1 * losses[0]
