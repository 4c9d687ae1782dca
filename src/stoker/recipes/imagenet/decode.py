"""From the bytes of an image to the pixels that are needed: decoded at the smallest scale that still holds them."""

import io
import math
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, ImageFile

Pixels = npt.NDArray[np.uint8]  # (height, width, 3)
JPEG = b"\xff\xd8\xff"
RAW = b"\0RGB"  # of a packed set with --decoded: then height, width, and the pixels as they are
RAW_HEADER = struct.Struct("<4sII")
SEQUENTIAL = (0xC0, 0xC1)  # markers of frames whose rows follow one another
OTHER_FRAMES = (0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
SCAN = 0xDA
FOUR_COLOURS = ("CMYK", "YCCK")
MARK = np.array([7, 211, 64, 153, 18, 240, 99, 172, 33, 201, 5, 128], np.uint8)  # where nobody has written yet
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")  # by content, never by name; others may start other programs
MOST_PIXELS = 100_000_000  # of an image; more is taken for damage, or for an attack on memory
BLOCK_ROWS = 32  # rows that are coded together: 8 or 16, and 32 at most


class Broken(Exception):
    """An image that nobody can decode."""


@dataclass(frozen=True)
class Box:
    """A crop of an image, in pixels of the whole."""

    top: float
    left: float
    height: float
    width: float


def size_of(content: bytes) -> tuple[int, int]:
    """Height and width, from the header."""
    height, width = _stated_size(content)
    if height * width > MOST_PIXELS:
        raise Broken(f"it would have {height:,} x {width:,} pixels, and at most {MOST_PIXELS:,} are decoded")
    return height, width


def as_raw(pixels: Pixels) -> bytes:
    """An image that nobody needs to decode."""
    return RAW_HEADER.pack(RAW, *pixels.shape[:2]) + pixels.tobytes()


def raw_bytes(height: int, width: int) -> int:
    return RAW_HEADER.size + 3 * height * width


def _raw_pixels(content: bytes) -> Pixels:
    """A view of the content, read only."""
    height, width = RAW_HEADER.unpack_from(content)[1:] if len(content) >= RAW_HEADER.size else (0, 0)
    if not height * width or len(content) != raw_bytes(height, width):
        raise Broken(f"{len(content):,} bytes are not what an image of {height:,} x {width:,} pixels takes")
    return np.frombuffer(content, np.uint8, offset=RAW_HEADER.size).reshape(height, width, 3)


def _stated_size(content: bytes) -> tuple[int, int]:
    if content[:4] == RAW:
        height, width, _ = _raw_pixels(content).shape
        return height, width
    if content[:3] == JPEG:
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(content, strict=False)
            return height, width
        except (ValueError, KeyError):  # a header that is cut off is a KeyError to simplejpeg
            pass
    with _opened(content) as image:
        return image.height, image.width


@contextmanager
def _opened(content: bytes) -> Iterator[Image.Image]:
    """By Pillow, as one of the formats that it reads by itself; whatever damaged bytes make it raise is a broken image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd metadata
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                yield image
    except (Broken, MemoryError):
        raise
    except Exception as error:
        raise Broken(str(error) or type(error).__name__) from error


def decode_all(content: bytes) -> Pixels:
    """All pixels at full size, if they are not too many."""
    size_of(content)
    return decode(content)


def decode(content: bytes, min_height: int = 0, min_width: int = 0, *, fast: bool = False) -> Pixels:
    """All pixels, RGB; a JPEG at the smallest of its scales that has at least the height and width asked for.

    Fast: colours, which JPEG keeps at half the resolution, are repeated and not interpolated, and the cosine transform is
    less exact. Nobody sees that in a photograph that is shrunk next; an image of 32 pixels has nothing to lose.
    """
    if content[:4] == RAW:
        return _raw_pixels(content)
    if content[:3] == JPEG:
        try:
            return _decode_jpeg(content, min_height, min_width, fast=fast)
        except (ValueError, KeyError):
            pass
        if (damaged := _decode_damaged(content, min_height, min_width, fast=fast)) is not None:
            return damaged
    return _decode_slowly(content)


def is_whole(content: bytes) -> bool:
    """Nothing is wrong with a JPEG; of other kinds whoever decodes them says so."""
    try:
        return content[:3] != JPEG or len(_decode_jpeg(content, 1, 1, fast=True)) > 0
    except KeyError:
        return True
    except ValueError as error:
        return "nsupported" in str(error)  # twelve bits and the like, which Pillow knows


def decode_crop(content: bytes, box: Box, height: int, width: int, size: int) -> Pixels:
    """The pixels inside a box of an image of that height and width, enough of them to make size x size from."""
    if content[:4] == RAW:
        return _raw_pixels(content)[inside(box)].copy()
    # At most half the pixels are left out by a smaller scale: two of its pixels make one of ours.
    eighths = min(8, max(1, math.ceil(8 * size / min(box.height, box.width) - 1e-6)))
    tall, wide = _scaled(height, eighths), _scaled(width, eighths)
    crop = inside(box, tall / height, wide / width)
    pixels = _upper_rows(content, crop[0].stop, eighths, height, width)
    if pixels is None:
        pixels = decode(content, tall, wide, fast=True)
        crop = inside(box, pixels.shape[0] / height, pixels.shape[1] / width)
    return pixels[crop].copy()  # a view would keep the whole image


def inside(box: Box, scale_y: float = 1.0, scale_x: float = 1.0) -> tuple[slice, slice]:
    """Rows and columns of a box, in an image that was decoded at a scale."""
    top, left = round(box.top * scale_y), round(box.left * scale_x)
    bottom = max(top + 1, round((box.top + box.height) * scale_y))
    right = max(left + 1, round((box.left + box.width) * scale_x))
    return slice(top, bottom), slice(left, right)


def _scaled(side: int, eighths: int) -> int:
    return -(-side * eighths // 8)


def _decode_jpeg(
    content: bytes | bytearray, min_height: int, min_width: int, *, fast: bool, into: Pixels | None = None
) -> Pixels:
    """Refuses whatever is wrong with a file; `into` takes the pixels in any case, as far as there are some."""
    options = {} if into is None else {"buffer": into, "strict": False}
    pixels: Pixels = simplejpeg.decode_jpeg(
        content, "RGB", fastdct=fast, fastupsample=fast, min_height=min_height, min_width=min_width, **options
    )
    return pixels


def _decode_damaged(content: bytes, min_height: int, min_width: int, *, fast: bool) -> Pixels | None:
    """A file that ends early or has wrong bytes in it, grey or black where nothing was found. None: not one row was."""
    try:
        height, width = size_of(content)
        # Four colours go through memory of simplejpeg's own, which nobody clears: what no row was written to is rubbish.
        if simplejpeg.decode_jpeg_header(content, strict=False)[2] in FOUR_COLOURS:
            return None
        into = np.zeros(3 * height * width, np.uint8)
        into[: len(MARK)] = MARK[: into.size]
        pixels = _decode_jpeg(content, min_height, min_width, fast=fast, into=into)
    except (ValueError, KeyError, Broken):  # twelve bits and the like, which Pillow knows
        return None
    return None if np.array_equal(into[: len(MARK)], MARK[: into.size]) else pixels


def _upper_rows(content: bytes, stop: int, eighths: int, height: int, width: int) -> Pixels | None:
    """A scaled JPEG down to a row; None: all of it is needed, or it is no file that can be cut.

    Rows of a JPEG follow one another, so a decoder that is told of fewer rows stops there and does no work for the others.
    """
    blocks = -(-stop * 8 // (eighths * BLOCK_ROWS))
    kept = blocks * BLOCK_ROWS
    place = _place_of_height(content) if kept < height else None
    if place is None:
        return None
    shorter = bytearray(content)
    shorter[place : place + 2] = kept.to_bytes(2, "big")
    tall, wide = _scaled(kept, eighths), _scaled(width, eighths)
    into = np.empty(3 * tall * wide, np.uint8)
    into[-len(MARK) :] = MARK[-into.size :]
    try:
        # The rows that are left over count as damage. Rows are written in order: if the last one is there, all are.
        pixels = _decode_jpeg(shorter, tall, wide, fast=True, into=into)
    except (ValueError, KeyError):
        return None
    whole = pixels.shape[:2] == (tall, wide) and not np.array_equal(into[-len(MARK) :], MARK[-into.size :])
    return pixels if whole else None


def _place_of_height(content: bytes) -> int | None:
    """Where the header of a JPEG says how many rows there are. None: its rows do not simply follow one another."""
    at, place, components = 2, None, None
    while at + 10 <= len(content) and content[at] == 0xFF:
        kind = content[at + 1]
        if kind in SEQUENTIAL:
            place, components = at + 5, content[at + 9]
        elif kind in OTHER_FRAMES:
            return None
        elif kind == SCAN:  # all colours in one scan, or the rows come once for each
            return place if content[at + 4] == components and components != 4 else None
        at += 1 if kind == 0xFF else 2 + int.from_bytes(content[at + 2 : at + 4], "big")
    return None


def _decode_slowly(content: bytes) -> Pixels:
    """Whatever Pillow can read, as RGB: grey, CMYK, palettes, 16 bits, and files that end too early."""
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    with _opened(content) as image:
        image.load()
        # Pillow keeps silent about a JPEG that it cannot decode.
        if content[:3] == JPEG and not np.asarray(image).any():
            raise Broken("no row of it can be decoded")
        if image.mode in ("I;16", "I;16B", "I;16L", "I"):
            grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        return np.asarray(image.convert("RGB"))
