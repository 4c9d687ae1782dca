"""What the commands do, from Python: train, and use what was trained."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker.data.batch import to_device
from stoker.errors import UserError
from stoker.launch import commands
from stoker.launch.build import rebuild
from stoker.launch.commands import Outcome
from stoker.launch.targets import Target, resolve_target
from stoker.recipe import Recipe, Trained
from stoker.runs.folder import RunFolder, open_run
from stoker.train.evaluate import inference
from stoker.train.parallel import Ranks
from stoker.train.precision import autocast


def train(target: str | Recipe, preset: str | None = None, **overrides: Any) -> Outcome:
    """What `stoker train` does: `stoker.train("icecube", train={"lr": 1e-4})`, or with a Recipe itself.

    A recipe that is only an object of this process can be trained, and used with `load_run(..., recipe=RECIPE)`; to `stoker
    resume` it, it must be in a module.
    """
    words = [f"--{key}={_as_word(value)}" for key, value in _flat(overrides)]
    return commands.start(_target(target, preset, words))


def load_run(
    path: str | Path | RunFolder,
    *,
    checkpoint: str = "best",
    device: str = "auto",
    recipe: Recipe | None = None,
    trust: bool = False,
) -> "LoadedRun":
    """The trained model of a run, to be called on batches or, where the recipe says how, on samples."""
    run = open_run(path.path if isinstance(path, RunFolder) else Path(path))
    words = [f"--run.device={device}"]
    target = resolve_target(str(run.config), words, trusted=trust, recipe=recipe)
    return LoadedRun(rebuild(run, target, checkpoint, "auto", Ranks()), target.recipe)


@dataclass(frozen=True)
class LoadedRun:
    trained: Trained
    recipe: Recipe

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self.trained.task.model
        return model

    def __call__(self, samples: Any) -> Any:
        """Answers for samples as the recipe's `prepare` takes them, or for a batch where it has none."""
        one = self.trained
        batch = samples if self.recipe.prepare is None else self.recipe.prepare(one, samples)
        with inference(self.model), autocast(one.precision, one.device):
            return one.task.predict(to_device(batch, one.device))


def _target(target: str | Recipe, preset: str | None, words: list[str]) -> Target:
    if isinstance(target, str):
        if preset is not None:
            raise UserError(f"A preset is named in the target: stoker.train({f'{target}:{preset}'!r}).")
        return resolve_target(target, words)
    name = preset or next(iter(target.presets))
    return resolve_target(f"{target.name}:{name}", words, recipe=target)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _as_word(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple | list) else str(value)
