"""The folder of a run: made by its first process, found again after a restart, written to by nobody else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker import console, settings
from stoker.launch import elsewhere, trust
from stoker.launch.targets import Target
from stoker.runs.folder import RunFolder, create_run, locked, open_run
from stoker.train import parallel
from stoker.train.parallel import Ranks


@contextmanager
def held(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Nobody else writes to this run meanwhile, and one that is kept in a store is copied there."""
    if not ranks.is_first:
        yield
        return
    with locked(folder), elsewhere.mirrored(folder):
        yield


def _fixed_folder(target: Target) -> Path | None:
    """The name that torchrun's id gives a run; None: it gets one by the time."""
    config, job = target.config, os.environ.get("TORCHELASTIC_RUN_ID", "none")
    name = "-".join(word for word in (config.recipe.replace(":", "-"), job, config.run.name) if word)
    return elsewhere.working_root(config.run.folder) / name if job != "none" else None


def restarted(target: Target, ranks: Ranks) -> RunFolder | None:
    """The run that was there before: torchrun restarts us under the same id."""
    fixed = _fixed_folder(target)
    if fixed is None:
        return None
    # A machine that takes the place of another has nothing of it.
    elsewhere.fetched(target.config.run.folder, fixed.name)
    there = "yes" if (fixed / "config.yaml").is_file() else "no"
    if parallel.told_by_first(ranks, "restarted", there) == "no":
        return None
    console.say(f"{fixed} exists: going on with it.")
    return open_run(fixed)


def made(target: Target, ranks: Ranks) -> RunFolder:
    """Made by the first rank, and known to all of them."""
    config, folder = target.config, None
    if ranks.is_first:
        root = elsewhere.working_root(config.run.folder)
        folder = create_run(root, config.recipe, config.run.name, settings.as_yaml(config), _fixed_folder(target))
        elsewhere.keep_elsewhere(folder, config.run.folder)
        trust.keep_place(folder, target.module)
    known: RunFolder = parallel.from_first(folder)
    return known
