"""Many reads in flight: one thread with an event loop, as many requests at a time as the store bears, each tried again.

The number at a time rises while it is made use of and answers stay quick, and falls by half when the store says that it is
too busy; what happened is counted for the run's events.
"""

import asyncio
import atexit
import os
import random
import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import obstore
from obstore.exceptions import BaseError

from stoker import console
from stoker.data.storage import objects
from stoker.data.storage.objects import ShortAnswer
from stoker.data.storage.urls import Url
from stoker.errors import UserError
from stoker.runs.environment import environment_number

T = TypeVar("T")
FEWEST, FIRST, MOST = 2, 6, 256  # requests at a time
SLOWER = 3.0  # times the quickest answer of a size: more requests only wait for one another
BACK_OFF_S = 0.1, 5.0  # the first pause, and the longest
STALLED_S = 20.0  # an answer that is not there by then is asked for again, later each time
SAID_EVERY_S = 10.0
CLOSE_S = 2.0  # for requests that are given up when the process ends
PART = 8 << 20  # bytes of a larger read that are asked for at once: what came is not lost with the rest
GIVE_UP_S = 240  # below the loader's own limit, so that the error names the server


def give_up_after_s() -> float:
    return environment_number("STOKER_STORAGE_WAIT_S", GIVE_UP_S)


class Patience:
    """How long one request is tried again."""

    def __init__(self, url: Url) -> None:
        self._url, self._first, self._tries, self._said = url, 0.0, 0, 0.0

    def pause(self, error: BaseException) -> float:
        """Seconds until the next try; raises where it would not help, or when it was tried for long enough."""
        now = time.monotonic()
        self._first = self._first or now
        if not objects.may_pass(error):
            raise error if isinstance(error, FileNotFoundError) else objects.told(self._url, error) from None
        if now - self._first > give_up_after_s():
            told = objects.told(self._url, error)
            raise type(told)(
                f"{told} It was tried for {now - self._first:.0f} s (STOKER_STORAGE_WAIT_S sets how long); what is done is "
                f"kept, and the same command, or `stoker resume`, goes on."
            ) from None
        if now - self._first > SAID_EVERY_S and now - self._said > SAID_EVERY_S:
            self._said = now
            console.say(f"{objects.told(self._url, error)}; trying again for {give_up_after_s():.0f} s.")
        self._tries += 1
        return float(min(BACK_OFF_S[1], BACK_OFF_S[0] * 2 ** (self._tries - 1)) * random.uniform(0.5, 1.0))

    def wait(self, error: BaseException) -> None:
        time.sleep(self.pause(error))


class Pace:
    """How many requests may be in flight: one more after each round of quick answers, half as many when told off."""

    def __init__(self) -> None:
        self.limit, self.throttled, self._last_cut = float(FIRST), 0, 0.0
        self._starting = True
        self._quickest: dict[int, float] = {}
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._in_flight < int(self.limit) and not self._waiting:
            self._in_flight += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)  # who asked first is served first: that is the order of the plan
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        """As many of those who wait go in as may."""
        self._in_flight -= 1
        while self._waiting and self._in_flight < int(self.limit):
            place = self._waiting.popleft()
            if not place.done():
                self._in_flight += 1
                place.set_result(None)

    def answered(self, num_bytes: int, seconds: float) -> None:
        size = num_bytes.bit_length()
        self._quickest[size] = min(
            seconds, self._quickest.get(size, seconds) * 1.001
        )  # what was once quick may be over
        if self._in_flight < int(self.limit):
            change = 0.0  # fewer than might be: this says nothing about more
        elif seconds < SLOWER * self._quickest[size]:
            change = 1.0 if self._starting else 1.0 / self.limit  # twice as many a round, until that is too many
        else:
            self._starting, change = False, -0.25 / self.limit
        self.limit = min(MOST, max(FEWEST, self.limit + change))

    def told_off(self) -> None:
        self.throttled += 1
        self._starting = False
        if time.monotonic() - self._last_cut > 0.5:  # the answers to what was already asked say it again
            self._last_cut = time.monotonic()
            self.limit = max(FEWEST, self.limit / 2)


class Requests:
    """The event loop of a process, and what its requests came to."""

    def __init__(self) -> None:
        self._pid, self._loop = os.getpid(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="storage", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        self._paces: dict[tuple[str, str], Pace] = {}
        self._lock = threading.Lock()
        self._reset()

    def close(self) -> None:
        """Nothing may call back into an interpreter that ends."""
        if not self._thread.is_alive() or os.getpid() != self._pid:
            return

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(CLOSE_S)

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def read(self, url: Url, first: int, count: int, tag: str) -> Any:
        """So many bytes of one version of an object, as a buffer."""
        patience, pace = Patience(url), self._pace(url)
        tries = 0
        while True:
            async with pace:
                begin = time.perf_counter()
                try:
                    tries += 1
                    content = await asyncio.wait_for(_get(url, first, count, tag), STALLED_S * tries)
                    spent = time.perf_counter() - begin
                    pace.answered(count, spent)
                    self._count(count, spent, retried=False)
                    return content
                except (BaseError, OSError, TimeoutError, ShortAnswer) as error:
                    failed: BaseException = error
                    self._count(0, time.perf_counter() - begin, retried=True)
                    if objects.is_throttled(error):
                        pace.told_off()
            try:
                pause = patience.pause(failed)
            except FileNotFoundError:
                raise UserError(f"{url} is gone: it was there when the data were opened.") from None
            await asyncio.sleep(pause)

    async def copy(self, url: Url, first: int, count: int, tag: str, path: Path) -> None:
        """The same into a file, in parts, many of them at a time."""

        async def part(start: int) -> None:
            content = await self.read(url, first + start, min(PART, count - start), tag)
            await asyncio.get_running_loop().run_in_executor(None, _write_at, path, content, start)

        path.touch()
        await asyncio.gather(*(part(start) for start in range(0, count, PART)))

    def _pace(self, url: Url) -> Pace:
        return self._paces.setdefault((url.scheme, url.host), Pace())

    def _count(self, num_bytes: int, seconds: float, *, retried: bool) -> None:
        with self._lock:
            self._requests += 1
            self._retries += retried
            self._bytes += num_bytes
            self._seconds.append(seconds)

    def telemetry(self) -> dict[str, float]:
        """Since the last reading; the pace is that of the busiest store."""
        with self._lock:
            p50, p99 = np.percentile(self._seconds, [50, 99]) * 1e3 if self._seconds else (0.0, 0.0)
            read = {
                "bytes": float(self._bytes),
                "requests": float(self._requests),
                "retries": float(self._retries),
                "latency_p50_ms": round(float(p50), 3),
                "latency_p99_ms": round(float(p99), 3),
                "throttled": float(sum(pace.throttled for pace in self._paces.values())),
                "at_a_time": round(max((pace.limit for pace in self._paces.values()), default=0.0), 1),
            }
            self._reset()
            return read

    def _reset(self) -> None:
        self._bytes = self._requests = self._retries = 0
        self._seconds: deque[float] = deque(maxlen=4096)


def _write_at(path: Path, content: Any, start: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(memoryview(content))


async def _get(url: Url, first: int, count: int, tag: str) -> Any:
    """With the version asked for in the request, so that an object that is replaced meanwhile is noticed."""
    options: Any = {"range": (first, first + count)}
    if tag.startswith(('"', "W/")):
        options["if_match"] = tag
    answer = await obstore.get_async(objects.client(url), url.key, options=options)
    content = await answer.bytes_async()
    if len(content) != count or tuple(answer.range) != (first, first + count):
        raise ShortAnswer(f"{url}: {len(content):,} bytes came where {count:,} were asked for")
    return content


_requests: dict[int, Requests] = {}
_making = threading.Lock()


def requests() -> Requests:
    """Those of this process: a forked one has none of its parent's threads."""
    with _making:
        if os.getpid() not in _requests:
            _requests.clear()
            _requests[os.getpid()] = Requests()
        return _requests[os.getpid()]
