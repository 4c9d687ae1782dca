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

    # (bytes,) uint8 each: crops (height, width, 3) one after the other; some may lie on the device already
    pixels: tuple[Tensor, ...]
    offsets: Tensor  # (B,) int64, where each crop begins, in all of them together
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
        return sum(part.nbytes for part in self.pixels)

    def pin(self) -> "HostImages":
        pixels = tuple(part if part.is_cuda else part.pin_memory() for part in self.pixels)
        return replace(self, pixels=pixels, **{name: value.pin_memory() for name, value in self._tensors().items()})

    def _tensors(self) -> dict[str, Any]:
        return {field.name: value for field in fields(self) if isinstance(value := getattr(self, field.name), Tensor)}

    def to(self, device: torch.device) -> ImageBatch:
        moved = {name: value.to(device, non_blocking=True) for name, value in self._tensors().items()}
        pixels = [_moved(part, device) for part in self.pixels]
        joined = pixels[0] if len(pixels) == 1 else torch.cat(pixels)
        images = resize(joined, moved["offsets"], moved["shapes"], moved["flips"], self.size)
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


def _moved(pixels: Tensor, device: torch.device) -> Tensor:
    if pixels.is_cuda:  # made on a stream of its own: its memory is not used again before ours is through with it
        pixels.record_stream(torch.cuda.current_stream())
    return pixels.to(device, non_blocking=True)
