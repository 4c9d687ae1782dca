"""A file that lies elsewhere, made of pieces: read by ranges, or mapped as one stretch of memory that fills as they come.

Pieces that were read stay leased and mapped until they are said to be done with, or another process needs the room.
Processes that are forked to decode read what the process that forked them holds, and fetch nothing themselves.
"""

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.data.cache import PIECES, cache_folder
from stoker.data.ragged import Array, Indices
from stoker.data.storage import objects
from stoker.data.storage.blocks import block_bytes
from stoker.data.storage.index import Piece, path_of
from stoker.data.storage.pieces import Here, Pieces, pieces
from stoker.data.storage.sums import Expected
from stoker.data.storage.urls import Found, Url
from stoker.errors import UserError

_OWNER = os.getpid()  # processes that are forked from it fetch nothing
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000


def _may_fetch() -> bool:
    return os.getpid() == _OWNER


class RemoteFile:
    """One version of an object."""

    def __init__(self, url: Url, found: Found, block: int | None = None, sums: tuple[int, Sequence[int]] | None = None):
        """`sums`: what its pieces of so many bytes should sum up to."""
        self.url, self.size, self.block = url, found.size, block or block_bytes()
        self.num_blocks = -(-found.size // self.block)
        self._tag, self._object = found.tag, f"{objects.endpoint_of(url)} {url} {found.tag} {found.size}"
        self._lock = threading.RLock()
        self._here = np.zeros(self.num_blocks, bool)  # whole, leased, and mapped where there is a map
        self._held = np.zeros(self.num_blocks, np.int32)  # how many read it right now
        self.changes = self._readers = 0  # blocks that came or went, and those who read whatever is here
        self._coming: dict[int, Future[Here]] = {}
        self._expected = None if sums is None else Expected(sums[1], sums[0], found.size, self.block)
        self._is_wrong = False
        self._map: _Stretch | None = None
        if _may_fetch():
            self._pieces.add(self)

    @property
    def _pieces(self) -> Pieces:
        assert _may_fetch(), "a forked process reads what is held for it"
        return pieces()

    def blocks_of(self, first: int, count: int) -> range:
        """Numbers of the blocks that hold a range of bytes."""
        return range(first // self.block, -(-min(self.size, first + count) // self.block)) if count > 0 else range(0)

    def want(self, numbers: Sequence[int] | Indices) -> int:
        """Begins to fetch them; how many bytes are on their way now that were not before."""
        asked_for = np.asarray(numbers, np.int64)
        with self._lock:
            new = [one for one in asked_for[~self._here[asked_for]].tolist() if one not in self._coming]
            if new:
                asked = [self._piece(number) for number in new]
                futures = self._pieces.bring([(self.url, self._tag, piece) for piece in asked])
                self._coming.update(zip(new, futures, strict=True))
                for number, future in zip(new, futures, strict=True):
                    future.add_done_callback(partial(self._came, number))
            return sum(piece.count for piece in asked) if new else 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside the block nothing that is here is let go."""
        self._check()
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1

    def is_here(self, numbers: Indices) -> npt.NDArray[np.bool_]:
        return self._here[numbers]

    @contextmanager
    def held(self, numbers: Sequence[int] | Indices) -> Iterator[None]:
        """Inside the block they are here, whatever else needs room."""
        unique = np.unique(np.asarray(numbers, np.int64))
        self._hold(unique)
        try:
            yield
        finally:
            with self._lock:
                self._held[unique] -= 1

    def _hold(self, numbers: Indices) -> None:
        with self._lock:
            self._held[numbers] += 1
            missing = numbers[~self._here[numbers]].tolist()
            self.want(missing)
            # What is not on its way any more came while it was asked for.
            coming = {number: self._coming[number] for number in missing if number in self._coming}
        try:
            for number, future in coming.items():
                self._arrived(number, future.result())
            self._check()
        except BaseException:
            with self._lock:
                self._held[numbers] -= 1
                for number, future in coming.items():
                    if self._coming.get(number) is future and future.done() and future.exception() is not None:
                        del self._coming[number]  # it may be asked for again
            raise

    def _check(self) -> None:
        if self._is_wrong:
            raise UserError(
                f"{self.url} is not what was packed: what came here was dropped, and starting again fetches it once more. "
                f"If that ends in the same way it is damaged there: pack it, or copy it there, again."
            )

    def _came(self, number: int, future: "Future[Here]") -> None:
        """Whoever needs it next finds it in its place; an error is left to them."""
        if future.exception() is None:
            self._arrived(number, future.result())

    def _arrived(self, number: int, piece: Here) -> None:
        with self._lock:
            if self._coming.pop(number, None) is not None:
                if self._expected is not None and not self._expected.agrees(number, piece.crc):
                    self._is_wrong = True
                    # Whether it is wrong there, or came wrong: the next run fetches it once more.
                    self._pieces.drop([self._piece(one) for one in self._expected.beside(number)])
                if self._map is not None:
                    self._map.put(number * self.block, self._piece(number).count, piece.path)
                self._here[number] = True
                self.changes += 1

    def done_with(self, numbers: Sequence[int] | Indices, next_use: float | None = None) -> None:
        """They may be removed when room is needed."""
        with self._lock:
            if self._readers:
                return
            free = [int(one) for one in numbers if self._held[one] == 0 and self._settled(int(one))]
            for number in free:
                self._here[number] = False  # before it is counted: whoever looks in between must look again
                self.changes += 1
                self._coming.pop(number, None)
                if self._map is not None:
                    self._map.clear(number * self.block, self._piece(number).count)
            self._pieces.release([self._piece(number) for number in free], next_use)

    def _settled(self, number: int) -> bool:
        future = self._coming.get(number)
        return bool(self._here[number]) or (future is not None and future.done() and future.exception() is None)

    def read_once(self) -> None:
        """It was read, and is not needed until somebody asks for it again."""
        if _may_fetch():
            self.done_with(range(self.num_blocks))

    def let_go(self) -> None:
        if _may_fetch():
            with self._lock:  # what was fetched ahead too: it comes again
                settled = {number for number in self._coming if self._settled(number)}
                self.done_with([*settled, *np.flatnonzero(self._here & (self._held == 0)).tolist()])

    def keep(self) -> None:
        """All of it, as long as this process lives."""
        self._hold(np.arange(self.num_blocks))

    def path_of(self, number: int) -> Path:
        return path_of(cache_folder() / PIECES, self._piece(number).name)

    def read(self, first: int, count: int) -> bytes:
        """So many bytes from one on, fewer at the end of the file."""
        numbers = self.blocks_of(first, count)
        if not _may_fetch():  # whoever forked this process holds them
            return self._read(numbers, first, count)
        with self.held(numbers):
            return self._read(numbers, first, count)

    def _read(self, numbers: range, first: int, count: int) -> bytes:
        parts = []
        for number in numbers:
            start = max(0, first - number * self.block)
            length = min(self.block, first + count - number * self.block) - start
            file = os.open(self.path_of(number), os.O_RDONLY)
            try:
                parts.append(os.pread(file, length, start))
            finally:
                os.close(file)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def array(self) -> Array:
        """All bytes as one array. Only what is held may be looked at: the rest is no memory."""
        with self._lock:
            if self._map is None:
                self._map = _Stretch(self.size)
                for number in np.flatnonzero(self._here).tolist():
                    piece = self._piece(number)
                    self._map.put(number * self.block, piece.count, self.path_of(number))
            return self._map.array

    def _piece(self, number: int) -> Piece:
        first = number * self.block
        return Piece(self._object, first, min(self.block, self.size - first))


class _Stretch:
    """Addresses for a whole file; nothing lies there until a piece is put in its place."""

    def __init__(self, size: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
        ]  # fmt: skip
        self._start = self._call(None, max(1, size), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        memory = (ctypes.c_uint8 * size).from_address(self._start)
        self.array: Array = np.frombuffer(memory, np.uint8)  # type: ignore[call-overload]

    def put(self, first: int, count: int, path: Path) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            self._call(self._start + first, count, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file)
        finally:
            os.close(file)

    def clear(self, first: int, count: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._call(self._start + first, count, 0, flags, -1)

    def _call(self, address: int | None, count: int, protection: int, flags: int, file: int) -> int:
        found = self._libc.mmap(address, count, protection, flags, file, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map memory: {os.strerror(code)}")
        return int(found)
