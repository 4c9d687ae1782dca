"""Stages of making a batch, and what each of them costs: busy time, its spread, bytes, and the consumer's wait.

A stage is a function with a name; the output of one is the input of the next. The first gets a MicroBatch.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.data.batch import num_bytes

RECENT = 1024  # durations kept for the percentiles


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[Any], Any]
    # For what comes after a micro-batch: a job of its own behind that one's, so that its batch does not wait for it.
    read_ahead: Callable[[Any], None] | None = None


class StageTimes:
    """Sums over all threads since the last reading."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self._lock = threading.Lock()
        self._reset()

    @contextmanager
    def busy(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        spent = time.perf_counter() - begin
        with self._lock:
            self._busy_s[name] += spent
            self._count[name] += 1
            self._recent[name].append(spent)

    @contextmanager
    def busy_ahead(self, name: str) -> Iterator[None]:
        """Work of a stage that is for no batch yet."""
        begin = time.perf_counter()
        yield
        with self._lock:
            self._busy_s[name] += time.perf_counter() - begin

    def count_bytes(self, name: str, value: Any) -> None:
        counted = num_bytes(value)
        with self._lock:
            self._bytes[name] += counted

    def saw_ready(self, num_batches: int) -> None:
        """So many micro-batches lay ready when the consumer asked for the next."""
        with self._lock:
            self._ready.append(num_batches)

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._wait_s += seconds
            self._waits.append(seconds)

    def read(self) -> dict[str, Any]:
        """What happened since the last reading, for the events and the doctor; starts anew."""
        with self._lock:
            spent = time.perf_counter() - self._begin
            result = {
                "seconds": round(spent, 4),
                "wait_s": round(self._wait_s, 4),
                "wait_p50_ms": _percentile(self._waits, 50),
                "wait_p99_ms": _percentile(self._waits, 99),
                "ready": float(np.mean(self._ready)) if self._ready else 0.0,
                "stages": {
                    name: {
                        "busy_s": round(self._busy_s[name], 4),
                        "p50_ms": _percentile(self._recent[name], 50),
                        "p99_ms": _percentile(self._recent[name], 99),
                        "bytes": self._bytes[name],
                        "count": self._count[name],
                    }
                    for name in self._names
                },
            }
            self._reset()
            return result

    def _reset(self) -> None:
        self._begin = time.perf_counter()
        self._wait_s = 0.0
        self._busy_s = dict.fromkeys(self._names, 0.0)
        self._bytes = dict.fromkeys(self._names, 0)
        self._count = dict.fromkeys(self._names, 0)
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=RECENT) for name in self._names}
        self._waits: deque[float] = deque(maxlen=RECENT)
        self._ready: deque[int] = deque(maxlen=RECENT)


def _percentile(seconds: "deque[float]", percent: float) -> float:
    return round(float(np.percentile(seconds, percent)) * 1e3, 4) if seconds else 0.0
