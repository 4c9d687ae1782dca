"""Answers for many samples: in parts that survive a kill, shared by all ranks, joined by the first.

Each part that is done is kept as a file until the last one is, so a prediction that was stopped goes on. What an answer is,
and how a part of the samples is read, is the recipe's.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from stoker import console
from stoker.data.parquet import named_if_damaged
from stoker.errors import UserError
from stoker.files import write_bytes, write_json
from stoker.train import parallel
from stoker.train.evaluate import inference
from stoker.train.parallel import Ranks

MARKER = "prediction.json"


@dataclass(frozen=True)
class Parts:
    """The samples of a prediction, cut into parts, and the folder in which answers gather."""

    folder: Path
    num_samples: int
    part_samples: int
    unit: str  # what the samples are called

    def __len__(self) -> int:
        return -(-self.num_samples // self.part_samples)

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.parquet"

    def range(self, part: int) -> tuple[int, int]:
        first = part * self.part_samples
        return first, min(first + self.part_samples, self.num_samples)

    def size(self, part: int) -> int:
        first, stop = self.range(part)
        return stop - first


# (first, stop, what to tell of every sample that is done) -> a row for each sample that has an answer
Answer = Callable[[int, int, Callable[[int], None]], pa.Table]


def predict_in_parts(
    parts: Parts, model: nn.Module, identity: Mapping[str, Any], ranks: Ranks, answer: Answer
) -> dict[str, Any]:
    """Makes the parts that are missing, each rank its share; returns how many samples, and how many a second."""
    if ranks.is_first:
        _claim(parts, {**identity, "weights": weights_digest(model), "samples": parts.num_samples})
    parallel.gather(None)
    mine = [part for part in range(ranks.rank, len(parts), ranks.count) if not parts.path(part).exists()]
    begin, done = time.perf_counter(), 0
    with console.progress("predict", sum(map(parts.size, mine)), parts.unit) as bar, inference(model):
        for part in mine:
            table = answer(*parts.range(part), bar.advance)
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink)
            write_bytes(parts.path(part), sink.getvalue().to_pybytes())
            done += parts.size(part)
    spent = time.perf_counter() - begin
    everyone = sum(parallel.gather(done))
    return {"predicted_now": everyone, f"{parts.unit}_per_s": round(everyone / spent, 1)}


def tables(parts: Parts) -> Iterator[pa.Table]:
    """All parts in their order."""
    for part in range(len(parts)):
        with named_if_damaged(parts.path(part)):
            table = pq.read_table(parts.path(part))
        yield table


def remove(parts: Parts) -> None:
    shutil.rmtree(parts.folder)


def weights_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _claim(parts: Parts, identity: dict[str, Any]) -> None:
    """Makes the folder of parts, or sees that the one that is there belongs to the same prediction."""
    folder, marker = parts.folder, parts.folder / MARKER
    if not folder.exists() or not any(folder.iterdir()):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(marker, identity)
        return
    try:
        found = json.loads(marker.read_text())
    except (OSError, ValueError):
        found = None
    if found != identity:
        raise UserError(
            f"{folder} holds parts of another prediction (other weights, data or precision). Remove it, or name "
            f"another --out."
        )
    ready = sum(1 for _ in folder.glob("part-*.parquet"))
    console.say(f"{folder} holds {ready:,} parts that are done: going on from there.")
