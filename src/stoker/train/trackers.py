"""Trackers: Weights & Biases, TensorBoard and trackio hear of every event. One that fails never stops training."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from stoker import console
from stoker.errors import UserError
from stoker.settings import config

Event = dict[str, Any]
NUMBERS = ("step", "evaluation", "loader")  # events whose numbers are drawn as curves


@config
class LogConfig:
    tracker: Literal["wandb", "tensorboard", "trackio"] | None = None  # besides events.jsonl, which is always written
    project: str = "stoker"
    offline: bool = False  # of wandb: write to disk, `wandb sync` later

    def without_effect(self) -> dict[str, str]:
        """Keys that change nothing beside the others, and why."""
        if self.tracker is None:
            return dict.fromkeys(("project", "offline"), "log.tracker is not set")
        found = {} if self.tracker == "wandb" else {"offline": f"log.tracker is {self.tracker}"}
        return found | ({"project": "tensorboard knows no projects"} if self.tracker == "tensorboard" else {})


class Tracker(Protocol):
    def log(self, numbers: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def open_tracker(config: LogConfig, run: Path, name: str, settings: dict[str, Any]) -> "Listener | None":
    """Called for every event, or None where no tracker is asked for. A tracker that is not installed is an error now."""
    if config.tracker is None:
        return None
    makers: dict[str, Callable[..., Tracker]] = {"wandb": _Wandb, "tensorboard": _TensorBoard, "trackio": _Trackio}
    try:
        tracker = makers[config.tracker](config, run, name, settings)
    except ModuleNotFoundError as error:
        raise UserError(
            f"log.tracker is {config.tracker}, and the package {error.name} is not installed: pip install {error.name}."
        ) from error
    except Exception as error:
        console.say(f"The tracker {config.tracker} could not be started ({error}); training goes on without it.")
        return None
    return Listener(config.tracker, tracker)


class Listener:
    """Hands numbers on to a tracker until that fails."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name, self._tracker = name, tracker
        self._alive, self._last_system = True, 0.0

    def __call__(self, event: Event) -> None:
        if not self._alive or event["event"] not in NUMBERS:
            return
        try:
            numbers = {
                f"{event['event']}/{key.removeprefix('metrics/')}": value
                for key, value in _flat(event).items()
                if key not in ("step", "time", "version")
            }
            if time.monotonic() - self._last_system > 15:
                numbers |= _system()
                self._last_system = time.monotonic()
            self._tracker.log(numbers, int(event["step"]))
        except Exception as error:
            self._alive = False
            console.say(f"The tracker {self._name} failed ({error}); training goes on without it.")

    def close(self) -> None:
        try:
            if self._alive:
                self._tracker.close()
        except Exception as error:
            console.say(f"The tracker {self._name} could not be closed: {error}.")


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found


def _system() -> dict[str, float]:
    import psutil
    import torch

    numbers = {"system/cpu_percent": psutil.cpu_percent(), "system/memory_percent": psutil.virtual_memory().percent}
    if torch.cuda.is_available():
        numbers["system/gpu_memory_bytes"] = float(torch.cuda.memory_allocated())
    return numbers


class _Wandb:
    def __init__(self, config: LogConfig, run: Path, name: str, settings: dict[str, Any]) -> None:
        import wandb

        mode = "offline" if config.offline else "online"
        self._run = wandb.init(
            project=config.project, name=name, dir=str(run), config=settings, mode=mode, resume="allow"
        )

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    def __init__(self, config: LogConfig, run: Path, name: str, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"))
        text = "\n".join(f"    {key}: {value}" for key, value in settings.items())
        self._writer.add_text("config", text)

    def log(self, numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, config: LogConfig, run: Path, name: str, settings: dict[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=config.project, name=name, config=settings)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._trackio.log(numbers, step=step)

    def close(self) -> None:
        self._trackio.finish()
