"""What the commands do with a run: start it, go on with it, fork, evaluate, predict, export; and packing."""

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stoker import console, settings
from stoker.data import pack
from stoker.data.loader import Loader
from stoker.data.pack import PackRequest
from stoker.data.quality import shuffle_quality
from stoker.errors import Stopped, UserError
from stoker.files import new_folder, write_bytes, write_json
from stoker.launch import elsewhere
from stoker.launch.build import build_run, find_checkpoint, rebuild, trained
from stoker.launch.checks import check_facts, check_same_data, check_same_split, check_unchanged, with_order
from stoker.launch.folders import held, made, restarted
from stoker.launch.targets import Target, find_recipe, resolve_target
from stoker.recipe import Recipe, Trained
from stoker.runs import schema as events
from stoker.runs.events import EventLog, read_events
from stoker.runs.folder import RunFolder, check_new_run, open_run, record_environment
from stoker.train import checkpoint, parallel
from stoker.train.engine import Engine
from stoker.train.evaluate import evaluate
from stoker.train.loop import train
from stoker.train.parallel import Ranks
from stoker.train.precision import same_sums
from stoker.train.run import Run
from stoker.train.schedule import chart
from stoker.train.trackers import open_tracker


@dataclass(frozen=True)
class Outcome:
    folder: RunFolder
    recipe: Recipe
    metrics: dict[str, float]
    samples_per_s: float | None = None
    summary: tuple[tuple[str, str], ...] = ()  # of the run, for people
    about: dict[str, str] = field(default_factory=dict)  # checkpoint, weights, data and fingerprint of an evaluation

    def table(self) -> list[tuple[str, ...]]:
        """Each kind of weights that was judged, by name, and the recipe's baselines."""
        prefix = "ema_"
        averaged = {key.removeprefix(prefix): value for key, value in self.metrics.items() if key.startswith(prefix)}
        raw = {key: value for key, value in self.metrics.items() if not key.startswith(prefix)}
        if averaged:
            return self.recipe.result_table({"model, averaged weights": averaged, "model, raw weights": raw})
        weights = self.about.get("weights")
        return self.recipe.result_table({f"model, {weights} weights" if weights else "model": raw})


def start(
    target: Target, *, init_from: Path | None = None, allow_partial: bool = False, tuned_for: str | None = None
) -> Outcome:
    """A new run, from its first step to its last. Under torchrun a restarted run goes on from its last checkpoint.

    `tuned_for`: the fingerprint of the data that its settings were tuned for.
    """
    config = target.config
    with _met() as ranks:
        # Before anything is packed or simulated for it.
        elsewhere.check_writable(config.run.folder)
        check_new_run(elsewhere.working_root(config.run.folder), config.run.name)
        weights = None if init_from is None else checkpoint.read_checkpoint(init_from).tensors["model"]
        again = restarted(target, ranks)
        run = _built(target, ranks, again)
        if tuned_for and tuned_for != str(run.data.description.get("fingerprint", tuned_for)):
            raise UserError(
                "The data have changed since settings were tuned: `stoker tune` again, or leave --tuned out."
            )
        if target.recipe.initialise is not None:
            target.recipe.initialise(config, run.task)
        if weights is not None:
            checkpoint.load_weights(weights, run.task.model, str(init_from), allow_partial=allow_partial)
        folder = again or made(target, ranks)
        with held(folder, ranks):
            found = checkpoint.last_good(folder.checkpoints) if again is not None else None
            if again is not None:
                check_unchanged(folder, found, target, ())
                check_same_data(folder, run.data, ())
            return _run(folder, target, run, ranks, resume_from=found)


def resume(path: Path | str, overrides: list[str], *, trusted: bool = False) -> Outcome:
    """Goes on from the last checkpoint as if nothing had happened. A changed key must be named in `overrides`."""
    folder = open_run(elsewhere.latest(path))
    target = resolve_target(str(folder.config), overrides, trusted=trusted)
    with _met() as ranks, held(folder, ranks):
        if any(event.state == "finished" for event in read_events(folder.events, events.End)):
            raise UserError(
                f"{path} is finished; there is nothing to resume. `stoker evaluate {path}` shows its result."
            )
        found = checkpoint.last_good(folder.checkpoints)
        if found is None:
            console.say(f"{path} holds no checkpoint yet: starting it from the beginning.")
        else:
            check_unchanged(folder, found, target, overrides)
        run = _built(target, ranks, folder)
        check_same_data(folder, run.data, overrides)
        if ranks.is_first:
            record_environment(folder)
            write_bytes(folder.config, settings.as_yaml(target.config).encode())  # with the changes that were named
        return _run(folder, target, run, ranks, resume_from=found)


def target_of(path: Path | str, overrides: list[str], *, trusted: bool = False) -> Target:
    """What a run stands for."""
    return resolve_target(str(open_run(elsewhere.here(path)).config), overrides, trusted=trusted)


def fork(path: Path | str, overrides: list[str], which: str, *, trusted: bool = False) -> Outcome:
    """A new run with the weights and moments of another, its own overrides, and a new schedule from step 0."""
    old = open_run(elsewhere.here(path))
    target = resolve_target(str(old.config), overrides, trusted=trusted)
    with _met() as ranks:
        elsewhere.check_writable(target.config.run.folder)
        check_new_run(elsewhere.working_root(target.config.run.folder), target.config.run.name)
        run = build_run(target.recipe, target.config, ranks)
        found = find_checkpoint(old, which, run.task.goal)
        folder = restarted(target, ranks) or made(target, ranks)
        with held(folder, ranks):
            return _run(folder, target, run, ranks, take_over=found)


def evaluate_run(path: Path | str, which: str, weights: str, overrides: list[str], *, trusted: bool = False) -> Outcome:
    """Metrics of a checkpoint, with averaged or raw weights, on the run's validation samples or on other data."""
    folder = open_run(elsewhere.here(path))
    target = _for_use(folder, overrides, "an evaluation", trusted=trusted)
    with _met() as ranks:
        run = build_run(target.recipe, target.config, ranks)
        check_facts(folder, run.data)
        check_same_data(folder, run.data, overrides)
        check_same_split(folder, run.data)
        model = trained(folder, target, run.task, run.device, which, weights, ranks)
        model = replace(model, about=_about(folder, model, run))
        metrics = evaluate(run.task, run.validation, run.device, model.precision)
        if target.recipe.report is not None and ranks.count == 1:
            _report(folder, target.recipe, model, run, metrics)
        return Outcome(folder, target.recipe, metrics, about=dict(model.about))


def rebuild_run(folder: RunFolder, *, trusted: bool = False) -> Run:
    """A run as it was trained, with its data, in this process: to look at single steps of it."""
    target = _for_use(folder, [], "a replay", trusted=trusted)
    run = build_run(target.recipe, target.config, Ranks())
    check_facts(folder, run.data)
    check_same_data(folder, run.data, [])
    return run


def _about(folder: RunFolder, model: Trained, run: Run) -> dict[str, str]:
    """What was judged on what, for whoever finds the numbers later."""
    return {
        "run": str(folder.path),
        "checkpoint": model.checkpoint.name,
        "weights": "averaged" if model.averaged else "raw",
        "data": str(run.data.description.get("path")),
        "fingerprint": str(run.data.description.get("fingerprint")),
    }


def _report(folder: RunFolder, recipe: Recipe, model: Trained, run: Run, metrics: Mapping[str, float]) -> None:
    """The evaluation in depth, in a folder that appears when it is whole. A run of somebody else may be read only."""
    assert recipe.report is not None
    unknown = [name for name, value in metrics.items() if value != value]
    if unknown:
        console.say(f"No report in depth: {', '.join(unknown)} of this model is not a number.")
        return
    out = _unused(folder.path / "evaluation" / model.checkpoint.name)
    try:
        with new_folder(out, force=False, marker="report.json") as partial:
            recipe.report(model, run, partial)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        console.say(f"No tables and plots: {out} cannot be written ({error.strerror}).")
        return
    console.say(f"tables and plots: {out}")


def predict(
    path: Path | str,
    source: Path | str | None,
    out: Path | None,
    which: str,
    weights: str,
    overrides: list[str],
    *,
    trusted: bool = False,
) -> Any:
    """Answers of a checkpoint for a data set, written to a file."""
    folder = open_run(elsewhere.here(path))
    if source is not None:
        overrides = [*overrides, "--data.path", str(source)]
    target = _for_use(folder, overrides, "a prediction", trusted=trusted)
    if target.recipe.predict is None:
        raise UserError(f"The recipe {target.recipe.name} has no predictions to make.")
    with _met() as ranks:
        parallel.join(ranks, target.config.run.device)
        torch.manual_seed(target.config.run.seed)
        model = rebuild(folder, target, which, weights, ranks)
        return target.recipe.predict(model, out)


def export(
    path: Path | str, out: Path, samples: Path | None, which: str, weights: str, *, trusted: bool = False
) -> Any:
    """The model of a checkpoint as one file for other programs, checked against PyTorch."""
    folder = open_run(elsewhere.here(path))
    target = _for_use(folder, ["--run.device", "cpu"], "an export", trusted=trusted)
    if target.recipe.export is None:
        raise UserError(f"The recipe {target.recipe.name} has no export.")
    with _met() as ranks:
        return target.recipe.export(rebuild(folder, target, which, weights, ranks), out, samples)


def _for_use(folder: RunFolder, overrides: list[str], what: str, *, trusted: bool) -> Target:
    for word in overrides:
        if word.startswith("--") and not word.startswith(("--data.", "--loader.", "--run.", "--train.precision")):
            raise UserError(f"{word} does not matter to {what}: only data, loader and run keys and train.precision do.")
    return resolve_target(str(folder.config), overrides, trusted=trusted)


def _unused(folder: Path) -> Path:
    """This folder, or with a number behind it where it exists: an evaluation never replaces another."""
    number = 2
    chosen = folder
    while chosen.exists():
        chosen, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return chosen


def pack_data(recipe_name: str, request: PackRequest) -> Mapping[str, Any]:
    """Packs a data set, or this process's share of it under torchrun or in a Slurm array."""
    recipe, _, _ = find_recipe(recipe_name)
    if request.shuffled is not None and request.shuffled < 0:
        raise UserError(f"--shuffled is {request.shuffled}; a seed is 0 or more.")
    if request.threads is not None and request.threads < 1:
        raise UserError(f"--threads is {request.threads}; at least one is needed.")
    rank, num_ranks = pack.ranks_from_environment()
    request = replace(request, rank=rank, num_ranks=num_ranks)
    if recipe.pack is None:
        raise UserError(f"The recipe {recipe.name} has nothing to pack.")
    return elsewhere.packed(request, recipe.pack)


def _built(target: Target, ranks: Ranks, began: RunFolder | None) -> Run:
    """In the order that it began with; its settings stay as they are written, or the next resume would see a change."""
    config = target.config if began is None else with_order(began, target.config)
    return replace(build_run(target.recipe, config, ranks), settings=settings.kept_values(target.config))


@contextmanager
def _met() -> Iterator[Ranks]:
    """Together with the other processes of torchrun, if there are any; only the first one speaks."""
    ranks = parallel.meet()
    console.be_quiet(not ranks.is_first)
    try:
        yield ranks
        parallel.gather(None)  # leave together: a rank that tears its connections down early can abort another
    except Stopped:
        parallel.gather(None)  # and none of them ends while another still writes down how it ended
        raise
    finally:
        console.be_quiet(False)


def _run(
    folder: RunFolder,
    target: Target,
    run: Run,
    ranks: Ranks,
    resume_from: Path | None = None,
    take_over: Path | None = None,
) -> Outcome:
    config = target.config
    with (
        EventLog(folder.events if ranks.is_first else Path(os.devnull)) as log,
        _logged_to(folder, ranks),
        _end_recorded(log),
        same_sums(run.device, exact=run.config.deterministic),
    ):
        listener = open_tracker(config.log, folder.path, folder.path.name, run.settings) if ranks.is_first else None
        log.listeners += [listener] if listener else []
        log.listeners += target.recipe.listeners if ranks.is_first else ()
        check_facts(folder, run.data)
        if ranks.is_first:
            write_json(folder.facts, dict(run.data.facts))
        engine = Engine(run, folder.path, log)
        engine.rehearse()
        if resume_from is not None:
            engine.restore(checkpoint.read_checkpoint(resume_from), resume_from)
        if take_over is not None:
            engine.take_over(checkpoint.read_checkpoint(take_over), str(take_over))
        _introduce(folder, log, engine, target, resume_from, take_over)
        metrics, stopped_by = train(engine)
        if listener is not None:
            listener.close()
        if stopped_by is not None:
            raise Stopped(
                f"Stopped by {stopped_by} after step {engine.step} of {engine.total}. `stoker resume "
                f"{elsewhere.place_of(folder) or folder.path}` goes on."
            )
    rates = [event.samples_per_s for event in read_events(folder.events, events.Step)]
    return Outcome(folder, target.recipe, metrics, sum(rates) / len(rates) if rates else None, engine.summary())


def _introduce(
    folder: RunFolder, log: EventLog, engine: Engine, target: Target, resume_from: Path | None, take_over: Path | None
) -> None:
    """What a person wants to see before the first step, and the event that says how the run began."""
    config, run = engine.config, engine.run
    log.write(
        events.Start(
            resumed_from=resume_from.name if resume_from else None,
            forked_from=str(take_over) if take_over else None,
            data=dict(run.data.description),
            parameters=sum(parameter.numel() for parameter in run.task.model.parameters()),
            steps=engine.total,
            device=str(run.device),
            precision=engine.precision,
            ranks=run.ranks.count,
            know_nothing=run.task.know_nothing_loss,
            changed=dict(target.changed),
        )
    )
    console.say(f"run folder: {folder.path}")
    for notice in (*engine.notices(), engine.lr_rule, chart(config, engine.total, run.lr_at)):
        console.say(notice)
    _report_shuffle(log, run.training, engine.position.seed)


@contextmanager
def _logged_to(folder: RunFolder, ranks: Ranks) -> Iterator[None]:
    if not ranks.is_first:
        yield
        return
    with console.copy_to(folder.log):
        yield


def _report_shuffle(log: EventLog, loader: Loader, seed: int) -> None:
    """Measures how well the order is mixed, on the first part of the first two epochs."""
    plan, size = loader.plan, min(len(loader.plan), 200_000)
    if size < 3:
        return
    first, second = (plan.subset.rows(plan.order(seed, epoch).take(0, size)) for epoch in (0, 1))
    batch_size = plan.batch_size or max(1, size // max(1, plan.steps_per_epoch()))
    quality = shuffle_quality(first, plan.table.columns["shard"], batch_size, second)
    log.write(events.Shuffle(**asdict(quality)))
    console.say(f"shuffle: {quality.line()}")


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
        log.write(events.End(state=state, reason=reason))
