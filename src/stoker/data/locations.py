"""Where data lie, and the one module that reads them.

Everything that opens data takes a location, joins names to it with `/`, and comes here for the bytes. A location is a local
path; URLs are refused by name until there is a storage that reads them. What a run or the cache writes is no location: that
is always a local path.
"""

import errno
import os
import stat as kinds
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from stoker.errors import UserError
from stoker.files import check_regular

Location: TypeAlias = Path


@dataclass(frozen=True)
class Stat:
    """What is known of a file or a folder without reading it."""

    size: int
    is_folder: bool
    is_plain: bool  # a file, and no pipe or device
    written: int  # when, in nanoseconds: changes whenever the content does
    number: int  # of the file on its disk: changes when another file takes its name


def parse(text: Any) -> Any:
    """From the words of a user; refuses what is no local path."""
    if isinstance(text, str) and "://" in text:
        raise ValueError(f"{text} is a URL, and only local paths can be read: copy or mount the data first")
    return text


def named(text: "Location | str") -> Location:
    """A place that a program names."""
    try:
        return Location(parse(text)).expanduser()
    except (TypeError, ValueError) as error:
        raise UserError(f"{error}.") from error


DataPath = Annotated[Location, BeforeValidator(parse)]  # a key of a configuration that names data


def stat(location: Location) -> Stat | None:
    """None: there is nothing."""
    try:
        return _as_stat(location.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _as_stat(found: os.stat_result) -> Stat:
    is_folder, is_plain = kinds.S_ISDIR(found.st_mode), kinds.S_ISREG(found.st_mode)
    return Stat(found.st_size, is_folder, is_plain, found.st_mtime_ns, found.st_ino)


def is_file(location: Location) -> bool:
    found = stat(location)
    return found is not None and not found.is_folder


def is_folder(location: Location) -> bool:
    found = stat(location)
    return found is not None and found.is_folder


def list_folder(location: Location) -> dict[str, Stat]:
    """Everything in a folder by its name, in the order of names; links that lead nowhere are passed over."""
    listed: dict[str, Stat] = {}
    with os.scandir(location) as entries:
        for entry in entries:
            try:
                listed[entry.name] = _as_stat(entry.stat())
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
    return dict(sorted(listed.items()))


def walk(folder: Location, before: str = "", seen: frozenset[str] = frozenset()) -> Iterator[tuple[str, Stat]]:
    """All files below a folder by their names from there on, without hidden ones; a link back up is not followed."""
    here = identity(folder)
    if here in seen:
        return
    for name, found in list_folder(folder).items():
        if name.startswith((".", "__")):  # hidden, or a program's own, such as __MACOSX
            continue
        if found.is_folder:
            yield from walk(folder / name, f"{before}{name}/", seen | {here})
        else:
            yield f"{before}{name}", found


def read(location: Location) -> bytes:
    return read_range(location, 0, None)


def read_range(location: Location, first: int, count: int | None) -> bytes:
    """So many bytes from one on, fewer at the end of the file; None: all that follow."""
    # Without waiting: what is there may be a pipe that nobody writes to.
    file = os.open(location, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(file, "rb", buffering=0) as stream:
        found = os.fstat(file)
        if not kinds.S_ISREG(found.st_mode):
            raise UserError(f"{location} is no plain file, and a file is needed there.")
        left = max(0, found.st_size - first if count is None else min(count, found.st_size - first))
        stream.seek(first)
        pieces = []
        while left and (piece := stream.read(left)):  # one call reads at most 2 GiB
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_local(location: Location) -> Path:
    """A local file with the content, for what must be mapped into memory or is opened by a library."""
    check_regular(location)
    return location


def identity(location: Location) -> str:
    """The same for all spellings of one place."""
    return str(location.resolve())
