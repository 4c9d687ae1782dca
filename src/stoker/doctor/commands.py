"""What `stoker doctor` does: trials of a target or a probe, the events of a run, changes and their proof, two runs beside
each other."""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker import console, settings
from stoker.doctor import ledger
from stoker.doctor.finding import WARNING, Finding
from stoker.doctor.history import from_events
from stoker.doctor.learning.arms import SURE
from stoker.doctor.learning.picture import draw_rates
from stoker.doctor.learning.proof import compare_learning
from stoker.doctor.legs import Endless, timed_steps, warm_up
from stoker.doctor.measure import measure
from stoker.doctor.measured import Measured
from stoker.doctor.probe import Probe, find_probe, probe_of
from stoker.doctor.replay import replay
from stoker.doctor.rules import diagnose, verdict
from stoker.doctor.spikes import look_at_spikes, spike_steps
from stoker.doctor.waterfall import Bar, draw, waterfall
from stoker.errors import UserError
from stoker.files import write_bytes
from stoker.launch.commands import rebuild_run
from stoker.launch.targets import BUILT_IN, Target, resolve_target
from stoker.runs.events import EventLog
from stoker.runs.folder import RunFolder, open_run
from stoker.runs.schema import Found
from stoker.train.run import Run

SLOWER = 0.05  # of the rate, from which a run counts as slower than another
MOST_S = 600.0  # of a measurement
VERIFY_ROUNDS = 3
CERTAIN = ("evaluation", "saving", "straggler", "recompile")  # rules that no other work of the machine explains
WORTH_S = 60.0  # of training: of a shorter run nobody wants to know


@dataclass(frozen=True)
class Diagnosis:
    measured: Measured
    findings: list[Finding]
    bars: list[Bar]
    notes: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        looked = self.measured.run is not None or self.measured.learning is not None
        return looked and not any(one.share >= WARNING for one in self.findings)

    def as_json(self) -> dict[str, Any]:
        found = self.measured
        return {
            "name": found.name,
            "verdict": verdict(found, self.findings),
            "samples_per_s": found.rate,
            "waterfall": [vars(bar) for bar in self.bars],
            "findings": [one.as_json() for one in self.findings],
            "troubles": found.troubles,
            "notes": self.notes,
            "learning": None if found.learning is None else asdict(found.learning),
            "seconds": found.seconds,
        }

    def text(self) -> str:
        found = self.measured
        rate = f" {found.rate:,.0f} samples/s." if found.rate else ""
        parts = [f"{found.name}: {verdict(found, self.findings)}{rate}"]
        parts += ["", draw(self.bars)] if self.bars else []
        if found.learning is not None and found.learning.arms:
            parts += ["", console.table(found.learning.row_of_rates())]
        for one in self.findings:
            parts += ["", *one.lines(found.rate)]
        parts += [""] if found.troubles or self.notes else []
        parts += [f"could not be measured: {trouble}" for trouble in found.troubles]
        return "\n".join([*parts, *self.notes])


def examine(
    words: str, overrides: list[str], seconds: float, *, trusted: bool = False, only: str | None = None
) -> Diagnosis:
    """A target, a probe, or the folder of a run."""
    if not 0 < seconds <= MOST_S:
        raise UserError(f"--seconds is {seconds}; a measurement takes more than 0 and at most {MOST_S:.0f} s.")
    run = _run_of(words)
    if run is not None:
        if only is not None:
            raise UserError(f"{words} is a run: --only is for trials.")
        if overrides:
            raise UserError(f"{words} is a run: what its events say does not depend on {overrides[0]}.")
        found = from_events(run)
        notes = [
            "From the events of the run alone. Which part of a step is to blame, and what a change would gain, takes a "
            f"trial: `stoker doctor {run.config}`."
        ]
        replayed, more = _replays(run, trusted=trusted)
        return Diagnosis(found, [*replayed, *diagnose(found)], waterfall(found), [*notes, *more])
    # Results are printed to standard output: what a probe says goes elsewhere.
    with redirect_stdout(sys.stderr), _opened(words, overrides, trusted=trusted) as (probe, _):
        if only == "learning" and (probe.loss is None or probe.model is None):
            raise UserError(f"The probe {words} has no loss and model: of what it learns nothing can be said.")
        found = measure(probe, seconds, only)
    return Diagnosis(found, diagnose(found), waterfall(found))


def _replays(run: RunFolder, *, trusted: bool) -> tuple[list[Finding], list[str]]:
    """The first bad step that the run wrote down and the highest spike, once more; or why that cannot be done."""
    bundles = sorted((run.path / "bad_steps").glob("step-*"))
    looks: list[tuple[str, Callable[[Run], Finding]]] = []
    if bundles:
        looks.append((f"the bad step {bundles[0].name}", lambda made: replay(made, bundles[0]).finding()))
    if spike_steps(run):
        looks.append(("a spike", lambda made: look_at_spikes(made, run)))
    findings, notes = [], []
    for what, look in looks:
        try:
            with redirect_stdout(sys.stderr):
                findings.append(look(rebuild_run(run, trusted=trusted)))
        except UserError as error:
            notes.append(f"{what[0].upper()}{what[1:]} was written down, and cannot be replayed: {error}")
    return findings, notes


def _run_of(words: str) -> RunFolder | None:
    if not words.endswith((".yaml", ".yml")) and ":" not in words and words not in BUILT_IN:
        try:
            return open_run(Path(words))
        except UserError:
            if Path(words).is_dir():
                raise
    return None


@contextmanager
def _opened(words: str, overrides: list[str], *, trusted: bool) -> Iterator[tuple[Probe, Target | None]]:
    probe = find_probe(words)
    if probe is not None:
        if overrides:
            raise UserError(f"{words} is a probe, which has no key {overrides[0]}.")
        yield probe, None
        return
    target = resolve_target(words, overrides, trusted=trusted)
    with probe_of(target) as made:
        yield made, target


def further(
    words: str,
    overrides: list[str],
    diagnosis: Diagnosis,
    out: Path | None,
    seconds: float | None,
    *,
    trusted: bool,
    picture: Path | None = None,
) -> tuple[list[str], UserError | None]:
    """What drawing, applying the changes to `out`, and trying them for `seconds` came to, or why it could not be done."""
    told: list[str] = []
    try:
        if picture is not None:
            told.append(draw_picture(diagnosis, picture))
        if out is not None:
            told.append(apply(words, overrides, diagnosis, out, trusted=trusted))
        if seconds is not None:
            told.append(verify(words, overrides, diagnosis, seconds, trusted=trusted))
    except UserError as error:
        return told, error
    except OSError as error:
        return told, UserError(f"{error.filename or out or picture} cannot be written: {error.strerror}.")
    return told, None


def check_outputs(*paths: Path | None) -> None:
    """Before anything is measured."""
    for path in paths:
        if path is not None and path.exists():
            raise UserError(f"{path} exists, and nothing is overwritten: remove it, or name another file.")
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path} cannot be written: there is no folder {path.parent}.")
        if path is not None:
            try:
                tempfile.TemporaryFile(dir=path.parent).close()
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error.strerror}.") from error


def draw_picture(diagnosis: Diagnosis, out: Path) -> str:
    """Learning rates as SVG."""
    check_outputs(out)
    found = diagnosis.measured.learning
    if found is None or not found.arms:
        raise UserError("No learning rates were tried: there is nothing to draw.")
    write_bytes(out, draw_rates(found, diagnosis.measured.name).encode())
    return f"{out}: learning rates"


def apply(words: str, overrides: list[str], diagnosis: Diagnosis, out: Path, *, trusted: bool = False) -> str:
    """Writes the configuration with the changes of all findings that have some; says what differs."""
    check_outputs(out)
    changes = {key: value for one in reversed(diagnosis.findings) for key, value in one.keys.items()}
    if not changes:
        raise UserError("None of the findings is a matter of configuration: there is nothing to apply.")
    before = resolve_target(words, overrides, trusted=trusted)
    after = resolve_target(
        words, [*overrides, *(f"--{key}={value}" for key, value in changes.items())], trusted=trusted
    )
    write_bytes(out, settings.as_yaml(after.config).encode())
    differ = settings.difference(before.config, after.config)
    return "\n".join([f"{out}:", *(f"    {key}: {old} -> {new}" for key, (old, new) in differ.items())])


def verify(words: str, overrides: list[str], diagnosis: Diagnosis, seconds: float, *, trusted: bool = False) -> str:
    """The first change of configuration, before and after; what came of it goes into the ledger."""
    can_be_tried = (one for one in diagnosis.findings if one.keys and (one.factor or one.of == "learning"))
    one = next(can_be_tried, None)
    if one is None:
        raise UserError(
            "None of the findings can be tried: they have no change of configuration with a predicted rate."
        )
    changed = [*overrides, *(f"--{key}={value}" for key, value in one.keys.items())]
    with ExitStack() as stack:
        old, _ = stack.enter_context(_opened(words, overrides, trusted=trusted))
        new, _ = stack.enter_context(_opened(words, changed, trusted=trusted))
        if one.factor is None:
            return _learns_now(one, diagnosis.measured.name, *compare_learning(old, new, seconds))
        measured = compare_probes(old, new, seconds)
    entry = ledger.record(one.rule, diagnosis.measured.name, one.factor, measured)
    right = "right" if entry.right else "wrong"
    return f"{one.rule}: predicted {one.factor:.2f} x, measured {measured:.2f} x: {right} (within {ledger.RIGHT:.0%})."


def _learns_now(one: Finding, name: str, more: float, error: float, steps: int) -> str:
    """The ledger has 1 for a loss that falls further than before, as was promised, and 0 for one that does not."""
    is_so = more > SURE * error
    ledger.record(one.rule, name, 1.0, float(is_so))
    told = f"the loss lies {more:.4g} +- {error:.2g} below that of the run as it is: {'right' if is_so else 'wrong'}."
    return f"{one.rule}: after {steps} steps on batches that were not looked at, {told}"


def compare_probes(old: Probe, new: Probe, seconds: float) -> float:
    """Rate of the second over that of the first, each measured in turns."""
    rates: dict[int, list[float]] = {0: [], 1: []}
    sources = [Endless(probe.loader) for probe in (old, new)]
    for probe, source in zip((old, new), sources, strict=True):
        warm_up(probe, source.take())
        for _ in range(4):
            probe.step(source.take())
    for _ in range(VERIFY_ROUNDS):
        for number, (probe, source) in enumerate(zip((old, new), sources, strict=True)):
            samples, begin = 0, time.perf_counter()
            for _, _, _, batch in timed_steps(probe, source, seconds / VERIFY_ROUNDS):
                samples += probe.samples_of(batch)
            rates[number].append(samples / (time.perf_counter() - begin))
    for source in sources:
        source.close()
    middle = VERIFY_ROUNDS // 2
    return sorted(rates[1])[middle] / sorted(rates[0])[middle]


@dataclass(frozen=True)
class Comparison:
    rows: list[tuple[str, ...]]
    slower: bool
    ratio: float
    low: float
    high: float

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def against(path: str, other: str, share: float = SLOWER) -> Comparison:
    """Two runs leg by leg: the rate of the first over that of the second, with its interval."""
    first, second = (from_events(open_run(Path(one))) for one in (path, other))
    assert first.run is not None
    assert second.run is not None
    rows: list[tuple[str, ...]] = [("leg, ms a step", Path(path).name, Path(other).name, "ratio")]
    for mine, theirs in zip(waterfall(first), waterfall(second), strict=True):
        words = f"{mine.seconds / theirs.seconds:.2f}" if theirs.seconds > 0 else "-"
        rows.append((mine.name, f"{1e3 * mine.seconds:.3f}", f"{1e3 * theirs.seconds:.3f}", words))
    scale = first.samples / second.samples if second.samples else 1.0
    ratio = scale * second.run.mean / first.run.mean
    low = scale * second.run.interval()[0] / first.run.interval()[1]
    high = scale * second.run.interval()[1] / first.run.interval()[0]
    rows.append(("samples/s", f"{first.rate:,.0f}", f"{second.rate:,.0f}", f"{ratio:.2f}"))
    return Comparison(rows, high < 1 - share, ratio, low, high)


def of_events(run: RunFolder) -> list[Finding]:
    """What the events of a run tell, where they are enough to tell anything."""
    try:
        return diagnose(from_events(run))
    except UserError:
        return []


def at_end(run: RunFolder) -> str | None:
    """One line after training, where the events alone leave no doubt."""
    try:
        found = from_events(run)
    except UserError:
        return None
    findings = [one for one in diagnose(found) if one.share >= WARNING and one.rule in CERTAIN]
    if not findings or found.run is None or sum(found.run.seconds) < WORTH_S:
        return None
    with suppress(OSError), EventLog(run.events) as log:
        for one in findings:
            log.write(Found(rule=one.rule, share=round(one.share, 4), sentence=one.sentence, change=one.change))
    return f"doctor: {findings[0].sentence} `stoker doctor {run.path}` says more."
