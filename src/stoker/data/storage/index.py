"""The book of the cache: which pieces are here, who uses them, and how many bytes they may take.

A piece is a range of one version of an object, in a file of its own: written under a temporary name, renamed when it is
whole. Its bytes are reserved before the first of them is fetched, in one transaction that first removes others where the
budget asks for it, so that the sum is never above it, however many processes share the cache. What a process uses is
leased to it and not removed. A process that died is noticed by its lock, and what it left behind is cleared away.
"""

import fcntl
import hashlib
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Self

from stoker.errors import MachineError, UserError

SCHEMA = (
    "CREATE TABLE IF NOT EXISTS pieces (name TEXT PRIMARY KEY, object TEXT, first INTEGER, bytes INTEGER, whole INTEGER, "
    "crc INTEGER, next REAL, holder TEXT) WITHOUT ROWID",
    "CREATE INDEX IF NOT EXISTS by_next ON pieces (whole, next)",
    "CREATE TABLE IF NOT EXISTS leases (name TEXT, process TEXT, PRIMARY KEY (name, process)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS total (bytes INTEGER)",
    "INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM total)",
    "CREATE TRIGGER IF NOT EXISTS came AFTER INSERT ON pieces BEGIN UPDATE total SET bytes = bytes + NEW.bytes; END",
    "CREATE TRIGGER IF NOT EXISTS went AFTER DELETE ON pieces BEGIN UPDATE total SET bytes = bytes - OLD.bytes; END",
)
ANEW = "If it is damaged, `stoker cache clear` makes it anew."
OWN_BYTES = 256 << 10  # of the book itself, at least
LATEST = 1e12  # a time that never comes: pieces of which nobody knows when they are needed go before all others


class State(Enum):
    HERE = "here"  # whole, and leased to who asked
    MINE = "mine"  # reserved: to be fetched by who asked
    THEIRS = "theirs"  # being fetched by another process
    FULL = "full"  # no room until something else is let go


@dataclass(frozen=True)
class Piece:
    """A range of one version of an object."""

    object: str  # place, version and size
    first: int
    count: int

    @property
    def name(self) -> str:
        return hashlib.sha256(f"{self.object} {self.first} {self.count}".encode()).hexdigest()[:40]


def path_of(folder: Path, name: str) -> Path:
    return folder / name[:2] / name


class Index:
    """Thread-safe. One a process and folder."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.budget, self._pid = folder, budget, os.getpid()
        self.lock = threading.RLock()
        self._path = folder / "index.sqlite"
        try:
            (folder / "processes").mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(self._path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"The cache {folder.parent} cannot be used for data that lie elsewhere ({error}). STOKER_CACHE names "
                f"another folder. {ANEW}"
            ) from error
        self.others = 0  # bytes of the rest of the cache, which the budget holds too

    def _open(self) -> None:
        # Killed processes lose nothing by this; after a power cut checksums tell what is not whole.
        self._base.executescript(
            "PRAGMA synchronous=OFF; PRAGMA journal_mode=PERSIST; PRAGMA journal_size_limit=65536;"
        )
        with self._changed():
            for statement in SCHEMA:
                self._base.execute(statement)
        self.process = uuid.uuid4().hex
        self._mark = (self.folder / "processes" / self.process).open("w")
        fcntl.flock(self._mark, fcntl.LOCK_EX)

    def path(self, name: str) -> Path:
        return path_of(self.folder, name)

    def partial(self, name: str) -> Path:
        return self.folder / name[:2] / f".{name}.{self.process}"

    def take(self, pieces: Sequence[Piece]) -> list[tuple[State, int]]:
        """What is to be done for each, and the checksum of those that are here. Those are leased from now on."""
        with self._changed():
            return [self._take(piece) for piece in pieces]

    def _take(self, piece: Piece) -> tuple[State, int]:
        row = self._base.execute("SELECT whole, crc, holder FROM pieces WHERE name = ?", (piece.name,)).fetchone()
        if row is not None and row[0]:
            self._lease(piece.name)
            return State.HERE, row[1]
        if row is not None and (row[2] == self.process or self._is_alive(row[2])):
            return State.THEIRS, 0
        if row is not None:
            self._remove(piece.name)
        if not self._make_room(piece.count):
            return State.FULL, 0
        self._base.execute(
            "INSERT INTO pieces VALUES (?, ?, ?, ?, 0, 0, ?, ?)",
            (piece.name, piece.object, piece.first, piece.count, LATEST - time.time(), self.process),
        )
        self._lease(piece.name)
        return State.MINE, 0

    def _lease(self, name: str) -> None:
        self._base.execute("INSERT OR IGNORE INTO leases VALUES (?, ?)", (name, self.process))

    def fetched(self, name: str, crc: int) -> None:
        """A piece that was reserved is whole, and has its name."""
        with self._changed():
            self._base.execute("UPDATE pieces SET whole = 1, crc = ?, holder = '' WHERE name = ?", (crc, name))

    def forget(self, name: str) -> None:
        """A piece that could not be fetched, or is not what it was."""
        with self._changed():
            self._remove(name)
            self._base.execute("DELETE FROM leases WHERE name = ?", (name,))

    def release(self, names: Iterable[str], next_use: float | None = None) -> None:
        """This process does not use them any more, until then if that is known."""
        when = LATEST - time.time() if next_use is None else next_use
        with self._changed():
            for name in names:
                self._base.execute("DELETE FROM leases WHERE name = ? AND process = ?", (name, self.process))
                self._base.execute("UPDATE pieces SET next = ? WHERE name = ?", (when, name))

    def total(self) -> int:
        """Bytes of all pieces, reserved ones too, and of the book."""
        found: int = self._base.execute("SELECT bytes FROM total").fetchone()[0]
        return found + self._own_bytes()

    def _own_bytes(self) -> int:
        with suppress(OSError):
            return max(OWN_BYTES, 2 * self._path.stat().st_size)
        return OWN_BYTES

    def make_room(self, num_bytes: int) -> bool:
        """For something else in the cache; False: too much is in use."""
        with self._changed():
            return self._make_room(num_bytes)

    def _make_room(self, num_bytes: int) -> bool:
        """Removes what is needed last and used by nobody until so many bytes fit."""
        over = self.total() + self.others + num_bytes - self.budget
        if over <= 0:
            return True
        victims, freed = [], 0
        rows = self._base.execute(
            "SELECT name, bytes FROM pieces WHERE whole = 1 AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.name = "
            "pieces.name) ORDER BY next DESC"
        )
        for name, size in rows:
            victims.append(name)
            freed += size
            if freed >= over:
                break
        if freed < over:
            if not self._bury():
                return False
            return self._make_room(num_bytes)
        for name in victims:
            self._remove(name)
        return True

    def _remove(self, name: str) -> None:
        """The file first: a process that is killed in between leaves a row without a file, which is noticed."""
        self.path(name).unlink(missing_ok=True)
        for partial in self.path(name).parent.glob(f".{name}.*"):
            partial.unlink(missing_ok=True)
        self._base.execute("DELETE FROM pieces WHERE name = ?", (name,))

    def _bury(self) -> int:
        """Clears away what dead processes left: leases, and pieces that they were fetching."""
        known = {row[0] for row in self._base.execute("SELECT DISTINCT process FROM leases")}
        known |= {row[0] for row in self._base.execute("SELECT DISTINCT holder FROM pieces WHERE whole = 0")}
        known |= {path.name for path in (self.folder / "processes").iterdir()}
        dead = [process for process in known if process != self.process and not self._is_alive(process)]
        for process in dead:
            self._base.execute("DELETE FROM leases WHERE process = ?", (process,))
            left = self._base.execute("SELECT name FROM pieces WHERE whole = 0 AND holder = ?", (process,)).fetchall()
            for (name,) in left:
                self._remove(name)
            (self.folder / "processes" / process).unlink(missing_ok=True)
        return len(dead)

    def _is_alive(self, process: str) -> bool:
        try:
            with (self.folder / "processes" / process).open("r+") as mark:
                fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    @contextmanager
    def _changed(self) -> Iterator[None]:
        """One transaction, by one process at a time."""
        with self.lock:
            try:
                self._base.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._base.execute("ROLLBACK")
                    raise
                self._base.execute("COMMIT")
            except sqlite3.Error as error:
                raise MachineError(f"The book of the cache, {self._path}, cannot be used: {error}. {ANEW}") from error

    def all_pieces(self) -> list[tuple[str, str, int, int, int]]:
        """Name, object, bytes, checksum, and how many processes use it, of those that are whole."""
        with self._changed():
            self._bury()
            return self._base.execute(
                "SELECT name, object, bytes, crc, (SELECT count(*) FROM leases WHERE leases.name = pieces.name) "
                "FROM pieces WHERE whole = 1 ORDER BY object, first"
            ).fetchall()

    def clear(self) -> tuple[int, int]:
        """Removes all that no living process uses; how many pieces and bytes."""
        with self._changed():
            self._bury()
            rows = self._base.execute(
                "SELECT name, bytes FROM pieces WHERE whole = 1 AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.name = "
                "pieces.name)"
            ).fetchall()
            for name, _ in rows:
                self._remove(name)
            return len(rows), sum(size for _, size in rows)

    def sweep(self) -> int:
        """Removes files that stand in no row; how many. For `stoker cache verify`."""
        with self._changed():
            self._bury()
            names = {row[0] for row in self._base.execute("SELECT name FROM pieces")}
            strays = [
                file for folder in self.folder.iterdir() if folder.is_dir() and len(folder.name) == 2
                for file in folder.iterdir() if file.name.lstrip(".").partition(".")[0] not in names
            ]  # fmt: skip
            for file in strays:
                file.unlink(missing_ok=True)
            return len(strays)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if os.getpid() != self._pid:  # forked from us: nothing here is its own
            return
        with self.lock, suppress(sqlite3.Error):
            self._base.execute("DELETE FROM leases WHERE process = ?", (self.process,))
            self._base.close()
        self._mark.close()
        with suppress(OSError):
            (self.folder / "processes" / self.process).unlink()
