"""Sets of images: every layout gives the same samples, classes must agree, batches do not depend on threads."""

import io
import os
import re
import shutil
import tarfile
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.data.pack import PackRequest
from stoker.data.plan import MicroBatch, Position, Step
from stoker.errors import MachineError, UserError
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.recipes.imagenet import decoder, subset
from stoker.recipes.imagenet.config import ImageNetData, PackOptions, size_at
from stoker.recipes.imagenet.decode import Box, Broken, as_raw, decode, decode_crop, size_of
from stoker.recipes.imagenet.draw import CLASSES, draw_set
from stoker.recipes.imagenet.gpu_decode import GpuDecoder
from stoker.recipes.imagenet.pack import pack
from stoker.recipes.imagenet.predict import _own_samples
from stoker.recipes.imagenet.recipe import RECIPE
from stoker.recipes.imagenet.sources import FolderReader, open_images
from stoker.recipes.imagenet.subset import choose_images
from stoker.train.parallel import Ranks

BASE = ("--run.device", "cpu", "--loader.batch_size", "16", "--data.size", "32")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten classes, 24 + 12 images each; read only."""
    folder = tmp_path_factory.mktemp("pictures") / "set"
    draw_set(folder, per_class=24, held_out=12, seed=0)
    return folder


@pytest.fixture
def own_pictures(pictures: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pictures, tmp_path / "own"))


def parts_of(path: Path, *words: str):  # type: ignore[no-untyped-def]
    run = resolve_target("imagenet", ["--data.path", str(path), *BASE, *words]).config
    return build_run(RECIPE, run, Ranks())


def make_tars(pictures: Path, out: Path) -> Path:
    """The WebDataset layout: KEY.jpg and KEY.cls, several shards."""
    out.mkdir()
    for part in ("train", "val"):
        files = sorted((pictures / part).rglob("*.jpg"))
        for shard in range(2):
            with tarfile.open(out / f"{part}-{shard:03d}.tar", "w") as tar:
                for number, path in enumerate(files[shard::2]):
                    label = str(CLASSES.index(path.parent.name)).encode()
                    for ending, content in (("jpg", path.read_bytes()), ("cls", label)):
                        member = tarfile.TarInfo(f"{shard}{number:05d}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    return out


def content_by_class(path: Path) -> dict[tuple[int, int], list[bytes]]:
    images = open_images(path)
    found: dict[tuple[int, int], list[bytes]] = {}
    for row in range(len(images.table)):
        key = int(images.table.columns["part"][row]), int(images.table.columns["label"][row])
        found.setdefault(key, []).append(images.reader.read(row))
    return {key: sorted(contents) for key, contents in found.items()}


def test_folders_tars_and_packed_shards_hold_the_same_images(pictures: Path, tmp_path: Path) -> None:
    told = pack(PackRequest(pictures, tmp_path / "packed", verify=True, options=PackOptions()))
    assert told["samples"] == told["images_verified"] == 360
    folders, packed = content_by_class(pictures), content_by_class(tmp_path / "packed")
    assert folders == packed
    assert {key[0] for key in folders} == {0, 1}
    assert open_images(tmp_path / "packed").classes == open_images(pictures).classes
    tars = content_by_class(make_tars(pictures, tmp_path / "tars"))
    by_name = sorted(range(10), key=lambda label: CLASSES[label])  # numbers in the tars, names in the folders
    for (part, label), contents in folders.items():
        assert tars[part, by_name[label]] == contents


def test_a_packed_set_that_is_not_whole_is_refused(pictures: Path, tmp_path: Path) -> None:
    pack(PackRequest(pictures, tmp_path / "packed", options=PackOptions()))
    manifest = (tmp_path / "packed" / "images.json").read_text()
    for content, words in (
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (manifest.replace('"version": 2', '"version": 7'), "was changed since"),
    ):
        (tmp_path / "packed" / "images.json").write_text(content)
        with pytest.raises(UserError, match=words):
            open_images(tmp_path / "packed")
    (tmp_path / "packed" / "images.json").write_text(manifest)
    next((tmp_path / "packed").glob("val-*.bin")).unlink()
    with pytest.raises(UserError, match="lacks shards of its images: val-"):
        open_images(tmp_path / "packed")


def test_a_file_that_cannot_be_read_stops_a_pack(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: FolderReader, row: int) -> bytes:
        raise OSError("the network is gone")

    monkeypatch.setattr(FolderReader, "read", fails)
    with pytest.raises(MachineError, match=r"jpg cannot be read: the network is gone"):
        pack(PackRequest(pictures, tmp_path / "packed", options=PackOptions()))
    monkeypatch.undo()
    assert pack(PackRequest(pictures, tmp_path / "packed", options=PackOptions()))["samples"] == 360


def test_an_export_is_checked_on_the_images_of_any_layout(pictures: Path, tmp_path: Path) -> None:
    pack(PackRequest(pictures, tmp_path / "packed", options=PackOptions()))
    contents = []
    for path in (pictures, tmp_path / "packed"):
        run = resolve_target("imagenet", ["--data.path", str(path), *BASE]).config
        contents.append(sorted(content for _, content in _own_samples(SimpleNamespace(config=run))))  # type: ignore[arg-type]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 16


def test_a_pack_that_was_killed_goes_on_and_never_mixes(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.recipes.imagenet import pack as module

    monkeypatch.setattr(module, "SHARD_BYTES", 60_000)
    write = module._write_shard
    written: list[str] = []

    def dies_at_the_third(request, chosen, shard, *rest):  # type: ignore[no-untyped-def]
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(shard.name)
        write(request, chosen, shard, *rest)

    request = PackRequest(pictures, tmp_path / "out", shuffled=3, options=PackOptions(short_side=48, quality=80))
    monkeypatch.setattr(module, "_write_shard", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        pack(request)
    with pytest.raises(UserError, match="images"):
        open_images(tmp_path / "out")
    with pytest.raises(UserError, match="not the beginning of this pack"):
        pack(PackRequest(pictures, tmp_path / "out", options=PackOptions(short_side=40)))
    monkeypatch.setattr(module, "_write_shard", write)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.bin")}
    told = pack(PackRequest(**{**vars(request), "verify": True}))
    assert told["images_verified"] == 360
    assert told["shards"] > 4
    for name, time in done.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == time  # what was whole was not made again
    sizes = {min(size_of(content)) for contents in content_by_class(tmp_path / "out").values() for content in contents}
    assert max(sizes) <= 56  # 48, or the original where that was no larger
    with pytest.raises(UserError, match="short-side"):
        pack(PackRequest(pictures, tmp_path / "other", options=PackOptions(quality=50)))


@pytest.mark.parametrize("short_side", [None, 40])
def test_a_decoded_set_holds_the_pixels_and_says_beforehand_what_it_takes(
    pictures: Path, tmp_path: Path, short_side: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PackOptions(short_side=short_side, decoded=True)
    told = pack(PackRequest(pictures, tmp_path / "out", options=options, verify=True))
    assert told["images_verified"] == told["samples"] == 360
    said = re.search(r"360 images take about (\S+) GB decoded", capsys.readouterr().err)
    assert said is not None
    assert float(said[1]) == pytest.approx(told["bytes"] / 1e9, rel=0.02)
    images = open_images(tmp_path / "out")
    assert images.decoded
    by_id = {int(one): row for row, one in enumerate(images.table.columns["id"])}
    source = open_images(pictures)
    for row, number in list(enumerate(source.table.columns["id"]))[::40]:
        original, stored = source.reader.read(row), images.reader.read(by_id[int(number)])
        pixels = decode(stored)
        assert size_of(stored) == pixels.shape[:2]
        if short_side is None:
            assert np.array_equal(pixels, decode(original))
        else:
            assert min(pixels.shape[:2]) == min(short_side, *size_of(original))
        height, width = size_of(stored)
        box = Box(2, 3, height - 5, width - 4)
        assert np.array_equal(decode_crop(stored, box, height, width, 8), pixels[2 : height - 3, 3 : width - 1])


def test_a_decoded_image_that_is_damaged_is_a_broken_one() -> None:
    whole = as_raw(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    assert size_of(whole) == (2, 4)
    for content in (whole[:-1], whole + b"0", whole[:10], whole[:4], b"\0RGB" + bytes(8)):
        for look in (size_of, decode, lambda one: decode_crop(one, Box(0, 0, 1, 1), 2, 4, 1)):
            with pytest.raises(Broken):
                look(content)


def test_a_decoded_set_that_does_not_fit_the_disk_is_refused_before_anything_is_written(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.recipes.imagenet.pack.free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"has room for 0\.0 GB"):
        pack(PackRequest(pictures, tmp_path / "out", options=PackOptions(decoded=True)))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="packs pixels"):
        pack(PackRequest(pictures, tmp_path / "out", options=PackOptions(decoded=True, quality=80)))


def spoil(root: Path, how: str) -> None:
    if how == "missing":
        shutil.rmtree(root / "val" / "ring")
    elif how == "extra":
        shutil.copytree(root / "val" / "ring", root / "val" / "zebra")
    elif how == "empty":
        for path in (root / "val" / "ring").iterdir():
            path.unlink()
    elif how == "empty in training":
        for path in (root / "train" / "ring").iterdir():
            path.unlink()
    else:  # every validation folder holds the images of the next class
        for name in CLASSES:
            (root / "val" / name).rename(root / "val" / f"{name}-old")
        for name, after in zip(CLASSES, [*CLASSES[1:], CLASSES[0]], strict=True):
            (root / "val" / f"{after}-old").rename(root / "val" / name)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "Only in training, or empty in .*: ring"),
        ("extra", "Only in .*: zebra"),
        ("empty", "Only in training, or empty in .*: ring"),
        ("empty in training", "classes without a single image: ring"),
    ],
)
def test_classes_that_do_not_agree_are_refused_with_both_lists(own_pictures: Path, how: str, words: str) -> None:
    spoil(own_pictures, how)
    with pytest.raises(UserError, match=words):
        parts_of(own_pictures)


def flatten_validation(root: Path, into: str) -> dict[str, str]:
    """Classes get ImageNet's kind of names; validation images go into one folder. The class of each."""
    classes = {name: f"n{number:08d}" for number, name in enumerate(sorted(CLASSES))}
    for path in sorted((root / "train").iterdir()):
        path.rename(path.with_name(classes[path.name]))
    (root / "val").rename(root / "old")
    (root / into).mkdir(parents=True)
    found = {}
    for number, path in enumerate(sorted((root / "old").rglob("*.jpg"))):
        name = f"ILSVRC2012_val_{(number * 7919) % 10007:08d}.JPEG"
        found[name] = classes[path.parent.name]
        path.rename(root / into / name)
    shutil.rmtree(root / "old")
    return found


@pytest.mark.parametrize("kind", ["kaggle", "tiny", "synsets"])
def test_the_official_validation_images_in_one_folder_find_their_classes(own_pictures: Path, kind: str) -> None:
    before = content_by_class(own_pictures)
    classes = flatten_validation(own_pictures, "val/images" if kind == "tiny" else "val")
    if kind == "kaggle":
        lines = ["ImageId,PredictionString", *(f"{name[:-5]},{one} 1 2 3 4 " for name, one in classes.items())]
        (own_pictures / "LOC_val_solution.csv").write_text("\n".join(lines))
    elif kind == "tiny":
        lines = [f"{name}\t{one}\t0\t0\t9\t9" for name, one in classes.items()]
        (own_pictures / "val" / "val_annotations.txt").write_text("\n".join(lines))
    else:
        lines = [classes[name] for name in sorted(classes)]
        (own_pictures / "imagenet_2012_validation_synset_labels.txt").write_text("\n".join(lines))
    assert content_by_class(own_pictures) == before
    assert len(parts_of(own_pictures).validation.plan) == len(classes)


def test_validation_images_without_classes_are_refused_with_what_to_do(own_pictures: Path) -> None:
    classes = flatten_validation(own_pictures, "val")
    with pytest.raises(UserError, match=r"120 images and no folders of classes\. Put one of these beside it"):
        open_images(own_pictures)
    (own_pictures / "ILSVRC2012_validation_ground_truth.txt").write_text("1\n" * 120)
    with pytest.raises(UserError, match="numbers classes in the order of the challenge"):
        open_images(own_pictures)
    (own_pictures / "imagenet_2012_validation_synset_labels.txt").write_text("n00000001\n" * 119)
    with pytest.raises(UserError, match="has 119 classes, and there are 120 images"):
        open_images(own_pictures)
    (own_pictures / "LOC_val_solution.csv").write_text(f"{next(iter(classes))[:-5]},n00000001 1 2 3 4\n")
    with pytest.raises(UserError, match="does not say the class of 119 images"):
        open_images(own_pictures)


def test_permuted_validation_labels_are_found_before_the_first_step(tmp_path: Path) -> None:
    draw_set(tmp_path / "set", per_class=120, held_out=40, seed=1)
    parts_of(tmp_path / "set")  # as it is, nobody complains
    spoil(tmp_path / "set", "permuted")
    subset._opened.cache_clear()
    with pytest.raises(UserError, match=r"do not seem to mean.*(circle|square|ring|dots|waves) looks like \w+"):
        parts_of(tmp_path / "set")
    assert parts_of(tmp_path / "set", "--data.check_labels", "false") is not None


def batches_of(path: Path, *words: str) -> list[torch.Tensor]:
    parts = parts_of(path, *words)
    steps = list(parts.training.steps(Position(3), 1))
    return [step.batches[0].to(torch.device("cpu")).images for step in steps]


def test_batches_do_not_depend_on_threads_or_processes(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = ("--data.rand_augment", "2", "--data.mixup", "0.2", "--data.cutmix", "1.0", "--data.erasing", "0.5")
    first = batches_of(pictures, *every, "--loader.threads", "1")
    monkeypatch.setattr(decoder, "CHUNK", 5)  # several a batch
    for words in (
        ("--loader.threads", "3", "--loader.look_ahead", "2"),
        ("--loader.threads", "2", "--data.processes", "2"),
    ):
        for ours, theirs in zip(first, batches_of(pictures, *every, *words), strict=True):
            assert torch.equal(ours, theirs)
    assert len(first) == 15


@pytest.mark.parametrize("repeats", ["1", "3"])
def test_augmented_images_do_not_depend_on_ranks(pictures: Path, repeats: str) -> None:
    words = ("--data.rand_augment", "2", "--data.mixup", "0.2", "--data.cutmix", "1.0", "--data.erasing", "0.5")
    parts = parts_of(pictures, *words, "--data.repeats", repeats, "--loader.batch_size", "30")
    plan, make = parts.training.plan, parts.data.stages[0].run

    def images(step: Step, ranks: int) -> dict[tuple[int, int], tuple[torch.Tensor, int, float]]:
        found = {}
        for micro in (micro for mine in plan.deal(step, ranks) for micro in mine):
            batch = make(micro).to(torch.device("cpu"))
            copies = micro.copies if micro.copies is not None else np.zeros(len(micro.rows), int)
            for one, key in enumerate(zip(micro.rows.tolist(), copies.tolist(), strict=True)):
                found[key] = batch.images[one], int(batch.partner[one]), float(batch.weight[one])
        return found

    for step in [next(plan.steps(Position(0))), list(plan.steps(Position(0), 1))[-1]]:
        alone, mixed = images(step, 1), 0
        for ranks in (2, 5):
            shared = images(step, ranks)
            assert shared.keys() == alone.keys()
            for key, (image, partner, weight) in alone.items():
                torch.testing.assert_close(shared[key][0], image, rtol=0, atol=1e-5)
                assert shared[key][1:] == (partner, weight)
                mixed += weight < 1
        assert mixed > len(alone)


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_rank_may_have_nothing_to_do(pictures: Path, processes: str) -> None:
    parts = parts_of(pictures, "--data.processes", processes)
    value: object = MicroBatch(np.zeros(0, np.int64), 0, 0)
    for stage in parts.data.stages:
        value = stage.run(value)
    assert value.num_samples == 0  # type: ignore[attr-defined]


def test_images_keep_their_number_and_side_when_others_come(own_pictures: Path) -> None:
    shutil.rmtree(own_pictures / "val")
    before = open_images(own_pictures)
    shutil.copy(own_pictures / "train" / "ring" / "00003.jpg", own_pictures / "train" / "circle" / "0.jpg")
    (own_pictures / "train" / "cross" / "deeper").mkdir()
    shutil.move(own_pictures / "train" / "cross" / "00001.jpg", own_pictures / "train" / "cross" / "deeper" / "1.2.jpg")
    after = open_images(own_pictures)
    assert len(after.table) == 241
    held = [choose_images(images, None, None, 0, 0.3).validation for images in (before, after)]
    sides = [set(images.table.columns["id"][rows]) for images, rows in zip((before, after), held, strict=True)]
    assert len(sides[0] ^ sides[1]) <= 2  # the one that came and the one that was renamed


def test_ranks_pack_together_whoever_comes_last(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.recipes.imagenet import pack as module

    monkeypatch.setattr(module, "SHARD_BYTES", 60_000)
    base = {"source": pictures, "out": tmp_path / "out", "num_ranks": 2, "options": PackOptions()}
    assert pack(PackRequest(**base, rank=0))["state"] == "other ranks are still at work"
    assert pack(PackRequest(**base, rank=1))["samples"] == 360
    assert not (tmp_path / "out" / "lock").exists()
    with pytest.raises(UserError, match="another packed set"):
        pack(PackRequest(pictures, tmp_path / "out", options=PackOptions(short_side=32)))


def test_a_signal_to_the_group_does_not_end_the_processes() -> None:
    import signal

    from stoker.data.processes import Processes

    processes: Processes[int] = Processes(lambda argument, room: (os.getpid(), 0), 2, 8)
    pids = processes.run([0, 0], lambda pid, room: pid)
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
    assert set(processes.run([0, 0], lambda pid, room: pid)) <= set(pids)
    other: Processes[int] = Processes(lambda argument, room: (1, 0), 2, 8)
    processes.close()  # the second pool does not hold the first one's pipes
    assert not any(process._process.is_alive() for process in processes._all)
    other.close()


def test_many_threads_share_a_few_processes() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from stoker.data.processes import Processes

    def square(argument: int, room: memoryview) -> tuple[int, int]:
        room[:8] = argument.to_bytes(8, "little")
        return argument * argument, 8

    processes: Processes[int] = Processes(square, 3, 64)

    def ask(first: int) -> list[tuple[int, int]]:
        return processes.run(range(first, first + 20), lambda result, room: (result, int.from_bytes(room, "little")))

    with ThreadPoolExecutor(8) as pool:
        for first, answers in zip(range(0, 2000, 20), pool.map(ask, range(0, 2000, 20)), strict=True):
            assert answers == [(n * n, n) for n in range(first, first + 20)]
    processes.close()


def test_a_helper_is_asked_only_when_no_process_is_free() -> None:
    """The one process takes half a second for its first answer: the second question finds it busy."""
    from stoker.data.processes import Helper, Processes

    def slow(argument: int, room: memoryview) -> tuple[tuple[str, int], int]:
        sleep(0.5)
        return ("process", argument), 0

    ready = [True]
    helper: Helper[tuple[str, int]] = Helper(lambda argument: ("helper", argument), lambda: ready[0])
    processes: Processes[tuple[str, int]] = Processes(slow, 1, 8, helper)
    try:
        alone = processes.run([0, 1], lambda result, _: result)
        together = processes.run(range(9), lambda result, _: result, helped=True)
        ready[0] = False
        again = processes.run([0, 1], lambda result, _: result, helped=True)
    finally:
        processes.close()
    assert alone == again == [("process", 0), ("process", 1)]
    assert [number for _, number in together] == list(range(9))
    assert together[0] == ("process", 0)
    assert together[1] == ("helper", 1)


def test_a_helper_that_fails_is_free_again() -> None:
    from stoker.data.processes import Helper, Processes

    def fails(argument: int) -> int:
        raise UserError(f"no {argument}")

    helper = Helper(fails, lambda: True)
    processes: Processes[int] = Processes(lambda argument, room: (sleep(0.2) or argument, 0), 1, 8, helper)
    try:
        for _ in range(2):
            with pytest.raises(UserError, match="no 1"):
                processes.run([0, 1], lambda result, _: result, helped=True)
        assert processes.run([5], lambda result, _: result) == [5]
    finally:
        processes.close()


def test_repeated_augmentation_shows_an_image_in_several_ways(pictures: Path) -> None:
    parts = parts_of(pictures, "--data.repeats", "3", "--loader.batch_size", "12")
    step = next(iter(parts.training.steps(Position(0), 1)))
    rows = step.batches[0].rows.numpy()
    assert len(np.unique(rows)) == 4
    images = step.batches[0].to(torch.device("cpu")).images
    for row in np.unique(rows):
        a, b, c = images[torch.from_numpy(rows == row)]
        assert not torch.equal(a, b)
        assert not torch.equal(b, c)
    dealt = parts.training.plan.deal(next(parts.training.plan.steps(Position(0))), 4)
    pairs = [
        pair
        for rank in dealt
        for micro in rank
        for pair in zip(micro.rows.tolist(), micro.copies.tolist(), strict=True)
    ]
    assert len(set(pairs)) == 12  # ranks never augment two copies alike


def test_subsets_remap_labels_once_for_both_sides(pictures: Path) -> None:
    images = open_images(pictures)
    chosen = choose_images(images, 4, 5, seed=7, validation=0.1)
    assert len(chosen.classes) == 4
    assert len(chosen.training) == 20
    assert len(chosen.validation) == 48
    for rows in (chosen.training, chosen.validation):
        names = {images.classes.names[label] for label in images.table.columns["label"][rows]}
        assert names == set(chosen.classes.names)
        labels = chosen.label[np.asarray(images.table.columns["label"])[rows]]
        assert [chosen.classes.names[label] for label in labels] == [
            images.classes.names[label] for label in images.table.columns["label"][rows]
        ]
    again = choose_images(images, 4, 5, seed=7, validation=0.1)
    assert np.array_equal(again.training, chosen.training)
    assert not np.array_equal(choose_images(images, 4, 5, seed=8, validation=0.1).training, chosen.training)


def test_a_broken_image_is_named_and_left_out(own_pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = own_pictures / "train" / "ring" / "00003.jpg"
    bad.write_bytes(b"\xff\xd8\xff but nothing more")
    parts = parts_of(own_pictures, "--loader.threads", "1")
    seen = sum(batch.num_samples for step in parts.training.steps(Position(0), 1) for batch in step.batches)
    assert seen == 239
    assert str(bad) in capsys.readouterr().err
    parts = parts_of(own_pictures, "--data.broken", "stop")
    with pytest.raises(UserError, match="cannot be decoded"):
        list(parts.training.steps(Position(0), 1))


def test_a_partner_that_is_broken_is_not_mixed_in(own_pictures: Path) -> None:
    parts = parts_of(own_pictures, "--data.mixup", "0.2", "--loader.batch_size", "8", "--data.check_labels", "false")
    plan, make = parts.training.plan, parts.data.stages[0].run
    (micro,) = plan.deal(next(plan.steps(Position(0))), 1)[0]
    reader = parts.data.files_of(micro.rows[:1])
    (own_pictures / reader).write_bytes(b"no image")
    batch = make(micro).to(torch.device("cpu"))
    assert micro.partners is not None
    left = int(
        np.flatnonzero(micro.rows[1:] == micro.rows[micro.partners[0]])[0]
    )  # its partner, among those that are left
    assert batch.num_samples == 7
    assert batch.partner[left] == batch.labels[left]


class FakeDecoder(GpuDecoder):
    """Without a GPU: takes files that begin as JPEG does, unless told to fail."""

    fails: Exception | None = None

    def _begin(self) -> bool:
        self._stream = object()  # type: ignore[assignment]
        return True

    def _decode(self, contents: list[bytes]) -> list[torch.Tensor]:
        if self.fails is not None:
            raise self.fails
        return [torch.zeros(3, 1, 1) for _ in contents]


def test_the_gpu_decoder_is_left_alone_once_it_is_of_no_use(pictures: Path) -> None:
    decoder = FakeDecoder(torch.device("cpu"))
    good = next((pictures / "train").rglob("*.jpg")).read_bytes()
    for content in (b"PNG", good, b"PNG", b"PNG"):
        answer = decoder.decode([content])
        assert (answer is not None) == (content == good)
    assert decoder.decode([]) is None
    assert decoder.works
    decoder.fails = RuntimeError("one of them is broken")
    for _ in range(3):
        assert decoder.decode([good]) is None
    assert not decoder.works
    decoder.fails = None
    assert decoder.decode([good]) is None


def test_a_machine_without_the_gpu_decoder_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pictures: Path
) -> None:
    decoder = GpuDecoder(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(decoder, "_decode", FakeDecoder._decode.__get__(FakeDecoder(torch.device("cpu"))))
    monkeypatch.setattr(FakeDecoder, "fails", RuntimeError("not compiled with nvJPEG"))
    assert decoder.decode([next((pictures / "train").rglob("*.jpg")).read_bytes()]) is None
    assert not decoder.works
    said = capsys.readouterr()
    assert "not compiled with nvJPEG" in said.out + said.err


def test_decoding_on_a_gpu_is_refused_without_one(pictures: Path) -> None:
    with pytest.raises(UserError, match="this run is on cpu"):
        parts_of(pictures, "--data.decode_on_gpu", "true")


def test_images_grow_with_the_epochs() -> None:
    config = ImageNetData(size=192, first_size=128, grown_after=0.75)
    sizes = [size_at(config, epoch, 16) for epoch in range(16)]
    assert sizes[0] == 128
    assert sizes == sorted(sizes)
    assert sizes[12:] == [192] * 4
    assert all(size % 32 == 0 for size in sizes)


def test_validation_without_a_folder_is_held_out(own_pictures: Path) -> None:
    shutil.rmtree(own_pictures / "val")
    parts = parts_of(own_pictures, "--data.validation", "0.25", "--data.check_labels", "false")
    training, held = set(parts.data.training.rows(np.arange(len(parts.data.training)))), parts.data.validation
    assert len(training) + len(held) == 240
    assert not training & set(held.rows(np.arange(len(held))))


def test_processes_that_die_are_named(pictures: Path) -> None:
    from stoker.data.processes import Processes
    from stoker.errors import MachineError

    def dies(argument: int, room: memoryview) -> tuple[int, int]:
        if argument == 1:
            os._exit(7)
        if argument == 2:
            raise UserError("not this one")
        room[:1] = b"x"
        return argument, 1

    processes: Processes[int] = Processes(dies, 1, 100)
    assert processes.run([0, 3], lambda result, room: (result, bytes(room))) == [(0, b"x"), (3, b"x")]
    with pytest.raises(UserError, match="not this one"):
        processes.run([0, 2, 3], lambda result, room: None)
    assert processes.run([4], lambda result, room: result) == [4]  # and the answers after it are the right ones
    with pytest.raises(MachineError, match="ended by itself"):
        processes.run([1], lambda result, room: None)
    processes.close()
    assert MicroBatch(np.arange(1), 0, 0).copies is None


def test_a_step_in_pieces_holds_the_samples_of_the_whole(pictures: Path) -> None:
    whole_steps, pieces = (
        list(parts_of(pictures, *words).training.steps(Position(0), 1))
        for words in ((), ("--loader.micro_cost", "20000"))
    )
    assert all(len(step.batches) == 1 for step in whole_steps)
    assert max(len(step.batches) for step in pieces) > 2
    for one, other in zip(whole_steps, pieces, strict=True):
        assert sorted(one.rows) == sorted(row for batch in other.batches for row in batch.rows.tolist())


def test_images_of_formats_that_are_not_read_are_named(own_pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(open_images(own_pictures).table)
    (own_pictures / "train" / "ring" / "a.tiff").write_bytes(b"II*")
    (own_pictures / "train" / "ring" / "b.GIF").write_bytes(b"GIF89a")
    assert len(open_images(own_pictures).table) == before
    said = capsys.readouterr().err
    assert "2 files are left out" in said
    assert "a.tiff" in said
