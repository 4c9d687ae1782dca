"""Tables by name in files of others: SQLite databases, and folders of Parquet."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.data.locations import Location, open_local, walk
from stoker.data.parquet import as_array, named_if_damaged, open_parquet
from stoker.errors import UserError

EVENT = "event_no"
ROWS_AT_ONCE = 1 << 18

Columns = dict[str, npt.NDArray[Any]]


class Tables(Protocol):
    """Tables by name, in whatever kind of file."""

    def columns(self) -> Mapping[str, Sequence[str]]:
        """Names of the columns of each table."""

    def num_rows(self, table: str) -> int: ...

    def rows(self, table: str, names: Sequence[str]) -> Iterator[Columns]:
        """The rows of a table in pieces."""


class Database:
    """SQLite, opened for reading only."""

    def __init__(self, path: Location) -> None:
        self._path = path
        self._connection = sqlite3.connect(f"{open_local(path).resolve().as_uri()}?mode=ro", uri=True)
        self._connection.execute("BEGIN")  # all tables as they are at one moment

    def columns(self) -> dict[str, list[str]]:
        try:
            names = [row[0] for row in self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {
                name: [row[1] for row in self._connection.execute(f"PRAGMA table_info({_quoted(name)})")]
                for name in names
            }
        except sqlite3.Error as error:
            raise UserError(f"{self._path} cannot be read as an SQLite database: {error}") from error

    def num_rows(self, table: str) -> int:
        try:
            return int(self._connection.execute(f"SELECT count(*) FROM {_quoted(table)}").fetchone()[0])
        except sqlite3.Error as error:
            raise UserError(f"{self._path}: the table {table} cannot be read: {error}") from error

    def rows(self, table: str, names: Sequence[str]) -> Iterator[Columns]:
        chosen = ", ".join(map(_quoted, names))
        try:
            cursor = self._connection.execute(f"SELECT {chosen} FROM {_quoted(table)}")
            while rows := cursor.fetchmany(ROWS_AT_ONCE):
                yield {
                    name: self._numbers(table, name, column)
                    for name, column in zip(names, zip(*rows, strict=True), strict=True)
                }
        except sqlite3.Error as error:
            raise UserError(f"{self._path}: the table {table} cannot be read: {error}") from error

    def _numbers(self, table: str, name: str, column: Sequence[Any]) -> npt.NDArray[Any]:
        try:
            if name == EVENT:
                if any(one is None or one != int(one) for one in column):
                    raise ValueError("an event needs a whole number")
                return np.array([int(one) for one in column], np.int64)
            return np.array(column, np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"{self._path}: {table}.{name} holds something that is no number: {error}.") from error

    def close(self) -> None:
        self._connection.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class Folder:
    """Parquet files; those whose names differ only in their last number are one table."""

    def __init__(self, path: Location) -> None:
        self._path = path
        self._files: dict[str, list[str]] = {}
        for name in parquet_files(path):
            own = Path(name)
            table = own.parent.name if len(own.parts) > 1 else own.stem.rstrip("0123456789").rstrip("_")
            self._files.setdefault(table, []).append(name)

    def columns(self) -> dict[str, list[str]]:
        return {table: open_parquet(self._path / files[0]).schema_arrow.names for table, files in self._files.items()}

    def num_rows(self, table: str) -> int:
        return sum(int(open_parquet(self._path / name).metadata.num_rows) for name in self._files[table])

    def rows(self, table: str, names: Sequence[str]) -> Iterator[Columns]:
        seen = np.zeros(0, np.int64)
        for name in self._files[table]:
            path = self._path / name
            with named_if_damaged(path):
                found = open_parquet(path, list(names)).read(columns=list(names))
            ids = np.unique(as_array([found.column(EVENT)], np.int64, EVENT, path))
            both = np.intersect1d(seen, ids)
            if both.size:
                raise UserError(
                    f"{path}: event {both[0]} is in another file of {table} too; an event lies in one file."
                )
            seen = np.concatenate([seen, ids])
            yield {one: found.column(one).to_numpy().astype(np.int64 if one == EVENT else np.float64) for one in names}

    def close(self) -> None:
        pass


def parquet_files(path: Location) -> list[str]:
    return sorted(name for name, found in walk(path) if name.lower().endswith(".parquet") and found.is_plain)
