"""The detector: where each DOM hangs and how well it sees.

A sensor id of IceCube is `60 * (string - 1) + (dom - 1)`, so its tables are arrays of 86 strings x 60 DOMs. The built-in
detector is made by rule; a user's own `sensor_geometry.csv` replaces it, and may be of another detector, with any number of
sensors from 0 on.
"""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.locations import Location, read
from stoker.errors import UserError

NUM_STRINGS = 86
DOMS_PER_STRING = 60
NUM_SENSORS = NUM_STRINGS * DOMS_PER_STRING  # of IceCube
MOST_SENSORS = 1 << 15  # of any detector: a pulse keeps its sensor in 16 bits
FIRST_DEEPCORE_STRING = 79

# Rows of the hexagonal grid as deployed: 78 strings, 125 m apart, the rows turned by 9 degrees against the x axis.
GRID_ROWS = (6, 7, 8, 9, 10, 10, 9, 8, 7, 4)
GRID_SPACING_M = 125.0
GRID_TURN = math.radians(9.0)
TOP_M, DOM_SPACING_M = 500.0, 17.02
# DeepCore: ten DOMs above the dust layer as a veto, fifty below it in the clearest ice.
DEEPCORE_TOP_M, DEEPCORE_TOP_SPACING_M = 190.0, 10.0
DEEPCORE_LOW_M, DEEPCORE_LOW_SPACING_M = -158.0, 7.01
DEEPCORE_CENTRE_M, DEEPCORE_RADIUS_M = (46.0, -35.0), 72.0
HIGH_EFFICIENCY = 1.35  # quantum efficiency of a DeepCore PMT relative to a standard one


@dataclass(frozen=True)
class Geometry:
    """Positions in metres, IceCube coordinates (z up, 0 at the centre), and relative efficiency of each sensor."""

    xyz: npt.NDArray[np.float32]  # (sensors, 3)
    efficiency: npt.NDArray[np.float32]  # (sensors,)

    def __len__(self) -> int:
        return len(self.xyz)

    def facts(self) -> dict[str, Any]:
        """As JSON, for the run to keep."""
        usual = np.array_equal(self.efficiency, _efficiency(len(self)))
        return {"sensor_xyz": self.xyz.tolist()} | ({} if usual else {"efficiency": self.efficiency.tolist()})


def geometry_of(facts: Mapping[str, Any]) -> Geometry:
    xyz = np.array(facts["sensor_xyz"], np.float32)
    given = facts.get("efficiency")
    return Geometry(xyz, _efficiency(len(xyz)) if given is None else np.array(given, np.float32))


def standard_geometry() -> Geometry:
    """IceCube by rule: within a few tens of metres of the deployed detector, with the same density everywhere."""
    xy = np.concatenate([_grid_xy(), _deepcore_xy()])
    dom = np.arange(DOMS_PER_STRING)
    z = np.tile(TOP_M - DOM_SPACING_M * dom, (NUM_STRINGS, 1))
    low = dom >= 10
    z_deepcore = np.where(
        low, DEEPCORE_LOW_M - DEEPCORE_LOW_SPACING_M * (dom - 10), DEEPCORE_TOP_M - DEEPCORE_TOP_SPACING_M * dom
    )
    z[FIRST_DEEPCORE_STRING - 1 :] = z_deepcore
    xyz = np.concatenate([np.repeat(xy, DOMS_PER_STRING, axis=0), z.reshape(-1, 1)], axis=1)
    return Geometry(xyz=xyz.astype(np.float32).round(2), efficiency=_efficiency(NUM_SENSORS))


def read_geometry(path: Location) -> Geometry:
    """Positions from a Kaggle `sensor_geometry.csv`: columns sensor_id, x, y, z and, if it likes, efficiency."""
    try:
        rows = list(csv.DictReader(io.StringIO(read(path).decode(), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"The geometry {path} cannot be read ({error}). It should be a CSV file with the "
            f"columns sensor_id, x, y, z."
        ) from error
    missing_columns = {"sensor_id", "x", "y", "z"} - set(rows[0] if rows else ())
    if missing_columns:
        raise UserError(
            f"The geometry {path} lacks the column(s) {', '.join(sorted(missing_columns))}; it needs "
            f"sensor_id, x, y, z with one row for each sensor."
        )
    try:
        sensor = np.array([int(row["sensor_id"]) for row in rows])
        xyz = np.array([[float(row[axis]) for axis in "xyz"] for row in rows], dtype=np.float32)
        efficiency = [float(row["efficiency"]) for row in rows] if "efficiency" in rows[0] else None
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"The geometry {path} holds a value that is not a number ({error}).") from error
    _check_sensors(path, sensor, xyz)
    order = np.argsort(sensor)
    usual = _efficiency(len(sensor))
    return Geometry(xyz[order], usual if efficiency is None else np.array(efficiency, np.float32)[order])


def write_geometry(geometry: Geometry, path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        usual = np.array_equal(geometry.efficiency, _efficiency(len(geometry)))
        writer.writerow(["sensor_id", "x", "y", "z", *([] if usual else ["efficiency"])])
        for sensor, (x, y, z) in enumerate(geometry.xyz):
            more = [] if usual else [f"{geometry.efficiency[sensor]:.4g}"]
            writer.writerow([sensor, f"{x:.2f}", f"{y:.2f}", f"{z:.2f}", *more])


def _check_sensors(path: Location, sensor: npt.NDArray[np.int64], xyz: npt.NDArray[np.float32]) -> None:
    outside = sensor[(sensor < 0) | (sensor >= MOST_SENSORS)]
    if outside.size:
        raise UserError(
            f"The geometry {path} holds sensor id {outside[0]}; ids run from 0 to {MOST_SENSORS - 1} at most."
        )
    counts = np.bincount(sensor)
    if (counts != 1).any():
        wrong = np.flatnonzero(counts != 1)
        raise UserError(
            f"The geometry {path} must list each of its {len(counts)} sensors, from 0 on, once: {wrong.size} are missing or "
            f"repeated, the first is sensor {wrong[0]} with {counts[wrong[0]]} rows."
        )
    if not np.isfinite(xyz).all():
        bad = sensor[~np.isfinite(xyz).all(axis=1)][0]
        raise UserError(f"The geometry {path} gives sensor {bad} a position that is not finite.")


def _grid_xy() -> npt.NDArray[np.float64]:
    height = GRID_SPACING_M * math.sqrt(3) / 2
    middle = (len(GRID_ROWS) - 1) / 2
    points = [
        ((column - (width - 1) / 2) * GRID_SPACING_M, (row - middle) * height)
        for row, width in enumerate(GRID_ROWS)
        for column in range(width)
    ]
    cos, sin = math.cos(GRID_TURN), math.sin(GRID_TURN)
    return np.asarray(np.array(points) @ np.array([[cos, sin], [-sin, cos]]))


def _deepcore_xy() -> npt.NDArray[np.float64]:
    """Two infill strings near the centre, then six on a ring around it, as numbers 79 to 86."""
    infill = [(DEEPCORE_CENTRE_M[0] + dx, DEEPCORE_CENTRE_M[1] - 36.0) for dx in (-15.0, 26.0)]
    ring = [
        (
            DEEPCORE_CENTRE_M[0] + DEEPCORE_RADIUS_M * math.cos(GRID_TURN + math.radians(30 + 60 * k)),
            DEEPCORE_CENTRE_M[1] + DEEPCORE_RADIUS_M * math.sin(GRID_TURN + math.radians(30 + 60 * k)),
        )
        for k in range(6)
    ]
    return np.array(infill + ring)


def _efficiency(num_sensors: int) -> npt.NDArray[np.float32]:
    """Of IceCube, or of a detector that nothing is known of."""
    if num_sensors != NUM_SENSORS:
        return np.ones(num_sensors, np.float32)
    efficiency = np.ones((NUM_STRINGS, DOMS_PER_STRING), np.float32)
    efficiency[FIRST_DEEPCORE_STRING - 1 :] = HIGH_EFFICIENCY
    return efficiency.reshape(-1)
