"""Many images of different sizes to one size, flipped and normalised, in one pass: what a batch becomes on the device.

Bilinear with anti-aliasing: an output pixel is the mean of the input pixels under a triangle as wide as the shrinking asks
for, the same as torchvision's. On a GPU one kernel does it; elsewhere PyTorch does, image by image.
"""

# B images, S their new size
import torch
from torch import Tensor
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, what published weights expect
UNCHANGED = (0.0,) * 3, (1 / 255,) * 3  # a mean and a deviation that leave 0 .. 255


def resize(
    pixels: Tensor, offsets: Tensor, shapes: Tensor, flips: Tensor, size: int, *, normalised: bool = True
) -> Tensor:
    """(B, 3, S, S), channels last, normalised or 0 .. 255: from bytes (N,), the first one of each image (B,), (height,
    width) (B, 2)."""
    if pixels.is_cuda:
        from stoker.recipes.imagenet.kernels import resize_kernel  # needs Triton, which is of no use without a GPU

        mean, std = (MEAN, STD) if normalised else UNCHANGED
        return resize_kernel(pixels, offsets, shapes, flips, size, mean, std)
    images = _plain(pixels, offsets, shapes, flips, size)
    return (normalise(images) if normalised else images).to(memory_format=torch.channels_last)


def normalise(images: Tensor) -> Tensor:
    """From 0 .. 255."""
    mean, std = (torch.tensor(values, device=images.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images / 255 - mean) / std


def _plain(pixels: Tensor, offsets: Tensor, shapes: Tensor, flips: Tensor, size: int) -> Tensor:
    out = torch.empty(len(offsets), 3, size, size).to(memory_format=torch.channels_last)
    for number, (first, (height, width), flip) in enumerate(
        zip(offsets.tolist(), shapes.tolist(), flips.tolist(), strict=True)
    ):
        image = pixels[first : first + height * width * 3].view(height, width, 3).permute(2, 0, 1)[None].float()
        if (height, width) != (size, size):
            image = F.interpolate(image, (size, size), mode="bilinear", antialias=True, align_corners=False)
        out[number] = image[0].flip(-1) if flip else image[0]
    return out
