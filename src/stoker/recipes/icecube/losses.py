"""Losses on directions, the angle between them, and the von Mises-Fisher distribution on the sphere."""

import math

import torch
from torch import Tensor

LOG_SIGMA = 6.0  # bound of the logarithm of a spread: no input gives one that is zero or infinite
LOG_SPHERE = math.log(4 * math.pi)  # what a uniform density costs


def angle_between(predicted: Tensor, target: Tensor) -> Tensor:
    """Angle (rad) between unit vectors (..., 3), exact near 0 and pi, with finite gradients everywhere.

    arccos of the dot product has an infinite slope at both ends and loses half its digits there. Half the chord and
    half its complement are the sine and cosine of half the angle; their norms get a floor far below float32's
    resolution of an angle, which keeps the slope finite where a norm is zero.
    """
    half_sin = _safe_norm(predicted - target)
    half_cos = _safe_norm(predicted + target)
    return 2 * torch.atan2(half_sin, half_cos)


def von_mises_fisher(predicted: Tensor, kappa: Tensor, target: Tensor) -> Tensor:
    """Negative log likelihood of unit vectors (..., 3) under mean directions and concentrations (...).

    The exact closed form, kappa (1 - cos) + log((1 - exp(-2 kappa)) / (2 kappa)) + log 4 pi: no Bessel functions, no
    approximation with a jump in it, finite and smooth from kappa = 0 up.
    """
    one_minus_cos = (predicted - target).square().sum(-1) / 2  # keeps its digits at small angles
    return kappa * one_minus_cos + _log_normaliser(kappa) + LOG_SPHERE


def region_angle(kappa: Tensor, share: float) -> Tensor:
    """Angle (rad) about the mean direction inside which `share` of the distribution lies."""
    # With u = 1 - cos: P(u) = (1 - exp(-kappa u)) / (1 - exp(-2 kappa)).
    u = -torch.log1p(share * torch.expm1(-2 * kappa)) / kappa
    return 2 * torch.asin((u / 2).clamp(0, 1).sqrt())


def gaussian(predicted: Tensor, log_sigma: Tensor, target: Tensor) -> Tensor:
    """Negative log likelihood of (..., K) under a mean and one spread for all K, without its constant."""
    bounded = LOG_SIGMA * torch.tanh(log_sigma / LOG_SIGMA)
    square = (predicted - target).square().sum(-1)
    return square * torch.exp(-2 * bounded) / 2 + predicted.shape[-1] * bounded


def sigma_of(log_sigma: Tensor) -> Tensor:
    return torch.exp(LOG_SIGMA * torch.tanh(log_sigma / LOG_SIGMA))


def _log_normaliser(kappa: Tensor) -> Tensor:
    """log((1 - exp(-2 kappa)) / (2 kappa)), by its series where the quotient would be 0 / 0."""
    small = kappa < 1e-2
    safe = torch.where(small, torch.ones_like(kappa), kappa)
    return torch.where(
        small, -kappa + kappa.square() / 6 - kappa**4 / 180, torch.log(-torch.expm1(-2 * safe) / (2 * safe))
    )


def _safe_norm(vector: Tensor) -> Tensor:
    return (vector.square().sum(-1) + 1e-14).sqrt()
