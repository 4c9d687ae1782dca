"""The command line: words to one function call each. No logic here, and no import of torch until a command needs it.

A command is a dataclass whose fields are its options (tyro reads the comments beside them for `--help`) and whose `run`
makes the call. Words like `--train.lr 1e-4` are taken out first and handed to `run` as overrides.
"""

import errno
import io
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import tyro
from tyro.conf import FlagCreatePairsOff, Positional

from stoker import console
from stoker.errors import MachineError, Stopped, UserError

Flag = FlagCreatePairsOff[bool]
SUMMARY = "Trains PyTorch models on sharded data at the speed of the hardware, and says why when it does not."


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
        _no_overrides("simulate", overrides)
        if self.check:
            if self != Simulate(self.out, check=True, json=self.json):
                raise UserError("--check looks at a directory that exists and takes no other option than --json.")
            from stoker.recipes.icecube.check import check_events

            return _show_check(check_events(self.out), as_json=self.json)
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
        _print_result(result, f"{self.events:,} events in {self.out}", as_json=self.json)
        return 0


@dataclass(frozen=True)
class Pack:
    """Convert a data set to the packed store, once. A killed pack goes on where it was."""

    recipe: Positional[str]  # whose data it is
    source: Positional[Path]  # the data set
    out: Positional[Path]  # folder to make
    shuffled: int | None = None  # seed: write the samples in a random order, for disks that only read forward
    threads: int | None = None  # default: one a core, at most 8
    short_side: int | None = None  # of images: shrink larger ones so that their shorter side has this many pixels
    quality: int | None = None  # of shrunk images, 1 to 100; default 90
    keep: Flag = False  # of images: the original bytes, which is the default
    max_classes: int | None = None  # of images: only so many classes
    max_per_class: int | None = None  # of images: only so many training images of each class
    broken: Literal["few", "skip", "stop"] | None = None  # of images: what those do that cannot be decoded; default few
    only_present: Flag = False  # of events: the pulse files that are there, where the table lists more
    verify: Flag = False  # compare every value with the source afterwards, or of a store that exists
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        _no_overrides("pack", overrides)
        if self.keep and (self.short_side or self.quality):
            raise UserError(
                "--keep packs the original bytes; --short-side and --quality shrink them. Use one or the other."
            )
        from stoker.launch import commands
        from stoker.recipe import PackRequest

        names = (
            "source",
            "out",
            "shuffled",
            "threads",
            "verify",
            "short_side",
            "quality",
            "max_classes",
            "max_per_class",
            "broken",
            "only_present",
        )
        result = commands.pack_data(self.recipe, PackRequest(**{name: getattr(self, name) for name in names}))
        text = "\n".join(
            f"{key.replace('_', ' ')}: {value:,}" if isinstance(value, int) else f"{key}: {value}"
            for key, value in result.items()
        )
        _print_result(result, text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Train:
    """Train a model. --group.key VALUE overrides any key that `stoker config TARGET` prints."""

    target: Positional[str]  # recipe, recipe:preset, file.yaml, or module:attribute
    init_from: Path | None = None  # a checkpoint whose weights to begin with; everything else begins anew
    allow_partial: Flag = False  # with --init-from: take the weights that fit, and list the others
    gpus: int | None = None  # processes to start on this machine, one a GPU
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands, targets

        target = targets.resolve_target(self.target, overrides, trusted=self.trust)
        if self.gpus is not None:
            return _in_processes(self.gpus, target.config.run.device)
        outcome = commands.start(target, init_from=self.init_from, allow_partial=self.allow_partial)
        return _show_outcome(outcome, as_json=self.json)


@dataclass(frozen=True)
class Resume:
    """Go on with a run from its last checkpoint, bit for bit. A changed key must be named: --group.key VALUE."""

    path: Positional[Path]  # a run folder
    gpus: int | None = None  # processes to start on this machine, one a GPU
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        if self.gpus is not None:
            return _in_processes(
                self.gpus, commands.target_of(self.path, overrides, trusted=self.trust).config.run.device
            )
        return _show_outcome(commands.resume(self.path, overrides, trusted=self.trust), as_json=self.json)


@dataclass(frozen=True)
class Fork:
    """Start a new run with the weights and moments of another, overrides, and a new schedule, which is drawn first."""

    path: Positional[Path]  # a run folder
    checkpoint: str = "last"  # best, last, or the path of a checkpoint
    gpus: int | None = None  # processes to start on this machine, one a GPU
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        if self.gpus is not None:
            return _in_processes(
                self.gpus, commands.target_of(self.path, overrides, trusted=self.trust).config.run.device
            )
        outcome = commands.fork(self.path, overrides, self.checkpoint, trusted=self.trust)
        return _show_outcome(outcome, as_json=self.json)


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a checkpoint of a run on its validation samples, or with --data.path on others."""

    path: Positional[Path]  # a run folder
    checkpoint: str = "best"  # best, last, or the path of a checkpoint
    weights: Literal["auto", "raw", "ema"] = "auto"  # auto takes averaged weights where there are any
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        outcome = commands.evaluate_run(self.path, self.checkpoint, self.weights, overrides, trusted=self.trust)
        return _show_outcome(outcome, as_json=self.json)


@dataclass(frozen=True)
class Predict:
    """Answer for new samples with a checkpoint of a run, and write the answers to a file. Goes on where it was stopped."""

    path: Positional[Path]  # a run folder
    inputs: Positional[Path | None] = None  # the samples: a data set, an image, a folder of images
    data: Path | None = None  # the same; default: those that the run was given
    out: Path | None = None  # file to make; its ending chooses the format
    checkpoint: str = "best"  # best, last, or the path of a checkpoint
    weights: Literal["auto", "raw", "ema"] = "auto"  # auto takes averaged weights where there are any
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.launch import commands

        if self.inputs is not None and self.data is not None:
            raise UserError(f"What to predict was given twice: {self.inputs} and --data {self.data}.")
        source = self.inputs or self.data
        result = commands.predict(
            self.path, source, self.out, self.checkpoint, self.weights, overrides, trusted=self.trust
        )
        if not _is_other_rank():
            text = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items())
            _print_result(result, text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Export:
    """Write the model of a checkpoint as one file for other programs (ONNX), and check that it gives the same answers."""

    path: Positional[Path]  # a run folder
    out: Path  # file to make, ending in .onnx
    data: Path | None = None  # samples to check with: an image or a folder; default: the run's validation samples
    checkpoint: str = "best"  # best, last, or the path of a checkpoint
    weights: Literal["auto", "raw", "ema"] = "auto"  # auto takes averaged weights where there are any
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        _no_overrides("export", overrides)
        from stoker.launch import commands

        result = commands.export(self.path, self.out, self.data, self.checkpoint, self.weights, trusted=self.trust)
        text = "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items())
        _print_result(result, text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Runs:
    """List runs with their state, best metric, rate and age."""

    folder: Positional[Path] = Path("runs")  # where the run folders are
    json: Flag = False  # print the list as JSON

    def run(self, overrides: list[str]) -> int:
        _no_overrides("runs", overrides)
        from stoker.runs.folder import list_runs

        found = list_runs(self.folder)
        rows = [("run", "state", "step", "best", "samples/s", "age")]
        for one in found:
            best = f"{one.metric} {one.best:.4f}" if one.best is not None else "-"
            rate = f"{one.samples_per_s:,.0f}" if one.samples_per_s else "-"
            rows.append((one.name, one.state, f"{one.step:,}", best, rate, console.seconds_as_text(one.age_s)))
        text = console.table(rows) if found else f"no runs in {self.folder}"
        _print_result([asdict(one) for one in found], text, as_json=self.json)
        return 0


@dataclass(frozen=True)
class Config:
    """Print the resolved configuration of a target, with the origin of every value."""

    target: Positional[str]  # recipe, recipe:preset, file.yaml, or module:attribute
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print keys, values and origins as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker import settings
        from stoker.launch import targets

        found = targets.resolve_target(self.target, overrides, trusted=self.trust)
        values = settings.kept_values(found.config)
        listing = {key: {"value": value, "origin": found.origins[key]} for key, value in values.items()}
        notes = "".join(f"# {note}\n" for note in found.notes)
        _print_result(listing, notes + settings.as_yaml(found.config, found.origins).rstrip(), as_json=self.json)
        return 0


COMMANDS: dict[str, Any] = {
    "simulate": Simulate,
    "pack": Pack,
    "train": Train,
    "resume": Resume,
    "fork": Fork,
    "evaluate": Evaluate,
    "predict": Predict,
    "export": Export,
    "runs": Runs,
    "config": Config,
}


def main() -> None:
    _mend_streams()
    if under_launcher := "STOKER_OUTCOME" in os.environ:
        _end_with_parent()
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    if under_launcher or "TORCHELASTIC_RUN_ID" in os.environ:
        # Taking gloo's connections down at exit now and then aborts a rank whose work is done (seen with torch 2.15).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _mend_streams() -> None:
    """Streams that were closed go nowhere, and letters that a terminal does not have are spelt out."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: PTH123, SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _end_with_parent() -> None:
    """Asked to stop when the launcher dies, whatever it dies of: nobody trains as an orphan."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def run(words: list[str]) -> int:
    """Exit code 0: fine; 1: findings, or the work failed; 2: the user's mistake."""
    words, overrides = _split_overrides(words or ["--help"])
    try:
        command: Command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="stoker", description=SUMMARY, args=words
        )
        return command.run(overrides)
    except (UserError, MachineError) as error:
        return _ended(error, str(error), error.exit_code)
    except KeyboardInterrupt as error:
        return _ended(error, "interrupted.", 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _ended(error, f"the disk is full ({error}). Make room and run it again.", 1)
        if error.filename is None:
            raise
        # The machine said no: a place that is read only, a folder where a file should be, a disk that is gone.
        return _ended(error, f"{error.filename}: {error.strerror}.", 1)


def _ended(error: BaseException, text: str, code: int) -> int:
    """Says why, once: of several processes the first that ends speaks, and the others only lost it."""
    ranked = "RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ
    if not ranked:
        console.say(f"stoker: {text}")
        return code
    from stoker.train.launcher import OUTCOME, say_outcome
    from stoker.train.parallel import LostRank

    lost = isinstance(error, LostRank)
    if not lost and say_outcome(code):
        console.say(f"stoker: {text}")
    if not isinstance(error, Stopped):
        return code
    # An exit code of 1 would make torchrun start all of them again, as long as it may.
    left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) - int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return 0 if OUTCOME in os.environ or left > 0 else code


def _no_overrides(command: str, overrides: list[str]) -> None:
    if overrides:
        raise UserError(f"`stoker {command}` takes no configuration keys, and got {overrides[0]}.")


def _split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Takes `--group.key VALUE` and `--group.key=VALUE` out of the words; a dot in the name tells them apart."""
    own: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(word)
            continue
        overrides.append(word)
        if not equals:
            overrides += [value] if (value := next(rest, None)) is not None else []
    return own, overrides


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


def _is_other_rank() -> bool:
    from stoker.runs.environment import environment_number

    return "TORCHELASTIC_RUN_ID" in os.environ and environment_number("RANK") > 0


def _show_outcome(outcome: Any, *, as_json: bool) -> int:
    if _is_other_rank():
        return 0  # the first process speaks for all
    rate = outcome.samples_per_s
    lines = [console.table(outcome.table())] if outcome.metrics else []
    lines += [f"{name}: {value}" for name, value in outcome.summary]
    lines += [f"samples/s: {rate:,.0f}"] if rate else []
    lines += [f"{name}: {value}" for name, value in outcome.about.items() if name != "run"]
    lines += [f"run folder: {outcome.run.path}"]
    result = {"run": str(outcome.run.path), "samples_per_s": rate, "metrics": outcome.metrics, **outcome.about}
    _print_result(result, "\n".join(lines), as_json=as_json)
    return 0


def _show_check(findings: Any, *, as_json: bool) -> int:
    rows = [("quantity", "here", "real data", "expected", "")]
    for one in findings:
        band = f"{_figure(one.low)} to {_figure(one.high)}"
        rows.append((one.name, _figure(one.value), _figure(one.real), band, "ok" if one.ok else "OUTSIDE"))
    _print_result([asdict(one) | {"ok": one.ok} for one in findings], console.table(rows), as_json=as_json)
    return 0 if all(one.ok for one in findings) else 1


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3f}"


def _print_result(value: Any, text: str, *, as_json: bool) -> None:
    from stoker.runs.events import in_words

    print(json.dumps(in_words(value), indent=2) if as_json else text)
