"""The one place that puts source, loader, task and device together; everything below gets them handed in."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stoker import console, settings
from stoker.data.loader import loader_of
from stoker.errors import UserError
from stoker.launch.checks import as_json, check_honoured, check_same_settings, read_facts
from stoker.launch.targets import Target
from stoker.recipe import Recipe, RunConfig, Trained
from stoker.runs.folder import RunFolder
from stoker.train import checkpoint, parallel
from stoker.train.checkpoint import Snapshot
from stoker.train.optim import build_optimizer
from stoker.train.parallel import Ranks
from stoker.train.precision import resolve_precision
from stoker.train.randomness import seed_all
from stoker.train.run import Run
from stoker.train.schedule import checked, lr_at
from stoker.train.task import check_task

PRUNED_MEANWHILE = 5  # times that a checkpoint may be gone before it is read, because the run goes on


def build_run(recipe: Recipe, config: RunConfig, ranks: Ranks) -> Run:
    device = choose_device(config.run.device, ranks.local)
    data = parallel.first_of_machine_first(ranks, lambda: recipe.open_data(config, device))
    parallel.join(ranks, config.run.device)
    check_same_settings(config)
    check_honoured(config, data, recipe)
    data = replace(data, facts=as_json(data.facts))
    seed_all(config.run.seed)
    task = recipe.build_task(config, data.facts)
    # From here on each rank draws its own numbers (dropout); weights were drawn alike.
    seed_all(config.run.seed + 1_000_003 * ranks.rank)
    check_task(task, recipe.name)
    training, validation = (
        loader_of(data, config.loader, device, training=side, rank=ranks.rank, num_ranks=ranks.count)
        for side in (True, False)
    )
    kept = settings.kept_values(config)
    return Run(
        task,
        training,
        validation,
        data,
        device,
        config.train,
        kept,
        config.run.seed,
        ranks,
        make_optimizer=recipe.optimizer or build_optimizer,
        lr_at=lr_at if recipe.schedule is None else checked(recipe.schedule),
    )


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch sees no GPU here. Use --run.device cpu.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def rebuild(run: RunFolder, target: Target, which: str, weights: str, ranks: Ranks) -> Trained:
    """The trained model of a run, without opening the data it was trained on."""
    device = choose_device(target.config.run.device, ranks.local)
    facts: Mapping[str, Any] | None = read_facts(run)
    if facts is None:
        console.say(f"{run.path} keeps no facts of its data (facts.json): opening them.")
        facts = target.recipe.open_data(target.config, device).facts
    try:
        task = target.recipe.build_task(target.config, facts)
    except KeyError as error:
        raise UserError(f"{run.facts} does not hold {error}, which the task is built from.") from error
    return trained(run, target, task, device, which, weights, ranks)


def trained(
    run: RunFolder, target: Target, task: Any, device: torch.device, which: str, weights: str, ranks: Ranks
) -> Trained:
    """The task with the weights of a checkpoint: averaged ones where there are any, unless raw ones are asked for."""
    found, snapshot = read_one(run, which, task.goal)
    averaged = snapshot.tensors.get("average")
    if weights == "ema" and averaged is None:
        raise UserError(f"{found} holds no averaged weights: the run was trained without train.ema.")
    use_average = averaged is not None and weights != "raw"
    chosen = dict(averaged if averaged is not None and use_average else snapshot.tensors["model"])
    chosen.pop("__updates__", None)
    checkpoint.load_weights(chosen, task.model, str(found))
    task.model.to(device)
    precision = resolve_precision(target.config.train.precision, device)
    return Trained(target.config, task, found, device, precision, ranks, averaged=use_average)


def read_one(run: RunFolder, which: str, goal: str) -> tuple[Path, Snapshot]:
    """A checkpoint and its content. A run that goes on may remove one between finding and reading it: then the next."""
    for _ in range(PRUNED_MEANWHILE):
        found = find_checkpoint(run, which, goal)
        try:
            return found, checkpoint.read_checkpoint(found)
        except UserError:
            if which not in ("best", "last") or found.is_dir():
                raise
    raise UserError(f"The checkpoints of {run.path} are removed as soon as they are found: is the run going on?")


def find_checkpoint(run: RunFolder, which: str, goal: str) -> Path:
    """`best`, `last`, the path of a checkpoint, or the name of one of the run's."""
    if which not in ("best", "last"):
        named = run.checkpoints / which
        return named if named.is_dir() and not Path(which).is_dir() else Path(which)
    chosen = checkpoint.best(run.checkpoints, goal)
    found = chosen[0] if which == "best" and chosen else checkpoint.last_good(run.checkpoints)
    if found is None:
        raise UserError(f"{run.path} holds no checkpoint; it was stopped before its first one.")
    return found
