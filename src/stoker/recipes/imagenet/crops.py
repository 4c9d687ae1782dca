"""Which part of an image a sample shows: random in training, the middle in validation."""

# B samples
import math

import numpy as np

from stoker.recipes.imagenet.chance import Floats
from stoker.recipes.imagenet.decode import Box

TRIES = 10
NUMBERS = 2 * TRIES + 2  # uniform numbers that a random crop may use


def random_resized_crop(
    height: int, width: int, numbers: Floats, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """A part of random area and shape, uniform over where it fits; as torchvision defines it."""
    area = height * width
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for number in range(TRIES):
        wanted = area * (scale[0] + numbers[2 * number] * (scale[1] - scale[0]))
        shape = math.exp(low + numbers[2 * number + 1] * (high - low))
        wide, tall = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(numbers[-2] * (height - tall + 1))
            left = int(numbers[-1] * (width - wide + 1))
            return Box(top, left, tall, wide)
    wide, tall = width, height  # the largest part in the middle whose shape is allowed
    if width / height < ratio[0]:
        tall = min(height, round(width / ratio[0]))
    elif width / height > ratio[1]:
        wide = min(width, round(height * ratio[1]))
    return Box((height - tall) // 2, (width - wide) // 2, tall, wide)


def centre_crop(height: int, width: int, share: float) -> Box:
    """The square in the middle whose side is `share` of the shorter side: resize to S / share, then cut S."""
    side = max(1.0, share * min(height, width))
    return Box((height - side) / 2, (width - side) / 2, side, side)


def shifted(
    pixels: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", padding: int, numbers: Floats
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The image moved by up to `padding` pixels, its edge mirrored: what small images get instead of crops."""
    top, left = (int(number * (2 * padding + 1)) for number in numbers[-2:])
    padded = np.pad(pixels, ((padding, padding), (padding, padding), (0, 0)), mode="reflect")
    return padded[top : top + pixels.shape[0], left : left + pixels.shape[1]]
