"""Runs that nobody trained: their events are written by hand."""

import json
import platform
from pathlib import Path
from typing import Any

from stoker.runs.events import EventLog, in_words
from stoker.runs.schema import Checkpoint, End, Evaluation, Event, LoaderTimes, Norms, Spike, Start, Step


def step_event(step: int, loss: float, **more: Any) -> Step:
    return Step(**{
        "step": step, "epoch": 0, "consumed": step * 8, "samples_crc32": 1, "lr": 1e-3, "loss": loss, "bad": 0,
        "grad_norm": 1.0 + loss, "samples_per_s": 1000.0 + step % 7, "wait_share": 0.1, "host_bytes": 1 << 30,
        "step_ms": [8.0, 7.5], **more,
    })  # fmt: skip


def loader_event(step: int) -> LoaderTimes:
    stages = {"read": {"busy_s": 0.01, "p50_ms": 1.0, "p99_ms": 2.0, "bytes": 10.0, "count": 1.0}}
    return LoaderTimes(
        step=step, seconds=0.02, wait_s=0.001, wait_p50_ms=0.1, wait_p99_ms=0.5, ready=3.0, stages=stages
    )


def start_event(**more: Any) -> Start:
    return Start(**{"data": {"path": "somewhere", "training": 80, "validation": 20}, "parameters": 5, "steps": 100,
                    "device": "cpu", "precision": "fp32", "know_nothing": 2.0, **more})  # fmt: skip


def make_run(folder: Path, events: list[Event], config: str = "recipe: icecube:demo\ntrain:\n  lr: 0.001\n") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"host": platform.node(), "pid": 1, "started": 0.0}))
    with EventLog(folder / "events.jsonl") as log:
        for event in events:
            log.write(event)
    return folder


def usual_run(folder: Path, num_steps: int = 40, scale: float = 1.0, **start: Any) -> Path:
    """A whole run with every kind of chart, written by hand."""
    events: list[Event] = [start_event(**start)]
    for step in range(1, num_steps + 1):
        loss = scale * (2.0 / step + 0.1)
        events += [step_event(step, loss, cpu_share=0.5), loader_event(step)]
        if step % 10 == 0:
            norms = {f"layer.{number}.weight": loss * (number + 1) for number in range(5)}
            events += [Norms(step=step, gradient=norms, update_ratio=dict.fromkeys(norms, 1e-3))]
            score = 0.5 + loss
            events += [
                Evaluation(
                    step=step,
                    metric="error",
                    goal="min",
                    score=score,
                    metrics={"error": score, "other": 1.0},
                    seconds=0.5,
                )
            ]
            events += [Checkpoint(step=step, seconds=0.1)]
    events += [Spike(step=7, loss=9.0, mean=1.0, sigma=0.1), End(state="finished")]
    return make_run(folder, events)


def write_lines(path: Path, count: int) -> None:
    """Events of a long run, without going through the log for each."""
    step, loader = (
        {"event": one.kind, "version": 2, "time": 1.0, **in_words(vars(one))}
        for one in (step_event(1, 1.0), loader_event(1))
    )
    with path.open("a") as file:
        for number in range(1, count // 2 + 1):
            loss = 99.0 if number == 77_777 or number == count // 4 else 1.0 + 1.0 / number
            file.write(
                json.dumps({**step, "step": number, "loss": loss})
                + "\n"
                + json.dumps({**loader, "step": number})
                + "\n"
            )
