"""torch.compile as a run wants it: the same choices every time, made once, and found again by the next process."""

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stoker.data.cache import cache_folder
from stoker.train.task import Task, has_fixed_shapes

# What the compiler must not decide by the clock: the choice is the same nearly every time and takes seconds of each start.
# Products with odd sizes are not padded, and element-wise kernels take the first of their shapes.
OPTIONS: dict[str, Any] = {"shape_padding": False, "triton.autotune_pointwise": False}
FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def compile_task(task: Task, *, exact: bool) -> None:
    """Its model, and its losses if it says `compiles_losses`, at their first call; a model that is compiled stays as it is.

    `exact`: two reductions of different shape add in another order, so that none is chosen by the clock either.
    """
    if task.model._compiled_call_impl is not None:
        return
    # With dynamic shapes every number of Python, even a norm's epsilon, would become an input of the graph; the ones that
    # cannot make torch trace the model twice (shared/facts: 16.1 s of tracing instead of 4.8 on two cores).
    torch._dynamo.config.specialize_float = True
    torch.compiler.config.cache_key_tag = _operators_hash()
    # Ragged batches have a shape of their own each; others compile once for theirs.
    how: dict[str, Any] = {
        "dynamic": None if has_fixed_shapes(task) else True,
        "options": {**OPTIONS, "deterministic": exact},
    }
    task.model.compile(**how)
    if getattr(task, "compiles_losses", False):
        task.losses = torch.compile(task.losses, **how)  # type: ignore[method-assign]


def keep_compiled(device: torch.device) -> None:
    """Kernels go to a folder of the cache, told apart by torch and GPU, unless the environment names another."""
    if device.type != "cuda":
        return
    made_for = f"torch-{torch.__version__}-{torch.cuda.get_device_name(device)}".replace(" ", "-")
    folder = cache_folder() / "compiled" / made_for
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # torch has a place of its own
        return
    for variable, name in FOLDERS.items():
        if os.access(folder, os.W_OK):
            os.environ.setdefault(variable, str(folder / name))


def num_graphs() -> int:
    """That torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def recompile_reasons(graphs: int) -> list[str]:
    """The guards that failed when the latest graphs were made; nothing for those that were made for the first time."""
    from torch._dynamo.utils import get_compilation_metrics

    latest = list(get_compilation_metrics())[-graphs:]
    return [" ".join(str(one.recompile_reason).split())[:500] for one in latest if one.recompile_reason]


@cache
def _operators_hash() -> str:
    """Of our modules that define operators: torch does not notice when the gradient of one has changed."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        content = path.read_bytes()
        if b"custom_op(" in content:
            found.update(content)
    return found.hexdigest()[:16]
