"""Augmentation of a whole batch on the device; what is drawn at random is drawn on the host, with the sample.

Images are floats 0 .. 255, (B, 3, S, S). RandAugment's operations are those of torchvision, each on the images that drew it,
with a magnitude of its own for every image.
"""

# B images, K of them that drew an operation
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.data.ragged import Indices
from stoker.recipes.imagenet.chance import Floats

BINS = 31  # steps that a magnitude has in the literature: 9 means 9 / 30
# Largest value of each operation at magnitude 30; None: it has no magnitude.
LARGEST: dict[str, float | None] = {
    "identity": None,
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 150.0 / 331.0,  # of the side
    "translate_y": 150.0 / 331.0,
    "rotate": 30.0,  # degrees
    "brightness": 0.9,
    "colour": 0.9,
    "contrast": 0.9,
    "sharpness": 0.9,
    "posterize": 4.0,  # bits taken away
    "solarize": 255.0,  # off the threshold
    "autocontrast": None,
    "equalize": None,
}
OPERATIONS = tuple(LARGEST)
NUMBERS_OF_ERASING = 5


@dataclass(frozen=True)
class RandAugment:
    """What was drawn: (layers, B) operation and signed strength."""

    operation: Tensor  # int64
    strength: Tensor  # float32

    @classmethod
    def draw(cls, numbers: Floats, layers: int, magnitude: float, spread: float) -> "RandAugment":
        """From (B, 4 layers) uniform numbers; `spread` is the standard deviation of the magnitude."""
        operation = (numbers[:, :layers] * len(OPERATIONS)).astype(np.int64)
        normal = np.sqrt(-2 * np.log1p(-numbers[:, layers : 2 * layers])) * np.cos(
            2 * np.pi * numbers[:, 2 * layers : 3 * layers]
        )
        share = np.clip(magnitude + spread * normal, 0, BINS - 1) / (BINS - 1)
        largest = np.array([LARGEST[name] or 0.0 for name in OPERATIONS])
        sign = np.where(numbers[:, 3 * layers : 4 * layers] < 0.5, -1.0, 1.0)
        strength = share * largest[operation] * sign
        return cls(torch.from_numpy(operation.T.copy()), torch.from_numpy(strength.T.astype(np.float32)))


def rand_augment(images: Tensor, drawn: RandAugment) -> Tensor:
    """Layer after layer. Which images drew what is known on the host, so nobody waits for the device."""
    for operation, strength in zip(drawn.operation, drawn.strength, strict=True):
        for number, name in enumerate(OPERATIONS):
            chosen = torch.nonzero(operation == number).squeeze(1)
            if name == "identity" or not len(chosen):
                continue
            index = chosen.to(images.device, non_blocking=True)
            changed = apply(name, images[index], strength[chosen].to(images.device, non_blocking=True))
            images = images.index_copy(0, index, changed)
    return images


def apply(name: str, images: Tensor, strength: Tensor) -> Tensor:
    """One operation on (K, 3, S, S) with (K,) strengths."""
    if name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate"):
        return _affine(images, _matrices(name, strength, images.shape[-1]))
    per_image = strength.view(-1, 1, 1, 1)
    if name == "brightness":
        return (images * (1 + per_image)).clamp(0, 255)
    if name == "colour":
        return _blend(images, _grey(images), 1 + per_image)
    if name == "contrast":
        return _blend(images, _grey(images).floor().mean((1, 2, 3), keepdim=True), 1 + per_image)
    if name == "sharpness":
        return _blend(images, _blurred(images), 1 + per_image)
    if name == "posterize":
        step = 2.0 ** per_image.abs().round()
        return (images.floor() / step).floor() * step
    if name == "solarize":
        return torch.where(images >= 255 - per_image.abs(), 255 - images, images)
    if name == "autocontrast":
        low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
        stretched = (images - low) * (255 / (high - low).clamp_min(1e-6))
        return torch.where(high > low, stretched, images).clamp(0, 255)
    assert name == "equalize"
    return _equalize(images)


def _matrices(name: str, strength: Tensor, size: int) -> Tensor:
    """(K, 2, 3) from output to input coordinates, in -1 .. 1 from the centre."""
    matrix = torch.eye(2, 3, device=strength.device).repeat(len(strength), 1, 1)
    if name == "shear_x":
        matrix[:, 0, 1] = strength
    elif name == "shear_y":
        matrix[:, 1, 0] = strength
    elif name == "translate_x":
        matrix[:, 0, 2] = -2 * (strength * size).trunc() / size
    elif name == "translate_y":
        matrix[:, 1, 2] = -2 * (strength * size).trunc() / size
    else:
        angle = strength * (math.pi / 180)
        matrix[:, 0, 0] = matrix[:, 1, 1] = angle.cos()
        matrix[:, 0, 1], matrix[:, 1, 0] = -angle.sin(), angle.sin()
    return matrix


def _affine(images: Tensor, matrices: Tensor) -> Tensor:
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def _blend(images: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    return (weight * images + (1 - weight) * other).clamp(0, 255)


def _grey(images: Tensor) -> Tensor:
    weight = torch.tensor([0.2989, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
    return (images * weight).sum(1, keepdim=True)


def _blurred(images: Tensor) -> Tensor:
    """A 3 x 3 mean with a heavy middle; the outermost pixels stay as they are."""
    kernel = torch.ones(3, 3, device=images.device)
    kernel[1, 1] = 5.0
    kernel = (kernel / kernel.sum()).expand(3, 1, 3, 3)
    out = images.clone()
    out[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=3)
    return out


def _equalize(images: Tensor) -> Tensor:
    """Each channel's levels spread evenly: by the cumulated histogram, as Pillow does it."""
    levels = images.round().clamp(0, 255).long().flatten(2)  # (K, 3, pixels)
    histogram = torch.zeros(*levels.shape[:2], 256, device=images.device, dtype=torch.int64)
    histogram.scatter_add_(2, levels, torch.ones_like(levels))
    summed = histogram.cumsum(2)
    last = (histogram > 0).long() * torch.arange(256, device=images.device)
    of_last = histogram.gather(2, last.amax(2, keepdim=True))
    step = (summed[..., -1:] - of_last) // 255
    shifted = F.pad(summed, (1, 0))[..., :-1]
    table = ((shifted + step // 2) // step.clamp_min(1)).clamp(0, 255)
    table = torch.where(step > 0, table, torch.arange(256, device=images.device))
    return table.gather(2, levels).view(images.shape).to(images.dtype)


@dataclass(frozen=True)
class Mixing:
    """Every image with another of the batch: (B,) weight of the own image, and a box for those that are pasted."""

    partner: Tensor  # (B,) int64, places in the batch
    weight: Tensor  # (B,) of the own label
    blend: Tensor  # (B,) weight of the own pixels everywhere; 1 where a box is pasted
    boxes: Tensor  # (B, 4) top, left, bottom, right as shares of the side; empty where blended

    @classmethod
    def draw(
        cls, numbers: Floats, partner: Indices, mixup: float, cutmix: float, probability: float, switch: float
    ) -> "Mixing":
        """From (B, 6) uniform numbers; `mixup` and `cutmix` are the alphas of beta distributions, 0 for never."""
        active = numbers[:, 0] < probability
        cut = (numbers[:, 1] < switch) if mixup and cutmix else np.full(len(numbers), bool(cutmix))
        alpha = np.where(cut, cutmix or 1.0, mixup or 1.0)
        weight = _beta(alpha, numbers[:, 2], numbers[:, 3])
        side = np.sqrt(1 - weight)
        y, x = numbers[:, 4], numbers[:, 5]
        top, bottom = np.clip(y - side / 2, 0, 1), np.clip(y + side / 2, 0, 1)
        left, right = np.clip(x - side / 2, 0, 1), np.clip(x + side / 2, 0, 1)
        pasted = cut & active
        own = np.where(pasted, 1 - (bottom - top) * (right - left), np.where(active, weight, 1.0))
        boxes = np.stack([top, left, bottom, right], 1) * pasted[:, None]
        blend = np.where(active & ~cut, weight, 1.0)
        rest = (torch.from_numpy(values.astype(np.float32)) for values in (own, blend, boxes))
        return cls(torch.from_numpy(partner), *rest)


def _beta(alpha: Floats, first: Floats, second: Floats) -> Floats:
    """Draws of symmetric beta distributions: from a table of quantiles of the lower half, mirrored half of the time.

    With x = t^(1/alpha) / 2 the density in t is (1 - x)^(alpha - 1), smooth also where that in x has nearly all its weight
    at zero.
    """
    out = np.empty(len(alpha))
    t = (np.arange(4096) + 0.5) / 4096
    for value in np.unique(alpha):
        mine = alpha == value
        x = t ** (1 / value) / 2
        cumulated = np.cumsum((1 - x) ** (value - 1))
        half = np.interp(first[mine], (cumulated - cumulated[0] / 2) / cumulated[-1], x)
        out[mine] = np.where(second[mine] < 0.5, half, 1 - half)
    return out


def mix(images: Tensor, mixing: Mixing) -> Tensor:
    """Blends or pastes."""
    partner = images[mixing.partner]
    images = images * mixing.blend.view(-1, 1, 1, 1) + partner * (1 - mixing.blend.view(-1, 1, 1, 1))
    return torch.where(_in_boxes(mixing.boxes, images.shape[-1]), partner, images)


@dataclass(frozen=True)
class Erasing:
    boxes: Tensor  # (B, 4) as shares of the side; empty where nothing is erased

    @classmethod
    def draw(cls, numbers: Floats, probability: float) -> "Erasing":
        """From (B, 5) uniform numbers: 2 to 33 % of the image, of a shape between 0.3 and 3.3."""
        area = 0.02 + numbers[:, 1] * 0.31
        shape = np.exp(np.log(0.3) + numbers[:, 2] * (np.log(3.3) - np.log(0.3)))
        tall, wide = np.minimum(np.sqrt(area * shape), 1.0), np.minimum(np.sqrt(area / shape), 1.0)
        top, left = numbers[:, 3] * (1 - tall), numbers[:, 4] * (1 - wide)
        boxes = np.stack([top, left, top + tall, left + wide], 1) * (numbers[:, 0] < probability)[:, None]
        return cls(torch.from_numpy(boxes.astype(np.float32)))


def erase(images: Tensor, erasing: Erasing) -> Tensor:
    """Normalised images: zero is the mean colour."""
    return images.masked_fill(_in_boxes(erasing.boxes, images.shape[-1]), 0.0)


def _in_boxes(boxes: Tensor, size: int) -> Tensor:
    """(B, 1, S, S) true inside."""
    place = torch.arange(size, device=boxes.device)
    top, left, bottom, right = (boxes * size).round().unbind(1)
    rows = (place >= top[:, None]) & (place < bottom[:, None])
    cols = (place >= left[:, None]) & (place < right[:, None])
    return (rows[:, :, None] & cols[:, None, :])[:, None]
