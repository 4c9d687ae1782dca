"""Weights of others to begin with: files of timm or torchvision, or timm's hub. A head for other classes stays as drawn."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stoker import console
from stoker.errors import MachineError, UserError
from stoker.recipes.imagenet.model import SMALL, ImageModelConfig

WRAPPED = (
    "state_dict",
    "model",
    "model_ema",
    "state_dict_ema",
    "module",
)  # where files keep weights among other things


def load_pretrained(model: nn.Module, config: ImageModelConfig) -> None:
    if config.pretrained is None:
        return
    if config.name == SMALL:
        raise UserError(f"model.pretrained is for models of timm, and nobody has weights of {SMALL}.")
    if config.pretrained == "hub":
        found, origin = _from_hub(config), f"timm's hub ({config.name})"
    else:
        path = Path(config.pretrained).expanduser()
        found, origin = read_weights(path), str(path)
    _load(model, found, origin)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name; nothing in the file is executed."""
    if not path.is_file():
        raise UserError(f"model.pretrained is {path}, and there is no such file. `hub` fetches timm's own weights.")
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except (SafetensorError, RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} holds no weights that can be read safely: {reason}") from error
    for name in WRAPPED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"{path} holds no tensors by name.")
    return {str(name).removeprefix("module."): value for name, value in content.items() if isinstance(value, Tensor)}


def _from_hub(config: ImageModelConfig) -> dict[str, Tensor]:
    import timm

    try:
        made: nn.Module = timm.create_model(config.name, pretrained=True)
    except RuntimeError as error:
        raise UserError(f"timm has no weights of {config.name}: {error}") from error
    except Exception as error:  # whatever the network makes its many libraries raise
        raise MachineError(f"The weights of {config.name} cannot be fetched: {error}. Give a file instead.") from error
    return dict(made.state_dict())


def _load(model: nn.Module, found: Mapping[str, Tensor], origin: str) -> None:
    own = model.state_dict()
    head = _head(model)
    taken = {name: _fitted(model, name, value, own[name]) for name, value in found.items() if name in own}
    reshaped = sorted(name for name, value in taken.items() if value.shape != own[name].shape)
    other = [name for name in reshaped if not name.startswith(head)]
    missing = sorted(name for name in own.keys() - found.keys() if not name.startswith(head))
    # Counters of batch norms are in some files and not in others; nothing is computed with them.
    missing = [name for name in missing if not name.endswith("num_batches_tracked")]
    if other or missing:
        raise UserError(
            f"The weights in {origin} are of another model: {len(missing)} are missing ({', '.join(missing[:3]) or 'none'}),"
            f" {len(other)} have another shape ({', '.join(other[:3]) or 'none'})."
        )
    model.load_state_dict({**own, **{name: value for name, value in taken.items() if name not in reshaped}})
    ignored = sorted(found.keys() - own.keys())
    words = f"; the head is for other classes and begins anew ({', '.join(reshaped)})" if reshaped else ""
    words += f"; {len(ignored)} have no place here ({', '.join(ignored[:3])})" if ignored else ""
    console.say(f"Beginning with {len(taken) - len(reshaped)} of {len(own)} weights of {origin}{words}.")


def _fitted(model: nn.Module, name: str, value: Tensor, own: Tensor) -> Tensor:
    """Position embeddings of a transformer, for another size of images."""
    if not name.endswith("pos_embed") or value.shape == own.shape or value.ndim != 3:
        return value
    from timm.layers.pos_embed import resample_abs_pos_embed

    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    prefix = getattr(model, "num_prefix_tokens", 0)
    if grid is None:
        return value
    return resample_abs_pos_embed(value, new_size=list(grid), num_prefix_tokens=prefix)  # type: ignore[no-any-return]


def _head(model: nn.Module) -> str:
    """How the names of the last layer begin."""
    config = getattr(model, "default_cfg", {}) or {}
    classifier = config.get("classifier") or "head"
    return f"{classifier if isinstance(classifier, str) else classifier[0]}."
