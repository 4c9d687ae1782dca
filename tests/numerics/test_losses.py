import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.recipes.icecube.losses import angle_between, region_angle, von_mises_fisher

ANGLES = st.floats(0, 2 * math.pi)


def unit(azimuth: float, zenith: float) -> list[float]:
    return [math.sin(zenith) * math.cos(azimuth), math.sin(zenith) * math.sin(azimuth), math.cos(zenith)]


@given(ANGLES, st.floats(0, math.pi), ANGLES, st.floats(0, math.pi))
def test_the_angle_and_its_gradient_are_finite_and_right(a: float, b: float, c: float, d: float) -> None:
    first = torch.tensor(unit(a, b), requires_grad=True)
    second = torch.tensor(unit(c, d))
    angle = angle_between(first, second)
    angle.backward()
    assert first.grad is not None
    assert torch.isfinite(first.grad).all()
    # In float64 the cross product gives the angle to full precision at every size.
    u, v = first.detach().double().numpy(), second.double().numpy()
    expected = math.atan2(float(np.linalg.norm(np.cross(u, v))), float(u @ v))
    assert abs(angle.item() - expected) < 2e-6


def test_identical_and_opposite_vectors_have_finite_gradients() -> None:
    for sign in (1.0, -1.0):
        first = torch.tensor([[0.6, 0.0, 0.8], [0.0, 0.0, 1.0]], requires_grad=True)
        angle = angle_between(first, sign * first.detach())
        angle.sum().backward()
        assert first.grad is not None
        assert torch.isfinite(first.grad).all()
        expected = 0.0 if sign > 0 else math.pi
        assert torch.allclose(angle, torch.full((2,), expected), atol=1e-6)


@given(st.floats(1e-4, 1e5), st.floats(0, math.pi))
def test_the_density_on_the_sphere_is_right_finite_and_smooth(kappa: float, angle: float) -> None:
    strength = torch.tensor(kappa, dtype=torch.float64, requires_grad=True)
    mean, where = torch.tensor([0.0, 0.0, 1.0]).double(), torch.tensor(unit(0.3, angle)).double()
    cost = von_mises_fisher(mean, strength, where)
    cost.backward()
    assert strength.grad is not None
    # kappa / (4 pi sinh kappa), with the exponentials taken out so that it holds for every kappa
    log_constant = math.log(kappa) - kappa - math.log(2 * math.pi) - math.log(-math.expm1(-2 * kappa))
    assert abs(cost.item() - (-log_constant - kappa * math.cos(angle))) < 1e-6 * max(1.0, kappa)
    coth = 1 / math.tanh(kappa)
    assert abs(strength.grad.item() - (coth - 1 / kappa - math.cos(angle))) < 1e-5


def test_no_kappa_breaks_the_likelihood_in_float32() -> None:
    kappa = torch.tensor([0.0, 1e-30, 1e-6, 9.9e-3, 1.01e-2, 1.0, 88.0, 100.0, 101.0, 1e4, 1.6e5], requires_grad=True)
    mean = torch.nn.functional.normalize(torch.randn(len(kappa), 3), dim=-1).requires_grad_()
    cost = von_mises_fisher(mean, kappa, torch.nn.functional.normalize(torch.randn(len(kappa), 3), dim=-1))
    cost.sum().backward()
    assert kappa.grad is not None
    assert mean.grad is not None
    for values in (cost, kappa.grad, mean.grad):
        assert torch.isfinite(values).all()
    assert abs(cost[0].item() - math.log(4 * math.pi)) < 1e-6  # uniform


@pytest.mark.parametrize("kappa", [0.01, 1.0, 30.0, 3000.0])
def test_a_region_holds_the_share_that_it_says(kappa: float) -> None:
    """Against draws: 1 - cos of the angle is an exponential, cut at 2."""
    share = torch.rand(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = -torch.log1p(share * math.expm1(-2 * kappa)) / kappa
    angle = torch.arccos((1 - distance).clamp(-1, 1))
    for wanted in (0.1, 0.5, 0.68, 0.95):
        held = (angle < region_angle(torch.tensor(kappa).double(), wanted)).double().mean().item()
        assert abs(held - wanted) < 0.005
