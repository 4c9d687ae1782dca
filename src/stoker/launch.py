"""From words to a run: finds the recipe, resolves the configuration, builds source, loader, task and engine.

The one place that puts the parts together; everything below it gets them handed in.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stoker import console, settings
from stoker.data import pack
from stoker.data.loader import Loader, LoaderConfig
from stoker.data.order import StorageOrder
from stoker.data.plan import Plan
from stoker.data.quality import shuffle_quality
from stoker.data.stages import Stage
from stoker.data.store import is_store, open_store
from stoker.errors import MachineError, UserError
from stoker.files import write_bytes, write_json
from stoker.recipe import PackRequest, Recipe, RunConfig, RunData, Trained
from stoker.runs.events import EventLog, read_events
from stoker.runs.folder import RunFolder, create_run, open_run, record_environment
from stoker.settings import Layer
from stoker.train import checkpoint, parallel
from stoker.train.engine import Engine, Trainer
from stoker.train.evaluate import evaluate
from stoker.train.loop import train
from stoker.train.parallel import Ranks
from stoker.train.precision import resolve_precision
from stoker.train.schedule import chart
from stoker.train.trackers import open_tracker

# Keys that change how fast or where a run goes, and never its numbers: they may differ when it is resumed.
HARMLESS = ("run.name", "run.folder", "loader.threads", "loader.look_ahead", "loader.ram_bytes", "loader.stuck_after_s")
SHARED = ("loader.", "train.", "model.", "run.seed")  # keys that must be the same on all ranks, but for those above
COMMAND_LINE = "the command line"  # where a value came from
BUILT_IN = {"icecube": "stoker.recipes.icecube.recipe:RECIPE", "imagenet": "stoker.recipes.imagenet.recipe:RECIPE"}


@dataclass(frozen=True)
class Target:
    """What the word TARGET stands for, once resolved."""

    recipe: Recipe
    config: RunConfig
    origins: dict[str, str]  # where each value came from
    notes: Sequence[str] = ()  # of the preset


@dataclass(frozen=True)
class Outcome:
    run: RunFolder
    recipe: Recipe
    metrics: dict[str, float]
    samples_per_s: float | None = None
    summary: tuple[tuple[str, str], ...] = ()  # of the run, for people


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
    layers.append(Layer(COMMAND_LINE, settings.parse_overrides(overrides)))
    config, origins = settings.resolve(recipe.presets[preset](), layers)
    for key, why in settings.without_effect(config).items():
        if origins.get(key) == COMMAND_LINE:  # in a file it may stand beside what it was written for
            raise UserError(f"--{key} would change nothing: {why}.")
    origins = settings.default_origins(config, f"preset {recipe.name}:{preset}", origins)
    return Target(recipe, config, origins, recipe.notes.get(preset, ()))


def start(target: Target, *, init_from: Path | None = None, allow_partial: bool = False) -> Outcome:
    """A new run, from its first step to its last. Under torchrun a restarted run goes on from its last checkpoint."""
    config = target.config
    with _joined(config) as ranks:
        parts = build_parts(target.recipe, config, ranks)
        if init_from is not None:
            weights = checkpoint.read_checkpoint(init_from).tensors["model"]
            checkpoint.load_weights(weights, parts.task.model, str(init_from), allow_partial=allow_partial)
        run, again = _run_folder(target, ranks)
        resume_from = checkpoint.last_good(run.checkpoints) if again else None
        return _run(run, target, parts, ranks, resume_from=resume_from)


def resume(path: Path, overrides: list[str]) -> Outcome:
    """Goes on from the last checkpoint as if nothing had happened. A changed key must be named in `overrides`."""
    run = open_run(path)
    target = resolve_target(str(run.config), overrides)
    with _joined(target.config) as ranks:
        ended = [event for event in read_events(run.events, "end") if event["state"] == "finished"]
        if ended:
            raise UserError(
                f"{path} is finished; there is nothing to resume. `stoker evaluate {path}` shows its result."
            )
        found = checkpoint.last_good(run.checkpoints)
        if found is None:
            console.say(f"{path} holds no checkpoint yet: starting it from the beginning.")
        else:
            _check_unchanged(found, target, overrides)
        parts = build_parts(target.recipe, target.config, ranks)
        _check_same_data(run, parts.data, overrides)
        if ranks.is_first:
            record_environment(run)
            write_bytes(run.config, settings.as_yaml(target.config).encode())  # with the changes that were named
        return _run(run, target, parts, ranks, resume_from=found)


def fork(path: Path, overrides: list[str], which: str) -> Outcome:
    """A new run with the weights and moments of another, its own overrides, and a new schedule from step 0."""
    old = open_run(path)
    target = resolve_target(str(old.config), overrides)
    with _joined(target.config) as ranks:
        parts = build_parts(target.recipe, target.config, ranks)
        found = _find_checkpoint(old, which, parts.task.goal)
        run, _ = _run_folder(target, ranks)
        return _run(run, target, parts, ranks, take_over=found)


def evaluate_run(path: Path, which: str, weights: str, overrides: list[str]) -> Outcome:
    """Metrics of a checkpoint, with averaged or raw weights, on the run's validation samples or on other data."""
    run = open_run(path)
    target = _for_use(run, overrides, "an evaluation")
    with _joined(target.config) as ranks:
        parts = build_parts(target.recipe, target.config, ranks)
        _check_kept(run, parts.data)
        model = _trained(run, target, parts.task, parts.device, which, weights, ranks)
        metrics = evaluate(parts.task, parts.validation, parts.device, model.precision)
        if target.recipe.report is not None and ranks.count == 1:
            folder = _unused(run.path / "evaluation" / model.checkpoint.name)
            target.recipe.report(model, parts.data, parts.validation, folder)
            console.say(f"tables and plots: {folder}")
        return Outcome(run, target.recipe, metrics)


def predict(path: Path, source: Path | None, out: Path | None, which: str, weights: str, overrides: list[str]) -> Any:
    """Answers of a checkpoint for a data set, written to a file."""
    run = open_run(path)
    if source is not None:
        overrides = [*overrides, "--data.path", str(source)]
    target = _for_use(run, overrides, "a prediction")
    if target.recipe.predict is None:
        raise UserError(f"The recipe {target.recipe.name} has no predictions to make.")
    with _joined(target.config) as ranks:
        torch.manual_seed(target.config.run.seed)
        model = _rebuilt(run, target, which, weights, ranks)
        return target.recipe.predict(model, out)


def export(path: Path, out: Path, samples: Path | None, which: str, weights: str) -> Any:
    """The model of a checkpoint as one file for other programs, checked against PyTorch."""
    run = open_run(path)
    target = _for_use(run, ["--run.device", "cpu"], "an export")
    if target.recipe.export is None:
        raise UserError(f"The recipe {target.recipe.name} has no export.")
    with _joined(target.config) as ranks:
        return target.recipe.export(_rebuilt(run, target, which, weights, ranks), out, samples)


def _rebuilt(run: RunFolder, target: Target, which: str, weights: str, ranks: Ranks) -> Trained:
    """The trained model of a run, without opening the data it was trained on where the recipe can do without."""
    rebuild, device = target.recipe.rebuild_task, choose_device(target.config.run.device, ranks.local)
    task = rebuild(target.config, run.path) if rebuild else target.recipe.build_task(target.config)
    return _trained(run, target, task, device, which, weights, ranks)


def _for_use(run: RunFolder, overrides: list[str], what: str) -> Target:
    for word in overrides:
        if word.startswith("--") and not word.startswith(("--data.", "--loader.", "--run.", "--train.precision")):
            raise UserError(f"{word} does not matter to {what}: only data, loader and run keys and train.precision do.")
    return resolve_target(str(run.config), overrides)


def _trained(
    run: RunFolder, target: Target, task: Any, device: torch.device, which: str, weights: str, ranks: Ranks
) -> Trained:
    """The task with the weights of a checkpoint: averaged ones where there are any, unless raw ones are asked for."""
    found = _find_checkpoint(run, which, task.goal)
    snapshot = checkpoint.read_checkpoint(found)
    averaged = snapshot.tensors.get("average")
    if weights == "ema" and averaged is None:
        raise UserError(f"{found} holds no averaged weights: the run was trained without train.ema.")
    chosen = dict(averaged if averaged is not None and weights != "raw" else snapshot.tensors["model"])
    chosen.pop("__updates__", None)
    checkpoint.load_weights(chosen, task.model, str(found))
    task.model.to(device)
    precision = resolve_precision(target.config.train.precision, device)
    return Trained(target.config, task, found, device, precision, ranks)


def _check_kept(run: RunFolder, data: RunData) -> None:
    """What a run keeps of its data, such as its classes, must be what the data say now."""
    for name, content in data.keep.items():
        path = run.path / name
        if path.is_file() and (kept := json.loads(path.read_text())) != content:
            raise UserError(
                f"The data do not fit the run: {path} says {_short(kept)}, and the data say {_short(content)}. The model's "
                f"answers would get the wrong names."
            )


def _short(value: Any, most: int = 300) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else f"{text[:most]} ..."


def _check_same_data(run: RunFolder, data: RunData, overrides: list[str]) -> None:
    """Samples that are not those of the run's beginning would make its position mean something else."""
    began = next(iter(read_events(run.events, "start")), None)
    before, now = (began or {}).get("data", {}).get("fingerprint"), data.description.get("fingerprint")
    if before is None or before == now:
        return
    if not any(word.startswith("--data.") for word in overrides):
        raise UserError(
            f"The data are not those that {run.path} began with: files were changed, added or removed, or made anew on "
            f"another kind of machine. Name them (`--data.path DIR`) to go on all the same, or use `stoker fork`."
        )
    console.say("The data are not those that the run began with; going on, as asked.")


def _unused(folder: Path) -> Path:
    """This folder, or with a number behind it where it exists: an evaluation never replaces another."""
    number = 2
    chosen = folder
    while chosen.exists():
        chosen, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return chosen


def pack_data(recipe_name: str, request: PackRequest) -> Mapping[str, Any]:
    """Packs a data set, or this process's share of it under torchrun or in a Slurm array."""
    recipe, _ = _find_recipe(recipe_name)
    if request.shuffled is not None and request.shuffled < 0:
        raise UserError(f"--shuffled is {request.shuffled}; a seed is 0 or more.")
    if request.threads is not None and request.threads < 1:
        raise UserError(f"--threads is {request.threads}; at least one is needed.")
    rank, num_ranks = pack.ranks_from_environment()
    request = replace(request, rank=rank, num_ranks=num_ranks)
    if recipe.pack is not None:
        return recipe.pack(request)
    for name in ("short_side", "quality", "max_classes", "max_per_class"):
        if getattr(request, name) is not None:
            raise UserError(
                f"--{name.replace('_', '-')} is for images; the recipe {recipe.name} packs nothing of the kind."
            )
    num_threads = request.threads or LoaderConfig().num_threads
    if recipe.packing is None:
        raise UserError(f"The recipe {recipe.name} has nothing to pack.")
    packing = recipe.packing(request.source, request.shuffled, num_threads)
    if request.verify and is_store(request.out):
        store = open_store(request.out)
    else:
        packed = pack.pack(request.out, packing, threads=num_threads, rank=rank, num_ranks=num_ranks)
        if packed is None:
            return {"path": str(request.out), "state": "other ranks are still at work"}
        store = packed
    result: dict[str, Any] = {
        "path": str(request.out),
        "samples": len(store.table),
        "rows": store.num_rows,
        "bytes": store.num_bytes,
    }
    if request.verify:
        result["values_verified"] = pack.verify(store, packing, num_threads)
    return result


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch sees no GPU here. Use --run.device cpu.")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


@contextmanager
def _joined(config: RunConfig) -> Iterator[Ranks]:
    """Together with the other processes of torchrun, if there are any; only the first one speaks."""
    ranks = parallel.join(config.run.device)
    console.be_quiet(not ranks.is_first)
    try:
        yield ranks
        parallel.gather(None)  # leave together: a rank that tears its connections down early can abort another
    finally:
        console.be_quiet(False)


@dataclass(frozen=True)
class Parts:
    task: Any
    training: Loader[Any]
    validation: Loader[Any]
    device: torch.device
    data: RunData


def build_parts(recipe: Recipe, config: RunConfig, ranks: Ranks) -> Parts:
    device = choose_device(config.run.device, ranks.local)
    # The first process of each machine makes what is missing in the cache; the others find it there.
    data = recipe.open_data(config, device) if ranks.local == 0 else None
    parallel.gather(None)
    data = data or recipe.open_data(config, device)
    _check_same_settings(config)
    torch.manual_seed(config.run.seed)
    task = recipe.build_task(config)
    # From here on each rank draws its own numbers (dropout); weights were drawn alike.
    torch.manual_seed(config.run.seed + 1_000_003 * ranks.rank)
    return Parts(
        task=task,
        training=_loader(data, config, device, ranks, training=True),
        validation=_loader(data, config, device, ranks, training=False),
        device=device,
        data=data,
    )


def _check_same_settings(config: RunConfig) -> None:
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


def _loader(data: RunData, config: RunConfig, device: torch.device, ranks: Ranks, *, training: bool) -> Loader[Any]:
    loader = config.loader
    subset = data.training if training else data.validation
    stages = data.stages if training else data.validation_stages or data.stages
    plan = Plan(
        table=data.table,
        subset=subset,
        order=data.order(subset) if training else lambda seed, epoch: StorageOrder(),
        batch_size=loader.batch_size,
        batch_cost=loader.batch_cost,
        micro_cost=loader.micro_cost,
        sample_cost=loader.sample_cost,
        repeated=training and data.repeated,
        paired=training and data.paired,
    )
    pinned = [Stage("pin", lambda batch: batch.pin())] if device.type == "cuda" else []
    return Loader(
        plan,
        [*stages, *pinned],
        loader,
        rank=ranks.rank,
        num_ranks=ranks.count,
        where=data.where,
        bytes_per_cost=data.bytes_per_cost,
        cache_bytes=data.cache_bytes,
    )


def _run_folder(target: Target, ranks: Ranks) -> tuple[RunFolder, bool]:
    """The run's folder on every rank, and whether it was there before: torchrun restarts us under the same id."""
    config, job = target.config, os.environ.get("TORCHELASTIC_RUN_ID", "none")
    name = "-".join(word for word in (config.recipe.replace(":", "-"), job, config.run.name) if word)
    fixed = config.run.folder / name if job != "none" else None
    if fixed is not None and parallel.from_first((fixed / "config.yaml").is_file()):
        console.say(f"{fixed} exists: going on with it.")
        return open_run(fixed), True
    made = None
    if ranks.is_first:
        made = create_run(config.run.folder, config.recipe, config.run.name, settings.as_yaml(config), fixed)
    return parallel.from_first(made), False


def _run(
    run: RunFolder,
    target: Target,
    parts: Parts,
    ranks: Ranks,
    resume_from: Path | None = None,
    take_over: Path | None = None,
) -> Outcome:
    config = target.config
    values = {key: str(value) if isinstance(value, Path) else value for key, value in settings.leaves(config)}
    with EventLog(run.events if ranks.is_first else Path(os.devnull)) as log, _said_in(run, ranks), _end_recorded(log):
        listener = open_tracker(config.log, run.path, run.path.name, values) if ranks.is_first else None
        log.listeners += [listener] if listener else []
        trainer = Trainer(
            config=config.train,
            task=parts.task,
            training=parts.training,
            validation=parts.validation,
            device=parts.device,
            log=log,
            folder=run.path,
            quarantine=parts.data.quarantine,
            settings=values,
            ranks=ranks,
        )
        _check_kept(run, parts.data)
        for name, content in parts.data.keep.items() if ranks.is_first else ():
            write_json(run.path / name, content)
        engine = Engine(trainer, config.run.seed)
        if resume_from is not None:
            engine.restore(checkpoint.read_checkpoint(resume_from), str(resume_from))
        if take_over is not None:
            engine.take_over(checkpoint.read_checkpoint(take_over), str(take_over))
        _introduce(run, log, engine, parts, resume_from, take_over)
        metrics, stopped_by = train(engine)
        if listener is not None:
            listener.close()
        if stopped_by is not None:
            raise Stopped(
                f"Stopped by {stopped_by} after step {engine.step} of {engine.total}. `stoker resume {run.path}` goes on."
            )
    rates = [event["samples_per_s"] for event in read_events(run.events, "step")]
    return Outcome(run, target.recipe, metrics, sum(rates) / len(rates) if rates else None, engine.summary())


def _introduce(
    run: RunFolder, log: EventLog, engine: Engine, parts: Parts, resume_from: Path | None, take_over: Path | None
) -> None:
    """What a person wants to see before the first step, and the event that says how the run began."""
    config = engine.config
    log.write(
        "start",
        resumed_from=resume_from.name if resume_from else None,
        forked_from=str(take_over) if take_over else None,
        data=dict(parts.data.description),
        parameters=sum(parameter.numel() for parameter in parts.task.model.parameters()),
        steps=engine.total,
        device=str(parts.device),
        precision=engine.precision,
        ranks=engine.trainer.ranks.count,
    )
    console.say(f"run folder: {run.path}")
    console.say(engine.lr_rule)
    console.say(chart(config, engine.total))
    _report_shuffle(log, parts.training, engine.position.seed)


@contextmanager
def _said_in(run: RunFolder, ranks: Ranks) -> Iterator[None]:
    if not ranks.is_first:
        yield
        return
    with console.copy_to(run.log):
        yield


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


class Stopped(MachineError):
    """A run that was asked to stop, and saved itself first."""


@contextmanager
def _end_recorded(log: EventLog) -> Iterator[None]:
    """Writes how the run ended, whatever ended it."""
    state = "failed"
    try:
        yield
        state = "finished"
    except (KeyboardInterrupt, Stopped):
        state = "stopped"
        raise
    finally:
        reason = repr(sys.exc_info()[1]) if state == "failed" else None
        log.write("end", state=state, reason=reason)


def _find_checkpoint(run: RunFolder, which: str, goal: str) -> Path:
    """`best`, `last`, or the path of a checkpoint."""
    if which not in ("best", "last"):
        return Path(which)
    chosen = checkpoint.best(run.checkpoints, goal)
    found = chosen[0] if which == "best" and chosen else checkpoint.last_good(run.checkpoints)
    if found is None:
        raise UserError(f"{run.path} holds no checkpoint; it was stopped before its first one.")
    return found


def _check_unchanged(path: Path, target: Target, overrides: list[str]) -> None:
    """A configuration that is not the checkpoint's would make a resumed run another run."""
    saved = checkpoint.read_checkpoint(path).state["settings"]
    named = {word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")}
    now = {key: str(value) if isinstance(value, Path) else value for key, value in settings.leaves(target.config)}
    now = json.loads(json.dumps(now))
    changed = {key: (saved.get(key), value) for key, value in now.items() if saved.get(key) != value}
    unnamed = {key: values for key, values in changed.items() if key not in (*named, *HARMLESS) and key[:4] != "log."}
    if unnamed:
        listed = "; ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in unnamed.items())
        key, (_, new) = next(iter(unnamed.items()))
        raise UserError(
            f"The configuration changed since the checkpoint {path.name}: {listed}. Put it back, or name the change "
            f"(`stoker resume RUN --{key} {new}`), or start a new run from these weights with `stoker fork`."
        )
    for key, (old, new) in changed.items():
        console.say(f"Resuming with {key} {new!r} instead of {old!r}.")


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
