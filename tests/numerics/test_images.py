"""Pixels: decoding, crops, resizing and augmentation against torchvision and Pillow."""

import io
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as reference

from stoker.recipes.imagenet import augment, crops
from stoker.recipes.imagenet.augment import OPERATIONS, Erasing, Mixing, RandAugment
from stoker.recipes.imagenet.chance import uniforms
from stoker.recipes.imagenet.decode import Box, Broken, Pixels, _upper_rows, decode, decode_crop, size_of
from stoker.recipes.imagenet.draw import CLASSES, draw
from stoker.recipes.imagenet.resize import MEAN, STD, resize


def picture(number: int = 0) -> np.ndarray:
    return draw(CLASSES[number % len(CLASSES)], np.random.default_rng(number))


def pack_pixels(pictures: list[np.ndarray]) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [one.size for one in pictures]
    offsets = torch.tensor([0, *np.cumsum(sizes)[:-1]])
    shapes = torch.tensor([one.shape[:2] for one in pictures], dtype=torch.int32)
    return torch.from_numpy(np.concatenate([one.ravel() for one in pictures])), offsets, shapes


def torchvision_way(one: np.ndarray, size: int, flip: bool) -> Tensor:
    image = torch.from_numpy(one.copy()).permute(2, 0, 1).float()
    image = reference.resize(image, [size, size], antialias=True)
    image = reference.horizontal_flip(image) if flip else image
    return reference.normalize(image / 255, list(MEAN), list(STD))


@pytest.mark.parametrize("size", [16, 64, 150])
@pytest.mark.parametrize("way", ["plain", "kernel"])
def test_images_of_all_sizes_become_what_torchvision_makes_of_them(size: int, way: str) -> None:
    pictures = [picture(number) for number in range(3)] + [picture(3)[:1, :40], picture(4)[:9, :5]]
    flips = torch.tensor([0, 1, 0, 1, 0], dtype=torch.uint8)
    given = pack_pixels(pictures)
    if way == "plain":
        out = resize(*given, flips, size)
    elif torch.cuda.is_available():
        out = resize(*(tensor.cuda() for tensor in given), flips.cuda(), size).cpu()
    else:
        from stoker.recipes.imagenet.kernels import resize_kernel

        out = resize_kernel(*given, flips, size, MEAN, STD)
    assert out.is_contiguous(memory_format=torch.channels_last)
    for number, one in enumerate(pictures):
        expected = torchvision_way(one, size, bool(flips[number]))
        torch.testing.assert_close(
            out[number], expected, rtol=0, atol=2e-3
        )  # of about 4: a twentieth of a level of 255


def test_a_part_decoded_at_a_smaller_scale_is_the_part() -> None:
    large = np.asarray(Image.fromarray(picture(5)).resize((800, 600), Image.Resampling.BICUBIC))
    content = simplejpeg.encode_jpeg(np.ascontiguousarray(large), quality=95)
    assert size_of(content) == (600, 800)
    box = Box(100, 200, 320, 400)
    part = decode_crop(content, box, 600, 800, 100)
    assert part.shape[0] < 320  # fewer pixels than the box has
    assert min(part.shape[:2]) >= 100  # and enough of them
    ours = resize(*pack_pixels([part]), torch.zeros(1), 100, normalised=False)
    exact = resize(*pack_pixels([large[100:420, 200:600]]), torch.zeros(1), 100, normalised=False)
    assert (ours - exact).abs().mean() < 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rows_below_the_part_change_nothing(data: st.DataObject) -> None:
    """A file that is told to end below the part gives the same pixels as the whole, to the bit."""
    height, width = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 120))
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(pixels).convert(data.draw(st.sampled_from(["RGB", "L", "CMYK"])))
    options = {"progressive": data.draw(st.booleans()), "subsampling": data.draw(st.integers(0, 2))}
    if data.draw(st.booleans()):
        options["restart_marker_rows"] = 1
    sink = io.BytesIO()
    image.save(sink, "JPEG", **options)
    content = sink.getvalue()
    if data.draw(st.booleans()):
        content = content[: max(len(content) // 2, 700)]  # cut off
    tall, wide = data.draw(st.integers(1, height)), data.draw(st.integers(1, width))
    top, left = data.draw(st.integers(0, height - tall)), data.draw(st.integers(0, width - wide))
    box, size = Box(top, left, tall, wide), data.draw(st.integers(1, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stoker.recipes.imagenet.decode._upper_rows", lambda *_: None)
        whole = part_or_nothing(content, box, height, width, size)
    part = part_or_nothing(content, box, height, width, size)
    assert (part is None) == (whole is None)
    assert whole is None or np.array_equal(part, whole)


def part_or_nothing(content: bytes, box: Box, height: int, width: int, size: int) -> Pixels | None:
    try:
        return decode_crop(content, box, height, width, size)
    except Broken:
        return None


def test_rows_below_the_part_are_not_decoded() -> None:
    content = simplejpeg.encode_jpeg(np.zeros((480, 640, 3), np.uint8))
    upper = _upper_rows(content, 40, 4, 480, 640)
    assert upper is not None
    assert upper.shape == (48, 320, 3)  # at half the size: 40 rows are 80, in blocks of 32 they are 96


@pytest.mark.parametrize("mode", ["L", "CMYK", "P", "RGBA", "I;16", "cut", "RGB"])
def test_odd_images_are_decoded(mode: str) -> None:
    image, sink = Image.fromarray(picture(0)), io.BytesIO()
    if mode == "I;16":
        grey = np.asarray(image.convert("L")).astype(np.uint16) * 257
        Image.fromarray(grey).save(sink, "PNG")
    elif mode in ("P", "RGBA"):
        image.convert(mode).save(sink, "PNG")
    else:
        image.convert("RGB" if mode == "cut" else mode).save(sink, "JPEG", quality=95)
    content = sink.getvalue()
    pixels = decode(content[: len(content) // 2] if mode == "cut" else content)
    assert pixels.shape == picture(0).shape
    assert pixels.dtype == np.uint8
    expected = np.asarray(image.convert("L").convert("RGB") if mode in ("L", "I;16") else image).astype(float)
    tolerance = {"P": 40, "cut": 255, "CMYK": 12}.get(mode, 9)  # noise loses some of its colours
    assert np.abs(pixels - expected).mean() < tolerance


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_files_are_broken_or_the_same_every_time(data: st.DataObject) -> None:
    """Never memory that nobody has written."""
    sink = io.BytesIO()
    image = Image.fromarray(picture(3))
    image.save(sink, "JPEG", progressive=data.draw(st.booleans()), quality=90)
    content = bytearray(sink.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(2, len(content) - 1))] = data.draw(st.integers(0, 255))
    box = Box(3, 5, 20, 20)

    def outcome(fill: int) -> bytes:
        trash = np.full((200, 200, 3), fill, np.uint8)  # what the next array of that size may find
        del trash
        try:
            height, width = size_of(bytes(content))
            if height * width > 10**6:
                return b"large"
            whole = decode(bytes(content), fast=True)
            return whole.tobytes() + decode_crop(bytes(content), box, height, width, 20).tobytes()
        except Broken:
            return b"broken"

    assert outcome(0) == outcome(201)


@pytest.mark.parametrize("progressive", [True, False])
@pytest.mark.parametrize("kept", [0.05, 0.3, 0.5, 0.8])
def test_four_colours_that_end_early_are_the_same_every_time(progressive: bool, kept: float) -> None:
    """The decoder keeps four colours in memory of its own, and nobody clears it."""
    noise = np.random.default_rng(90).integers(0, 256, (90, 44, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(noise).convert("CMYK").save(sink, "JPEG", progressive=progressive, subsampling=0)
    content = sink.getvalue()[: max(700, int(kept * len(sink.getvalue())))]
    outcomes = set()
    for fill in range(20):
        trash = [np.full(90 * 44 * planes, fill, np.uint8) for planes in (1, 3, 4) for _ in range(4)]
        del trash
        part = part_or_nothing(content, Box(11, 6, 72, 13), 90, 44, 13)
        outcomes.add(None if part is None else part.tobytes())
    assert len(outcomes) == 1


def test_a_file_without_a_single_row_is_broken() -> None:
    content = bytearray(simplejpeg.encode_jpeg(np.full((480, 640, 3), 90, np.uint8)))
    scan = content.index(b"\xff\xda")
    content[scan + 5] = 99  # a colour that the frame does not have
    with pytest.raises(Broken):
        decode(bytes(content))
    with pytest.raises(Broken):
        decode_crop(bytes(content), Box(0, 0, 100, 100), 480, 640, 50)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff\xe0 half a header"])
def test_what_is_no_image_is_broken(content: bytes) -> None:
    with pytest.raises(Broken):
        size_of(content)
    with pytest.raises(Broken):
        decode(content)


def test_random_crops_have_the_sizes_and_shapes_of_torchvision() -> None:
    height, width, count = 375, 500, 4000
    numbers = uniforms(0, 0, np.arange(count), crops.NUMBERS)
    ours = [crops.random_resized_crop(height, width, one, (0.08, 1.0), (3 / 4, 4 / 3)) for one in numbers]
    torch.manual_seed(0)
    image = torch.zeros(3, height, width)
    theirs = [v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(224), [image]) for _ in range(count)]
    for name in ("height", "width", "top", "left"):
        mine, other = np.array([getattr(box, name) for box in ours]), np.array([box[name] for box in theirs])
        assert abs(mine.mean() - other.mean()) < 5 * other.std() * np.sqrt(2 / count)
        assert abs(mine.std() / other.std() - 1) < 0.1
    for box in ours:
        assert 0 <= box.top <= box.top + box.height <= height
        assert 0 <= box.left <= box.left + box.width <= width


def test_random_numbers_belong_to_the_sample() -> None:
    first = uniforms(1, 2, np.array([5, 6, 7]), 8)
    again = uniforms(1, 2, np.array([7, 5]), 8)
    np.testing.assert_array_equal(first[[2, 0]], again)
    assert not np.array_equal(first, uniforms(1, 3, np.array([5, 6, 7]), 8))
    copies = uniforms(1, 2, np.array([5, 5]), 8, np.array([0, 1]))
    assert not np.array_equal(copies[0], copies[1])
    many = uniforms(0, 0, np.arange(20_000), 4)
    assert abs(many.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef(many.T) - np.eye(4)).max() < 0.03


def reference_operation(name: str, image: Tensor, strength: float) -> Tensor:
    """torchvision's operation on one uint8 image."""
    size = image.shape[-1]
    if name in ("shear_x", "shear_y"):
        angle = float(np.degrees(np.arctan(strength)))
        shear = [angle, 0.0] if name == "shear_x" else [0.0, angle]
        return reference.affine(image, 0.0, [0, 0], 1.0, shear, center=None)
    if name in ("translate_x", "translate_y"):
        moved = int(strength * size)
        return reference.affine(image, 0.0, [moved, 0] if name == "translate_x" else [0, moved], 1.0, [0.0, 0.0])
    operations = {
        "rotate": lambda: reference.rotate(image, strength),
        "brightness": lambda: reference.adjust_brightness(image, 1 + strength),
        "colour": lambda: reference.adjust_saturation(image, 1 + strength),
        "contrast": lambda: reference.adjust_contrast(image, 1 + strength),
        "sharpness": lambda: reference.adjust_sharpness(image, 1 + strength),
        "posterize": lambda: reference.posterize(image, 8 - round(abs(strength))),
        "solarize": lambda: reference.solarize(image, 255 - abs(strength)),
        "autocontrast": lambda: reference.autocontrast(image),
        "equalize": lambda: reference.equalize(image),
        "identity": lambda: image,
    }
    return operations[name]()


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_torchvisions(name: str) -> None:
    images = torch.stack(
        [reference.resize(torch.from_numpy(picture(n).copy()).permute(2, 0, 1), [64, 64]) for n in range(6)]
    )
    largest = augment.LARGEST[name] or 0.0
    strength = torch.tensor([0.3, -0.3, 0.9, -0.9, 0.5, -1.0]) * largest
    if name == "identity":
        return
    ours = augment.apply(name, images.float(), strength)
    for number, image in enumerate(images):
        expected = reference_operation(name, image, float(strength[number])).float()
        difference = (ours[number] - expected).abs()
        # Warps may choose the other of two pixels that are equally near; colours are not rounded between operations.
        assert (difference > 2.1).float().mean() < 0.02, (number, difference.max())


def test_each_image_gets_the_operations_that_it_drew() -> None:
    images = torch.rand(40, 3, 16, 16) * 255
    numbers = uniforms(0, 0, np.arange(40), 8)
    drawn = RandAugment.draw(numbers, 2, 9.0, 0.5)
    together = augment.rand_augment(images, drawn)
    for number in range(40):
        alone = RandAugment(drawn.operation[:, number : number + 1], drawn.strength[:, number : number + 1])
        torch.testing.assert_close(augment.rand_augment(images[number : number + 1], alone)[0], together[number])
    assert set(drawn.operation.unique().tolist()) <= set(range(len(OPERATIONS)))


def test_mixing_keeps_labels_and_pixels_in_step() -> None:
    images = torch.arange(1.0, 401.0).view(-1, 1, 1, 1).expand(400, 3, 32, 32)
    numbers, partner = uniforms(0, 0, np.arange(400), 6), np.random.default_rng(0).permutation(400)
    for mixup, cutmix in ((0.2, 0.0), (0.0, 1.0), (0.1, 1.0)):
        mixing = Mixing.draw(numbers, partner, mixup, cutmix, 0.8, 0.5)
        mixed = augment.mix(images, mixing)
        own = images[:, 0, 0, 0]
        other = own[mixing.partner]
        share = (mixed.mean((1, 2, 3)) - other) / (own - other)  # of the own image in the pixels
        share[own == other] = mixing.weight[own == other]
        assert (share - mixing.weight).abs().max() < 0.08  # boxes have whole pixels
        assert 0.1 < (mixing.weight == 1).float().mean() < 0.4


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 3.0])
def test_weights_of_mixing_have_their_beta_distribution(alpha: float) -> None:
    numbers = uniforms(1, 0, np.arange(20_000), 6)
    weights = np.sort(Mixing.draw(numbers, np.arange(20_000), alpha, 0.0, 1.0, 0.5).weight.numpy())
    expected = np.sort(np.random.default_rng(0).beta(alpha, alpha, 20_000))
    for edge in (1e-4, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999):
        assert abs(np.mean(weights < edge) - np.mean(expected < edge)) < 0.015, edge


def test_erasing_takes_a_box_of_the_share_that_it_should() -> None:
    erasing = Erasing.draw(uniforms(0, 0, np.arange(2000), 5), 0.25)
    erased = (augment.erase(torch.ones(2000, 3, 32, 32), erasing) == 0).float().mean((1, 2, 3))
    assert 0.2 < (erased > 0).float().mean() < 0.3
    assert erased[erased > 0].min() > 0.01
    assert erased.max() < 0.36


def test_drawn_images_differ_and_repeat(tmp_path: Path) -> None:
    same = [draw("circle", np.random.default_rng(1)) for _ in range(2)]
    assert np.array_equal(*same)
    assert not np.array_equal(same[0][:40, :40], draw("circle", np.random.default_rng(2))[:40, :40])
