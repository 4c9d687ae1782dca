"""A batch of images: on the host as crops of different sizes, on the device as one normalised array."""

# B images, S their size, L layers of RandAugment
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stoker.data.batch import map_tensors
from stoker.recipes.imagenet.augment import Erasing, Mixing, RandAugment, erase, mix, rand_augment
from stoker.recipes.imagenet.resize import normalise, resize


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

    def to(self, device: torch.device) -> ImageBatch:
        # What RandAugment drew stays: on the host nobody has to wait to know which images it is for.
        _keep_until_used(self.pixels)
        here: HostImages = map_tensors(replace(self, augment=None), lambda tensor: tensor.to(device, non_blocking=True))
        joined = here.pixels[0] if len(here.pixels) == 1 else torch.cat(here.pixels)
        pixels = resize(joined, here.offsets, here.shapes, here.flips, self.size, normalised=self.augment is None)
        images = pixels if self.augment is None else normalise(rand_augment(pixels, self.augment))
        partner, weight = here.labels, torch.ones(len(here.labels), device=device)
        if here.mixing is not None:
            images, partner, weight = mix(images, here.mixing), here.labels[here.mixing.partner], here.mixing.weight
        if here.erasing is not None:
            images = erase(images, here.erasing)
        images = images.contiguous(memory_format=torch.channels_last)
        return ImageBatch(images, here.labels, partner, weight, here.rows)


def _keep_until_used(pixels: tuple[Tensor, ...]) -> None:
    """Of pixels made on another stream of the device: their memory is not used again before ours is through with it."""
    for tensor in pixels:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())
