"""What `stoker cache` shows, verifies and clears: pieces of remote data, and all that was made in the cache."""

import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from stoker import console
from stoker.data.cache import PIECES, budget_bytes, cache_folder, folder_sizes, made_bytes, size_below
from stoker.data.storage.index import Index
from stoker.errors import MachineError, UserError

MADE = (
    "simulated",
    "drawn",
    "packed",
    "packing",
    "imported",
    "tables",
    "splits",
    "listings",
    "verified",
    "compiled",
    "runs",
)
RUNS, SYNCED = "runs", ".synced"  # working copies of runs; those with the mark are whole in their store


@dataclass(frozen=True)
class Kept:
    """A part of the cache."""

    name: str
    num_bytes: int
    pieces: int = 0
    in_use: int = 0  # pieces that living processes use


def show() -> list[Kept]:
    """Objects of remote data by their place, then the folders of what was made."""
    found: dict[str, list[tuple[int, int]]] = {}
    if _has_pieces():
        with _index() as index:
            for _, name, size, _, users in index.all_pieces():
                found.setdefault(_place(name), []).append((size, users))
    listed = [
        Kept(place, sum(size for size, _ in all_), len(all_), sum(users > 0 for _, users in all_))
        for place, all_ in found.items()
    ]
    return listed + [Kept(name, size) for name, size in folder_sizes().items() if name in MADE]


def verify() -> tuple[int, int, int]:
    """Pieces that are whole, those that were not and are removed, and files that belonged to none."""
    if not _has_pieces():
        return 0, 0, 0
    whole = damaged = 0
    with _index() as index:
        rows = index.all_pieces()
        with console.progress("verify", len(rows), "pieces") as bar:
            for name, _, size, crc, _ in rows:
                if _is_whole(index.path(name), size, crc):
                    whole += 1
                else:
                    damaged += index.path(name).exists()  # a kill while room was made leaves a line without a file
                    index.forget(name)
                bar.advance()
        return whole, damaged, index.sweep()


def clear(*, made: bool) -> int:
    """Removes pieces that nobody uses, and with `made` what can be made again; bytes that are free now."""
    freed = 0
    if _has_pieces():
        try:
            with _index() as index:
                freed = index.clear()[1]
        except (UserError, MachineError):  # no book that can be read: without it pieces are worth nothing
            freed = folder_sizes()[PIECES]
            shutil.rmtree(cache_folder() / PIECES)
    for name, size in folder_sizes().items() if made else ():
        if name in MADE and name != RUNS:
            shutil.rmtree(cache_folder() / name, ignore_errors=True)
            freed += size
    for mark in list((cache_folder() / RUNS).glob(f"*/*/{SYNCED}")) if made else ():
        freed += size_below(mark.parent)
        shutil.rmtree(mark.parent, ignore_errors=True)
    return freed


def make_room(num_bytes: int, what: str, instead: str) -> None:
    """For something that is about to be made in the cache; pieces of remote data that nobody uses go first."""
    room = budget_bytes() - made_bytes()
    if _has_pieces():
        with _index() as index:
            index.others = budget_bytes() - room
            room = room if index.make_room(num_bytes) else max(0, room - index.total())
    if num_bytes > room:
        needed = budget_bytes() - room + num_bytes
        raise UserError(
            f"{what} would take about {num_bytes / 1e6:,.0f} MB, and the budget of the cache leaves "
            f"{max(0, room) / 1e6:,.0f} MB. STOKER_CACHE_BYTES={needed} would do; `stoker cache show` says what takes the "
            f"rest. Or {instead}"
        )


def _has_pieces() -> bool:
    return (cache_folder() / PIECES / "index.sqlite").is_file()


def _index() -> Index:
    return Index(cache_folder() / PIECES, budget_bytes())


def _is_whole(path: Path, size: int, crc: int) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) == size and zlib.crc32(content) == crc


def _place(name: str) -> str:
    """The folder of an object, for people."""
    url = next((word for word in name.split(" ") if "://" in word and not word.startswith("http")), name)
    return url.rpartition("/")[0]
