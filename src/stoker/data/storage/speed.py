"""How quickly a store answers this machine at most."""

import time

from stoker.data.storage import objects
from stoker.data.storage.requests import requests
from stoker.data.storage.urls import Found, Url

MOST, PART = 64 << 20, 4 << 20  # bytes in all, and of a request
LEAST = 4 * PART  # of a file: a shorter one says little
LEVELS = 2  # of folders that are looked through for it


def bytes_per_s(folder: Url) -> float | None:
    """Of the largest file in a folder, its parts asked for all at once, past the cache; None: none of them is large."""
    if folder.scheme in ("https", "http"):
        return None  # nobody lists what is there
    url, found = _largest(folder)
    if found is None or found.size < LEAST:
        return None
    count = min(found.size, MOST) // PART * PART
    requests().start(requests().read(url, 0, PART, found.tag)).result()  # connected, and the file known there
    begin = time.perf_counter()
    coming = [requests().start(requests().read(url, first, PART, found.tag)) for first in range(0, count, PART)]
    for one in coming:
        one.result()
    return count / (time.perf_counter() - begin)


def _largest(folder: Url) -> tuple[Url, Found | None]:
    level, best, place = [folder], None, folder
    for _ in range(LEVELS):
        below = []
        for one in level:
            names, files = objects.list_folder(one)
            below += [one / name for name in names]
            for file in files:
                if best is None or file.size > best.size:
                    best, place = file, one / file.name
        level = below[:8]
    return place, best
