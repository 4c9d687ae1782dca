"""Images as they are stored: the same file twice, the same picture twice, files that end too early."""

import hashlib
from collections.abc import Iterator

import numpy as np

from stoker.data.agreement import Floats
from stoker.data.ragged import Indices
from stoker.data.source import Content
from stoker.errors import UserError
from stoker.recipes.imagenet.decode import Broken, decode, is_whole, size_of
from stoker.recipes.imagenet.sources import Reader

SIDE = 16  # fields of a thumbnail, whose brightness rises or falls to the next

BITS, FLAT = 512, 2.0  # that are kept, and grey levels of which 255 are white: what rises less is noise


def contents_of(reader: Reader, rows: Indices) -> Iterator[Content]:
    for row in rows.tolist():
        try:
            content = reader.read(row)
            size_of(content)  # not too many pixels
            pixels = decode(content, 2 * SIDE, 2 * SIDE, fast=True).astype(np.float64)
        except (Broken, OSError, UserError) as error:
            yield Content(trouble=str(error))
            continue
        grey = field_means(pixels, SIDE + 1).mean(2)
        rises = np.concatenate([np.diff(grey, axis=0).ravel(), np.diff(grey, axis=1).ravel()])[:BITS]
        whole = is_whole(content)
        yield Content(
            hashlib.blake2b(content, digest_size=16).digest(),
            np.packbits(rises > 0).tobytes() + np.packbits(np.abs(rises) > FLAT).tobytes(),
            "" if whole else "its end is missing, or bytes in it are wrong: only a part of the picture is there",
        )


def field_means(values: Floats, side: int) -> Floats:
    """Over side x side fields of an image of any size; pixels are repeated where it is smaller."""
    tall, wide = values.shape[:2]
    if min(tall, wide) < side:
        values = values.repeat(-(-side // tall), 0).repeat(-(-side // wide), 1)
        tall, wide = values.shape[:2]
    rows, cols = (np.linspace(0, size, side + 1).astype(int) for size in (tall, wide))
    summed = np.add.reduceat(np.add.reduceat(values, rows[:-1], 0), cols[:-1], 1)
    return np.asarray(summed / (np.diff(rows)[:, None] * np.diff(cols))[:, :, None])
