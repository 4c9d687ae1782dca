"""Pieces of objects in the cache: fetched once, checked when a process first uses them, let go when others need the room."""

import asyncio
import atexit
import os
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from stoker.data.cache import PIECES, budget_bytes, cache_folder, made_bytes
from stoker.data.storage.index import Index, Piece, State
from stoker.data.storage.requests import Requests, give_up_after_s, requests
from stoker.data.storage.urls import Url
from stoker.errors import MachineError, UserError
from stoker.files import said_if_full

LARGE = 8 << 20  # bytes that are not asked for, nor read, at once
WRITERS = 4  # threads that write, check and keep the book
LOOK_EVERY_S = 0.2  # whether another process needs room
MEASURE_EVERY_S = 30.0  # the rest of the cache
THEIRS_S, FULL_S = 0.01, 0.05  # between two looks at what another process fetches, and at whether there is room
DAMAGED_AT_MOST = 3  # times that one piece may turn out to be damaged


class Here(NamedTuple):
    """A piece that is whole."""

    path: Path
    crc: int


@dataclass
class _Wanted:
    url: Url
    tag: str
    piece: Piece
    future: "Future[Here]" = field(default_factory=Future)


class Holder(Protocol):
    """Whoever keeps pieces that it may need again."""

    def let_go(self) -> None:
        """Of all that is not being read right now."""


class Pieces:
    """The pieces that this process uses."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.index = Index(folder, budget)
        self._requests: Requests = requests()
        self._pool = ThreadPoolExecutor(WRITERS, "pieces")
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._pressure = folder / "pressure"
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()  # how often each piece was asked for and not released yet
        self._hits = self._misses = self.num_damaged = 0
        self.index.others = made_bytes()
        self._requests.start(self._look())
        atexit.register(self.index.close)

    def add(self, holder: Holder) -> None:
        self._holders.add(holder)

    def bring(self, wanted: Sequence[tuple[Url, str, Piece]]) -> "list[Future[Here]]":
        """Each piece as a file that is whole, leased to this process, as soon as it is here."""
        batch = [_Wanted(*one) for one in wanted]
        with self._lock:
            self._users.update(one.piece.name for one in batch)
        self._requests.start(self._bring(batch))
        return [one.future for one in batch]

    def release(self, pieces: Iterable[Piece], next_use: float | None = None) -> None:
        """They are not used here any more; where it is known, when they will be."""
        names = [piece.name for piece in pieces]
        if names:
            with self._lock:
                self._users.subtract(names)
            self._pool.submit(self._release, names, next_use)

    def _release(self, names: list[str], next_use: float | None) -> None:
        """What was asked for again meanwhile stays ours."""
        with self.index.lock:
            free = [name for name in names if self._users[name] <= 0]
            self.index.release(free, next_use)
            with self._lock:
                for name in free:
                    if self._users[name] <= 0:
                        del self._users[name]

    def drop(self, pieces: Iterable[Piece]) -> None:
        """They are of no use to anybody."""
        for piece in pieces:
            self._pool.submit(self.index.forget, piece.name)

    def path(self, piece: Piece) -> Path:
        return self.index.path(piece.name)

    def telemetry(self) -> dict[str, float]:
        """Since the last reading: of the requests, and of the cache."""
        with self._lock:
            hits, misses = self._hits, self._misses
            self._hits = self._misses = 0
        return {
            **self._requests.telemetry(),
            "hits": float(hits),
            "misses": float(misses),
            "damaged": float(self.num_damaged),
            "cache_bytes": float(self.index.total() + self.index.others),
            "budget_bytes": float(self.index.budget),
        }

    async def _bring(self, batch: list[_Wanted]) -> None:
        try:
            states = await self._in_thread(self.index.take, [one.piece for one in batch])
        except BaseException as error:
            with self._lock:
                self._users.subtract(one.piece.name for one in batch)
            for one in batch:
                one.future.set_exception(error)
            return
        await asyncio.gather(*(self._settle(one, *state) for one, state in zip(batch, states, strict=True)))

    async def _settle(self, one: _Wanted, state: State, crc: int) -> None:
        """Until the piece is here, whoever brings it."""
        try:
            damaged, full_since = 0, None
            while True:
                if state is State.HERE:
                    if await self._in_thread(self._is_whole, one.piece, crc):
                        self._count(hit=True)
                        break
                    damaged += 1
                    self._saw_damage(one, damaged)
                    await self._in_thread(self.index.forget, one.piece.name)
                elif state is State.MINE:
                    crc = await self._fetch(one)
                    self._count(hit=False)
                    break
                elif state is State.FULL:
                    full_since = full_since or time.monotonic()
                    await self._ask_for_room(one, full_since)
                else:
                    await asyncio.sleep(THEIRS_S)
                ((state, crc),) = await self._in_thread(self.index.take, [one.piece])
            one.future.set_result(Here(self.path(one.piece), crc))
        except BaseException as error:
            with self._lock:
                self._users[one.piece.name] -= 1
            one.future.set_exception(error)

    async def _fetch(self, one: _Wanted) -> int:
        """Its checksum."""
        try:
            if one.piece.count > LARGE:
                return await self._fetch_large(one)
            content = await self._requests.read(one.url, one.piece.first, one.piece.count, one.tag)
            crc: int = await self._in_thread(self._keep, one.piece, content)
            return crc
        except BaseException:
            await self._in_thread(self.index.forget, one.piece.name)
            raise

    async def _fetch_large(self, one: _Wanted) -> int:
        """A whole file, part by part."""
        partial = self.index.partial(one.piece.name)
        partial.parent.mkdir(exist_ok=True)
        with self._written(partial):
            await self._requests.copy(one.url, one.piece.first, one.piece.count, one.tag, partial)
            crc: int = await self._in_thread(_crc_of, partial)
            partial.rename(self.path(one.piece))
        await self._in_thread(self.index.fetched, one.piece.name, crc)
        return crc

    def _keep(self, piece: Piece, content: Any) -> int:
        """Under a temporary name first; whoever is killed on the way leaves nothing that counts."""
        partial, view = self.index.partial(piece.name), memoryview(content)
        with self._written(partial):
            partial.parent.mkdir(exist_ok=True)
            with partial.open("wb") as file:
                file.write(view)
            partial.rename(self.path(piece))
        crc = zlib.crc32(view)
        self.index.fetched(piece.name, crc)
        return crc

    @contextmanager
    def _written(self, partial: Path) -> Iterator[None]:
        """Nothing of the file is left unless it got its name inside the block."""
        stays = f"The cache {cache_folder()} may take {self.index.budget / 1e9:,.1f} GB: STOKER_CACHE_BYTES sets less."
        try:
            with said_if_full(lambda: stays):
                yield
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)

    def _is_whole(self, piece: Piece, crc: int) -> bool:
        try:
            return self.path(piece).stat().st_size == piece.count and _crc_of(self.path(piece)) == crc
        except OSError:
            return False

    def _saw_damage(self, one: _Wanted, times: int) -> None:
        with self._lock:
            self.num_damaged += 1
        if times > DAMAGED_AT_MOST:
            raise MachineError(
                f"A piece of {one.url} was damaged {times} times in the cache {cache_folder()}: its disk cannot be trusted."
            )

    async def _ask_for_room(self, one: _Wanted, since: float) -> None:
        """Everybody lets go of what is not being read."""
        if time.monotonic() - since > give_up_after_s():
            raise UserError(
                f"The cache {cache_folder()} has no room for {one.url}: all of its {self.index.budget / 1e6:,.0f} MB are in "
                f"use at this moment. Raise STOKER_CACHE_BYTES, or `stoker cache clear`."
            )
        self._let_go()
        with suppress(OSError):
            self._pressure.touch()
        await asyncio.sleep(FULL_S)

    def _let_go(self) -> None:
        for holder in list(self._holders):
            holder.let_go()

    async def _look(self) -> None:
        """Now and then: whether others need room, and what the rest of the cache takes."""
        seen, measured = time.time(), time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(OSError):
                asked = self._pressure.stat().st_mtime
                if asked > seen:
                    seen = asked
                    self._let_go()
            if time.monotonic() - measured > MEASURE_EVERY_S:
                self.index.others = await self._in_thread(made_bytes)
                measured = time.monotonic()

    def _count(self, *, hit: bool) -> None:
        with self._lock:
            self._hits += hit
            self._misses += not hit

    def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)


def _crc_of(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while part := file.read(LARGE):
            crc = zlib.crc32(part, crc)
    return crc


_pieces: dict[tuple[int, Path], Pieces] = {}
_making = threading.Lock()


def pieces() -> Pieces:
    """Those of this process."""
    key = os.getpid(), cache_folder().absolute()
    with _making:
        if key not in _pieces:
            _pieces[key] = Pieces(key[1] / PIECES, budget_bytes())
        return _pieces[key]


def telemetry() -> dict[str, float] | None:
    """What storage did since the last reading; None: this process reads nothing from afar."""
    found = _pieces.get((os.getpid(), cache_folder().absolute()))
    return None if found is None else found.telemetry()
