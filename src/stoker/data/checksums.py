"""Checksums of the files of a packed set: written when it is packed, looked at once on every machine that reads it.

Small sets are read through when they are opened, large ones in the background while training has begun; a set that was
found whole is not read again until a file of it changes its size or its time. Whatever changes a file without a trace of
that, such as a failing disk, is found by `stoker pack SOURCE SET --verify`.
"""

import hashlib
import json
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stoker import console
from stoker.data.cache import cache_folder
from stoker.data.locations import Location, expect, identity, is_file, read, read_range, stat
from stoker.data.storage.urls import Url
from stoker.errors import UserError
from stoker.files import write_json

PIECE = 64 << 20  # bytes that have a checksum of their own
AT_A_TIME = 4 << 20  # bytes in memory
AT_ONCE = 1 << 30  # bytes that are read through on opening
OWN = "crc32"  # key of a manifest for its own checksum

Checksums = Mapping[str, Sequence[int]]  # of each piece of each file


def checksums(folder: Location, names: Sequence[str], threads: int) -> dict[str, list[int]]:
    """Of all files, in parallel: the sums of a file's pieces in their order."""
    pieces = [(name, first) for name in names for first in _starts(_size(folder / name))]
    found: dict[str, list[int]] = {name: [] for name in names}
    with ThreadPoolExecutor(threads, "checksums") as pool, console.progress("checksums", len(pieces), "pieces") as bar:
        for (name, _), value in zip(pieces, pool.map(lambda one: _crc(folder / one[0], one[1]), pieces), strict=True):
            found[name].append(value)
            bar.advance()
    return found


def write_manifest(path: Path, content: Mapping[str, Any]) -> None:
    """JSON that notices when it is changed."""
    write_json(path, {**content, OWN: _own(content)})


def read_manifest(path: Location) -> dict[str, Any]:
    """What `write_manifest` wrote; raises OSError or ValueError where it is not that any more."""
    content = json.loads(read(path))
    if not isinstance(content, dict) or OWN not in content:
        raise ValueError("it has no checksum of its own: it is damaged, or of an older version")
    if content.pop(OWN) != _own(content):
        raise ValueError("it was changed since it was written")
    return content


class Verification:
    """Compares a set with its checksums; `check` raises as soon as a difference is known."""

    def __init__(self, folder: Location, expected: Checksums) -> None:
        self._folder, self._expected = folder, expected
        self._problem: str | None = None
        self.done = False  # and found whole
        missing = [name for name in expected if not is_file(folder / name)]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing[:3])}: the packed set is not whole. Pack it again.")
        if isinstance(folder, Url):  # compared as it comes
            for name, sums in expected.items():
                expect(folder / name, PIECE, sums)
            return
        self._mark = cache_folder() / "verified" / _identity(folder, list(expected))
        if self._mark.exists():
            self.done = True
            return
        size = sum(_size(folder / name) for name in expected)
        if size <= AT_ONCE:
            self._run()
            self.check()
        else:
            threading.Thread(target=self._run, name="verify", daemon=True).start()

    def check(self) -> None:
        if self._problem is not None:
            raise UserError(self._problem)

    def _run(self) -> None:
        try:
            for name, sums in self._expected.items():
                path = self._folder / name
                starts = list(_starts(_size(path)))
                if len(starts) != len(sums) or any(
                    _crc(path, at) != value for at, value in zip(starts, sums, strict=True)
                ):
                    self._problem = f"{path} is not what was packed: a disk or a copy damaged it. Pack it again."
                    return
            self.done = True
            self._mark.parent.mkdir(parents=True, exist_ok=True)
            self._mark.touch()
        except OSError:
            return  # the mark is only there to save time, and training itself will meet a file that cannot be read


def _starts(size: int) -> Iterator[int]:
    yield from range(0, max(1, size), PIECE)


def _size(path: Location) -> int:
    found = stat(path)
    if found is None:
        raise FileNotFoundError(path)
    return found.size


def _crc(path: Location, first: int) -> int:
    value = 0
    for start in range(first, first + PIECE, AT_A_TIME):
        value = zlib.crc32(read_range(path, start, AT_A_TIME), value)
    return value


def _own(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _identity(folder: Location, names: list[str]) -> str:
    """Changes when a file is written again, and with the place."""
    words = [identity(folder)]
    for name in sorted(names):
        found = stat(folder / name)
        assert found is not None, "looked for a moment ago"
        words.append(f"{name} {found.size} {found.written} {found.number}")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]
