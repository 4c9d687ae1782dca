"""Events as they are stored, for whoever looks for the same one twice."""

import hashlib
from collections.abc import Iterator

import numpy as np

from stoker.data.bad_samples import BadShard
from stoker.data.plan import MicroBatch
from stoker.data.ragged import Indices
from stoker.data.source import Content
from stoker.recipes.icecube.sources import DirectEvents, PackedEvents


def contents_of(source: DirectEvents | PackedEvents, rows: Indices) -> Iterator[Content]:
    """Pulses of each event, whatever its name; in the order of the rows."""
    troubles: dict[int, str] = {}
    while True:
        readable = rows[~np.isin(source.table.columns["shard"][rows], list(troubles))]
        try:
            pulses = source.gather(MicroBatch(readable)).ragged
            break
        except BadShard as error:
            troubles[error.shard] = str(error)
    place = {row: number for number, row in enumerate(pulses.rows.tolist())}
    for row in rows.tolist():
        if row not in place:
            yield Content(trouble=troubles[int(source.table.columns["shard"][row])])
            continue
        inside = slice(int(pulses.offsets[place[row]]), int(pulses.offsets[place[row] + 1]))
        digest = hashlib.blake2b(digest_size=16)
        for name in ("time", "charge", "sensor"):
            digest.update(np.ascontiguousarray(pulses.columns[name][inside]).tobytes())
        yield Content(digest.digest())
