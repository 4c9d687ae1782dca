"""Shards that cannot be read: stop, or leave their samples out and say so. Never a silent skip."""

import threading
from collections.abc import Mapping

import numpy as np

from stoker import console
from stoker.data.ragged import Indices
from stoker.data.samples import SampleTable, shard_rows
from stoker.errors import UserError


class BadShard(UserError):
    """A shard, or a part of it, that cannot be read."""

    def __init__(self, shard: int, reason: str) -> None:
        super().__init__(reason)
        self.shard = shard


class Quarantine:
    """Keeps the samples of bad shards out of batches. With policy "stop" the first bad shard is an error."""

    def __init__(self, table: SampleTable, policy: str) -> None:
        self._table, self._policy = table, policy
        self._bad: dict[int, str] = {}
        self._unreported: list[dict[str, object]] = []
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
            self._unreported.append(
                {"file": self._table.shards[error.shard], "samples": num_samples, "reason": str(error)}
            )
        console.say(
            f"QUARANTINE: {num_samples:,} samples of {self._table.shards[error.shard]} are left out from here on. {error}"
        )

    def usable(self, rows: Indices) -> Indices:
        """The rows whose shards are not known to be bad."""
        if not self._bad:
            return rows
        return rows[~np.isin(self._table.columns["shard"][rows], list(self._bad))]

    def drain(self) -> list[dict[str, object]]:
        """What was quarantined since the last call, for the run's events."""
        with self._lock:
            found, self._unreported = self._unreported, []
        return found
