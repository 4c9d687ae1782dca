"""What `stoker tune` does: the stages one after the other, the whole beside what was there, and what it came to."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from stoker import console, settings
from stoker.doctor import ledger
from stoker.doctor.commands import check_outputs
from stoker.errors import UserError
from stoker.files import write_bytes
from stoker.launch.targets import Target, resolve_target
from stoker.tune import rates, stored
from stoker.tune.batch import offer_batch, tune_pieces
from stoker.tune.search import GAIN, Decision, OutOfTime, Search
from stoker.tune.space import STAGES, Knob, Stage, Tunable, plain, space_of
from stoker.tune.trial import Answer, find_tunable, tried, words_of

TURNS = 2  # of the joint proof
LEAST_S = 10.0
RATES_SHARE = 0.7  # of the time that is left, for the training of rates; the rest is for starting and for surprises
# Bytes of a step, in the order of the table; what a GPU has and what the machine has.
ON_DEVICE = (
    "weights",
    "gradients",
    "moments",
    "activations",
    "activations a sample",
    "of them in recorded graphs",
    "held beyond the peak",
    "workspaces and context",
    "headroom",
)
ON_HOST = ("batch", "batches made ahead", "cache", "this process", "its processes", "RAM")


@dataclass
class Tuning:
    name: str
    before: Answer = field(default_factory=Answer)  # the run as it is
    after: Answer = field(default_factory=Answer)
    ratio: float | None = None  # of their rates, measured in turns at the end
    chosen: dict[str, Any] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
    told: list[str] = field(default_factory=list)  # offers, and what could not be done
    rates: dict[str, Any] | None = None
    trials: int = 0
    seconds: float = 0.0
    planned_steps: int | None = None
    ended: str | None = None  # why it ended early

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "samples_per_s": {"before": self.before.rate, "after": self.after.rate, "ratio": self.ratio},
            "chosen": {key: plain(value) for key, value in self.chosen.items()},
            "decisions": [one.as_json() for one in self.decisions],
            "told": self.told,
            "rates": self.rates,
            "ceilings": self.before.facts.get("ceilings"),
            "memory": {"before": self.before.memory, "after": self.after.memory},
            "trials": self.trials,
            "seconds": round(self.seconds, 1),
            "saves_s": self.saves_s,
            "ended": self.ended,
        }

    @property
    def saves_s(self) -> float | None:
        """Of the run that is planned."""
        if not self.planned_steps or not self.before.rate or not self.ratio:
            return None
        whole = self.planned_steps * self.before.samples / self.before.rate
        return whole * (1 - 1 / self.ratio)

    def text(self) -> str:
        parts = [_machine(self.before.facts.get("ceilings") or {})]
        parts += [line for one in self.decisions for line in one.lines()]
        if self.rates is not None:
            parts += ["", console.table(rates.table_of_rates(self.rates)), _rate_words(self.rates)]
        parts += ["", *self.told] if self.told else []
        if self.after.memory:
            parts += ["", console.table(_memory_table(self.before.memory, self.after.memory))]
        parts += ["", self._sum()]
        return "\n".join(parts)

    def _sum(self) -> str:
        changes = ", ".join(f"{key}={value}" for key, value in self.chosen.items()) or "nothing to change"
        gained = f" {self.ratio:.2f} times the rate, measured in turns." if self.ratio else ""
        saved = f" The planned run is shorter by {self.saves_s:,.0f} s." if (self.saves_s or 0) > 0 else ""
        early = f" {self.ended}" if self.ended else ""
        return f"{self.name}: {changes}.{gained} {self.trials} trials in {self.seconds:.0f} s.{saved}{early}"


def tune(
    words: str,
    overrides: list[str],
    out: Path,
    *,
    budget_s: float,
    seconds: float,
    only: list[Stage] | None = None,
    allow_batch_change: bool = False,
    picture: Path | None = None,
    trusted: bool = False,
) -> Tuning:
    """Tries settings within the budget, and writes those that were best."""
    check_outputs(out, picture)
    stages: list[Stage] = list(STAGES) if only is None else only
    if budget_s < LEAST_S:
        raise UserError(f"--budget is {budget_s:.0f} s, which is not enough for a single trial; try 5m.")
    if picture is not None and ("lr" not in stages or picture.resolve() == out.resolve()):
        raise UserError(
            "--picture draws learning rates into a file of its own: let --only name lr, and --out another file."
        )
    if allow_batch_change and "batch" not in stages:
        raise UserError("--allow-batch-change is for the stage batch, which --only leaves out.")
    with redirect_stdout(sys.stderr):  # what a module prints when it is imported is no result
        own = find_tunable(words)
    target = None if own is not None else resolve_target(words, overrides, trusted=trusted)
    if own is not None:
        _check_own(words, overrides, only, allow_batch_change=allow_batch_change)
    found = Tuning(own.name if own is not None else target.config.recipe)  # type: ignore[union-attr]
    with console.progress("tune", int(budget_s), "seconds") as bar, _terminated_like_interrupted():
        run = partial(tried, tick=bar.advance)
        search = Search(words, overrides, seconds, budget_s, trusted, run=run)
        _searched(search, found, own, target, stages, allow_batch=allow_batch_change)
    found.chosen, found.decisions = dict(search.best), search.decisions
    found.trials, found.seconds = search.num_trials, search.spent_s
    _write(found, words, overrides, target, out, trusted=trusted)
    if picture is not None and found.rates is not None:
        rates.draw(found.rates, found.name, picture)
    elif picture is not None:
        found.told.append(f"{picture} was not drawn: no rates were compared.")
    return found


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM leaves the best so far too."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _searched(
    search: Search, found: Tuning, own: Tunable | None, target: Target | None, stages: list[Stage], *, allow_batch: bool
) -> None:
    """All stages and the proof, or as far as the budget, or somebody's patience, goes."""
    try:
        found.before = _first(search, found)
        with suppress(OutOfTime):
            _stages(search, found, own, target, stages, allow_batch=allow_batch)
            found.ended = None
        search.reserved_s = 0.0
        _prove(search, found)
    except OutOfTime:
        found.ended = "The budget ended before the whole was proven: these are the best so far."
    except KeyboardInterrupt:
        if not search.num_trials:
            raise
        found.ended = "Interrupted: these are the best so far, and not proven."


def _check_own(words: str, overrides: list[str], only: list[Stage] | None, *, allow_batch_change: bool) -> None:
    """What means nothing for a loop of one's own."""
    if overrides:
        raise UserError(f"{words} is a probe, which has no key {overrides[0]}.")
    if allow_batch_change or "batch" in (only or ()):
        raise UserError(f"{words} is a probe: its batch is one of its knobs, or not tuned.")


def _first(search: Search, found: Tuning) -> Answer:
    answer = search.trial({}, "run")
    if not answer.ok and not answer.out_of_memory:
        raise UserError(f"{search.target} cannot be tried as it is: {answer.error}")
    if not answer.ok:  # it may still be opened
        answer = replace(answer, facts=search.trial({}, "facts").facts)
    found.planned_steps = answer.facts.get("planned_steps")
    proof = 2 * TURNS * search.spent_s
    search.reserved_s = proof if proof < search.budget_s / 2 else 0.0
    found.ended = "The budget ended before everything was tried."
    return answer


def _stages(
    search: Search, found: Tuning, own: Tunable | None, target: Target | None, only: list[Stage], *, allow_batch: bool
) -> None:
    knobs = own.space() if own is not None else _space(found, target)
    now: dict[str, Any] = own.now() if own is not None else settings.kept_values(target.config)  # type: ignore[union-attr]
    facts = found.before.facts
    # What does not fit must be cut first: nothing else can be tried before.
    order = ("batch", "step", "loader", "lr") if found.before.out_of_memory else STAGES
    for stage in order:
        if stage not in only:
            continue
        if stage == "loader" and (fed := _is_fed(search)) is not None:
            found.told.append(fed)
            continue
        for knob in knobs:
            if knob.stage == stage:
                search.choose(knob, _value(now, knob, facts), "run" if stage == "loader" else "resident")
        if stage == "batch" and target is not None:
            batch_norm = bool(facts.get("batch_norm"))
            largest = int(facts.get("largest_cost", 1))
            tune_pieces(search, now.get("loader.micro_cost"), largest, batch_norm=batch_norm)
            if (size := now.get("loader.batch_size")) is not None:
                offer = offer_batch(
                    search,
                    size,
                    now["train.lr"],
                    str(facts.get("optimizer")),
                    allowed=allow_batch,
                    samples=int(facts.get("samples", 1 << 40)),
                    scaled=now.get("train.lr_batch") is not None,
                )
                found.told += [offer] if offer else []
        if stage == "lr":
            _learning_rate(search, found, now.get("train.lr") if target is not None else None)


def _is_fed(search: Search) -> str | None:
    """Whether the run is as fast as its step on batches that lie ready: then no setting of the loader gains anything."""
    ready, fed = search.trial({}, "resident"), search.trial({}, "run")
    if not (ready.ok and fed.ok) or fed.rate * (1 + GAIN) < ready.rate:
        return None
    return (
        f"The loader was left as it is: the run has {min(1.0, fed.rate / ready.rate):.2f} of the rate of its step on "
        f"batches that lie ready ({ready.rate:,.0f} samples/s), which is all that a loader can give."
    )


def _space(found: Tuning, target: Target | None) -> list[Knob]:
    assert target is not None
    facts = found.before.facts
    return space_of(
        target.config,
        on_gpu=facts.get("device") == "cuda",
        fixed_shapes=bool(facts.get("fixed_shapes")),
        batches_that_fit=facts.get("batches_that_fit"),
    )


def _value(now: dict[str, Any], knob: Knob, facts: dict[str, Any]) -> Any:
    """What a setting that is left to the program comes to."""
    value = now.get(knob.name)
    if knob.name == "train.precision" and value == "auto":
        return "bf16" if facts.get("device") == "cuda" else "fp32"
    return value


def _learning_rate(search: Search, found: Tuning, now: float | None) -> None:
    """`now`: the key's value; None: a loop of one's own, whose rate is only told."""
    # It comes last and takes what is left: a rate is found by training, and the longer the better.
    answer = search.trial({}, "rates", seconds=max(search.seconds, RATES_SHARE * search.left_s))
    if not answer.ok or answer.rates is None:
        found.told.append(f"Learning rates were not compared: {answer.error}")
        return
    found.rates = answer.rates
    if answer.rates["chosen"] is None or now is None:
        return
    # Rates are compared as the optimizer has them; the key is stated for train.lr_batch samples.
    value = float(f"{answer.rates['chosen'] / float(answer.facts.get('lr_scale', 1.0)):.4g}")
    now = search.best.get("train.lr", now)  # of a larger batch, if that was taken
    value = now if abs(value / now - 1) < 0.01 else value
    if value != now:
        search.best["train.lr"] = value
    search.decisions.append(Decision("train.lr", now, value, [], "rates side by side, from the same weights"))


def _rate_words(found: dict[str, Any]) -> str:
    swept = found["range test"]["suggests"]
    second = "" if swept is None else f"The range test suggests {swept:.2e}, which has no error of its own."
    if found["chosen"] is None:
        return (
            f"No decision: after {found['steps']} steps no rate is surely better than with the labels of other samples. A "
            f"larger --budget trains for longer. {second}"
        )
    extended = " The best lies at the end of the range that was tried: it may be higher." if found["at the end"] else ""
    return f"Learning rate {found['chosen']:.2e}.{extended} {second}"


def _prove(search: Search, found: Tuning) -> None:
    """Both as whole runs, in turns and anew; predicted and measured go into the doctor's ledger."""
    speeds = {key: value for key, value in search.best.items() if key != "train.lr"}
    if not speeds:
        found.after = found.before
        return
    chosen = dict(search.best)
    predicted = search.trial({}, "run", called="all of it")
    measured: dict[bool, list[Answer]] = {False: [], True: []}
    try:
        for _ in range(TURNS):
            for new in (False, True):
                search.best = chosen if new else {}
                called = "proof, as tuned" if new else "proof, as it was"
                measured[new].append(search.trial({}, "run", anew=True, called=called))
    finally:
        search.best = chosen
    old, new_ones = ([one for one in measured[side] if one.ok] for side in (False, True))
    found.after = max(new_ones, key=lambda one: one.rate, default=predicted)
    if old and new_ones and predicted.ok and found.before.ok:
        found.ratio = max(one.rate for one in new_ones) / max(one.rate for one in old)
        with suppress(OSError):
            ledger.record("tune", found.name, predicted.rate / found.before.rate, found.ratio)
    elif new_ones and not old:
        found.told.append("As it was it does not run; with these settings it does.")
    if not new_ones or (found.ratio is not None and found.ratio <= 1):
        _take_back(search, found, new_ones)


def _take_back(search: Search, found: Tuning, new_ones: list[Answer]) -> None:
    """What does not stand the proof is not taken; a rate that belongs to a larger batch goes with it."""
    words = ", ".join(f"{key}={value}" for key, value in search.best.items() if key != "train.lr")
    failed = f"{found.ratio:.2f} times the rate" if new_ones else "a run that fails"
    found.told.append(f"The proof gave {failed} with {words}: nothing of that is taken.")
    kept = {} if "loader.batch_size" in search.best else {"train.lr": search.best.get("train.lr")}
    # What was proven before and is stored stays.
    search.decisions = [replace(one, whole=one.whole and one.knob not in search.best) for one in search.decisions]
    search.best = {key: value for key, value in kept.items() if value is not None}
    found.after, found.ratio = found.before, None


def _write(found: Tuning, words: str, overrides: list[str], target: Target | None, out: Path, *, trusted: bool) -> None:
    if target is None:
        write_bytes(out, settings.plain_yaml({key: plain(value) for key, value in found.chosen.items()}).encode())
        return
    tuned = resolve_target(words, [*overrides, *words_of(found.chosen)], trusted=trusted)
    write_bytes(out, settings.as_yaml(tuned.config).encode())
    decided = {one.knob for one in found.decisions if one.whole}
    speeds = found.chosen.keys() - {"train.lr"}
    if decided and (found.ratio is not None or not speeds):  # what is faster was proven
        fingerprint = str(found.before.facts.get("fingerprint", ""))
        gain = (found.after.rate, found.before.rate) if found.ratio is not None else (0.0, 0.0)
        with suppress(OSError):
            stored.keep(target.config, stored.Stored(found.chosen, fingerprint, *gain), decided)


def _machine(found: dict[str, Any]) -> str:
    """What the machine can do at most, as the doctor measures it."""
    words = [f"{rate / 1e12:.3g} TFLOP/s in {kind}" for kind, rate in found.get("products", {}).items()]
    for key, unit, size in (
        ("copy", "GB/s copied in its memory", 1e9),
        ("to_device", "GB/s to the GPU", 1e9),
        ("disk", "GB/s from disk", 1e9),
        ("decode", "JPEG/s a thread", 1.0),
    ):
        if found.get(key):
            words.append(f"{found[key] / size:,.3g} {unit}")
    return f"This machine, at most: {', '.join(words)}."


def _memory_table(before: dict[str, float], after: dict[str, float]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("memory, MB", "before", "after")]
    for name in (*ON_DEVICE, *ON_HOST):
        if name in after:
            rows.append((name, f"{before.get(name, 0.0) / 1e6:,.2f}", f"{after[name] / 1e6:,.2f}"))
    return rows
