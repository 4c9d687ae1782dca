"""A proxy on the loopback that makes a real server behave as distant and unreliable ones do.

`python tests/storage/proxy.py --upstream PORT --latency 0.03 --bandwidth 200e6` prints its own port. Faults are drawn from a
seeded generator; one thread, so that a test can change them while requests run.
"""

import argparse
import asyncio
import contextlib
import random
import threading
import time
from dataclasses import dataclass, field

KINDS = ("503", "429", "reset", "truncated", "wrong range", "stall")
CHUNK = 128 << 10


@dataclass
class Faults:
    latency_s: float = 0.0  # before the first byte of every answer
    jitter_s: float = 0.0
    bandwidth: float = 0.0  # bytes a second over all connections; 0: no limit
    share: float = 0.0  # of requests that fail
    kinds: tuple[str, ...] = KINDS
    stall_s: float = 2.0
    down: bool = False  # nobody answers
    methods: tuple[str, ...] = ("GET",)


class Proxy:
    """In a thread of its own until `close`."""

    def __init__(self, upstream: int, faults: Faults | None = None, seed: int = 0) -> None:
        self.upstream, self.faults, self.random = upstream, faults or Faults(), random.Random(seed)
        self.counts: dict[str, int] = {}
        self.requests = 0
        self.most_at_once = self._at_once = 0
        self._free_at = 0.0  # when the line is free again
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self.port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait(10)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 20))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(0.05))  # until all lines are closed
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Upstream(self.upstream)
        try:
            while await self._answer(reader, writer, line):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass
        finally:
            line.close()
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: "_Upstream") -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        if self.faults.down:
            return False
        self.requests += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            body = await reader.readexactly(_length(head))
            method = head.split(b" ", 1)[0].decode()
            fault = self._fault(method)
            faults = self.faults
            await asyncio.sleep(faults.latency_s + self.random.uniform(0, faults.jitter_s))
            if fault == "reset":
                writer.transport.abort()
                return False
            if fault in ("503", "429"):
                reason, code = (
                    ("Service Unavailable", "SlowDown") if fault == "503" else ("Too Many Requests", "TooMany")
                )
                text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>slow down</Message></Error>'.encode()
                writer.write(f"HTTP/1.1 {fault} {reason}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
                await writer.drain()
                return True
            return await self._forward(head, body, method, fault, writer, line)
        finally:
            self._at_once -= 1

    def _fault(self, method: str) -> str:
        faults = self.faults
        if method not in faults.methods or self.random.random() >= faults.share or not faults.kinds:
            return ""
        kind = self.random.choice(faults.kinds)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return kind

    async def _forward(
        self, head: bytes, body: bytes, method: str, fault: str, writer: asyncio.StreamWriter, line: "_Upstream"
    ) -> bool:
        source, answer = await line.ask(head, body)
        length = 0 if method == "HEAD" or answer.split(b" ")[1] in (b"204", b"304") else _length(answer)
        if fault == "wrong range":
            answer = _shifted(answer)
        writer.write(answer)
        sent = 0
        while sent < length:
            part = await source.readexactly(min(CHUNK, length - sent))
            if fault in ("truncated", "stall") and sent + len(part) > length // 2:
                part = part[: max(0, length // 2 - sent)]
                writer.write(part)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                if fault == "stall":
                    await asyncio.sleep(self.faults.stall_s)
                writer.transport.abort()
                return False
            await self._pass(len(part))
            writer.write(part)
            await writer.drain()
            sent += len(part)
        if _is_chunked(answer) and method != "HEAD":
            await _copy_chunks(source, writer)
        await writer.drain()
        return True

    async def _pass(self, num_bytes: int) -> None:
        """Waits until the line has carried so many bytes."""
        if self.faults.bandwidth:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self.faults.bandwidth
            if self._free_at > now + 0.001:
                await asyncio.sleep(self._free_at - now)


@dataclass
class _Upstream:
    """A connection to the real server that is used again."""

    port: int
    _line: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = field(default=None)

    async def ask(self, head: bytes, body: bytes) -> tuple[asyncio.StreamReader, bytes]:
        for fresh in (False, True):
            if self._line is None or fresh:
                self._line = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
            reader, writer = self._line
            try:
                writer.write(head + body)
                await writer.drain()
                return reader, await reader.readuntil(b"\r\n\r\n")
            except (ConnectionError, asyncio.IncompleteReadError):
                if fresh:
                    raise
        raise ConnectionError

    def close(self) -> None:
        if self._line is not None:
            self._line[1].close()


def _header(head: bytes, name: bytes) -> bytes:
    for line in head.split(b"\r\n")[1:]:
        key, _, value = line.partition(b":")
        if key.strip().lower() == name:
            return value.strip()
    return b""


def _length(head: bytes) -> int:
    return int(_header(head, b"content-length") or 0)


def _is_chunked(head: bytes) -> bool:
    return _header(head, b"transfer-encoding").lower() == b"chunked"


async def _copy_chunks(source: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        size = await source.readuntil(b"\r\n")
        content = await source.readexactly(int(size, 16) + 2)
        writer.write(size + content)
        if int(size, 16) == 0:
            return


def _shifted(answer: bytes) -> bytes:
    """The answer to another range than the one that was asked for."""
    value = _header(answer, b"content-range")
    if not value:
        return answer
    first, last = value.split(b" ")[1].split(b"/")[0].split(b"-")
    wrong = b"bytes %d-%d/%s" % (int(first) + 7, int(last) + 7, value.split(b"/")[1])
    return answer.replace(value, wrong)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--upstream", type=int, required=True)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--bandwidth", type=float, default=0.0)
    words = parser.parse_args()
    proxy = Proxy(words.upstream, Faults(latency_s=words.latency, bandwidth=words.bandwidth))
    print(proxy.port, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
