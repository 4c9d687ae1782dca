"""What commands print: tables for people, JSON for programs. Of several processes the first one speaks."""

import json
import os
from dataclasses import asdict
from typing import Any

from stoker import console


def is_other_rank() -> bool:
    from stoker.runs.environment import environment_number

    return "TORCHELASTIC_RUN_ID" in os.environ and environment_number("RANK") > 0


def show_outcome(outcome: Any, *, as_json: bool) -> int:
    if is_other_rank():
        return 0  # the first process speaks for all
    rate = outcome.samples_per_s
    lines = [console.table(outcome.table())] if outcome.metrics else []
    lines += [f"{name}: {value}" for name, value in outcome.summary]
    lines += [f"samples/s: {rate:,.0f}"] if rate else []
    lines += [f"{name}: {value}" for name, value in outcome.about.items() if name != "run"]
    lines += [f"run folder: {outcome.folder.path}"]
    lines += [said] if (said := _doctor_line(outcome)) else []
    result = {"run": str(outcome.folder.path), "samples_per_s": rate, "metrics": outcome.metrics, **outcome.about}
    print_result(result, "\n".join(lines), as_json=as_json)
    return 0


def _doctor_line(outcome: Any) -> str | None:
    """Of a run that just ended."""
    if outcome.samples_per_s is None:
        return None
    from stoker.doctor.commands import at_end

    return at_end(outcome.folder)


def show_check(findings: Any, *, as_json: bool) -> int:
    rows = [("quantity", "here", "real data", "expected", "")]
    for one in findings:
        band = f"{_figure(one.low)} to {_figure(one.high)}"
        rows.append((one.name, _figure(one.value), _figure(one.real), band, "ok" if one.ok else "OUTSIDE"))
    print_result([asdict(one) | {"ok": one.ok} for one in findings], console.table(rows), as_json=as_json)
    return 0 if all(one.ok for one in findings) else 1


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:.3f}"


def print_result(value: Any, text: str, *, as_json: bool) -> None:
    from stoker.runs.events import in_words

    print(json.dumps(in_words(value), indent=2) if as_json else text)
