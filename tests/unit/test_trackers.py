"""Trackers hear the numbers of every event, and one that fails never stops training."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stoker.errors import UserError
from stoker.runs import schema
from stoker.runs.events import EventLog
from stoker.train.trackers import LogConfig, open_tracker


def write_events(folder: Path, config: LogConfig) -> None:
    listener = open_tracker(config, folder, "icecube-now", {"train.lr": 1e-3})
    assert listener is not None
    with EventLog(folder / "events.jsonl") as log:
        log.listeners.append(listener)
        log.write(schema.Start())
        place = {"epoch": 0, "consumed": 9, "samples_crc32": 1, "lr": 0.1, "grad_norm": 1.0, "bad": 0}
        for step in (1, 2):
            log.write(schema.Step(step=step, loss=1.0 / step, samples_per_s=10.0, wait_share=0.0, **place))
        log.write(schema.Evaluation(step=2, metric="error", goal="min", score=0.5, metrics={"error": 0.5}))
    listener.close()


def test_tensorboard_files_hold_the_curves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_events(tmp_path, LogConfig(tracker="tensorboard"))
    seen = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    seen.Reload()
    assert [point.value for point in seen.Scalars("step/loss")] == [1.0, 0.5]
    assert seen.Scalars("evaluation/error")[0].step == 2


@pytest.mark.parametrize("offline", [True, False])
def test_wandb_gets_name_config_mode_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda numbers, step: calls.append((step, numbers)), finish=lambda: calls.append("end"))
    module = ModuleType("wandb")
    module.init = lambda **words: calls.append(words) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    write_events(tmp_path, LogConfig(tracker="wandb", offline=offline, project="ice"))
    assert calls[0]["name"] == "icecube-now"
    assert calls[0]["config"] == {"train.lr": 1e-3}
    assert calls[0]["mode"] == ("offline" if offline else "online")
    assert calls[1][1]["step/loss"] == 1.0
    assert "system/cpu_percent" in calls[1][1]
    assert calls[-1] == "end"


def test_a_tracker_that_fails_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*words: Any, **more: Any) -> None:
        raise ConnectionError("no network")

    module = ModuleType("trackio")
    module.init, module.log, module.finish = (lambda **words: None), fail, fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    write_events(tmp_path, LogConfig(tracker="trackio"))
    assert capsys.readouterr().err.count("training goes on without it") == 1
    module.init = fail  # type: ignore[attr-defined]
    assert open_tracker(LogConfig(tracker="trackio"), tmp_path, "x", {}) is None


def test_a_tracker_that_is_not_installed_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        open_tracker(LogConfig(tracker="wandb"), tmp_path, "x", {})
