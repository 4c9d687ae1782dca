"""Folders written to an object store: every object is complete or absent, and those that make the folder count come last."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from stoker import console
from stoker.data.storage import objects
from stoker.data.storage.urls import Url

AT_ONCE = 8


def upload(folder: Path, url: Url, names: Sequence[str], advance: Callable[[int], None] = lambda _: None) -> None:
    """These files of a folder, side by side."""

    def one(name: str) -> None:
        with suppress(FileNotFoundError):  # a checkpoint that was pruned while it was copied
            objects.put(url / name, folder / name)
            advance((folder / name).stat().st_size)

    with ThreadPoolExecutor(AT_ONCE, "upload") as pool:
        for _ in pool.map(one, names):
            pass


def upload_set(folder: Path, url: Url, manifest: str) -> None:
    """A packed set: without its manifest it is none, so that comes when all else is there."""
    names = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != manifest
    )
    total = sum((folder / name).stat().st_size for name in names)
    with console.progress("upload", total, "bytes") as bar:
        upload(folder, url, names, bar.advance)
    upload(folder, url, [manifest])
