"""Columns of a packed store that lie elsewhere: which blocks some samples need, and whether they are here."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import numpy.typing as npt

from stoker import console
from stoker.data.ragged import Array, Indices
from stoker.data.storage.blocks import block_bytes, touched
from stoker.data.storage.remote import RemoteFile


class MappedColumns:
    """Files of columns by name, and the bytes of an element of each."""

    def __init__(self, files: Mapping[str, RemoteFile], sizes: Mapping[str, int], num_elements: int) -> None:
        self._files, self._sizes = files, sizes
        # Elements that a block of the widest column holds: blocks of the others hold as many or more.
        self._chunk = block_bytes() // max(sizes.values())
        self._num_chunks = -(-num_elements // self._chunk)
        # Of which number of changes, chunks that were here then in all columns, and whether those were all.
        self._ready: tuple[int, npt.NDArray[np.bool_], bool] = (-1, np.zeros(0, bool), False)

    @property
    def is_whole(self) -> bool:
        """Everything is here, at this moment."""
        return bool(self._looked()[1])

    def want_all(self) -> None:
        for file in self._files.values():
            file.want(range(file.num_blocks))

    def places(self, first: Array, count: Array) -> list[tuple[RemoteFile, Indices]]:
        """Blocks that hold these samples; none: all of them are here."""
        return [] if self._are_here(first, count) else self._blocks(first, count)

    @contextmanager
    def held(self, first: Array, count: Array) -> Iterator[None]:
        """Inside the block these samples are here, whatever else needs room."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.enter_context(file.reading())
            if not self._are_here(first, count):
                stack.close()  # while somebody reads nothing is let go, and room may be needed
                for file, numbers in self._blocks(first, count):
                    stack.enter_context(file.held(numbers))
            yield

    def _blocks(self, first: Array, count: Array) -> list[tuple[RemoteFile, Indices]]:
        return [
            (file, touched(first * self._sizes[name], (first + count) * self._sizes[name], file.block))
            for name, file in self._files.items()
        ]

    def _are_here(self, first: Array, count: Array) -> bool:
        ready, whole = self._looked()
        if whole:
            return True
        last = self._num_chunks - 1  # where a sample without elements may begin after all others
        low = np.minimum(first // self._chunk, last)
        high = np.minimum((first + np.maximum(count, 1) - 1) // self._chunk, last)
        return bool(ready[low].all() and ready[high].all() and (high - low).max(initial=0) <= 1)

    def _looked(self) -> tuple[npt.NDArray[np.bool_], bool]:
        """Chunks that are here in all columns, and whether those are all."""
        changes = sum(file.changes for file in self._files.values())
        if self._ready[0] != changes:
            ready = self._chunks_here()
            self._ready = changes, ready, bool(ready.all())
        return self._ready[1:]

    def _chunks_here(self) -> npt.NDArray[np.bool_]:
        starts = np.arange(self._num_chunks, dtype=np.int64) * self._chunk
        here = np.ones(self._num_chunks, bool)
        for name, file in self._files.items():
            here &= file.is_here(starts * self._sizes[name] // file.block)
        return here

    def rows_of(self, file: RemoteFile, numbers: Indices, first: Array) -> Indices:
        """A sample in each block; `first`: of all samples."""
        name = next(name for name, one in self._files.items() if one is file)
        elements = numbers * (file.block // self._sizes[name])
        return np.asarray(np.minimum(np.searchsorted(first, elements), len(first) - 1))

    def keep(self) -> None:
        """Everything, as long as this process lives."""
        for name, file in self._files.items():
            with console.progress(f"fetch {name}", file.num_blocks, "blocks") as bar:
                file.want(range(file.num_blocks))
                for number in range(file.num_blocks):
                    with file.held([number]):
                        bar.advance()
            file.keep()
