"""From words to a run: finds the recipe, resolves the configuration, builds source, loader, task and trainer.

The one place that puts the parts together; everything below it gets them handed in.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stoker import console, settings
from stoker.data import pack
from stoker.data.loader import Loader, LoaderConfig
from stoker.data.order import Order, StorageOrder
from stoker.data.plan import Plan
from stoker.data.quality import shuffle_quality
from stoker.data.samples import Subset
from stoker.data.stages import Stage
from stoker.data.store import is_store, open_store
from stoker.errors import UserError
from stoker.recipe import Recipe, RunConfig, RunData
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


def pack_data(
    recipe_name: str, source: Path, out: Path, *, shuffled: int | None, threads: int | None, verify: bool
) -> dict[str, Any]:
    """Packs a data set, or this process's share of it under torchrun or in a Slurm array."""
    recipe, _ = _find_recipe(recipe_name)
    if shuffled is not None and shuffled < 0:
        raise UserError(f"--shuffled is {shuffled}; a seed is 0 or more.")
    num_threads = threads or LoaderConfig().num_threads
    packing = recipe.packing(source, shuffled, num_threads)
    rank, num_ranks = pack.ranks_from_environment()
    if verify and is_store(out):
        store = open_store(out)
    else:
        packed = pack.pack(out, packing, threads=num_threads, rank=rank, num_ranks=num_ranks)
        if packed is None:
            return {"path": str(out), "state": "other ranks are still at work"}
        store = packed
    result: dict[str, Any] = {
        "path": str(out),
        "samples": len(store.table),
        "rows": store.num_rows,
        "bytes": store.num_bytes,
    }
    if verify:
        result["values_verified"] = pack.verify(store, packing, num_threads)
    return result


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
    data: RunData


def _build(recipe: Recipe, config: RunConfig, device: torch.device) -> _Parts:
    data = recipe.open_data(config, device)
    torch.manual_seed(config.run.seed)
    task = recipe.build_task(config)
    return _Parts(
        task=task,
        training=_loader(data, data.training, data.order(data.training), config, device),
        validation=_loader(data, data.validation, lambda seed, epoch: StorageOrder(), config, device),
        device=device,
        data=data,
    )


def _loader(
    data: RunData, subset: Subset, order: Callable[[int, int], Order], config: RunConfig, device: torch.device
) -> Loader[Any]:
    loader = config.loader
    plan = Plan(
        table=data.table,
        subset=subset,
        order=order,
        batch_size=loader.batch_size,
        batch_cost=loader.batch_cost,
        micro_cost=loader.micro_cost,
        sample_cost=loader.sample_cost,
    )
    pinned = [Stage("pin", lambda batch: batch.pin())] if device.type == "cuda" else []
    return Loader(
        plan,
        [*data.stages, *pinned],
        loader,
        where=data.where,
        bytes_per_cost=data.bytes_per_cost,
        cache_bytes=data.cache_bytes,
    )


def _run(run: RunFolder, recipe: Recipe, config: RunConfig, parts: _Parts, resume_from: Path | None) -> Outcome:
    with EventLog(run.events) as log, console.copy_to(run.log), _end_recorded(log):
        console.say(f"run folder: {run.path}")
        num_parameters = sum(parameter.numel() for parameter in parts.task.model.parameters())
        log.write(
            "start",
            resumed_from=resume_from.name if resume_from else None,
            data=dict(parts.data.description),
            parameters=num_parameters,
            steps=total_steps(config.train, parts.training),
            device=str(parts.device),
        )
        _report_shuffle(log, parts.training, config.run.seed)
        trainer = Trainer(
            config=config.train,
            task=parts.task,
            training=parts.training,
            validation=parts.validation,
            device=parts.device,
            log=log,
            checkpoints=run.checkpoints,
            quarantine=parts.data.quarantine,
        )
        metrics = train(trainer, config.run.seed, resume_from)
    rates = [event["samples_per_s"] for event in read_events(run.events, "step")]
    return Outcome(run, recipe, metrics, sum(rates) / len(rates) if rates else None)


def _report_shuffle(log: EventLog, loader: Loader[Any], seed: int) -> None:
    """Measures how well the order is mixed, on the first part of the first two epochs."""
    plan, size = loader.plan, min(len(loader.plan), 200_000)
    if size < 3:
        return
    first, second = (plan.subset.rows(plan.order(seed, epoch).take(0, size)) for epoch in (0, 1))
    batch_size = plan.batch_size or max(1, size // max(1, plan.steps_per_epoch()))
    quality = shuffle_quality(first, plan.table.columns["shard"], batch_size, second)
    log.write("shuffle", **asdict(quality))
    console.say(f"shuffle: {quality.line()}")


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
