"""`stoker doctor`, and the look that `stoker train --check` takes first."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tyro.conf import Positional

from stoker import console
from stoker.cli.options import Flag
from stoker.cli.output import print_result
from stoker.errors import MachineError, UserError


@dataclass(frozen=True)
class Doctor:
    """Say why a run is slow: what limits it, by how much, what to change, and what that will gain."""

    target: Positional[str | None] = None  # recipe, recipe:preset, file.yaml, module:probe, or the folder of a run
    seconds: float = 4.0  # of each measurement
    only: Literal["speed", "learning"] | None = None  # look at one of them alone
    picture: Path | None = None  # draw the learning rates into this SVG file
    page: Path | None = None  # write the diagnosis as a page to look at, one HTML file
    apply: Path | None = None  # write the changed configuration to this file
    verify: Flag = False  # try the first change, before and after in turns, and write down what came of it
    against: str | None = None  # another run: compare, and end with 1 where this one is slower
    slower: float = 0.05  # share of the rate from which a run counts as slower, of --against
    record: Flag = False  # show how often predictions were right
    trust: Flag = False  # run the code of a recipe that a file names
    json: Flag = False  # print the result as JSON

    def run(self, overrides: list[str]) -> int:
        from stoker.doctor import commands, ledger

        if self.record and self != Doctor(record=True, json=self.json):
            raise UserError("--record shows what was verified so far, and takes no other option than --json.")
        if self.against is not None and (
            self.apply is not None
            or self.picture is not None
            or self.page is not None
            or self.verify
            or self.only
            or self.seconds != Doctor.seconds
        ):
            raise UserError("--against compares what two runs wrote down: nothing is measured, applied or verified.")
        if self.against is None and self.slower != Doctor.slower:
            raise UserError("--slower is for --against.")
        if not 0 <= self.slower < 1:
            raise UserError(f"--slower is {self.slower}: a share of the rate from 0 to 1, such as 0.05.")
        if self.record:
            rows = ledger.score()
            print_result(rows, console.table(rows) if len(rows) > 1 else "nothing was verified yet", as_json=self.json)
            return 0
        if self.target is None:
            raise UserError("What should be looked at? `stoker doctor TARGET`, `module:probe`, or the folder of a run.")
        if self.against is not None:
            compared = commands.against(_here(self.target), _here(self.against), self.slower)
            slower = "slower" if compared.slower else "not slower"
            interval = f"{compared.low:.2f} to {compared.high:.2f}"
            text = f"{console.table(compared.rows)}\n{slower}: {compared.ratio:.2f} ({interval})"
            print_result(compared.as_json(), text, as_json=self.json)
            return 1 if compared.slower else 0
        return self._examine(overrides)

    def _examine(self, overrides: list[str]) -> int:
        from stoker.doctor import commands

        assert self.target is not None
        commands.check_outputs(self.apply, self.picture, self.page)
        if self.picture is not None and self.only == "speed":
            raise UserError("--picture draws learning rates, and --only speed tries none.")
        target = _here(self.target)
        found = commands.examine(target, overrides, self.seconds, trusted=self.trust, only=self.only)
        seconds = self.seconds if self.verify else None
        more, refused = commands.further(
            target, overrides, found, self.apply, seconds, trusted=self.trust, picture=self.picture
        )
        if self.page is not None:
            more = [*more, _write_page(found, self.page)]
        print_result({**found.as_json(), "more": more}, "\n".join([found.text(), *more]), as_json=self.json)
        if refused is not None:
            raise refused
        return 0 if found.is_well else 1


def _write_page(found: Any, out: Path) -> str:
    from stoker.doctor import ledger
    from stoker.files import write_bytes
    from stoker.report.page import page, page_data
    from stoker.runs.events import in_words

    told = in_words(found.as_json())
    bars = [{"name": bar.name, "seconds": bar.seconds, "unsure": bar.low <= 0 < bar.seconds} for bar in found.bars]
    notes = [*(f"could not be measured: {one}" for one in told["troubles"]), *told["notes"]]
    diagnosis = {"verdict": told["verdict"], "bars": bars, "findings": told["findings"], "troubles": notes}
    write_bytes(
        out, page(f"Diagnosis of {told['name']}", page_data(diagnosis=diagnosis, record=ledger.score())).encode()
    )
    return f"page: {out}"


def _here(target: str) -> str:
    """A run that is kept in a store is copied first."""
    from stoker.launch.elsewhere import here

    return str(here(target)) if "://" in target else target


def stop_if_it_cannot_learn(target: str, overrides: list[str], *, trusted: bool) -> None:
    """In a process of its own: nothing that it opens or compiles is in the way of the run. Of several ranks nobody looks."""
    if "RANK" in os.environ:  # the one who started us has looked
        return
    words = [sys.executable, "-m", "stoker", "doctor", target, "--only", "learning", "--seconds", "1", "--json"]
    done = subprocess.run([*words, *overrides, *(["--trust"] if trusted else [])], stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:
        raise UserError("What the model would learn could not be looked at: see above.")
    try:
        told = json.loads(done.stdout)
    except ValueError:
        raise MachineError(f"The look at what the model learns ended with {done.returncode}: see above.") from None
    serious = [one for one in told["findings"] if one["of"] == "learning" and one["severity"] == "critical"]
    for one in serious:
        console.say("\n    ".join([f"CRITICAL {one['rule']}: {one['sentence']}", *one["evidence"], one["change"]]))
    if serious:
        raise UserError(f"Not trained: {serious[0]['sentence']} Without --check it is trained all the same.")
    console.say(f"check: {told['verdict']}")
