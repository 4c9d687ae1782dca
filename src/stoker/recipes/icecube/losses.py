"""Losses on directions, and the angle between them."""

import torch
from torch import Tensor


def angle_between(predicted: Tensor, target: Tensor) -> Tensor:
    """Angle (rad) between unit vectors (..., 3), exact near 0 and pi, with finite gradients everywhere.

    arccos of the dot product has an infinite slope at both ends and loses half its digits there. Half the chord and
    half its complement are the sine and cosine of half the angle; their norms get a floor far below float32's
    resolution of an angle, which keeps the slope finite where a norm is zero.
    """
    half_sin = _safe_norm(predicted - target)
    half_cos = _safe_norm(predicted + target)
    return 2 * torch.atan2(half_sin, half_cos)


def _safe_norm(vector: Tensor) -> Tensor:
    return (vector.square().sum(-1) + 1e-14).sqrt()
