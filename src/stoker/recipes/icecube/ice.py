"""South Pole ice at 400 nm: effective scattering and absorption length by depth, the dust layer included.

IceCube's z points up and depth = 1948.07 - z; the dust layer lies at z = -150 .. -50. Published pipelines that map
z = (depth - 1950) / 500 hold the ice upside down, so the sign is kept in this one place.
"""

import numpy as np
import numpy.typing as npt

CENTRE_DEPTH_M = 1948.07

# (depth m, effective scattering length m, absorption length m): the table of arXiv:1301.5361, averaged over 20 m
# in inverse length, which is what light sums up along its way.
LAYERS = (
    (1400, 14, 47), (1420, 16, 55), (1440, 15, 55), (1460, 18, 67), (1480, 30, 103), (1500, 39, 135),
    (1520, 21, 78), (1540, 14, 46), (1560, 16, 56), (1580, 16, 56), (1600, 23, 76), (1620, 19, 68),
    (1640, 32, 113), (1660, 44, 156), (1680, 42, 147), (1700, 28, 101), (1720, 20, 75), (1740, 20, 68),
    (1760, 28, 99), (1780, 36, 115), (1800, 36, 125), (1820, 39, 134), (1840, 29, 100), (1860, 21, 71),
    (1880, 33, 105), (1900, 41, 155), (1920, 48, 167), (1940, 31, 118), (1960, 19, 70), (1980, 12, 41),
    (2000, 12, 40), (2020, 8, 31), (2040, 5, 19), (2060, 8, 31), (2080, 15, 56), (2100, 52, 177),
    (2120, 34, 119), (2140, 51, 168), (2160, 38, 126), (2180, 29, 95), (2200, 32, 103), (2220, 44, 144),
    (2240, 54, 168), (2260, 59, 182), (2280, 78, 224), (2300, 75, 239), (2320, 67, 224), (2340, 40, 136),
    (2360, 26, 94), (2380, 38, 129), (2400, 57, 203), (2420, 58, 191), (2440, 73, 218), (2460, 84, 267),
    (2480, 67, 211),
)  # fmt: skip


def ice_lengths(z: npt.NDArray[np.floating]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Effective scattering and absorption length (m) at height z; the outermost layers continue beyond the table."""
    depth, scattering, absorption = np.array(LAYERS, dtype=float).T
    here = CENTRE_DEPTH_M - np.asarray(z, dtype=float)
    return 1 / np.interp(here, depth, 1 / scattering), 1 / np.interp(here, depth, 1 / absorption)
