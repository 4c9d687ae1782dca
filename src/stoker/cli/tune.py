"""`stoker tune`, and what `stoker train` knows of it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from stoker import console
from stoker.cli.options import Flag, local
from stoker.cli.output import is_other_rank, print_result
from stoker.errors import UserError

UNSAID = ("preset", "default")  # how the origin begins of a value that nobody gave


@dataclass(frozen=True)
class Tune:
    """Find batch size, precision, compilation, threads and learning rate for this machine and this data, by measurement."""

    target: Positional[str]  # recipe, recipe:preset, file.yaml, or module:attribute that is a stoker.Tunable
    out: Path  # file to write the settings to
    budget: str = "5m"  # the most that all trials may take: 90s, 5m, 1h
    only: str | None = None  # step,batch,loader,lr: some of them
    seconds: float = 2.0  # of each measurement
    allow_batch_change: Flag = False  # take another number of samples a step, if it is faster and learns as much
    picture: Path | None = None  # draw the learning rates into this PNG file
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.tune.commands import tune

        local(self.out)
        if not 0 < self.seconds <= 120:
            raise UserError(f"--seconds is {self.seconds}; a measurement takes more than 0 and at most 120 s.")
        found = tune(
            self.target,
            overrides,
            self.out,
            budget_s=seconds_of(self.budget),
            seconds=self.seconds,
            only=_stages(self.only),
            allow_batch_change=self.allow_batch_change,
            picture=self.picture,
            trusted=self.trust,
        )
        print_result(found.as_json(), f"{found.text()}\n{self.out}", as_json=self.json)
        return 0


def seconds_of(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or not float(found[1]):
        raise UserError(f"--budget is {text!r}, and should be a time such as 90s, 5m or 1h.")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _stages(text: str | None) -> Any:
    from stoker.tune.space import STAGES

    if text is None:
        return None
    named = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in named if word not in STAGES]:
        raise UserError(f"--only names {unknown[0]!r}; the stages are {', '.join(STAGES)}.")
    if not named:
        raise UserError(f"--only names no stage; they are {', '.join(STAGES)}.")
    return named


def tuned_words(target: Any, *, asked: bool, several: bool = False) -> tuple[list[str], str | None]:
    """Settings that were found for this target on this machine, and the fingerprint of the data they were found for.

    If they are asked for; else nothing, and a line that says they exist. `several`: processes.
    """
    from stoker import settings
    from stoker.tune.stored import TOGETHER, known
    from stoker.tune.trial import words_of

    if asked and (several or int(os.environ.get("WORLD_SIZE", "1")) > 1):
        raise UserError("--tuned takes settings that were measured with one process; they say nothing of several.")
    found = known(target.config)
    if found is None and asked:
        raise UserError(
            "Nothing was tuned for this model on this machine and data.path: `stoker tune TARGET --out tuned.yaml`."
        )
    if found is None or not found.knobs:
        return [], None
    # What somebody typed or wrote into a file is meant.
    own = {key: value for key, value in found.knobs.items() if target.origins.get(key, "").startswith(UNSAID)}
    if found.knobs.keys() >= TOGETHER and not own.keys() >= TOGETHER:  # the rate was found for the batch
        own = {key: value for key, value in own.items() if key not in TOGETHER}
    now = settings.kept_values(target.config)
    own = {key: value for key, value in own.items() if str(now.get(key)) != str(value)}
    if not asked:
        if is_other_rank() or not own:
            return [], None
        gain = f" ({found.rate / found.before:.2f} times the rate)" if found.before else ""
        console.say(f"Settings were tuned for this on this machine{gain}: --tuned takes them.")
        return [], None
    if not is_other_rank():
        console.say("tuned: " + (", ".join(f"{key}={value}" for key, value in own.items()) or "as it is already"))
    return words_of(own), found.fingerprint
