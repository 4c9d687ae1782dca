"""Checkpoints: a folder a step, complete or absent, with tensors as safetensors and the rest as JSON. No pickle.

`checkpoints/step-00001200/` holds model.safetensors, optimizer.safetensors and state.json. The last one and the best
one are kept.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stoker.data.plan import Position
from stoker.errors import UserError
from stoker.files import new_folder, write_json


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int
    position: Position
    score: float | None = None  # the task's metric at this step, where it was evaluated
    best_score: float | None = None


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, *, goal: str) -> Path:
    """Writes a checkpoint and removes those that are neither the last nor the best."""
    out = folder / f"step-{progress.step:08d}"
    with new_folder(out, force=True, marker="state.json") as partial:
        save_file(_contiguous(model.state_dict()), partial / "model.safetensors")
        save_file(_optimizer_tensors(model, optimizer), partial / "optimizer.safetensors")
        state = {"progress": asdict(progress), "torch_rng": torch.get_rng_state().tolist()}
        if torch.cuda.is_available():
            state["cuda_rng"] = torch.cuda.get_rng_state().tolist()
        write_json(partial / "state.json", state)
    keep = {last(folder), best(folder, goal)}
    for path in folder.glob("step-*"):
        if path not in keep:
            shutil.rmtree(path)
    return out


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Progress:
    """Loads weights, and with an optimizer its moments and the state of the random numbers too."""
    load_weights(path, model)
    state = _read_state(path)
    if optimizer is not None:
        _load_optimizer(model, optimizer, _load(path / "optimizer.safetensors"))
        torch.set_rng_state(torch.tensor(state["torch_rng"], dtype=torch.uint8))
        if "cuda_rng" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.tensor(state["cuda_rng"], dtype=torch.uint8))
    progress = dict(state["progress"])
    return Progress(**(progress | {"position": Position(**progress["position"])}))


def load_weights(path: Path, model: nn.Module) -> None:
    weights = _load(path / "model.safetensors")
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    reshaped = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if missing or unexpected or reshaped:
        raise UserError(
            f"The weights in {path} are of another model: missing {_some(missing)}; unexpected {_some(unexpected)}; "
            f"of another shape {_some(sorted(reshaped))}."
        )
    model.load_state_dict(weights)


def last(folder: Path) -> Path | None:
    return max(_complete(folder), default=None)


def best(folder: Path, goal: str) -> Path | None:
    """The checkpoint with the best score; the later one of two equals."""
    scored = []
    for path in _complete(folder):
        score = _read_state(path)["progress"]["score"]
        if score is not None:
            scored.append((-score if goal == "min" else score, path))
    return max(scored)[1] if scored else None


def _complete(folder: Path) -> list[Path]:
    return [path for path in folder.glob("step-*") if (path / "state.json").is_file()]


def _read_state(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / "state.json").read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise UserError(f"The checkpoint {path} cannot be read: {error}") from error


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"The checkpoint file {path} is missing or damaged: {error}") from error


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Moments under the names of their parameters: `exp_avg/head.0.weight`."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, moments in optimizer.state.items():
        for kind, value in moments.items():
            tensors[f"{kind}/{names[id(parameter)]}"] = torch.as_tensor(value).detach().contiguous()
    return tensors


def _load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in tensors.items():
        kind, _, parameter_name = name.partition("/")
        parameter = parameters[parameter_name]
        optimizer.state[parameter][kind] = value.to(parameter.device) if value.ndim or parameter.is_cuda else value


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:4])}{', ...' if len(names) > 4 else ''})" if names else "none"
