"""Mutated files of every format we read, and what becomes of them.

`python tests/faults/fuzz.py --cases 2000` tries that many of each format; the tests try a few hundred of all. Each case is
seeded by its number, so that `--only meta --first 812 --cases 1` shows one again. Cases run in a process of their own, so
that one that hangs or crashes is counted and the rest goes on.
"""

import argparse
import hashlib
import io
import json
import multiprocessing as mp
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

CLEAN, EQUAL, UNSEEN = "clean message", "accepted and equal", "accepted, and cannot be noticed (docs/data.md)"
DIFFERENT, TRACEBACK, HANG, CRASH = "accepted and different", "traceback", "hang", "crash"
OUTSIDE = "file outside its folder"
BAD = (DIFFERENT, TRACEBACK, HANG, CRASH, OUTSIDE)
PATIENCE_S = 60.0
ODD_VALUES = (-7, 0, 10**12, -1, 1.5, None, "", "x", [], {}, [[]], {"a": 1}, True, 2**63, "NaN", -(10**30))


def mutate(content: bytes, dice: np.random.Generator) -> bytes:
    """One to three changes of the kinds that disks, copies and people make."""
    changed = bytearray(content)
    for _ in range(int(dice.integers(1, 4))):
        if not changed:
            return b"x"
        at, kind = int(dice.integers(len(changed))), int(dice.integers(7))
        length = int(dice.integers(1, max(2, min(len(changed) - at, 2000)) + 1))
        if kind == 0:
            changed[at] ^= 1 << int(dice.integers(8))
        elif kind == 1:
            changed[at] = int(dice.integers(256))
        elif kind == 2:
            del changed[at:]
        elif kind == 3:
            changed[at : at + length] = bytes(len(changed[at : at + length]))
        elif kind == 4:
            changed[at:at] = changed[at : at + length]
        elif kind == 5:
            changed[at:at] = dice.bytes(min(length, 64))
        else:
            del changed[at : at + length]
    return bytes(changed)


def mutate_json(content: bytes, dice: np.random.Generator) -> bytes:
    """Another value at a place of the structure."""
    value = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(value)
    if not places or dice.random() < 0.05:
        return json.dumps(ODD_VALUES[int(dice.integers(len(ODD_VALUES)))]).encode()
    node, key = places[int(dice.integers(len(places)))]
    if isinstance(node, dict) and dice.random() < 0.2:
        del node[key]
    else:
        node[key] = ODD_VALUES[int(dice.integers(len(ODD_VALUES)))]
    return json.dumps(value).encode()


class Format:
    """A folder as it should be, made once; a case is a copy of it with one file mutated."""

    def __init__(self, folder: Path) -> None:
        self.whole = folder / type(self).__name__.lower()
        self.whole.mkdir()
        self.make(self.whole)
        self.expected = self.read(self.whole)

    def make(self, folder: Path) -> None:
        raise AssertionError("each format makes its own")

    def read(self, folder: Path) -> Any:
        """What someone gets from the folder; raises UserError where something is wrong with it."""
        raise AssertionError("each format reads its own")

    def files(self, folder: Path) -> list[Path]:
        return sorted(path for path in folder.rglob("*") if path.is_file())

    def change(self, folder: Path, dice: np.random.Generator) -> None:
        files = self.files(folder)
        path = files[int(dice.integers(len(files)))]
        content = path.read_bytes()
        as_json = path.suffix == ".json" and dice.random() < 0.5
        path.write_bytes(mutate_json(content, dice) if as_json else mutate(content, dice))

    def is_unseen(self, found: Any) -> bool:
        """Whether another answer is one that nobody could tell from the right one."""
        return False


class Pulses(Format):
    mode = "direct"

    def make(self, folder: Path) -> None:
        from stoker.recipes.icecube.simulate import simulate

        simulate(folder, num_events=40, num_files=2, seed=1, force=True)
        (folder / "truth.parquet").unlink()

    def files(self, folder: Path) -> list[Path]:
        return [folder / "train" / "batch_1.parquet"]

    def change(self, folder: Path, dice: np.random.Generator) -> None:
        """Bytes, or the values of a file that is written again as it should be."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        (path,) = self.files(folder)
        if dice.random() < 0.5:
            path.write_bytes(mutate(path.read_bytes(), dice))
            return
        table = pq.read_table(path)
        at = int(dice.integers(table.num_columns))
        values = table.column(at).to_pylist()
        kind = int(dice.integers(4))
        if kind == 0:
            values = [values[place] for place in dice.permutation(len(values))]
        elif kind == 1:
            values[int(dice.integers(len(values)))] = None
        elif kind == 2:
            odd = (-1, 70_000, 2**40, float("nan"), 1e300, -0.5)[int(dice.integers(6))]
            values[int(dice.integers(len(values)))] = odd
        else:
            values = [str(value) for value in values]
        try:
            column = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            column = pa.array([float(value) for value in values])
        pq.write_table(table.set_column(at, table.column_names[at], column), path)

    def read(self, folder: Path) -> Any:
        import torch

        from stoker.data.plan import MicroBatch
        from stoker.recipe import RunConfig
        from stoker.recipes.icecube.data import IceCubeData, open_data
        from stoker.recipes.icecube.model import TwoStageConfig

        data = IceCubeData(path=folder, mode=self.mode, split="hash", validation=0.5)  # type: ignore[arg-type]
        opened = open_data(RunConfig(recipe="icecube", data=data, model=TwoStageConfig()), torch.device("cpu"))
        value: Any = MicroBatch(np.arange(len(opened.table)), 0, 0)
        for stage in opened.stages:
            value = stage.run(value)
        batch = value.to(torch.device("cpu"))
        counts = np.asarray(opened.table.columns["count"])[batch.rows.numpy()]
        ids = np.asarray(opened.table.columns["id"])[batch.rows.numpy()]
        pulses = np.stack([batch.time.numpy(), batch.charge.numpy(), batch.auxiliary.numpy()], 1).astype(np.float64)
        sensor = np.repeat(batch.sensor.numpy(), np.diff(batch.dom_offsets.numpy()))
        return ids, counts, np.column_stack([pulses, sensor]), batch.direction.numpy()

    def is_unseen(self, found: Any) -> bool:
        """Possible values in the right events; a file without checksums does not say that they were others."""
        ids, counts, pulses, direction = found
        same = np.array_equal(ids, self.expected[0]) and np.array_equal(counts, self.expected[1])
        possible = np.isfinite(pulses).all() and (pulses[:, 1] >= 0).all() and (pulses[:, 3] < 5160).all()
        return bool(same and possible and np.isfinite(direction).all())


class Packing(Pulses):
    mode = "packed"


class Meta(Pulses):
    def files(self, folder: Path) -> list[Path]:
        return [folder / "train_meta.parquet"]


class Store(Format):
    def make(self, folder: Path) -> None:
        from stoker.data.pack import pack
        from stoker.recipes.icecube import events
        from stoker.recipes.icecube.simulate import simulate
        from stoker.recipes.icecube.table import open_events

        source = folder.with_name("source")
        simulate(source, num_events=40, num_files=2, seed=1)
        folder.rmdir()
        pack(folder, events.packing(source, open_events(source)), threads=1)

    def read(self, folder: Path) -> Any:
        from stoker.data.plan import MicroBatch
        from stoker.data.store import open_store

        store = open_store(folder)
        gathered = store.gather(MicroBatch(np.arange(len(store.table))))
        columns = [gathered.columns[name].tobytes() for name in sorted(gathered.columns)]
        table = [np.asarray(store.table.columns[name]).tobytes() for name in sorted(store.table.columns)]
        return columns, table, store.table.shards


class Tars(Format):
    def make(self, folder: Path) -> None:
        import simplejpeg

        dice = np.random.default_rng(0)
        for part in ("train", "val"):
            with tarfile.open(folder / f"{part}-000.tar", "w") as tar:
                for number in range(8):
                    pixels = dice.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                    for ending, content in (("jpg", simplejpeg.encode_jpeg(pixels)), ("cls", b"ab"[number % 2 :][:1])):
                        member = tarfile.TarInfo(f"{number:03d}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))

    def read(self, folder: Path) -> Any:
        from stoker.recipes.imagenet.sources import open_images

        images = open_images(folder)
        columns, names = images.table.columns, images.classes.names
        found = {}
        for row in range(len(images.table)):
            place = (images.table.shards[columns["shard"][row]], int(columns["first"][row]), int(columns["count"][row]))
            found[place] = (names[columns["label"][row]], int(columns["part"][row]), images.reader.read(row))
        return found

    def is_unseen(self, found: Any) -> bool:
        """The bytes of an image or of a .cls, and names in headers whose sum is right, have no checksum in a tar."""
        return len(found) == len(self.expected)


class Pictures(Format):
    def make(self, folder: Path) -> None:
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
        for kind in ("jpeg", "png", "webp", "bmp", "tiff", "gif"):
            Image.fromarray(pixels).save(folder / f"one.{kind}")

    def change(self, folder: Path, dice: np.random.Generator) -> None:
        files = self.files(folder)
        path = files[int(dice.integers(len(files)))]
        path.write_bytes(mutate(path.read_bytes(), dice))
        for other in files:
            if other != path:
                other.unlink()

    def read(self, folder: Path) -> Any:
        from stoker.errors import UserError
        from stoker.recipes.imagenet.decode import MOST_PIXELS, Box, Broken, decode_all, decode_crop, size_of

        found = {}
        for path in self.files(folder):
            content = path.read_bytes()
            try:
                height, width = size_of(content)
                assert height * width <= MOST_PIXELS
                pixels = decode_all(content)
                part = decode_crop(content, Box(0, 0, max(1, height / 2), max(1, width / 2)), height, width, 8)
            except Broken as error:
                raise UserError(str(error)) from error
            assert pixels.ndim == 3
            assert min(part.shape) >= 1
            found[path.name] = pixels.tobytes()
        return found

    def is_unseen(self, found: Any) -> bool:
        return True  # a pixel may have any value


class Settings(Format):
    def make(self, folder: Path) -> None:
        from stoker.launch.targets import resolve_target
        from stoker.settings import as_yaml

        (folder / "config.yaml").write_text(as_yaml(resolve_target("icecube", []).config))

    def read(self, folder: Path) -> Any:
        from stoker.launch.targets import resolve_target

        return resolve_target(str(folder / "config.yaml"), []).config

    def is_unseen(self, found: Any) -> bool:
        return True  # another configuration that is one


class Checkpoints(Format):
    def make(self, folder: Path) -> None:
        import torch

        from stoker.train.checkpoint import Snapshot, write_checkpoint
        from stoker.train.randomness import random_states

        tensors = {
            "model": {"weight": torch.arange(20.0)},
            "optimizer": {"exp_avg/weight": torch.arange(20.0)},
            "random": {f"0/{name}": value for name, value in random_states().tensors().items()},
        }
        position = {"seed": 0, "epoch": 0, "consumed": 12}
        state = {"step": 3, "position": position, "latest_score": 0.5, "settings": {"train.lr": 0.1, "train.epochs": 2},
                 "meter": {"results": [[1.0, 2.0, 0.0]], "samples": [4]}, "recent_losses": [1.0], "bad_steps": [0, 0],
                 "optimizer": "AdamW", "evaluation_due": False}  # fmt: skip
        folder.rmdir()
        write_checkpoint(folder, Snapshot(tensors, state))
        (folder / "score.json").write_text('{"score": 0.5}\n')

    def change(self, folder: Path, dice: np.random.Generator) -> None:
        super().change(folder, dice)
        if dice.random() < 0.3:  # as someone who knows the format would
            names = [path for path in self.files(folder) if path.name not in ("checksums.json", "score.json")]
            sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in names}
            (folder / "checksums.json").write_text(json.dumps(sums))

    def read(self, folder: Path) -> Any:
        from stoker.train.checkpoint import best, read_checkpoint, read_score
        from stoker.train.randomness import restore_random_states

        best(folder.parent, "min")
        read_score(folder)
        snapshot = read_checkpoint(folder)
        random = {key.removeprefix("0/"): value for key, value in snapshot.tensors["random"].items()}
        try:
            restore_random_states(random)
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            from stoker.errors import UserError

            raise UserError(f"caught by Engine.restore: {error}") from error
        tensors = {
            kind: {name: value.tolist() for name, value in some.items()} for kind, some in snapshot.tensors.items()
        }
        return tensors, snapshot.state

    def is_unseen(self, found: Any) -> bool:
        """Only with checksums made anew: a state or tensors that are possible."""
        return True


class Events(Format):
    def make(self, folder: Path) -> None:
        from stoker.runs import schema
        from stoker.runs.events import EventLog
        from stoker.runs.folder import create_run

        for name in ("spoilt", "other"):
            run = create_run(folder, "icecube", name, "recipe: icecube\n", folder / name)
            with EventLog(run.events) as log:
                log.write(schema.Start(data={"fingerprint": "a"}, steps=3))
                place = {"epoch": 0, "consumed": 9, "samples_crc32": 1, "lr": 0.1, "grad_norm": 1.0, "bad": 0}
                for step in range(1, 4):
                    log.write(schema.Step(step=step, loss=1.0, samples_per_s=100.0, wait_share=0.0, **place))
                log.write(schema.Evaluation(step=3, metric="error", goal="min", score=0.5, metrics={"error": 0.5}))
                log.write(schema.End(state="finished"))

    def files(self, folder: Path) -> list[Path]:
        return [folder / "spoilt" / "events.jsonl", folder / "spoilt" / "environment.json"]

    def change(self, folder: Path, dice: np.random.Generator) -> None:
        path = self.files(folder)[int(dice.random() < 0.2)]
        lines = path.read_bytes().splitlines(keepends=True)
        if dice.random() < 0.5 and path.suffix == ".jsonl":
            at = int(dice.integers(len(lines)))
            lines[at] = mutate_json(lines[at], dice) + b"\n"
            path.write_bytes(b"".join(lines))
        else:
            path.write_bytes(mutate(path.read_bytes(), dice))

    def read(self, folder: Path) -> Any:
        from stoker.runs.folder import list_runs

        listed = {one.name: (one.state, one.step, one.best, one.samples_per_s) for one in list_runs(folder)}
        assert listed["other"] == ("finished", 3, 0.5, 100.0)
        assert "spoilt" in listed
        return listed

    def is_unseen(self, found: Any) -> bool:
        return True  # events that were not written are not missed


FORMATS: dict[str, type[Format]] = {kind.__name__.lower(): kind for kind in (
    Pulses, Packing, Meta, Store, Tars, Pictures, Settings, Checkpoints, Events)}  # fmt: skip


def try_case(one: Format, number: int, folder: Path) -> tuple[str, str]:
    """The outcome of a case, and what was said."""
    from stoker.errors import MachineError, UserError

    place = folder / "cases" / str(number)
    shutil.copytree(one.whole, place / "data")
    os.environ["STOKER_CACHE"] = str(place / "cache")
    before = _listing(folder, place)
    one.change(place / "data", np.random.default_rng((number, list(FORMATS).index(type(one).__name__.lower()))))
    try:
        found = one.read(place / "data")
        outcome, text = EQUAL if _same(found, one.expected) else UNSEEN if one.is_unseen(found) else DIFFERENT, ""
    except (UserError, MachineError) as error:
        outcome, text = CLEAN, str(error)
    except OSError as error:  # the command line makes a sentence of those that name a file
        outcome, text = (CLEAN if error.filename else TRACEBACK), repr(error)
    except Exception:
        outcome, text = TRACEBACK, traceback.format_exc()
    if _listing(folder, place) != before:
        outcome, text = OUTSIDE, "files beside the case's own folder"
    shutil.rmtree(place)
    return outcome, text


def _listing(folder: Path, place: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if place not in path.parents and path != place}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple | list) and isinstance(second, tuple | list):
        return len(first) == len(second) and all(map(_same, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and np.array_equal(first, second, equal_nan=True)
    return bool(first == second)


def _serve(name: str, folder: Path, pipe: Connection) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    import torch

    torch.set_num_threads(1)
    os.environ["STOKER_CACHE"] = str(folder / "cache")
    one = FORMATS[name](folder)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        pipe.send(try_case(one, number, folder))


class Fuzzer:
    """Drives a process that tries cases, and replaces it when it hangs or crashes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begin()

    def _begin(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{self._name}-"))
        self._pipe, theirs = mp.Pipe()
        context = mp.get_context("spawn")
        self._process = context.Process(target=_serve, args=(self._name, self._folder, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._answer()[0] == "r", f"{self._name} could not be made"

    def _answer(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            return HANG, f"no answer within {PATIENCE_S} s"
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            return CRASH, f"exit code {self._process.exitcode}"

    def run(self, number: int) -> tuple[str, str]:
        self._pipe.send(number)
        outcome, text = self._answer()
        if outcome in (HANG, CRASH):
            self.close()
            self._begin()
        return outcome, text

    def close(self) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid or 0, signal.SIGKILL)
        self._process.join()
        self._pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def fuzz(name: str, first: int, cases: int, tell: Callable[[int, str, str], None]) -> Counter[str]:
    fuzzer, counts = Fuzzer(name), Counter[str]()
    try:
        for number in range(first, first + cases):
            outcome, text = fuzzer.run(number)
            counts[outcome] += 1
            tell(number, outcome, text)
    finally:
        fuzzer.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FORMATS, action="append")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--verbose", action="store_true", help="say what every case came to")
    options = parser.parse_args()
    bad = 0
    for name in options.only or FORMATS:

        def tell(number: int, outcome: str, text: str, name: str = name) -> None:
            if outcome in BAD or options.verbose:
                print(f"{name} {number}: {outcome}: {text}", flush=True)

        counts = fuzz(name, options.first, options.cases, tell)
        print(json.dumps({"format": name, "first": options.first, **counts}), flush=True)
        bad += sum(counts[outcome] for outcome in BAD)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
