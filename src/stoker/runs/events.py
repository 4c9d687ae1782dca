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
        if path.is_file() and _ends_torn(path):
            os.write(self._file, b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        event = {"event": kind, "time": round(time.time(), 3)} | {key: in_words(value) for key, value in fields.items()}
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


def _ends_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def read_events(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Events in their order, only of these kinds if any are named; what is no event, such as a torn line, is passed over."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if (
                isinstance(event, dict)
                and isinstance(event.get("event"), str)
                and (not kinds or event["event"] in kinds)
            ):
                yield event


def in_words(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are kept as words, since they are what someone will look for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: in_words(item) for key, item in value.items()}
    return [in_words(item) for item in value] if isinstance(value, list | tuple) else value
