"""From the folder of a run to what its page shows: plain values, ready for JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stoker import console, settings
from stoker.errors import UserError
from stoker.report.series import MOST, Numbers, chart, in_order, short
from stoker.runs.folder import RunFolder, state_of
from stoker.runs.history import LOADER, STEP, History, Norms, read_history, step_of

MOST_PARAMETERS, MOST_CELLS = 500, 40_000  # of the heat map
WORDS = {
    "bad_step": "skipped: not finite",
    "spike": "spike of the loss",
    "stuck": "no better than chance",
    "checkpoint": "checkpoint",
    "not_saved": "not saved",
    "compilation": "compiled",
    "left_out": "samples left out",
    "out_of_patience": "out of patience",
    "end": "end",
}


def run_data(run: RunFolder, findings: Sequence[Mapping[str, Any]] | None = None, most: int = MOST) -> dict[str, Any]:
    """Everything a page says of one run. `findings` are the doctor's, where it was asked; else those that the run keeps."""
    history = read_history(run.events)
    state = state_of(run, history.ended)
    found = [dict(one) for one in (history.findings if findings is None else findings)]
    return {
        "name": run.path.resolve().name,
        "state": state,
        "verdict": _verdict(history, state, found),
        "figures": _figures(history, state),
        "charts": _charts(history, most),
        "marks": _marks(history),
        "counts": {kind: history.counts.get(kind, 0) for kind in WORDS},
        "norms": _norms(history.norms),
        "bars": _bars(history),
        "findings": found,
        "config": _config(run, history),
        "environment": _flat(_json(run.environment)),
        "sections": _sections(run.path),
    }


def _verdict(history: History, state: str, findings: Sequence[Mapping[str, Any]]) -> str:
    step = history.num_steps
    if not step:
        return f"The run is {state}, and no step was written down yet."
    said = [f"The run is {state} after step {step:,}."]
    if history.best is not None:
        best, last = history.best, history.evaluations[-1]
        said.append(f"Best {best['metric']}: {_figure(best['score'])} at step {best['step']:,}.")
        if last["step"] != best["step"]:
            said.append(f"At the end it was {_figure(last['score'])}.")
    said.append(f"{_rate(history)} samples a second, {history.wait_share:.0%} of the time waiting for data.")
    if history.counts.get("bad_step"):
        said.append(f"{history.counts['bad_step']:,} steps were not finite and were skipped.")
    said += [str(findings[0].get("sentence", ""))] if findings else []
    return " ".join(said)


def _figures(history: History, state: str) -> list[list[str]]:
    start = history.marks["start"][-1] if history.marks["start"] else {}
    rows = [["state", state], ["steps", f"{history.num_steps:,} of {int(start.get('steps') or 0):,}"]]
    if history.best is not None:
        rows.append([f"best {history.best['metric']}", _figure(history.best["score"])])
    losses = [one for one in history.steps["loss"] if math.isfinite(one)]
    if losses:
        rows.append(["loss at the end", _figure(losses[-1])])
    if _finite(start.get("know_nothing")) is not None:
        rows.append(["loss of knowing nothing", _figure(start["know_nothing"])])
    rows += [
        ["samples/s", _rate(history)],
        ["waiting for data", f"{history.wait_share:.1%}"],
        ["in steps", console.seconds_as_text(sum(history.steps["step_s"]))],
        ["parameters", f"{int(start.get('parameters') or 0):,}"],
        ["device", f"{start.get('device', '?')}, {start.get('precision', '?')}, {start.get('ranks', 1)} rank(s)"],
    ]
    for kind, name in (("bad_step", "steps skipped"), ("spike", "spikes"), ("left_out", "left out")):
        if history.counts.get(kind):
            rows.append([name, f"{history.counts[kind]:,}"])
    resumed = max(0, history.counts.get("start", 0) - 1)
    rows += [["taken up again", f"{resumed} times"]] if resumed else []
    if history.shuffle:
        rows.append(
            [
                "shuffle",
                f"neighbours correlate by {history.shuffle['lag1']:.3f} (+-{history.shuffle['lag1_error']:.3f})",
            ]
        )
    data = start.get("data") or {}
    rows += [
        [
            "data",
            f"{data.get('path', '?')}: {data.get('training', '?')} training, {data.get('validation', '?')} validation",
        ]
    ]
    return rows


def _charts(history: History, most: int) -> list[dict[str, Any]]:
    """One x axis each, so that each is thinned by what it shows."""
    kept = in_order(np.frombuffer(history.steps["step"], np.float64))
    at = {name: np.frombuffer(history.steps[name], np.float64)[kept] for name in STEP}
    step, start = at["step"], history.marks["start"][-1] if history.marks["start"] else {}
    gib = {
        "process": at["host_bytes"] / 2**30,
        "GPU": np.where(at["device_bytes"] > 0, at["device_bytes"], np.nan) / 2**30,
    }
    busy = {"CPU, all cores": 100 * at["cpu_share"], "GPU": 100 * at["device_busy"]}
    charts = [
        chart("loss", step, {"training loss": at["loss"]}, most, baseline=_finite(start.get("know_nothing"))),
        *_evaluation_charts(history),
        chart("lr", step, {"learning rate": at["lr"]}, most),
        chart("gradient", step, {"norm of the gradient": at["grad_norm"]}, most, log=True),
        chart("rate", step, {"samples/s": at["samples_per_s"]}, most, least=0),
        chart("wait", step, {"waiting for data, %": 100 * at["wait_share"]}, most, least=0),
        chart("memory", step, gib, most, least=0),
        chart("busy", step, busy, most, least=0),
        *_loader_charts(history, most),
    ]
    return [one for one in charts if one is not None]


def _evaluation_charts(history: History) -> list[dict[str, Any] | None]:
    """The metric of the run first, then the others."""
    judged = history.evaluations
    if not judged:
        return []
    kept = in_order(np.array([float(one["step"]) for one in judged]))
    judged = [judged[place] for place in kept]
    step = np.array([float(one["step"]) for one in judged])
    metric = str(judged[-1]["metric"])
    names = [name for name in judged[-1].get("metrics", {}) if name not in (metric, "samples")]
    charts = [chart("metric", step, {metric: _column(one["score"] for one in judged)}, goal=judged[-1]["goal"])]
    others = {name: _column(one.get("metrics", {}).get(name) for one in judged) for name in names}
    return [*charts, *(chart(f"metric {name}", step, {name: values}) for name, values in others.items())]


def _loader_charts(history: History, most: int) -> list[dict[str, Any] | None]:
    at = {name: np.frombuffer(history.loader[name], np.float64) for name in LOADER}
    if not len(at["step"]):
        return []
    kept = in_order(at["step"])
    spent = np.maximum(at["seconds"][kept], 1e-9)
    stages = {}
    for name, busy in history.stages.items():
        whole = np.full(len(at["step"]), np.nan)
        whole[: len(busy)] = np.frombuffer(busy, np.float64)
        stages[name] = whole[kept] / spent
    step = at["step"][kept]
    return [
        chart("stages", step, stages, most, least=0),
        chart("ready", step, {"micro-batches ready": at["ready"][kept]}, most, least=0),
        chart("longest wait", step, {"99 % of waits below, ms": at["wait_p99_ms"][kept]}, most),
    ]


def _marks(history: History) -> list[dict[str, Any]]:
    """What happened, and when: lines in the charts."""
    found = []
    last = 0
    for number, start in enumerate(history.marks["start"]):
        source = start.get("resumed_from") or start.get("forked_from")
        last = step_of(source) if source else last
        if source or number:
            kind = "fork" if start.get("forked_from") else "resume"
            found.append({"step": last, "kind": kind, "text": f"{kind} from {source or 'the beginning'}"})
    for kind, word in WORDS.items():
        for event in history.marks[kind]:
            step = event.get("step", history.num_steps)
            found.append({"step": int(step), "kind": kind, "text": _told(kind, word, event)})
    return sorted(found, key=lambda one: one["step"])


def _told(kind: str, word: str, event: Mapping[str, Any]) -> str:
    extra = {
        "bad_step": lambda: f": samples {event['samples'][:8]}",
        "spike": lambda: f": {_figure(event['loss'])} beside {_figure(event['mean'])}",
        "compilation": lambda: f": {event['graphs']} graphs in {_figure(event['seconds'])} s",
        "not_saved": lambda: f": {event['reason']}",
        "left_out": lambda: f": {event['name']}, {event['reason']}",
        "end": lambda: f": {event['state']}{', ' + str(event['reason']) if event.get('reason') else ''}",
    }.get(kind)
    try:
        return word + (extra() if extra else "")
    except (KeyError, TypeError, ValueError):
        return word  # of another version


def _norms(norms: Norms) -> dict[str, Any] | None:
    """At most MOST_CELLS of each: parameters with the largest gradients, and moments of which the largest stays."""
    largest: dict[str, float] = {}
    for moment in norms.gradient:
        for name, value in moment.items():
            largest[name] = max(largest.get(name, -math.inf), value if math.isfinite(value) else math.inf)
    if not largest:
        return None
    kept = set(sorted(largest, key=lambda name: -largest[name])[:MOST_PARAMETERS])
    names = [name for name in largest if name in kept]
    together = -(-len(norms.steps) * len(names) // MOST_CELLS)

    def rows(moments: Sequence[Mapping[str, float]]) -> list[list[float | None]]:
        return [short(_largest(_column(one.get(name) for one in moments), together), 3) for name in names]

    return {
        "steps": norms.steps[::together],
        "names": names,
        "gradient": rows(norms.gradient),
        "update": rows(norms.update_ratio),
        "of": len(largest),
    }


def _largest(values: Numbers, together: int) -> Numbers:
    """Of neighbours; NaN where one of them is no number."""
    return np.maximum.reduceat(values, np.arange(0, len(values), together))


def _bars(history: History) -> list[dict[str, Any]]:
    """Where the time of the run went, by its events; copies overlap with computing and are in none of them."""
    stepped = np.frombuffer(history.steps["step_s"], np.float64)
    waits = np.nan_to_num(np.frombuffer(history.steps["wait_share"], np.float64))
    total, waited = float(stepped.sum()), float((stepped * waits).sum())
    parts = {
        "computing": total - waited,
        "waiting for batches": waited,
        "compiling": history.seconds.get("compilation", 0.0),
        "evaluating": history.seconds.get("evaluation", 0.0),
        "saving": history.seconds.get("checkpoint", 0.0),
    }
    return [{"name": name, "seconds": seconds} for name, seconds in parts.items() if seconds > 0]


def _config(run: RunFolder, history: History) -> list[list[Any]]:
    """Key, value, whether it differs from the preset, and what the preset has."""
    try:
        values = _flat(settings.read_yaml(run.config)) if run.config.is_file() else []
    except UserError as error:
        return [["config.yaml", str(error), False, None]]
    changed = history.marks["start"][-1].get("changed") or {} if history.marks["start"] else {}
    return [[key, value, key in changed, _word(changed.get(key))] for key, value in values]


def _sections(path: Path) -> list[dict[str, Any]]:
    """What the newest evaluation in depth has to show."""
    pages = sorted((path / "evaluation").glob("*/page.json"), key=lambda one: one.stat().st_mtime)
    found = _json(pages[-1]) if pages else None
    sections = found.get("sections") if isinstance(found, dict) else None
    return [one for one in sections if isinstance(one, dict)] if isinstance(sections, list) else []


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def _flat(values: Any, prefix: str = "") -> list[list[str]]:
    if not isinstance(values, Mapping):
        return []
    rows: list[list[str]] = []
    for key, value in values.items():
        inner = _flat(value, f"{prefix}{key}.")
        rows += inner or [[f"{prefix}{key}", _word(value)]]
    return rows


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _column(values: Any) -> Numbers:
    return np.array([math.nan if one is None else float(one) for one in values], np.float64)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _figure(value: Any) -> str:
    return f"{float(value):.5g}"


def _rate(history: History) -> str:
    rates = [one for one in history.steps["samples_per_s"] if math.isfinite(one)]
    return f"{float(np.median(rates)):,.0f}" if rates else "?"
