"""Results of tuning, kept with the user's state under what they hold for: machine, model, data, versions."""

import hashlib
import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stoker import settings
from stoker.doctor.ledger import ledger_path
from stoker.files import write_json
from stoker.runs.environment import cpu_name, gpu_names, package_versions


@dataclass(frozen=True)
class Stored:
    knobs: dict[str, Any]
    fingerprint: str  # of the data
    rate: float
    before: float


TOGETHER = frozenset({"loader.batch_size", "train.lr"})  # the rate of one batch is none of another
# Keys that a tuning decides, or that have nothing to do with what it found.
LEFT_OUT = (
    "run.", "log.", "loader.threads", "loader.look_ahead", "loader.micro_cost", "loader.ram_bytes", "data.processes",
    "data.decode_on_gpu", "data.mode", "train.precision", "train.compile", "train.cuda_graphs", "train.lr", "train.steps",
    "train.epochs", "train.log_every", "train.norms_every", "train.evaluate_every", "train.save_every", "train.keep_best",
)  # fmt: skip


def key_of(config: Any) -> str:
    """Of a resolved configuration on this machine: all but its data, which must be opened to be known."""
    values = {name: str(value) for name, value in settings.kept_values(config).items() if not _is_left_out(name)}
    versions = {name: value for name, value in package_versions().items() if name in ("torch", "stoker")}
    gpus = [] if config.run.device == "cpu" else gpu_names()
    whole = [gpus, len(os.sched_getaffinity(0)), cpu_name(), values, versions]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:24]


def _is_left_out(name: str) -> bool:
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in LEFT_OUT)


def _path(key: str) -> Path:
    return ledger_path().parent / "tuned" / f"{key}.json"


def keep(config: Any, found: Stored, decided: Collection[str] = ()) -> None:
    """`decided`: the keys that were tried. What is kept of others stays, if it is for the same data."""
    before = known(config)
    if before is not None and before.fingerprint == found.fingerprint:
        dead = {*decided, *(TOGETHER if TOGETHER & {*decided} else ())}
        others = {key: value for key, value in before.knobs.items() if key not in dead}
        if others.keys() - {"train.lr"} and not found.rate:  # the gain is theirs
            found = replace(found, rate=before.rate, before=before.before)
        found = replace(found, knobs={**others, **found.knobs})
    path = _path(key_of(config))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(found))


def known(config: Any) -> Stored | None:
    """What was found for this configuration on this machine, if it can be read."""
    try:
        found = Stored(**json.loads(_path(key_of(config)).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    whole = isinstance(found.knobs, dict) and isinstance(found.fingerprint, str)
    return found if whole and all(isinstance(one, int | float) for one in (found.rate, found.before)) else None
