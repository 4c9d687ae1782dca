"""Files and folders of object stores, asked for as `stoker.data.locations` asks for local ones."""

import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.data.cache import cache_folder
from stoker.data.storage import objects
from stoker.data.storage.blocks import block_bytes
from stoker.data.storage.remote import RemoteFile
from stoker.data.storage.requests import requests
from stoker.data.storage.urls import Found, Url
from stoker.errors import UserError

Folder = dict[str, Found | None]  # what is in it by name; None: a folder
_files: dict[tuple[int, Path, Url, str, int], RemoteFile] = {}
_listed: dict[
    Url, dict[str, Folder]
] = {}  # folders below a place that was listed as a whole, by their name from there on
_sums: dict[
    Url, tuple[int, Sequence[int]]
] = {}  # what files of packed sets should sum up to, by pieces of so many bytes
_lock = threading.Lock()


@contextmanager
def listed_once(root: Url) -> Iterator[None]:
    """Inside the block all questions about what lies below are answered from one listing, made side by side."""
    if root in _listed or root.scheme in ("https", "http"):
        yield
        return
    folders: dict[str, Folder] = {"": {}}
    for found in objects.list_all(root):
        folder, _, name = found.name.rpartition("/")
        folders.setdefault(folder, {})[name] = found
        while folder and folder.rpartition("/")[2] not in folders.setdefault(folder.rpartition("/")[0], {}):
            folders[folder.rpartition("/")[0]][folder.rpartition("/")[2]] = None
            folder = folder.rpartition("/")[0]
    _listed[root] = folders
    try:
        yield
    finally:
        _listed.pop(root, None)


def _from_listing(url: Url) -> tuple[dict[str, Folder], str] | None:
    for root, folders in _listed.items():
        if (root.scheme, root.host) == (url.scheme, url.host) and f"{url.key}/".startswith(f"{root.key}/".lstrip("/")):
            return folders, url.key[len(root.key) :].strip("/")
    return None


def find(url: Url) -> Found | None:
    """An object; None: there is none of that name."""
    listing = _from_listing(url)
    if listing is not None:
        folder, _, name = listing[1].rpartition("/")
        return listing[0].get(folder, {}).get(name)
    return objects.head(url) if url.key else None


def is_folder(url: Url) -> bool:
    if url.scheme in ("https", "http"):
        return find(url) is None  # nobody can tell: whatever is asked for in it will be missing, or not
    listing = _from_listing(url)
    if listing is not None:
        return listing[1] in listing[0] and bool(listing[0][listing[1]])
    folders, found = objects.list_folder(url)
    return bool(folders or found)


def list_folder(url: Url) -> Folder:
    listing = _from_listing(url)
    if listing is not None:
        if listing[1] not in listing[0]:
            raise FileNotFoundError(str(url))
        return dict(sorted(listing[0][listing[1]].items()))
    folders, found = objects.list_folder(url)
    if not folders and not found:
        raise FileNotFoundError(str(url))
    return dict(sorted({**dict.fromkeys(folders), **{one.name: one for one in found}}.items()))


def opened(url: Url, *, whole: bool = False, found: Found | None = None) -> RemoteFile:
    """The object that is there now, in pieces or as one."""
    found = found or find(url)
    if found is None:
        raise FileNotFoundError(2, "There is no such object", str(url))
    block = max(1, found.size) if whole or found.size <= block_bytes() else block_bytes()
    key = os.getpid(), cache_folder().absolute(), url, found.tag, block
    with _lock:
        if key not in _files:
            _files[key] = RemoteFile(url, found, block, _sums.get(url))
        return _files[key]


def expect(url: Url, piece: int, sums: Sequence[int]) -> None:
    """From now on this object is compared with the checksums it was packed with."""
    _sums[url] = piece, sums


def read_once(url: Url, first: int, count: int) -> bytes:
    """A range that is not kept: it will not be asked for again."""
    found = find(url)
    if found is None:
        raise FileNotFoundError(2, "There is no such object", str(url))
    first = max(0, found.size + first) if first < 0 else first
    count = min(count, found.size - first)
    return bytes(requests().start(requests().read(url, first, count, found.tag)).result()) if count > 0 else b""


def local_copy(url: Url) -> Path:
    """A local file with the whole content, kept as long as this process lives."""
    found = find(url)
    if found is None:
        raise UserError(f"There is no {url}.")
    if not found.size:
        raise UserError(f"{url} is empty.")
    file = opened(url, whole=True, found=found)
    file.keep()
    return file.path_of(0)


def version_number(tag: str) -> int:
    """A number that changes with the version of an object."""
    return zlib.crc32(tag.encode()) << 20
