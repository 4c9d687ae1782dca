"""Things that can be made again: the folder they are kept in on disk, and a cache of them in memory."""

import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from stoker.errors import UserError
from stoker.files import file_lock

K = TypeVar("K")
V = TypeVar("V")


def cache_folder() -> Path:
    """$STOKER_CACHE, or .cache/stoker in the home directory."""
    named = os.environ.get("STOKER_CACHE")
    if named and Path(named).exists() and not Path(named).is_dir():
        raise UserError(f"STOKER_CACHE is {named}, which is no folder.")
    return Path(named) if named else Path.home() / ".cache" / "stoker"


@contextmanager
def cache_lock(folder: Path, waiting: str | None = None) -> Iterator[None]:
    """Inside the block this process alone makes, or finds, a folder of the cache; `waiting` is said to those who wait."""
    if cache_folder().is_dir() and not os.access(cache_folder(), os.W_OK):
        yield  # nobody makes anything here: what is there can be used all the same
        return
    with file_lock(cache_folder() / "locks" / f"{folder.parent.name}-{folder.name}", waiting):
        yield


def free_bytes(folder: Path) -> int:
    """Room on the disk of a folder that may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


class ByteCache(Generic[K, V]):
    """At most so many bytes of values, the least recently used dropped first.

    One thread makes a value while others that need it wait; different values are made at the same time.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit, self._held_bytes = num_bytes, 0
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._making: dict[K, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, key: K, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The value, made here or by whoever is at it."""
        value = self._held(key)
        if value is None:
            with self._making_of(key):
                value = self._held(key)
                if value is None:
                    value = self._make(key, make, size)
        return value

    def get_unless_busy(self, key: K, make: Callable[[], V], size: Callable[[V], int]) -> V | None:
        """The value, or None while another thread is making it: there may be something better to do than wait."""
        value = self._held(key)
        if value is not None:
            return value
        making = self._making_of(key)
        if not making.acquire(blocking=False):
            return None
        try:
            value = self._held(key)
            return self._make(key, make, size) if value is None else value
        finally:
            making.release()

    def _held(self, key: K) -> V | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def _making_of(self, key: K) -> threading.Lock:
        with self._lock:
            return self._making.setdefault(key, threading.Lock())

    def _make(self, key: K, make: Callable[[], V], size: Callable[[V], int]) -> V:
        value = make()
        self._keep(key, value, size(value))
        return value

    def has(self, key: K) -> bool:
        return key in self._values

    def is_busy(self, key: K) -> bool:
        making = self._making.get(key)
        return making is not None and making.locked()

    def drop(self, key: K) -> None:
        """Forgets a value that will not be asked for again."""
        with self._lock:
            if key in self._values:
                self._held_bytes -= self._values.pop(key)[1]

    def drop_where(self, is_dead: Callable[[K], bool]) -> None:
        """Forgets all values that will not be asked for again."""
        for key in [key for key in list(self._values) if is_dead(key)]:
            self.drop(key)

    def _keep(self, key: K, value: V, num_bytes: int) -> None:
        with self._lock:
            self._values[key] = value, num_bytes
            self._held_bytes += num_bytes
            while self._held_bytes > self._limit and len(self._values) > 1:
                self._held_bytes -= self._values.popitem(last=False)[1][1]
            self._making.pop(key, None)
