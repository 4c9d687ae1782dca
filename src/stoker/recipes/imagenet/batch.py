"""A batch of images: on the host as crops of different sizes, on the device as one normalised array."""

# B images, S their size, L layers of RandAugment
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stoker.recipes.imagenet.augment import Erasing, Mixing, RandAugment, erase, mix, rand_augment
from stoker.recipes.imagenet.resize import denormalise, normalise, resize


@dataclass(frozen=True)
class ImageBatch:
    """On the device."""

    images: Tensor  # (B, 3, S, S) normalised, channels last
    labels: Tensor  # (B,) int64
    partner: Tensor  # (B,) int64, the label that is mixed in
    weight: Tensor  # (B,) float32, of the own label
    rows: Tensor  # (B,)

    @property
    def num_samples(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class HostImages:
    """As decoded."""

    pixels: Tensor  # (bytes,) uint8, crops one after the other, (height, width, 3) each
    offsets: Tensor  # (B,) int64, where each crop begins
    shapes: Tensor  # (B, 2) int32
    flips: Tensor  # (B,) uint8
    labels: Tensor  # (B,)
    rows: Tensor  # (B,)
    size: int
    augment: RandAugment | None
    mixing: Mixing | None
    erasing: Erasing | None

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes

    def pin(self) -> "HostImages":
        return replace(self, **{name: value.pin_memory() for name, value in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)}

    def to(self, device: torch.device) -> ImageBatch:
        moved = {name: value.to(device, non_blocking=True) for name, value in self._tensors().items()}
        images = resize(moved["pixels"], moved["offsets"], moved["shapes"], moved["flips"], self.size)
        labels = moved["labels"]
        partner, weight = labels, torch.ones(len(labels), device=device)
        if self.augment is not None:
            images = normalise(rand_augment(denormalise(images), self.augment))
        if self.mixing is not None:
            mixing = Mixing(*(value.to(device, non_blocking=True) for value in vars(self.mixing).values()))
            images, partner, weight = mix(images, mixing), labels[mixing.partner], mixing.weight
        if self.erasing is not None:
            images = erase(images, Erasing(self.erasing.boxes.to(device, non_blocking=True)))
        images = images.contiguous(memory_format=torch.channels_last)
        return ImageBatch(images, labels, partner, weight, moved["rows"])
