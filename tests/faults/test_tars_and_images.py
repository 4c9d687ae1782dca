"""Tars that are damaged, files that are not what their names say, images too large to be true."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from stoker import cli
from stoker.errors import UserError
from stoker.recipes.imagenet import decode as decoding
from stoker.recipes.imagenet.decode import Broken, decode, decode_all, size_of
from stoker.recipes.imagenet.draw import CLASSES, draw_set
from stoker.recipes.imagenet.sources import open_images

COUNT = 20  # images


def jpeg(seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels))


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """One training and one validation shard of two classes."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for part in ("train", "val"):
        with tarfile.open(folder / f"{part}-000.tar", "w") as tar:
            for number in range(COUNT):
                add(tar, f"{number:04d}.jpg", jpeg(number))
                add(tar, f"{number:04d}.cls", b"cat" if number % 2 else b"dog")
    return folder


def headers(path: Path) -> list[int]:
    with tarfile.open(path) as tar:
        return [member.offset for member in tar]


def change(path: Path, work: Callable[[bytearray], bytearray]) -> None:
    path.write_bytes(work(bytearray(path.read_bytes())))


def test_a_flipped_bit_in_any_header_is_an_error(shards: Path) -> None:
    path = shards / "train-000.tar"
    whole, dice = path.read_bytes(), np.random.default_rng(0)
    for header in headers(path)[1::3]:
        content = bytearray(whole)
        content[header + int(dice.integers(0, 400))] ^= 1 << int(dice.integers(0, 8))
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"train-000\.tar"):
            open_images(shards)


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda content: content[: len(content) // 3 // 512 * 512], "end marker|not whole|beyond"),
        (lambda content: content[: len(content) // 3], "not whole|beyond"),
        (lambda content: content[:20480] + bytearray(2048) + content[22528:], "behind its end marker|damaged"),
        (lambda content: content + b"more", "behind its end marker"),
        (lambda content: bytearray(gzip.compress(content)), "compressed .gzip"),
    ],
)
def test_cuts_holes_and_what_comes_after_the_end_are_named(
    shards: Path, work: Callable[[bytearray], bytearray], words: str
) -> None:
    change(shards / "train-000.tar", work)
    with pytest.raises(UserError, match=words):
        open_images(shards)


def test_a_damaged_tar_is_used_as_far_as_it_goes_when_asked(
    shards: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = shards / "train-000.tar"
    at = headers(path)[20]
    change(path, lambda content: content[: at + 10] + b"\xff" + content[at + 11 :])
    words = ["pack", "imagenet", str(shards), str(tmp_path / "packed")]
    assert cli.run(words) == 2
    assert "--broken skip" in capsys.readouterr().err
    assert cli.run([*words, "--broken", "skip"]) == 0
    assert "DAMAGED TAR" in capsys.readouterr().err
    assert len(open_images(tmp_path / "packed").table) == 10 + COUNT


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("extra.cls", b"cat", "belongs to no image"),
        ("extra.jpg", jpeg(), "no class"),
        ("0003.cls", b"\xff\xfe\x00", "no name of a class"),
        ("0003.cls", b"x" * 5000, "no name of a class"),
        ("0003.jpg", jpeg(), "twice"),
    ],
)
def test_members_without_a_partner_and_classes_that_are_none_are_named(
    shards: Path, name: str, content: bytes, words: str
) -> None:
    with tarfile.open(shards / "train-000.tar", "a") as tar:
        add(tar, name, content)
    with pytest.raises(UserError, match=words):
        open_images(shards)


def test_only_a_whole_word_makes_a_tar_one_of_validation(shards: Path) -> None:
    (shards / "train-000.tar").rename(shards / "latest-000.tar")
    images = open_images(shards)
    assert np.bincount(images.table.columns["part"]).tolist() == [COUNT, COUNT]
    (shards / "val-000.tar").unlink()
    assert not open_images(shards).has_validation


def test_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    draw_set(tmp_path / "set", 2, 1, 0)
    for folder in (".ipynb_checkpoints", "__MACOSX"):
        (tmp_path / "set" / "train" / folder).mkdir()
        (tmp_path / "set" / "train" / folder / "a.jpg").write_bytes(jpeg())
    assert open_images(tmp_path / "set").classes.names == tuple(sorted(CLASSES))


def test_a_pipe_among_the_images_is_refused(tmp_path: Path) -> None:
    draw_set(tmp_path / "set", 2, 1, 0)
    os.mkfifo(tmp_path / "set" / "train" / "circle" / "waits.jpg")
    with pytest.raises(UserError, match="no plain file"):
        open_images(tmp_path / "set")


def test_what_is_no_image_by_its_content_starts_no_other_program(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "check_call", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n%%EndComments\nshowpage\n"
    for look in (size_of, decode):
        with pytest.raises(Broken):
            look(eps)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "GIF", "JPEG"])
def test_the_usual_formats_are_known_by_content(kind: str) -> None:
    sink = io.BytesIO()
    Image.new("RGB", (20, 10), (200, 10, 10)).save(sink, kind)
    assert size_of(sink.getvalue()) == (10, 20)
    assert decode(sink.getvalue()).shape == (10, 20, 3)


def test_an_image_of_too_many_pixels_is_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    content = jpeg()
    monkeypatch.setattr(decoding, "MOST_PIXELS", 500)
    for look in (size_of, decode_all):
        with pytest.raises(Broken, match="24 x 24 pixels"):
            look(content)


def test_packing_has_the_limit_on_broken_images_that_training_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw_set(tmp_path / "set", 30, 2, 0)
    for path in sorted((tmp_path / "set" / "train" / "circle").iterdir())[:15]:
        path.write_bytes(b"no image")
    words = ["pack", "imagenet", str(tmp_path / "set")]
    assert cli.run([*words, str(tmp_path / "a")]) == 2
    assert "cannot be decoded" in capsys.readouterr().err
    assert cli.run([*words, str(tmp_path / "b"), "--broken", "skip"]) == 0
    assert len(open_images(tmp_path / "b").table) == 320 - 15


def test_two_swapped_classes_of_ten_are_noticed(tmp_path: Path) -> None:
    from stoker.recipes.imagenet.probe import check_labels
    from stoker.recipes.imagenet.subset import choose_images

    def check() -> None:
        chosen = choose_images(open_images(tmp_path / "set"), None, None, 0, 0.1)
        check_labels(chosen.images, chosen.classes, chosen.label, chosen.training, chosen.validation, 2)

    draw_set(tmp_path / "set", 200, 80, 0)
    check()
    val = tmp_path / "set" / "val"
    (val / "gradient").rename(val / "away")
    (val / "dots").rename(val / "gradient")
    (val / "away").rename(val / "dots")
    with pytest.raises(UserError, match="dots and gradient look like each other"):
        check()


def test_the_name_of_a_model_is_looked_at_before_the_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw_set(tmp_path / "set", 2, 1, 0)
    words = ["train", "imagenet", "--data.path", str(tmp_path / "set"), "--model.name", "resnet5O"]
    assert cli.run(words) == 2
    text = capsys.readouterr().err
    assert "timm has no model" in text
    assert "labels:" not in text
