"""What is known of events besides their direction: energy, vertex and kind, from `truth.parquet` beside them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.locations import Location, is_file, open_local
from stoker.data.parquet import named_if_damaged
from stoker.data.samples import SampleTable
from stoker.errors import UserError
from stoker.recipes.icecube.events import TRUTH

VERTEX = ("vertex_x", "vertex_y", "vertex_z")


def read_truth(root: Location, table: SampleTable, rows: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
    """Energy (GeV), kind and vertex (m) of some rows of the table; nothing where that is not known of all of them."""
    if not is_file(root / TRUTH):
        return {}
    with named_if_damaged(root / TRUTH):
        truth = pq.read_table(open_local(root / TRUTH))
    if "event_id" not in truth.column_names:
        raise UserError(f"{root / TRUTH} has no column event_id.")
    ids = truth.column("event_id").to_numpy()
    order = np.argsort(ids, kind="stable")
    if (ids[order][1:] == ids[order][:-1]).any():
        twice = ids[order][1:][ids[order][1:] == ids[order][:-1]][0]
        raise UserError(f"{root / TRUTH} lists event {twice} more than once.")
    at = np.searchsorted(ids[order], np.asarray(table.columns["id"][rows]))
    if at.max(initial=0) >= len(ids) or (ids[order][at] != table.columns["id"][rows]).any():
        return {}
    chosen = order[at]
    return {
        name: _array(truth.column(name))[chosen] for name in ("energy", "kind", *VERTEX) if name in truth.column_names
    }


def targets(root: Location, table: SampleTable, *, energy: bool, vertex: bool) -> npt.NDArray[np.float32] | None:
    """(rows of the table, 4): log10 of the energy / GeV and the vertex (m), for models that learn them; None: none does."""
    if not (energy or vertex):
        return None
    truth = read_truth(root, table, np.arange(len(table)))
    missing = [name for name in (*(["energy"] if energy else []), *(VERTEX if vertex else ())) if name not in truth]
    if missing:
        raise UserError(
            f"The model is to learn {' and '.join(missing)}, and {root / TRUTH} does not hold it for every event. It is a "
            f"table with the columns event_id, energy (GeV), vertex_x, vertex_y, vertex_z (m)."
        )
    found = np.zeros((len(table), 4), np.float32)
    if energy:
        values = truth["energy"].astype(np.float64)
        if not (values > 0).all():
            raise UserError(f"{root / TRUTH} holds {int((~(values > 0)).sum()):,} energies that are not above 0.")
        found[:, 0] = np.log10(values)
    if vertex:
        found[:, 1:] = np.stack([truth[name].astype(np.float32) for name in VERTEX], -1)
    if not np.isfinite(found).all():
        raise UserError(f"{root / TRUTH} holds values that are not finite.")
    return found


def _array(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    values: npt.NDArray[Any] = column.to_numpy()
    return values.astype(str) if values.dtype == object else values
