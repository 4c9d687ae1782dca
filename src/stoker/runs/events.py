"""The history of a run: `events.jsonl`, one JSON object a line, appended and never rewritten.

The loop writes, and whoever wants to know reads: the console, `stoker runs`, the report and the doctor all look here.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class EventLog:
    """Appends events. Each line is handed to the kernel in one write, so a killed process loses none of them."""

    def __init__(self, path: Path) -> None:
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # A process killed inside a write may have left half a line; it must not swallow the next one.
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            os.write(self._file, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        event = {"event": kind, "time": round(time.time(), 3)} | {key: _finite(value) for key, value in fields.items()}
        os.write(self._file, (json.dumps(event, allow_nan=False) + "\n").encode())
        for listener in self.listeners:
            listener(event)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Events in their order, only of these kinds if any are named; a torn line is passed over."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not kinds or event["event"] in kinds:
                yield event


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are kept as words, since they are what someone will look for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
