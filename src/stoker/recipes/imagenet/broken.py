"""Images that cannot be decoded: named, counted, left out; too many of them are an error. The same when packing."""

import threading
from typing import Literal

from stoker.data.bad_samples import BadSamples, LeftOut
from stoker.errors import UserError
from stoker.recipes.imagenet.sources import Reader

MOST_BROKEN = 0.01  # share of the images seen that may be broken
ALWAYS_ALLOWED = 10

# few: up to that share is left out, a damaged tar is an error; skip: whatever can be read is used; stop: none may be broken.
Policy = Literal["few", "skip", "stop"]


class BrokenImages:
    def __init__(self, reader: Reader, policy: Policy, log: BadSamples) -> None:
        self._reader, self._policy, self._log, self._lock = reader, policy, log, threading.Lock()
        self._names: set[str] = set()
        self._seen = 0

    def saw(self, count: int) -> None:
        with self._lock:
            self._seen += count

    def add(self, row: int, reason: str) -> None:
        name = self._reader.name(row)
        if self._policy == "stop":
            raise UserError(
                f"The image {name} cannot be decoded: {reason}. Broken images are left out unless told to stop."
            )
        with self._lock:
            if name not in self._names:
                self._log.add(LeftOut("image", name, 1, reason))
            self._names.add(name)
            if self._policy == "few" and len(self._names) > max(ALWAYS_ALLOWED, MOST_BROKEN * self._seen):
                raise UserError(
                    f"{len(self._names)} of {self._seen} images cannot be decoded, the last one is {name}: {reason}. "
                    f"`--data.broken skip` (`stoker pack`: --broken skip) goes on without them, however many they are."
                )
