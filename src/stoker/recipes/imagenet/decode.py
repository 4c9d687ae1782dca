"""From the bytes of an image to the pixels that are needed: decoded at the smallest scale that still holds them."""

import io
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
JPEG = b"\xff\xd8\xff"


class Broken(Exception):
    """An image that nobody can decode."""


@dataclass(frozen=True)
class Box:
    """A part of an image, in pixels of the whole."""

    top: float
    left: float
    height: float
    width: float


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width, from the header."""
    if content[:3] == JPEG:
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(content, strict=False)
            return height, width
        except (ValueError, KeyError):  # a header that is cut off is a KeyError to simplejpeg
            pass
    try:
        with Image.open(io.BytesIO(content)) as image:
            return image.height, image.width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Broken(str(error) or type(error).__name__) from error


def decode(content: bytes, min_height: int = 0, min_width: int = 0, *, fast: bool = False) -> Pixels:
    """All pixels, RGB; a JPEG at the smallest of its scales that has at least the height and width asked for.

    Fast: colours, which JPEG keeps at half the resolution, are repeated and not interpolated, and the cosine transform is
    less exact. Nobody sees that in a photograph that is shrunk next; an image of 32 pixels has nothing to lose.
    """
    if content[:3] == JPEG:
        try:
            pixels: Pixels = simplejpeg.decode_jpeg(
                content,
                "RGB",
                fastdct=fast,
                fastupsample=fast,
                min_height=min_height,
                min_width=min_width,
                strict=False,
            )
            return pixels
        except (ValueError, KeyError):
            pass  # CMYK, twelve bits and the like: Pillow knows them
    return _decode_slowly(content)


def decode_part(content: bytes, box: Box, height: int, width: int, size: int) -> Pixels:
    """The pixels inside a box of an image of that height and width, enough of them to make size x size from."""
    tall, wide = (min(1.0, size / side) for side in (box.height, box.width))
    # At most half the pixels are left out by a smaller scale: two of its pixels make one of ours.
    pixels = decode(content, _at_least(height * tall), _at_least(width * wide), fast=True)
    rows, columns = inside(box, pixels.shape[0] / height, pixels.shape[1] / width)
    return pixels[rows, columns].copy()  # a view would keep the whole image


def inside(box: Box, scale_y: float = 1.0, scale_x: float = 1.0) -> tuple[slice, slice]:
    """Rows and columns of a box, in an image that was decoded at a scale."""
    top, left = round(box.top * scale_y), round(box.left * scale_x)
    bottom = max(top + 1, round((box.top + box.height) * scale_y))
    right = max(left + 1, round((box.left + box.width) * scale_x))
    return slice(top, bottom), slice(left, right)


def _at_least(side: float) -> int:
    return max(1, int(np.ceil(side - 1e-6)))


def _decode_slowly(content: bytes) -> Pixels:
    """Whatever Pillow can read, as RGB: grey, CMYK, palettes, 16 bits, and files that end too early."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata
            ImageFile.LOAD_TRUNCATED_IMAGES = True
            with Image.open(io.BytesIO(content)) as image:
                image.load()
                if image.mode in ("I;16", "I;16B", "I;16L", "I"):
                    grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
                    return np.repeat(grey[:, :, None], 3, axis=2)
                return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Broken(str(error) or type(error).__name__) from error
