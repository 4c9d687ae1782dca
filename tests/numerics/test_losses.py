import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.recipes.icecube.losses import angle_between

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
