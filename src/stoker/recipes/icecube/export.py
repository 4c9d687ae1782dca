"""The model as one ONNX file: events go in as they are, flat and ragged, any number of them; nothing is padded."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.data.locations import named
from stoker.errors import UserError
from stoker.recipe import Trained
from stoker.recipes.icecube.attention import exporting
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.data import load_rows, open_all
from stoker.recipes.icecube.geometry import geometry_of
from stoker.train.evaluate import judged
from stoker.train.onnx_file import check_out, onnx_file

CHECKED = 16  # events that the exported model is compared on
INPUTS = ("time", "charge", "auxiliary", "dom_offsets", "sensor", "event_offsets")


class Flat(nn.Module):
    """The model with plain tensors for arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        time: Tensor,
        charge: Tensor,
        auxiliary: Tensor,
        dom_offsets: Tensor,
        sensor: Tensor,
        event_offsets: Tensor,
    ) -> Tensor:
        nothing = torch.zeros(0)
        batch = EventBatch(time, charge, auxiliary, dom_offsets, sensor, event_offsets, nothing, nothing)
        return self.model(batch)  # type: ignore[no-any-return]


def export(model: Trained, out: Path, samples: Path | None) -> Mapping[str, Any]:
    """Writes `out`, and compares its answers on real events with PyTorch's."""
    check_out(out)
    events = _events(model, samples)
    network = Flat(model.task.model.cpu().float())
    example = {name: getattr(events[1], name) for name in INPUTS}
    free = {name: {0: torch.export.Dim.DYNAMIC} for name in INPUTS}
    with ExitStack() as stack:
        stack.enter_context(judged(network))
        with exporting():
            session = stack.enter_context(onnx_file(network, example, free, "answers", _about(model), out))
        differences = [_difference(network, session, batch) for batch in events]
        largest = float(np.max(differences))  # not a number, if one of them is none
        if not largest <= 1e-3:
            raise UserError(f"The exported model does not give PyTorch's answers: they differ by up to {largest:.2g}.")
    return {
        "path": str(out),
        "inputs": list(INPUTS),
        "checked_on": sum(batch.num_samples for batch in events),
        "largest_difference": largest,
    }


def _events(model: Trained, samples: Path | None) -> list[EventBatch]:
    """One event alone, and several together: both must give the same answers."""
    config = model.config
    if samples is not None:
        config = replace(config, data=replace(config.data, path=named(samples)))
    data = open_all(config)
    if not np.array_equal(geometry_of(data.facts).xyz, model.task.sensor_xyz.numpy()):
        raise UserError(f"The detector of {data.description['path']} is not the one that the run was trained for.")
    rows = np.arange(min(CHECKED, len(data.table)))
    if len(rows) < 5:
        raise UserError(
            f"{data.description['path']} has {len(rows)} events, and five are needed to check an export with."
        )
    cpu = torch.device("cpu")
    return [load_rows(data.stages, some, cpu) for some in (rows[:1], rows[1:3], rows[3:])]


def _difference(network: nn.Module, session: Any, batch: EventBatch) -> float:
    """Largest difference of an answer, kappa relative to itself."""
    values = {name: getattr(batch, name) for name in INPUTS}
    theirs = torch.from_numpy(session.run(None, {name: value.numpy() for name, value in values.items()})[0])
    ours = network(**values)
    difference = (ours - theirs).abs()
    difference[:, 3] /= ours[:, 3].abs().clamp_min(1)
    return float(difference.max())


def _about(model: Trained) -> dict[str, str]:
    """What somebody needs to know who has nothing but the file."""
    further = model.task.answers
    answers = ["x", "y", "z", "kappa"]
    answers += ["(log10(energy / GeV) - 3)", "log sigma of it"] if further.energy else []
    answers += ["vertex x / 500 m", "vertex y / 500 m", "vertex z / 500 m", "log sigma of it"] if further.vertex else []
    return {
        "answers": json.dumps(answers),
        "time": "ns, as in the pulse files; pulses by event, then by DOM, then by time",
        "charge": "photo-electrons",
        "auxiliary": "1 where a pulse is not part of a local coincidence, else 0",
        "dom_offsets": "first pulse of each DOM, and the number of pulses",
        "sensor": "number of each DOM, its place in sensor_xyz",
        "sensor_xyz": json.dumps([[round(float(one), 2) for one in place] for place in model.task.sensor_xyz]),
        "event_offsets": "first DOM of each event, and the number of DOMs",
        "direction": "a unit vector to where the neutrino came from",
    }
