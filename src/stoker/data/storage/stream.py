"""A remote file read from its beginning to its end: the next pieces are on their way, and those behind are let go."""

import io
from typing import Any

from stoker.data.storage.remote import RemoteFile

AHEAD = 4  # pieces


class Stream(io.RawIOBase):
    """What libraries that want a file are given."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._place, self._oldest = file, 0, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._file.size - self._place))
        if not count:
            return 0
        now = self._place // self._file.block
        self._file.want(range(now, min(self._file.num_blocks, now + AHEAD)))
        buffer[:count] = self._file.read(self._place, count)
        self._place += count
        if now > self._oldest:
            self._file.done_with(range(self._oldest, now))
            self._oldest = now
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.done_with(range(self._oldest, self._file.num_blocks))
        super().close()
