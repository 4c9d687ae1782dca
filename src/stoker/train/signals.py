"""SIGTERM, SIGINT and SIGUSR1 ask a run to finish its step, save and end; a second SIGINT ends it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stoker import console

ASKED_BY = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    def __init__(self) -> None:
        self.by: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name
        console.say(f"{self.by}: finishing the step and saving.")


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers; an embedding program keeps its own
        return
    before = {number: signal.signal(number, request) for number in ASKED_BY}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
