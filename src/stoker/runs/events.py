"""The history of a run: `events.jsonl`, one JSON object a line, appended and never rewritten.

The loop writes, and whoever wants to know reads: `stoker runs`, trackers, the report and the doctor all look here. What can
stand in it is in `schema`.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter

from stoker.runs.schema import KINDS, VERSION, Event, upgraded

E = TypeVar("E", bound=Event)


class EventLog:
    """Appends events. Each line is handed to the kernel in one write, so a killed process loses none of them."""

    def __init__(self, path: Path) -> None:
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        # A process killed inside a write may have left half a line; it must not swallow the next one.
        if path.is_file() and _ends_torn(path):
            os.write(self._file, b"\n")

    def write(self, event: Event) -> None:
        head = {"event": event.kind, "version": VERSION, "time": round(time.time(), 3)}
        line = head | {key: in_words(value) for key, value in asdict(event).items() if key != "time"}
        os.write(self._file, (json.dumps(line, allow_nan=False) + "\n").encode())
        for listener in self.listeners:
            listener(line)

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


def read_events(path: Path, *kinds: type[E]) -> Iterator[E]:
    """Events in their order, of these kinds; what is none of them, such as a line that a kill tore, is passed over."""
    if not path.is_file():
        return
    wanted = {kind.kind: adapter_of(kind.kind) for kind in kinds}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = upgraded(json.loads(line))
                adapter = wanted.get(event["event"])
                if adapter is not None:
                    yield adapter.validate_python({key: event[key] for key in event if key not in ("event", "version")})
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                continue


@cache
def adapter_of(kind: str) -> TypeAdapter[Any]:
    """Fields of a later version are passed over; numbers that JSON does not have are words."""
    return TypeAdapter(KINDS[kind])


def in_words(value: Any) -> Any:
    """JSON has no NaN and no infinity; they are kept as words, since they are what someone will look for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: in_words(item) for key, item in value.items()}
    return [in_words(item) for item in value] if isinstance(value, list | tuple) else value
