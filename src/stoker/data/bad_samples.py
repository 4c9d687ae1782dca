"""Samples that cannot be used: files that cannot be read, images that cannot be decoded. Never a silent skip.

What is left out goes into one log, from wherever it was noticed, and from there into the run's events and its log.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stoker import console
from stoker.data.ragged import Indices
from stoker.data.samples import SampleTable, shard_rows
from stoker.errors import UserError


@dataclass(frozen=True)
class LeftOut:
    """Samples that are used no more."""

    kind: str  # shard, or image: what could not be read
    name: str
    samples: int
    reason: str

    def __str__(self) -> str:
        return f"{self.kind.upper()} LEFT OUT: {self.name} ({self.samples:,} samples). {self.reason}"


class BadSamples:
    """The log of a process; what is in it is said at once, and handed on once."""

    def __init__(self) -> None:
        self._unreported: list[LeftOut] = []
        self._lock = threading.Lock()

    def add(self, left_out: LeftOut) -> None:
        with self._lock:
            self._unreported.append(left_out)
        console.say(str(left_out))

    def drain(self) -> list[LeftOut]:
        """What was left out since the last call."""
        with self._lock:
            found, self._unreported = self._unreported, []
        return found


class BadShard(UserError):
    """A shard, or a part of it, that cannot be read."""

    def __init__(self, shard: int, reason: str) -> None:
        super().__init__(reason)
        self.shard = shard


class Quarantine:
    """Keeps the samples of bad shards out of batches. With policy "stop" the first bad shard is an error."""

    def __init__(self, table: SampleTable, policy: str, log: BadSamples) -> None:
        self._table, self._policy, self._log = table, policy, log
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()
        for shard, reason in table.unreadable.items():
            self.add(BadShard(shard, reason))

    @property
    def shards(self) -> Mapping[int, str]:
        return self._bad

    def add(self, error: BadShard) -> None:
        if self._policy == "stop":
            raise error
        with self._lock:
            if error.shard in self._bad:
                return
            self._bad[error.shard] = str(error)
        num_samples = len(shard_rows(self._table, error.shard))
        self._log.add(LeftOut("shard", self._table.shards[error.shard], num_samples, str(error)))

    def usable(self, rows: Indices) -> Indices:
        """The rows whose shards are not known to be bad."""
        if not self._bad:
            return rows
        return rows[~np.isin(self._table.columns["shard"][rows], list(self._bad))]
