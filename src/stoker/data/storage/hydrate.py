"""Copying a set beforehand: many files at a time, verified, going on where it was; or reading a slow disk through once."""

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker import console
from stoker.data.cache import free_bytes
from stoker.data.locations import Location, is_file, is_folder, read_range, walk
from stoker.data.storage import objects
from stoker.data.storage.requests import requests
from stoker.data.storage.urls import Found, Url
from stoker.errors import MachineError, UserError
from stoker.files import said_if_full

JOURNAL = ".stoker-fetch"  # names and versions of the files that are whole
AT_ONCE, PART = 16, 8 << 20  # files, and bytes of a request
PLAIN_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True)
class Fetched:
    files: int
    num_bytes: int
    already: int  # files that were there


def fetch(source: Location, out: Path | None, subset: Sequence[str] = (), threads: int = AT_ONCE) -> Fetched:
    """All files below a place, or those whose names fit one of the patterns; without `out` they are only read."""
    found = sorted(_listed(source, subset), key=lambda one: one.name)
    if not found:
        what = f" that fit {', '.join(subset)}" if subset else ""
        raise UserError(f"{source} holds no files{what}.")
    names = {one.name for one in found}
    both = [name for name in names for parent in PurePosixPath(name).parents if str(parent) in names]
    if both:
        raise UserError(
            f"{source} has objects that are folders too, such as that of {both[0]}: a disk cannot hold both."
        )
    if out is None:
        return _warm(source, found, threads)
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file, and a folder is needed there.")
    whole = _whole(out)
    todo = [one for one in found if not _is_there(out, one, whole)]
    foreign = [one.name for one in todo if (out / one.name).exists() and one.name not in whole]
    if foreign:
        raise UserError(f"{out / foreign[0]} exists and was not fetched from {source}: nothing is overwritten.")
    needed = sum(one.size for one in todo)
    out.mkdir(parents=True, exist_ok=True)
    if needed > free_bytes(out):
        raise UserError(f"{out} needs {needed / 1e9:,.1f} GB, and its disk has {free_bytes(out) / 1e9:,.1f} GB free.")
    with said_if_full(lambda: f"{len(_whole(out))} of {len(found)} files are whole and stay in {out}."):
        _copy_all(source, out, todo, needed, threads)
    return Fetched(len(todo), needed, len(found) - len(todo))


def _listed(source: Location, subset: Sequence[str]) -> Iterator[Found]:
    if isinstance(source, Url):
        alone = objects.head(source) if source.key else None
        below = list(objects.list_all(source))
        if alone and below:
            raise UserError(f"{source} is an object and a folder too, and a disk cannot hold both: name what is in it.")
        listed: Iterable[Found] = [Found(source.name, alone.size, alone.tag)] if alone else below
    elif is_file(source):
        listed = [Found(source.name, source.stat().st_size, "")]
    elif is_folder(source):
        listed = (Found(name, one.size, f"{one.size} {one.written}") for name, one in walk(source) if one.is_plain)
    else:
        raise UserError(f"There is no {source}.")
    for one in listed:
        if not subset or any(fnmatch.fnmatch(one.name, pattern) for pattern in subset):
            yield one


def _whole(out: Path) -> dict[str, str]:
    """Versions of the files that were fetched, by name."""
    try:
        lines = (out / JOURNAL).read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        try:
            name, tag = json.loads(line)
            found[name] = tag
        except (ValueError, TypeError):
            continue  # cut short by a kill: that file is fetched again
    return found


def _is_there(out: Path, one: Found, whole: dict[str, str]) -> bool:
    path = out / one.name
    return whole.get(one.name) == one.tag and path.is_file() and path.stat().st_size == one.size


def _copy_all(source: Location, out: Path, todo: list[Found], num_bytes: int, threads: int) -> None:
    pool = ThreadPoolExecutor(threads, "fetch")
    with console.progress("fetch", num_bytes, "bytes") as bar, (out / JOURNAL).open("a") as journal:
        copying = {pool.submit(_copy, source, out, one, bar): one for one in todo}
        try:
            for done in as_completed(copying):
                done.result()
                journal.write(json.dumps([copying[done].name, copying[done].tag]) + "\n")
                journal.flush()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a server that is gone must not keep us


def _copy(source: Location, out: Path, one: Found, bar: console.Progress) -> None:
    """Under a temporary name first, part by part, each of them tried again by itself."""
    place = source if source.name == one.name and not _is_below(source, one) else source / one.name
    path = out / one.name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, digest = path.with_name(f".{path.name}.fetching"), hashlib.md5(usedforsecurity=False)
    with partial.open("wb") as file:
        for first in range(0, one.size, PART):
            content = _part(place, first, min(PART, one.size - first), one.tag)
            digest.update(content)
            file.write(content)
            bar.advance(len(content))
        file.flush()
        os.fsync(file.fileno())
    expected = PLAIN_MD5.fullmatch(one.tag) if isinstance(source, Url) else None
    if expected and expected[1] != digest.hexdigest():
        partial.unlink()
        raise MachineError(
            f"{place} arrived damaged: its checksum is not the one that its store names. Fetch it again."
        )
    partial.replace(path)


def _is_below(source: Location, one: Found) -> bool:
    """Whether a name is that of something in the place, and not of the place itself."""
    if isinstance(source, Url):
        return objects.head(source) is None
    return is_folder(source)


def _part(place: Location, first: int, count: int, tag: str) -> bytes:
    if isinstance(place, Url):
        return bytes(requests().start(requests().read(place, first, count, tag)).result())
    return read_range(place, first, count)


def _warm(source: Location, found: list[Found], threads: int) -> Fetched:
    """A disk that loads what is read first is quick afterwards."""
    if isinstance(source, Url):
        raise UserError(f"Where should {source} be copied to? `stoker fetch {source} DIR`.")
    total = sum(one.size for one in found)

    def read_through(one: Found) -> None:
        for first in range(0, one.size, PART):
            bar.advance(len(read_range(source / one.name if is_folder(source) else source, first, PART)))

    with console.progress("read", total, "bytes") as bar, ThreadPoolExecutor(threads, "read") as pool:
        for _ in pool.map(read_through, found):
            pass
    return Fetched(len(found), total, 0)
