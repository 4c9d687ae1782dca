"""The commands: a dataclass each, whose fields are its options and whose `run` makes one call.

tyro reads the comments beside the fields for `--help`. Words like `--train.lr 1e-4` come in as overrides.
"""

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from tyro.conf import Positional, arg

from stoker import console
from stoker.cli.doctor import Doctor, stop_if_it_cannot_learn
from stoker.cli.options import Flag, local, no_overrides
from stoker.cli.output import is_other_rank, print_result, show_check, show_outcome
from stoker.cli.report import Report, Show
from stoker.cli.storage import Cache, Fetch
from stoker.cli.tune import Tune, tuned_words
from stoker.errors import UserError

Options = TypeVar("Options")


class Command(Protocol):
    def run(self, overrides: list[str]) -> int: ...


@dataclass(frozen=True)
class Simulate:
    """Simulate neutrino events in the layout of the Kaggle data set."""

    out: Positional[Path]  # directory to make, or with --check to look at
    events: int = 100_000  # how many triggered events
    files: int = 10  # how many Parquet files to spread them over
    seed: int = 0  # of the random numbers; the same seed gives the same events
    device: str = "cpu"  # cpu, cuda or cuda:N
    geometry: Path | None = None  # a sensor_geometry.csv to use instead of the built-in detector
    force: Flag = False  # replace the directory if it exists
    check: Flag = False  # simulate nothing; compare an existing directory with the real data
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("simulate", overrides)
        local(self.out)
        if self.check:
            if self != Simulate(self.out, check=True, json=self.json):
                raise UserError("--check looks at a directory that exists and takes no other option than --json.")
            from stoker.recipes.icecube.check import check_events

            return show_check(check_events(self.out), as_json=self.json)
        from stoker.recipes.icecube.simulate import simulate

        simulate(
            self.out,
            num_events=self.events,
            num_files=self.files,
            seed=self.seed,
            device=self.device,
            geometry_path=self.geometry,
            force=self.force,
        )
        result = {"path": str(self.out), "events": self.events, "files": self.files}
        print_result(result, f"{self.events:,} events in {self.out}", as_json=self.json)
        return 0


@dataclass(frozen=True)
class NoOptions:
    """Of a recipe whose data can be packed in one way only."""


@dataclass(frozen=True)
class Pack(Generic[Options]):
    """Convert a data set to the packed store, once. A killed pack goes on where it was. `stoker pack RECIPE --help` lists
    what only that recipe can do."""

    recipe: Positional[str]  # whose data it is
    source: Positional[str]  # the data set: a folder, or a URL of an object store
    out: Positional[str]  # folder to make, or a URL
    options: Annotated[Options, arg(name="")]
    shuffled: int | None = None  # seed: write the samples in a random order, for disks that only read forward
    threads: int | None = None  # default: one a core, at most 8
    verify: Flag = False  # compare every value with the source afterwards, or of a store that exists
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("pack", overrides)
        from stoker.data.locations import named
        from stoker.data.pack import PackRequest
        from stoker.launch import commands

        request = PackRequest(
            named(self.source), named(self.out), self.shuffled, self.threads, self.verify, self.options
        )
        result = commands.pack_data(self.recipe, request)
        text = "\n".join(
            f"{key.replace('_', ' ')}: {value:,}" if isinstance(value, int) else f"{key}: {value}"
            for key, value in result.items()
        )
        print_result(result, text, as_json=self.json)
        return 0


def pack_command(words: list[str]) -> Any:
    """With the options of the recipe that the words name."""
    from stoker.launch import targets

    named = next((word for word in words[1:] if targets.names_recipe(word)), None)
    options = targets.find_recipe(named)[0].pack_options if named else None
    return Pack[options or NoOptions]  # type: ignore[misc]


@dataclass(frozen=True)
class Train:
    """Train a model. --group.key VALUE overrides any key that `stoker config TARGET` prints."""

    target: Positional[str]  # recipe, recipe:preset, file.yaml, or module:attribute
    init_from: Path | None = None  # a checkpoint whose weights to begin with; everything else begins anew
    allow_partial: Flag = False  # with --init-from: take the weights that fit, and list the others
    gpus: int | None = None  # processes to start on this machine, one a GPU
    check: Flag = (
        False  # look first at what it would learn (`stoker doctor --only learning`), and stop if that is serious
    )
    tuned: Flag = False  # with the settings that `stoker tune` found for this on this machine
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands, targets

        target = targets.resolve_target(self.target, overrides, trusted=self.trust)
        found, tuned_for = tuned_words(target, asked=self.tuned, several=(self.gpus or 1) > 1)
        if found:
            target = targets.resolve_target(self.target, [*overrides, *found], trusted=self.trust)
        if self.check:
            stop_if_it_cannot_learn(self.target, [*overrides, *found], trusted=self.trust)
        if self.gpus is not None:
            return _in_processes(self.gpus, target.config.run.device)
        outcome = commands.start(
            target, init_from=self.init_from, allow_partial=self.allow_partial, tuned_for=tuned_for
        )
        return show_outcome(outcome, as_json=self.json)


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its last checkpoint, bit for bit. A changed key must be named: --group.key VALUE."""

    path: Positional[str]  # a run folder, the name of one below runs/, or a URL
    gpus: int | None = None  # processes to start on this machine, one a GPU
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        if self.gpus is not None:
            return _run_in_processes(self, overrides)
        return show_outcome(commands.resume(self.path, overrides, trusted=self.trust), as_json=self.json)


@dataclass(frozen=True)
class Fork:
    """Start a new run with the weights and moments of another, overrides, and a new schedule, which is drawn first."""

    path: Positional[str]  # a run folder, the name of one below runs/, or a URL
    checkpoint: str = "last"  # best, last, or a checkpoint by its name or path
    gpus: int | None = None  # processes to start on this machine, one a GPU
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        if self.gpus is not None:
            return _run_in_processes(self, overrides)
        outcome = commands.fork(self.path, overrides, self.checkpoint, trusted=self.trust)
        return show_outcome(outcome, as_json=self.json)


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a checkpoint of a run on its validation samples, or with --data.path on others."""

    path: Positional[str]  # a run folder, the name of one below runs/, or a URL
    checkpoint: str = "best"  # best, last, or a checkpoint by its name or path
    weights: Literal["auto", "raw", "ema"] = "auto"  # auto takes averaged weights where there are any
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        outcome = commands.evaluate_run(self.path, self.checkpoint, self.weights, overrides, trusted=self.trust)
        return show_outcome(outcome, as_json=self.json)


@dataclass(frozen=True)
class Predict:
    """Answer for new samples with a checkpoint of a run, and write the answers to a file. Goes on where it was stopped."""

    path: Positional[str]  # a run folder, the name of one below runs/, or a URL
    inputs: Positional[str | None] = None  # the samples: a data set, an image, a folder of images; or a URL
    data: str | None = None  # the same; default: those that the run was given
    out: Path | None = None  # file to make; its ending chooses the format
    checkpoint: str = "best"  # best, last, or a checkpoint by its name or path
    weights: Literal["auto", "raw", "ema"] = "auto"  # auto takes averaged weights where there are any
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        if self.inputs is not None and self.data is not None:
            raise UserError(f"What to predict was given twice: {self.inputs} and --data {self.data}.")
        source = self.inputs or self.data
        if source is not None and any(word.startswith("--data.path") for word in overrides):
            raise UserError(f"What to predict was given twice: {source} and --data.path.")
        result = commands.predict(
            self.path, source, self.out, self.checkpoint, self.weights, overrides, trusted=self.trust
        )
        if not is_other_rank():
            text = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items())
            print_result(result, text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Export:
    """Write the model of a checkpoint as one file for other programs (ONNX), and check that it gives the same answers."""

    path: Positional[str]  # a run folder, the name of one below runs/, or a URL
    out: Path  # file to make, ending in .onnx
    data: Path | None = None  # samples to check with: an image or a folder; default: the run's validation samples
    checkpoint: str = "best"  # best, last, or a checkpoint by its name or path
    weights: Literal["auto", "raw", "ema"] = "auto"  # auto takes averaged weights where there are any
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("export", overrides)
        from stoker.launch import commands

        result = commands.export(self.path, self.out, self.data, self.checkpoint, self.weights, trusted=self.trust)
        text = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items())
        print_result(result, text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Runs:
    """List runs with their state, best metric, rate and age."""

    folder: Positional[Path] = Path("runs")  # where the run folders are
    json: Flag = False  # print the list as JSON

    def run(self, overrides: list[str]) -> int:
        no_overrides("runs", overrides)
        from stoker.runs.folder import list_runs

        found = list_runs(self.folder)
        rows = [("run", "state", "step", "best", "samples/s", "age")]
        for one in found:
            best = f"{one.metric} {one.best:.4f}" if one.best is not None else "-"
            rate = f"{one.samples_per_s:,.0f}" if one.samples_per_s else "-"
            rows.append((one.name, one.state, f"{one.step:,}", best, rate, console.seconds_as_text(one.age_s)))
        text = console.table(rows) if found else f"no runs in {self.folder}"
        print_result([asdict(one) for one in found], text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Config:
    """Print the resolved configuration of a target, with the origin, the meaning and the choices of every value."""

    target: Positional[str]  # recipe, recipe:preset, file.yaml, or module:attribute
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print keys, values, origins and meanings as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker import settings
        from stoker.launch import targets
        from stoker.meanings import meanings

        found = targets.resolve_target(self.target, overrides, trusted=self.trust)
        values, told = settings.kept_values(found.config), meanings(found.config)
        listing = {
            key: {"value": value, "origin": found.origins[key], "meaning": told[key]} for key, value in values.items()
        }
        comments = {key: f"({found.origins[key]}) {told[key]}".rstrip() for key in told}
        notes = "".join(f"# {note}\n" for note in found.notes)
        print_result(listing, notes + settings.as_yaml(found.config, comments).rstrip(), as_json=self.json)
        return 0


COMMANDS: dict[str, Any] = {
    "simulate": Simulate,
    "pack": Pack[NoOptions],
    "train": Train,
    "resume": Resume,
    "fork": Fork,
    "evaluate": Evaluate,
    "predict": Predict,
    "export": Export,
    "doctor": Doctor,
    "tune": Tune,
    "report": Report,
    "show": Show,
    "runs": Runs,
    "fetch": Fetch,
    "cache": Cache,
    "config": Config,
}


def _run_in_processes(command: "Resume | Fork", overrides: list[str]) -> int:
    from stoker.launch import commands

    assert command.gpus is not None
    target = commands.target_of(command.path, overrides, trusted=command.trust)
    return _in_processes(command.gpus, target.config.run.device)


def _in_processes(count: int, device: str) -> int:
    from stoker.train import launcher

    launcher.check_gpus(count, device)
    return launcher.run_processes(_without_gpus(sys.argv[1:]), count)


def _without_gpus(words: list[str]) -> list[str]:
    """The words that each of the processes is started with."""
    left: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--gpus":
            next(rest, None)
        elif not word.startswith("--gpus="):
            left.append(word)
    return left


def check_bare_keys(words: list[str]) -> None:
    """Answers `--lr` with `--train.lr`: what is no option of a command may be a key of its target's configuration."""
    name, *rest = words
    if name not in ("train", "config", "resume", "fork", "evaluate", "predict") or not rest or rest[0].startswith("-"):
        return
    known = {field.name for field in fields(COMMANDS[name])} | {"help"}
    bare = [word[2:].partition("=")[0] for word in rest[1:] if word.startswith("--")]
    wrong = next((word for word in bare if word.replace("-", "_") not in known), None)
    if wrong is None:
        return
    from stoker import settings
    from stoker.launch import targets
    from stoker.launch.elsewhere import here
    from stoker.runs.folder import open_run

    target = rest[0] if name in ("train", "config") else str(open_run(here(rest[0])).config)
    found = targets.resolve_target(target, [], trusted="--trust" in rest)
    raise UserError(settings.unknown_key(found.config, wrong.replace("-", "_"), "the command line"))


def keys_are_asked(words: list[str]) -> bool:
    """`stoker train TARGET --help`: options are in `stoker train --help`, and keys are the target's."""
    return len(words) == 3 and words[0] == "train" and words[2] in ("-h", "--help") and not words[1].startswith("-")
