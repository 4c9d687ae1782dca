"""Pictures to learn from where there are none: ten classes of shapes, textures and colours, as JPEG in class folders."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import simplejpeg

from stoker import console
from stoker.files import new_folder

CLASSES = ("circle", "square", "triangle", "ring", "cross", "stripes", "checks", "dots", "gradient", "waves")
SIZES = (56, 96)  # shortest and longest side
Image = npt.NDArray[np.uint8]


def draw_set(out: Path, per_class: int, held_out: int, seed: int) -> None:
    """`train/CLASS/N.jpg` and `val/CLASS/N.jpg`."""
    total = len(CLASSES) * (per_class + held_out)
    with new_folder(out, force=True, marker="train") as folder, console.progress("draw images", total, "images") as bar:
        for label, name in enumerate(CLASSES):
            for part, count in (("train", per_class), ("val", held_out)):
                (folder / part / name).mkdir(parents=True)
                for number in range(count):
                    generator = np.random.default_rng((seed, label, part == "val", number))
                    content = simplejpeg.encode_jpeg(draw(name, generator), quality=90)
                    (folder / part / name / f"{number:05d}.jpg").write_bytes(content)
                    bar.advance()


def draw(name: str, generator: np.random.Generator) -> Image:
    """One picture: a figure or a texture of random colours, place, size and turn, with noise on it."""
    height, width = generator.integers(*SIZES, size=2)
    background, ink = _two_colours(generator)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    centre = generator.uniform(0.35, 0.65, 2) * (height, width)
    turn, radius = generator.uniform(0, 2 * np.pi), generator.uniform(0.2, 0.38) * min(height, width)
    u = (x - centre[1]) * np.cos(turn) + (y - centre[0]) * np.sin(turn)
    v = (y - centre[0]) * np.cos(turn) - (x - centre[1]) * np.sin(turn)
    share = _figure(name, u, v, radius, generator)
    picture = background + share[:, :, None] * (ink - background)
    picture += generator.normal(0, generator.uniform(2, 14), picture.shape)
    return np.ascontiguousarray(picture.clip(0, 255).astype(np.uint8))


def _figure(
    name: str, u: npt.NDArray[np.float64], v: npt.NDArray[np.float64], radius: float, generator: np.random.Generator
) -> npt.NDArray[np.float64]:
    """How much ink lies on each pixel, 0 .. 1."""
    distance, pitch = np.hypot(u, v), generator.uniform(0.25, 0.45) * radius * 2
    if name == "circle":
        inside = distance < radius
    elif name == "square":
        inside = np.maximum(abs(u), abs(v)) < radius * 0.85
    elif name == "triangle":
        inside = (v > -radius * 0.6) & (v + 1.9 * abs(u) < radius)
    elif name == "ring":
        inside = abs(distance - radius * 0.8) < radius * 0.2
    elif name == "cross":
        inside = (np.minimum(abs(u), abs(v)) < radius * 0.25) & (np.maximum(abs(u), abs(v)) < radius)
    elif name == "stripes":
        inside = (u / pitch) % 1 < 0.5
    elif name == "checks":
        inside = ((u / pitch) % 1 < 0.5) ^ ((v / pitch) % 1 < 0.5)
    elif name == "dots":
        inside = np.hypot((u / pitch) % 1 - 0.5, (v / pitch) % 1 - 0.5) < 0.28
    elif name == "gradient":
        return np.clip(0.5 + u / (4 * radius), 0, 1)
    else:
        return np.asarray(0.5 + 0.5 * np.sin(2 * np.pi * (u + radius * 0.5 * np.sin(v / radius * 3)) / (1.6 * pitch)))
    return inside.astype(np.float64)


def _two_colours(generator: np.random.Generator) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Far enough apart to be seen."""
    while True:
        first, second = generator.uniform(0, 255, (2, 3))
        if np.abs(first - second).sum() > 220:
            return first, second
