"""From words to a run: finds the recipe, resolves the configuration, builds source, loader, task and trainer.

The one place that puts the parts together; everything below it gets them handed in.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker import console, settings
from stoker.data.loader import Loader
from stoker.data.plan import Plan
from stoker.errors import UserError
from stoker.recipe import Recipe, RunConfig
from stoker.runs.events import EventLog, read_events
from stoker.runs.folder import RunFolder, create_run, open_run, record_environment
from stoker.settings import Layer
from stoker.train import checkpoint
from stoker.train.evaluate import evaluate
from stoker.train.loop import Trainer, total_steps, train

BUILT_IN = {"icecube": "stoker.recipes.icecube.recipe:RECIPE"}


@dataclass(frozen=True)
class Target:
    """What the word TARGET stands for, once resolved."""

    recipe: Recipe
    config: RunConfig
    origins: dict[str, str]  # where each value came from


@dataclass(frozen=True)
class Outcome:
    run: RunFolder
    recipe: Recipe
    metrics: dict[str, float]
    samples_per_s: float | None = None


def resolve_target(target: str, overrides: list[str]) -> Target:
    """TARGET is `recipe`, `recipe:preset`, `file.yaml`, `module:attribute` or `module:attribute:preset`."""
    layers = []
    if target.endswith((".yaml", ".yml")):
        values = settings.read_yaml(Path(target))
        base = values.pop("recipe", None)
        if not isinstance(base, str):
            raise UserError(f"{target} does not say which recipe it configures: add a line like `recipe: icecube`.")
        layers.append(Layer(f"the file {target}", values))
    else:
        base = target
    recipe, preset = _find_recipe(base)
    layers.append(Layer("the command line", settings.parse_overrides(overrides)))
    config, origins = settings.resolve(recipe.presets[preset](), layers)
    return Target(recipe, config, settings.default_origins(config, f"preset {recipe.name}:{preset}", origins))


def start(target: Target) -> Outcome:
    """A new run, from its first step to its last."""
    config = target.config
    device = choose_device(config.run.device)
    parts = _build(target.recipe, config, device)
    run = create_run(config.run.folder, config.recipe, config.run.name, settings.as_yaml(config))
    return _run(run, target.recipe, config, parts, resume_from=None)


def resume(path: Path) -> Outcome:
    """Goes on from the last checkpoint as if nothing had happened."""
    run = open_run(path)
    target = resolve_target(str(run.config), [])
    ended = [event for event in read_events(run.events, "end") if event["state"] == "finished"]
    if ended:
        raise UserError(f"{path} is finished; there is nothing to resume. `stoker evaluate {path}` shows its result.")
    found = checkpoint.last(run.checkpoints)
    if found is None:
        console.say(f"{path} holds no checkpoint yet: starting it from the beginning.")
    parts = _build(target.recipe, target.config, choose_device(target.config.run.device))
    record_environment(run)
    return _run(run, target.recipe, target.config, parts, resume_from=found)


def evaluate_run(path: Path, which: str) -> Outcome:
    """Metrics of the best or the last checkpoint on the run's validation samples."""
    run = open_run(path)
    target = resolve_target(str(run.config), [])
    device = choose_device(target.config.run.device)
    parts = _build(target.recipe, target.config, device)
    folder = run.checkpoints
    found = checkpoint.best(folder, parts.task.goal) if which == "best" else checkpoint.last(folder)
    if found is None:
        raise UserError(f"{path} holds no checkpoint to evaluate; it was stopped before its first one.")
    checkpoint.load_weights(found, parts.task.model)
    parts.task.model.to(device)
    return Outcome(run, target.recipe, evaluate(parts.task, parts.validation, device))


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch sees no GPU here. Use --run.device cpu.")
    return torch.device(name)


@dataclass(frozen=True)
class _Parts:
    task: Any
    training: Loader[Any]
    validation: Loader[Any]
    device: torch.device
    description: dict[str, Any]


def _build(recipe: Recipe, config: RunConfig, device: torch.device) -> _Parts:
    data = recipe.open_data(config)
    torch.manual_seed(config.run.seed)
    task = recipe.build_task(config)
    batch_size = config.loader.batch_size
    return _Parts(
        task=task,
        training=Loader(Plan(data.training, batch_size), data.make_batch, config.loader),
        validation=Loader(Plan(data.validation, batch_size, shuffle=False), data.make_batch, config.loader),
        device=device,
        description=dict(data.description),
    )


def _run(run: RunFolder, recipe: Recipe, config: RunConfig, parts: _Parts, resume_from: Path | None) -> Outcome:
    with EventLog(run.events) as log, console.copy_to(run.log), _end_recorded(log):
        console.say(f"run folder: {run.path}")
        num_parameters = sum(parameter.numel() for parameter in parts.task.model.parameters())
        log.write(
            "start",
            resumed_from=resume_from.name if resume_from else None,
            data=parts.description,
            parameters=num_parameters,
            steps=total_steps(config.train, parts.training),
            device=str(parts.device),
        )
        trainer = Trainer(
            config.train, parts.task, parts.training, parts.validation, parts.device, log, run.checkpoints
        )
        metrics = train(trainer, config.run.seed, resume_from)
    rates = [event["samples_per_s"] for event in read_events(run.events, "step")]
    return Outcome(run, recipe, metrics, sum(rates) / len(rates) if rates else None)


@contextmanager
def _end_recorded(log: EventLog) -> Iterator[None]:
    """Writes how the run ended, whatever ended it."""
    state = "failed"
    try:
        yield
        state = "finished"
    except KeyboardInterrupt:
        state = "stopped"
        raise
    finally:
        reason = repr(sys.exc_info()[1]) if state == "failed" else None
        log.write("end", state=state, reason=reason)


def _find_recipe(words: str) -> tuple[Recipe, str]:
    """The recipe and the name of the preset; built-in names first, then module:attribute."""
    name, _, preset = words.partition(":")
    if name in BUILT_IN:
        recipe = _import(BUILT_IN[name])
    else:
        parts = words.split(":")
        if len(parts) not in (2, 3):
            raise UserError(
                f"There is no recipe {words!r}. Built in: {', '.join(BUILT_IN)}; a file ends in .yaml; a recipe of "
                f"your own is named module:attribute."
            )
        recipe, preset = _import(":".join(parts[:2])), parts[2] if len(parts) == 3 else ""
    preset = preset or next(iter(recipe.presets))
    if preset not in recipe.presets:
        raise UserError(f"The recipe {recipe.name} has no preset {preset!r}; it has {', '.join(recipe.presets)}.")
    return recipe, preset


def _import(words: str) -> Recipe:
    module_name, _, attribute = words.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a user's own module lies in the directory the command is run in
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # something that the user's module needs is missing: its traceback says what
        raise UserError(f"There is no module {module_name} to take the recipe {words!r} from.") from error
    except AttributeError as error:
        raise UserError(f"The module {module_name} has no {attribute}, asked for by the target {words!r}.") from error
    if not isinstance(found, Recipe):
        raise UserError(f"{words} is a {type(found).__name__}, and a recipe must be a stoker.recipe.Recipe.")
    return found
