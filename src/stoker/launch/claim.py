"""One machine at a time trains a run that is kept in a store.

A small object beside the run changes every few seconds while somebody trains it. Whoever wants to go on watches it for a
while: one that changes belongs to a machine that lives, one that stands still was left behind by one that died.
"""

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker import console
from stoker.data.storage.urls import Url
from stoker.errors import MachineError, UserError

CLAIM = ".training.json"
BEAT_S = 5.0  # between two changes
WATCH_S = 4 * BEAT_S  # a living machine changes it meanwhile


@contextmanager
def claimed(folder: Path, place: Url) -> Iterator["Claim"]:
    """Inside the block the run is ours, unless `is_lost` says otherwise."""
    claim = Claim(folder, place)
    try:
        yield claim
    finally:
        claim.close()


class Claim:
    """Kept up by a thread of its own: copying a checkpoint may take longer than others wait."""

    def __init__(self, folder: Path, place: Url) -> None:
        self._object, self._own = place / CLAIM, folder / CLAIM
        _watch(self._object, place, _text(self._own))
        self._by, self._beat = uuid.uuid4().hex, 0
        self._own.write_text(self._by)  # a process of this machine that follows us knows that it is not another's
        self.is_lost = False  # another machine has taken the run over
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._write()
        self._thread = threading.Thread(target=self._loop, name="claim", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._ended.wait(BEAT_S) and not self.is_lost:
            with suppress(UserError, MachineError, OSError), self._lock:  # the copies of the run say it
                self._look()
                if not self.is_lost and not self._ended.is_set():
                    self._write()

    def check(self) -> None:
        """Raises where another machine has taken the run over, or had it meanwhile: this one may have slept for hours."""
        with self._lock:
            self._look()
        if self.is_lost:
            raise MachineError("Another machine went on with the run meanwhile.")

    def _look(self) -> None:
        found = None if self.is_lost else read_claim(self._object)
        if self.is_lost or (found is not None and found.get("by") == self._by):
            return
        self.is_lost = True
        who = "Another machine" if found is None else found.get("machine")
        console.say(f"{who} went on with this run: nothing more is copied to the store.")

    def _write(self) -> None:
        from stoker.data.storage import objects

        self._beat += 1
        content = {"by": self._by, "machine": platform.node(), "process": os.getpid(), "beat": self._beat}
        objects.put(self._object, json.dumps(content).encode())

    def give_up(self) -> None:
        """The store cannot be reached: nothing is taken back there, and who comes next watches for a while."""
        self._ended.set()
        self.is_lost = True

    def close(self) -> None:
        from stoker.data.storage import objects

        self._ended.set()
        if self.is_lost:
            return
        self._thread.join()
        with suppress(UserError, MachineError, OSError):
            self._look()
            if not self.is_lost:
                objects.delete([self._object])


def read_claim(place: Url) -> dict[str, Any] | None:
    """None: nobody trains it, or nobody can tell."""
    from stoker.data.storage import objects

    try:
        found = json.loads(objects.get(place))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _watch(place: Url, run: Url, own: str) -> None:
    """Until it is clear that nobody else trains the run."""
    first = read_claim(place)
    if first is None or first.get("by") == own:
        return
    who = f"process {first.get('process')} on {first.get('machine')}"
    console.say(f"{run} was being trained by {who}: waiting for {WATCH_S:.0f} s, in case it still is.")
    begin = time.monotonic()
    while time.monotonic() - begin < WATCH_S:
        time.sleep(1.0)
        now = read_claim(place)
        if now is None:
            return
        if now != first:
            raise UserError(f"{run} is being trained by {who}. Stop that one first.")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
