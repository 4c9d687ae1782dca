"""Things that can be made again: the folder they are kept in on disk, and a cache of them in memory."""

import os
import re
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from stoker.errors import UserError
from stoker.files import file_lock

K = TypeVar("K")
V = TypeVar("V")
PIECES = "blocks"  # the folder of pieces of remote data


def cache_folder() -> Path:
    """$STOKER_CACHE, or .cache/stoker in the home directory."""
    named = os.environ.get("STOKER_CACHE")
    if named and Path(named).exists() and not Path(named).is_dir():
        raise UserError(f"STOKER_CACHE is {named}, which is no folder.")
    return Path(named) if named else Path.home() / ".cache" / "stoker"


def budget_bytes() -> int:
    """The most that the cache may take: $STOKER_CACHE_BYTES, such as 200GB, or half of its disk."""
    text = os.environ.get("STOKER_CACHE_BYTES", "").strip()
    if not text:
        return shutil.disk_usage(_existing(cache_folder())).total // 2
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise UserError(f"STOKER_CACHE_BYTES is {text!r}, and should be a size such as 200GB or 50000000.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " "))


def made_bytes() -> int:
    """What was made in the cache takes: simulated, drawn and packed sets, tables, splits; not pieces of remote data."""
    return sum(size for name, size in folder_sizes().items() if name != PIECES)


def folder_sizes() -> dict[str, int]:
    """Bytes of each folder of the cache."""
    folder = cache_folder()
    found = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    return {path.name: size_below(path) for path in found}


def size_below(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it may be removed meanwhile
                total += (Path(where) / name).lstat().st_size
    return total


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
    return shutil.disk_usage(_existing(folder)).free


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


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
