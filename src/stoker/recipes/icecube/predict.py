"""Directions for all events of a data set, in the format of the competition: event_id, azimuth, zenith.

Events are read straight from their files, in their order, in parts. Each part that is done is kept beside the output until
the last one is, so a prediction that was stopped goes on, and the processes of torchrun share the parts.
"""

# E events
import hashlib
import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from stoker import console
from stoker.data.device import feed
from stoker.data.loader import Loader
from stoker.data.order import StorageOrder
from stoker.data.plan import Plan, Position
from stoker.data.samples import RangeSubset, SampleTable
from stoker.data.stages import Stage
from stoker.errors import UserError
from stoker.files import write_bytes, write_json
from stoker.recipe import Trained
from stoker.recipes.icecube import data
from stoker.recipes.icecube.task import azimuth_zenith
from stoker.train import parallel
from stoker.train.evaluate import inference
from stoker.train.precision import autocast

PART_EVENTS = 100_000
COLUMNS = ("event_id", "azimuth", "zenith")


def predict(model: Trained, out: Path | None) -> Mapping[str, Any]:
    """Writes `out`: CSV, or Parquet with kappa beside the angles."""
    out = out or Path("submission.csv")
    if out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {out} should end in .csv (the competition's format) or .parquet (with kappa).")
    if out.exists():
        raise UserError(f"{out} exists, and nothing is overwritten: remove it, or name another --out.")
    source = data.open_all(model.config)
    table: SampleTable = source.table
    parts = out.with_name(out.name + ".parts")
    count = -(-len(table) // PART_EVENTS)
    if model.ranks.is_first:
        _claim(parts, model, table)
    parallel.gather(None)
    mine = [part for part in range(model.ranks.rank, count, model.ranks.count) if not _part_path(parts, part).exists()]
    begin, done = time.perf_counter(), 0
    with (
        console.progress("predict", sum(_size(table, part) for part in mine), "events") as bar,
        inference(model.task.model),
    ):
        for part in mine:
            write_bytes(_part_path(parts, part), _predict_part(model, source, part, bar))
            done += _size(table, part)
    spent = time.perf_counter() - begin
    everyone = sum(parallel.gather(done))
    if model.ranks.is_first:
        _join(parts, count, out)
    parallel.gather(None)
    return {
        "path": str(out),
        "events": len(table),
        "predicted_now": everyone,
        "events_per_s": round(everyone / spent, 1),
    }


def _predict_part(model: Trained, source: data.AllEvents, part: int, bar: console.Progress) -> bytes:
    """One part as a Parquet file."""
    first, size = part * PART_EVENTS, _size(source.table, part)
    subset = RangeSubset(np.array([first]), np.array([0, size]))
    config = model.config.loader
    plan = Plan(
        table=source.table,
        subset=subset,
        order=lambda seed, epoch: StorageOrder(),
        batch_size=config.batch_size,
        batch_cost=config.batch_cost,
        micro_cost=config.micro_cost,
        sample_cost=config.sample_cost,
    )
    pinned = [Stage("pin", lambda batch: batch.pin())] if model.device.type == "cuda" else []
    loader: Loader[Any] = Loader(
        plan,
        [*source.stages, *pinned],
        config,
        where=source.where,
        bytes_per_cost=data.BYTES_PER_PULSE,
        cache_bytes=source.cache_bytes,
    )
    rows, answers = [], []
    for step in feed(loader.batches(Position(seed=0), num_epochs=1), model.device):
        for batch in step.batches:
            if batch.num_samples:
                with autocast(model.precision, model.device):
                    answers.append(model.task.predict(batch).float())
                rows.append(batch.rows)
        bar.advance(step.loaded.num_samples)
    row, answer = torch.cat(rows).cpu().numpy(), torch.cat(answers).cpu().numpy()
    order = np.argsort(row, kind="stable")
    azimuth, zenith = azimuth_zenith(answer[order, :3])
    content = {
        "event_id": np.asarray(source.table.columns["id"][row[order]]),
        "azimuth": azimuth,
        "zenith": zenith,
        "kappa": answer[order, 3].astype(np.float64),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(content), sink)
    return sink.getvalue()


def _claim(parts: Path, model: Trained, table: SampleTable) -> None:
    """Makes the folder of parts, or sees that the one that is there belongs to the same prediction."""
    weights = hashlib.sha256()
    for tensor in model.task.model.state_dict().values():
        weights.update(tensor.detach().float().cpu().numpy().tobytes())
    identity = {
        "weights": weights.hexdigest(),
        "data": table.fingerprint,
        "events": len(table),
        "sample_cost": model.config.loader.sample_cost,
        "precision": model.precision,
    }
    marker = parts / "prediction.json"
    if not parts.exists():
        parts.mkdir(parents=True)
        write_json(marker, identity)
        return
    try:
        found = json.loads(marker.read_text())
    except (OSError, ValueError):
        found = None
    if found != identity:
        raise UserError(
            f"{parts} holds parts of another prediction (other weights, data or precision). Remove it, or name "
            f"another --out."
        )
    ready = sum(1 for _ in parts.glob("part-*.parquet"))
    console.say(f"{parts} holds {ready:,} parts that are done: going on from there.")


def _join(parts: Path, count: int, out: Path) -> None:
    """All parts in their order, then the parts go."""
    partial = out.with_name(f".{out.name}.partial")
    as_csv = out.suffix == ".csv"
    schema = pa.schema([("event_id", pa.int64()), *((name, pa.float64()) for name in ("azimuth", "zenith", "kappa"))])
    try:
        if as_csv:
            columns = pa.schema([schema.field(name) for name in COLUMNS])
            options = pyarrow.csv.WriteOptions(quoting_style="none")
            with pyarrow.csv.CSVWriter(partial, columns, write_options=options) as csv_writer:
                for part in range(count):
                    csv_writer.write_table(pq.read_table(_part_path(parts, part), columns=list(COLUMNS)))
        else:
            with pq.ParquetWriter(partial, schema) as writer:
                for part in range(count):
                    writer.write_table(pq.read_table(_part_path(parts, part)))
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    for path in [*parts.glob("part-*.parquet"), parts / "prediction.json"]:
        path.unlink()
    parts.rmdir()


def _part_path(parts: Path, part: int) -> Path:
    return parts / f"part-{part:06d}.parquet"


def _size(table: SampleTable, part: int) -> int:
    return min(PART_EVENTS, len(table) - part * PART_EVENTS)
