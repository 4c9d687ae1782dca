"""Checkpoints: a folder a step, complete or absent, tensors as safetensors, the rest as JSON. No pickle.

`checkpoints/step-00001200/` holds model, optimizer, average and random numbers as .safetensors, state.json, and
checksums.json, which is written last; score.json comes when the checkpoint was judged. The two latest are kept, and the
best by the task's metric. A damaged one is noticed by its checksums, and the one before it is used.
"""

import hashlib
import json
import math
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stoker import console
from stoker.errors import MachineError, UserError
from stoker.files import check_regular, new_folder, write_json
from stoker.runs.events import in_words

# What each optimizer keeps of a parameter.
MOMENTS = {
    "AdamW": {"step", "exp_avg", "exp_avg_sq"},
    "Lamb": {"step", "exp_avg", "exp_avg_sq"},
    "SGD": {"momentum_buffer"},
}
NUMBER = "#"  # behind the name of what is a number of Python, and must be one again
VERSION = 1
CHECKSUMS, SCORE = "checksums.json", "score.json"
REQUIRED = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json")

Count = Annotated[int, Field(ge=0)]
Number = float | Literal["nan", "inf", "-inf"]


@dataclass(frozen=True)
class MeterState:
    results: list[Annotated[list[Number], Field(min_length=3, max_length=3)]]
    samples: list[Count]


@dataclass(frozen=True)
class PositionState:
    seed: Count
    epoch: Count
    consumed: Count


@dataclass(frozen=True)
class State:
    """What state.json holds."""

    version: int
    step: Count
    position: PositionState
    latest_score: Number | None
    settings: dict[str, Any]
    meter: MeterState
    recent_losses: list[float]
    bad_steps: Annotated[list[Count], Field(min_length=2, max_length=2)]
    optimizer: str | None = None  # whose moments these are
    evaluation_due: bool = False  # this step is judged right after it is saved


_STATE = TypeAdapter(State)


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment, in host memory."""

    tensors: Mapping[str, Mapping[str, Tensor]]  # model, optimizer, average, random, scale
    state: Mapping[str, Any]  # see State

    @property
    def step(self) -> int:
        return int(self.state["step"])


class Saver:
    """Writes snapshots in the background, one at a time; an error is raised at the next call."""

    def __init__(self, folder: Path, goal: str, keep_best: int) -> None:
        self._folder, self._goal, self._keep_best = folder, goal, keep_best
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> None:
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="checkpoint")
        self._thread.start()

    def record_score(self, step: int, score: float) -> None:
        """Writes what the checkpoint of a step was judged to be worth, once it is there."""
        self.wait()
        path = self._folder / f"step-{step:08d}"
        if path.is_dir():
            write_json(path / SCORE, {"score": in_words(score)})
            prune(self._folder, self._goal, self._keep_best)

    def wait(self) -> None:
        """Returns when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            if not isinstance(error, OSError | SafetensorError):
                raise error
            raise MachineError(
                f"A checkpoint could not be written to {self._folder}: {error}. The earlier ones are complete; make room, "
                f"then `stoker resume {self._folder.parent}`."
            ) from error

    def _write(self, snapshot: Snapshot) -> None:
        try:
            write_checkpoint(self._folder / f"step-{snapshot.step:08d}", snapshot)
            prune(self._folder, self._goal, self._keep_best)
        except BaseException as error:
            self._error = error


def write_checkpoint(path: Path, snapshot: Snapshot) -> None:
    with new_folder(path, force=True, marker=CHECKSUMS) as partial:
        for name, tensors in snapshot.tensors.items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial / f"{name}.safetensors")
        write_json(partial / "state.json", {"version": VERSION, **snapshot.state})
        sums = {file.name: _sha256(file) for file in sorted(partial.iterdir())}
        write_json(partial / CHECKSUMS, sums)


def read_checkpoint(path: Path) -> Snapshot:
    """Reads a checkpoint and checks every file of it."""
    if not path.is_dir():
        raise UserError(f"There is no checkpoint {path}.")
    if not (path / CHECKSUMS).exists() and not (path / "state.json").exists():
        raise UserError(f"{path} is no checkpoint: those of a run lie in RUN/checkpoints/step-NNNNNNNN.")
    if (problem := damage(path)) is not None:
        raise UserError(f"The checkpoint {path} is damaged: {problem}.")
    try:
        state = _read_state(path)
        tensors = {
            name.removesuffix(".safetensors"): load_file(path / name) for name in _sums(path) if name[-5:] != ".json"
        }
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"The checkpoint {path} cannot be read: {error}") from error
    return Snapshot(tensors, state)


def read_score(path: Path) -> float | None:
    """What a checkpoint was judged to be worth, NaN too; None: it was not judged."""
    try:
        score = json.loads((path / SCORE).read_text())["score"]
    except FileNotFoundError:
        try:
            score = json.loads((path / "state.json").read_text()).get("score")
        except (OSError, ValueError, AttributeError):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        return None if score is None else float(score)
    except (TypeError, ValueError):
        return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, if anything: files that are missing or changed, a state that cannot be one."""
    try:
        sums = _sums(path)
        for name in REQUIRED:
            if name not in sums:
                return f"{CHECKSUMS} does not name {name}"
        for name, expected in sums.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if _sha256(path / name) != expected:
                return f"{name} does not have the content it was written with"
        _read_state(path)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _sums(path: Path) -> dict[str, str]:
    check_regular(path / CHECKSUMS)
    sums = json.loads((path / CHECKSUMS).read_text())
    if not isinstance(sums, dict) or not all(
        isinstance(value, str) and "/" not in name for name, value in sums.items()
    ):
        raise ValueError(f"{CHECKSUMS} holds no names and checksums")
    return sums


def _read_state(path: Path) -> dict[str, Any]:
    content = (path / "state.json").read_text()
    try:
        version = json.loads(content)["version"]
        state = asdict(_STATE.validate_json(content, strict=True))
    except (KeyError, TypeError, RecursionError):
        raise ValueError("state.json is not the state of a run") from None
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise ValueError(f"state.json is not the state of a run: {key}: {problem['msg']}") from None
    if version != VERSION:
        raise ValueError(f"it has format {version}, and this version reads format {VERSION}")
    return state


def last_good(folder: Path) -> Path | None:
    """The latest checkpoint that is not damaged; those passed over are named."""
    for path in sorted(all_checkpoints(folder), reverse=True):
        problem = damage(path)
        if problem is None:
            return path
        if path.is_dir():  # else the run went on meanwhile, and removed it
            console.say(f"The checkpoint {path} is damaged ({problem}): using the one before it.")
    return None


def best(folder: Path, goal: str, count: int = 1) -> list[Path]:
    """The best checkpoints by their score, the better and then the later first; a score of NaN is none."""
    scored = []
    for path in all_checkpoints(folder):
        score = read_score(path)
        if score is not None and math.isfinite(score):
            scored.append((-score if goal == "min" else score, path))
    return [path for _, path in sorted(scored, reverse=True)[:count]]


def prune(folder: Path, goal: str, keep_best: int) -> None:
    keep = {*sorted(all_checkpoints(folder))[-2:], *best(folder, goal, keep_best)}
    for path in all_checkpoints(folder):
        if path not in keep:
            # Out of sight first: nobody should find half of it.
            removed = path.with_name(f".{path.name}.removed")
            shutil.rmtree(removed, ignore_errors=True)
            path.rename(removed)
            shutil.rmtree(removed)


def load_weights(weights: Mapping[str, Tensor], model: nn.Module, origin: str, *, allow_partial: bool = False) -> None:
    """Strict: names and shapes must agree, unless partial loading was asked for; then what differs is listed."""
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    reshaped = sorted(name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape)
    if missing or unexpected or reshaped:
        report = f"missing {_some(missing)}; unexpected {_some(unexpected)}; of another shape {_some(reshaped)}"
        if not allow_partial:
            raise UserError(f"The weights in {origin} are of another model: {report}. --allow-partial takes what fits.")
        console.say(f"Loading only a part of {origin}: {report}.")
    model.load_state_dict({**own, **{k: v for k, v in weights.items() if k in own and k not in reshaped}})


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments under the names of their parameters: `exp_avg/head.0.weight`; numbers of Python are marked as such."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Tensor] = {}
    for parameter, moments in optimizer.state.items():
        if id(parameter) not in names:
            raise UserError(
                f"{type(optimizer).__name__} keeps something that is of no parameter: a checkpoint does not hold it."
            )
        for kind, value in moments.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                number = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
                found[f"{kind}{NUMBER}/{names[id(parameter)]}"] = number
            elif isinstance(value, Tensor):
                found[f"{kind}/{names[id(parameter)]}"] = value.detach().cpu().clone()
            elif value is not None:
                raise UserError(
                    f"{type(optimizer).__name__} keeps {kind}, a {type(value).__name__}, of each parameter: only tensors "
                    f"and numbers can be kept in a checkpoint."
                )
    return found


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    kind_saved: str | None,
    origin: str,
) -> None:
    """Moments as they were. Those of another kind of optimizer are of no use: then moments start anew, and that is said."""
    parameters = dict(model.named_parameters())
    ours = type(optimizer).__name__
    found = {name.partition("/")[0] for name in tensors}
    wanted = (
        MOMENTS.get(ours, found) if kind_saved is None else found
    )  # what does not say its name is told by its moments
    if (found and found != wanted) or kind_saved not in (None, ours):
        saved = kind_saved or ", ".join(sorted(found))
        console.say(f"The moments in {origin} ({saved}) are of another optimizer: those of {ours} start anew.")
        return
    for name, value in tensors.items():
        kind, _, parameter_name = name.partition("/")
        if parameter_name not in parameters:
            raise UserError(f"The optimizer state in {origin} is of another model: it has {parameter_name}.")
        parameter = parameters[parameter_name]
        if kind.endswith(NUMBER):
            optimizer.state[parameter][kind.removesuffix(NUMBER)] = value.item()
            continue
        if kind in MOMENTS.get(ours, ()) and value.ndim and value.shape != parameter.shape:
            raise UserError(f"The optimizer state in {origin} has {name} of another shape than the model's.")
        optimizer.state[parameter][kind] = _laid_out_like(parameter, value)


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """On the parameter's device and laid out like it: fused optimizers walk through both alike."""
    if value.shape != parameter.shape:
        return value.to(parameter.device) if value.ndim or parameter.is_cuda else value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def all_checkpoints(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if path.is_dir()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else "none"
