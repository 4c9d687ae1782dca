"""What was predicted and what came of it: one line a trial, kept with the user's state, and the score over all of them."""

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

RIGHT = 0.2  # a prediction within this share of what was measured


@dataclass(frozen=True)
class Entry:
    rule: str
    name: str  # of what was diagnosed
    predicted: float  # factor of the rate
    measured: float
    when: float

    @property
    def right(self) -> bool:
        return abs(self.predicted / max(self.measured, 1e-9) - 1) <= RIGHT


def ledger_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "stoker" / "doctor.jsonl"


def record(rule: str, name: str, predicted: float, measured: float) -> Entry:
    entry = Entry(rule, name, round(predicted, 4), round(measured, 4), round(time.time(), 1))
    path = ledger_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(entry)) + "\n")
    return entry


def entries() -> Iterator[Entry]:
    """All that can be read; half a line that a kill left is passed over."""
    try:
        lines = ledger_path().read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            one = Entry(**json.loads(line))
            numbers = float(one.predicted), float(one.measured), float(one.when)
        except (ValueError, TypeError):
            continue
        if all(map(math.isfinite, numbers)):
            yield Entry(str(one.rule), str(one.name), *numbers)


def score() -> list[tuple[str, ...]]:
    """By rule: how many trials, how many predictions were right, and by how much they were off in the middle."""
    by_rule: dict[str, list[Entry]] = {}
    for entry in entries():
        by_rule.setdefault(entry.rule, []).append(entry)
    rows: list[tuple[str, ...]] = [("rule", "trials", f"within {RIGHT:.0%}", "predicted / measured, median")]
    for rule, some in [*sorted(by_rule.items()), *([("all", list(entries()))] if by_rule else [])]:
        ratios = sorted(one.predicted / max(one.measured, 1e-9) for one in some)
        rows.append((rule, str(len(some)), str(sum(one.right for one in some)), f"{ratios[len(ratios) // 2]:.2f}"))
    return rows
