"""What must agree before a run begins or goes on: ranks with each other, a run with its checkpoints and its data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker import console, settings
from stoker.data.loader import LoaderConfig
from stoker.data.source import RunData
from stoker.errors import UserError
from stoker.launch.targets import Target
from stoker.recipe import Recipe, RunConfig
from stoker.runs.events import read_events
from stoker.runs.folder import RunFolder
from stoker.runs.schema import Start
from stoker.train import checkpoint, parallel
from stoker.train.config import TrainConfig

# Keys that change how fast or where a run goes, and never its numbers: they may differ when it is resumed.
HARMLESS = ("run.name", "run.folder", "loader.threads", "loader.look_ahead", "loader.ram_bytes", "loader.stuck_after_s")
SHARED = ("loader.", "train.", "model.", "run.seed")  # keys that must be the same on all ranks, but for those above


def check_same_settings(config: RunConfig) -> None:
    """Ranks cut the same steps, each for itself: presets that look at the machine may not differ in what they found."""
    mine = {key: value for key, value in settings.leaves(config) if key.startswith(SHARED) and key not in HARMLESS}
    for other in parallel.gather(mine):
        different = [key for key in mine if mine[key] != other.get(key)]
        if different:
            key = different[0]
            raise UserError(
                f"The processes of this run have different settings: {key} is {mine[key]} here and {other.get(key)} "
                f"elsewhere. Give it on the command line: --{key} VALUE."
            )


def check_unchanged(run: RunFolder, found: Path | None, target: Target, overrides: Sequence[str]) -> None:
    """A configuration that is not the checkpoint's, or the run's, would make a resumed run another run."""
    if found is not None:
        saved, origin = dict(checkpoint.read_checkpoint(found).state["settings"]), f"the checkpoint {found.name}"
    else:
        saved, origin = _flat(settings.read_yaml(run.config)), f"{run.config}"
    named = {word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")}
    now = json.loads(json.dumps(settings.kept_values(target.config)))
    # A key that did not exist when the run began stands for its default.
    known = {key: value for key, value in now.items() if key in saved or target.origins.get(key) != "default"}
    changed = {key: (saved.get(key), value) for key, value in known.items() if saved.get(key) != value}
    unnamed = {key: values for key, values in changed.items() if key not in (*named, *HARMLESS) and key[:4] != "log."}
    if unnamed:
        listed = "; ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in unnamed.items())
        key, (_, new) = next(iter(unnamed.items()))
        raise UserError(
            f"The configuration changed since {origin}: {listed}. Put it back, or name the change "
            f"(`stoker resume {run.path} --{key} {new}`), or start a new run from these weights with `stoker fork`."
        )
    for key, (old, new) in changed.items():
        console.say(f"Resuming with {key} {new!r} instead of {old!r}.")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def check_same_data(run: RunFolder, data: RunData, overrides: Sequence[str]) -> None:
    """Samples that are not those of the run's beginning would make its position, or its score, mean something else."""
    began = next(read_events(run.events, Start), None)
    before, now = began.data.get("fingerprint") if began else None, data.description.get("fingerprint")
    if before is None or before == now:
        return
    if not any(word.startswith("--data.") for word in overrides):
        raise UserError(
            f"The data in {data.description.get('path')} are not those that {run.path} began with: files were changed, "
            f"added or removed, or made anew on another kind of machine. Name them (`--data.path DIR`) to use them all the "
            f"same."
        )
    console.say("The data are not those that the run began with; going on, as asked.")


def with_order(run: RunFolder, config: RunConfig) -> RunConfig:
    """With the order of samples that the run began with: what a cache can hold may be another one now."""
    began = next(read_events(run.events, Start), None)
    order = began.data.get("order") if began else None
    if config.loader.order != "auto" or order not in ("exact", "window", "window-first"):
        return config
    return replace(config, loader=replace(config.loader, order=order))


def check_honoured(config: RunConfig, data: RunData, recipe: Recipe) -> None:
    """Keys that only some sources make use of are refused by the others, and those that a recipe has its own way for."""
    usual, usual_train = LoaderConfig(), TrainConfig()
    for name in ("sample_cost", "bad_shards", "window", "order"):
        if name not in data.honours and getattr(config.loader, name) != getattr(usual, name):
            raise UserError(f"loader.{name} means nothing to the data of the recipe {recipe.name}: leave it out.")
    for name, own in (("optimizer", recipe.optimizer), ("schedule", recipe.schedule)):
        if own is not None and getattr(config.train, name) != getattr(usual_train, name):
            raise UserError(f"The recipe {recipe.name} has {name}s of its own: leave train.{name} out.")
    if not isinstance(recipe.listeners, Sequence) or not all(map(callable, recipe.listeners)):
        raise UserError(f"The listeners of the recipe {recipe.name} must be a list of functions.")
    if recipe.optimizer is not None and config.train.layer_decay is not None:
        raise UserError(f"The recipe {recipe.name} has optimizers of its own: leave train.layer_decay out.")


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As the run will keep them, so that a task is built of the same now and later."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(facts), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"The facts of the data must be JSON, for the run to keep: {error}.") from error
    return kept


def check_same_split(run: RunFolder, data: RunData) -> None:
    """Samples that a run was trained on must not be judged as if it had never seen them."""
    began = next(read_events(run.events, Start), None)
    if began is None or began.data.get("fingerprint") != data.description.get("fingerprint"):
        return
    now = as_json(data.description)
    different = [key for key in ("split", "training", "validation") if began.data.get(key) != now.get(key)]
    if different:
        key = different[0]
        raise UserError(
            f"These are the data that the run was trained on, held out differently ({key} was {_short(began.data.get(key))} "
            f"and is {_short(now.get(key))}): samples it has seen would be judged. Leave --data.* as they were."
        )


def read_facts(run: RunFolder) -> dict[str, Any] | None:
    """What a run keeps of its data; None: nothing, as runs of the first versions."""
    if not run.facts.is_file():
        return None
    try:
        facts = json.loads(run.facts.read_text())
    except ValueError as error:
        raise UserError(f"{run.facts} is damaged: {error}.") from error
    if not isinstance(facts, dict):
        raise UserError(f"{run.facts} is damaged: it holds no facts by name.")
    return facts


def check_facts(run: RunFolder, data: RunData) -> None:
    """What a run keeps of its data, such as its classes, must be what the data say now."""
    kept, found = read_facts(run), as_json(data.facts)
    if kept is None:
        return
    for name in sorted(kept.keys() | found.keys()):
        before, now = kept.get(name), found.get(name)
        if before != now and name not in data.loose_facts:
            raise UserError(
                f"The data do not fit the run: {name} in {run.facts} is {_short(before)}, and the data say {_short(now)}. "
                f"The model's answers would mean something else."
            )


def _short(value: Any, most: int = 300) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]} ..."
