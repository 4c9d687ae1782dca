"""Directions for all events of a data set, in the format of the competition: event_id, azimuth, zenith.

Events are read straight from their files, in their order; `train.predict` cuts them into parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from stoker.data.batch import num_samples, rows_of
from stoker.data.device import feed
from stoker.data.loader import loader_of
from stoker.data.plan import Position
from stoker.data.samples import RangeSubset
from stoker.data.source import RunData
from stoker.errors import UserError
from stoker.recipe import Trained
from stoker.recipes.icecube.data import open_all
from stoker.recipes.icecube.geometry import geometry_of
from stoker.recipes.icecube.task import azimuth_zenith
from stoker.train import parallel
from stoker.train.precision import autocast
from stoker.train.predict import Parts, predict_in_parts, remove, tables

PART_EVENTS = 100_000
COLUMNS = ("event_id", "azimuth", "zenith")


def predict(model: Trained, out: Path | None) -> Mapping[str, Any]:
    """Writes `out`: CSV, or Parquet with kappa beside the angles, and whatever else the model has learnt."""
    out = out or Path("submission.csv")
    if out.suffix not in (".csv", ".parquet"):
        raise UserError(f"--out {out} should end in .csv (the competition's format) or .parquet (with kappa).")
    if out.exists():
        raise UserError(f"{out} exists, and nothing is overwritten: remove it, or name another --out.")
    data = open_all(model.config)
    if data.loose_facts:
        model.task.use(geometry_of(data.facts))
        model.task.model.to(model.device)
    elif not np.array_equal(np.array(data.facts["sensor_xyz"], np.float32), model.task.sensor_xyz.cpu().numpy()):
        raise UserError(
            f"The detector of {data.description['path']} (sensor_geometry.csv) is not the one that the run was trained for."
        )
    parts = Parts(out.with_name(out.name + ".parts"), len(data.table), PART_EVENTS, "events")
    identity = {
        "data": data.table.fingerprint,
        "sample_cost": model.config.loader.sample_cost,
        "precision": model.precision,
    }

    def answer(first: int, stop: int, advance: Callable[[int], None]) -> pa.Table:
        return _directions(model, data, first, stop, advance)

    told = predict_in_parts(parts, model.task.model, identity, model.ranks, answer)
    if model.ranks.is_first:
        _join(parts, out)
    parallel.gather(None)
    return {"path": str(out), "events": len(data.table), **told}


def _directions(model: Trained, data: RunData, first: int, stop: int, advance: Callable[[int], None]) -> pa.Table:
    some = replace(data, validation=RangeSubset(np.array([first]), np.array([0, stop - first])))
    loader = loader_of(some, model.config.loader, model.device, training=False)
    rows, answers = [], []
    for step in feed(loader.steps(Position(0), num_epochs=1), model.device):
        for batch in step.batches:
            if num_samples(batch):
                with autocast(model.precision, model.device):
                    answers.append(model.task.predict(batch).float())
                rows.append(rows_of(batch))
        advance(step.num_samples)
    row, answer = torch.cat(rows).cpu().numpy(), torch.cat(answers).cpu().numpy()
    order = np.argsort(row, kind="stable")
    azimuth, zenith = azimuth_zenith(answer[order, :3])
    return pa.table(
        {
            "event_id": np.asarray(data.table.columns["id"][row[order]]),
            "azimuth": azimuth,
            "zenith": zenith,
            "kappa": answer[order, 3].astype(np.float64),
            **_further(model, answer[order]),
        }
    )


def _further(model: Trained, answer: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[np.float64]]:
    """Energy (GeV) and vertex (m) with their uncertainties, where the model has learnt them."""
    found = {name: values.double().numpy() for name, values in model.task.further(torch.from_numpy(answer)).items()}
    columns: dict[str, npt.NDArray[np.float64]] = {}
    if "energy" in found:
        columns |= {"energy": 10 ** found["energy"][:, 0], "energy_sigma_log10": found["energy_sigma"][:, 0]}
    if "vertex" in found:
        columns |= {f"vertex_{axis}": found["vertex"][:, place] for place, axis in enumerate("xyz")}
        columns["vertex_sigma"] = found["vertex_sigma"][:, 0]
    return columns


def _join(parts: Parts, out: Path) -> None:
    """All parts in their order, then the parts go."""
    partial = out.with_name(f".{out.name}.partial")
    schema = next(iter(tables(parts))).schema
    try:
        if out.suffix == ".csv":
            columns = pa.schema([schema.field(name) for name in COLUMNS])
            options = pyarrow.csv.WriteOptions(quoting_style="none")
            with pyarrow.csv.CSVWriter(partial, columns, write_options=options) as csv_writer:
                for table in tables(parts):
                    csv_writer.write_table(table.select(COLUMNS))
        else:
            with pq.ParquetWriter(partial, schema) as writer:
                for table in tables(parts):
                    writer.write_table(table)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    remove(parts)
