"""Where data lie, and the one module that reads them.

Everything that opens data takes a location, joins names to it with `/`, and comes here for the bytes. A location is a local
path or a URL of an object store, whose bytes come through the cache (`stoker.data.storage`).
"""

import errno
import io
import os
import stat as kinds
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias

from pydantic import BeforeValidator

from stoker.data.storage.urls import Found, Url
from stoker.errors import UserError
from stoker.files import check_regular

Location: TypeAlias = Path | Url


@dataclass(frozen=True, slots=True)
class Stat:
    """What is known of a file or a folder without reading it."""

    size: int
    is_folder: bool
    is_plain: bool  # a file, and no pipe or device
    written: int  # when, in nanoseconds: changes whenever the content does
    number: int  # of the file on its disk: changes when another file takes its name
    tag: str = ""  # of the version of an object


def parse(text: Any) -> Any:
    """From the words of a user: a URL of a storage that can be read, or a local path."""
    return Url.parse(text) if isinstance(text, str) and "://" in text else text


def named(text: "Location | str") -> Location:
    """A place that a program or a user names."""
    try:
        place = parse(text)
        return place if isinstance(place, Url) else Path(place).expanduser()
    except (TypeError, ValueError) as error:
        raise UserError(f"{error}.") from error


DataPath = Annotated[Location, BeforeValidator(parse)]  # a key of a configuration that names data


def listed_once(root: Location) -> AbstractContextManager[None]:
    """Inside the block a remote folder is listed once for all questions about it."""
    return _files().listed_once(root) if isinstance(root, Url) else nullcontext()


def stat(location: Location) -> Stat | None:
    """None: there is nothing."""
    if isinstance(location, Url):
        found = _files().find(location)
        if found is None and _files().is_folder(location):
            return FOLDER
        return None if found is None else _as_object(found)
    try:
        return _as_stat(location.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _as_stat(found: os.stat_result) -> Stat:
    is_folder, is_plain = kinds.S_ISDIR(found.st_mode), kinds.S_ISREG(found.st_mode)
    return Stat(found.st_size, is_folder, is_plain, found.st_mtime_ns, found.st_ino)


FOLDER = Stat(0, is_folder=True, is_plain=False, written=0, number=0)  # of an object store, which has only names


def _as_object(found: Found) -> Stat:
    return Stat(
        found.size, is_folder=False, is_plain=True, written=_files().version_number(found.tag), number=0, tag=found.tag
    )


def _files() -> Any:
    """Storage is only there for those who read from it: it needs a client library and threads."""
    from stoker.data.storage import files

    return files


def is_file(location: Location) -> bool:
    if isinstance(location, Url):
        return _files().find(location) is not None
    found = stat(location)
    return found is not None and not found.is_folder


def is_folder(location: Location) -> bool:
    if isinstance(location, Url):
        return bool(_files().is_folder(location))
    found = stat(location)
    return found is not None and found.is_folder


def list_folder(location: Location) -> dict[str, Stat]:
    """Everything in a folder by its name, in the order of names; links that lead nowhere are passed over."""
    listed: dict[str, Stat] = {}
    if isinstance(location, Url):
        found = _files().list_folder(location)
        return {name: FOLDER if one is None else _as_object(one) for name, one in found.items()}
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
    if isinstance(location, Url):
        file = _files().opened(location)
        content: bytes = file.read(first, max(0, file.size - first) if count is None else count)
        return content
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
    if isinstance(location, Url):
        copy: Path = _files().local_copy(location)
        return copy
    check_regular(location)
    return location


def read_end(location: Url, count: int) -> bytes:
    """The last bytes of a remote file, which are not kept."""
    content: bytes = _files().read_once(location, -count, count)
    return content


def expect(location: Url, piece: int, sums: Sequence[int]) -> None:
    """Its pieces of so many bytes should sum up to this: whoever reads something else is told."""
    _files().expect(location, piece, sums)


def remote_file(location: Location) -> Any:
    """A file that lies elsewhere, by its pieces (`stoker.data.storage.remote.RemoteFile`)."""
    return _files().opened(location)


def new_remote_file(location: Location, found: Found) -> Any:
    """The same, of a file as it was listed, which nobody remembers."""
    return _files().RemoteFile(location, found)


def open_file(location: Location) -> BinaryIO:
    """For reading from the beginning to the end."""
    if isinstance(location, Url):
        from stoker.data.storage.stream import Stream

        return io.BufferedReader(Stream(remote_file(location)), 1 << 16)
    return open_local(location).open("rb")


def identity(location: Location) -> str:
    """The same for all spellings of one place."""
    return str(location) if isinstance(location, Url) else str(location.resolve())
