"""`stoker simulate`: neutrino events in an IceCube-like detector, written in the layout of the Kaggle data set.

Interactions are drawn in chunks, each seeded by (seed, file, chunk), so the result depends on the seed and the kind of
device but not on how many threads made it. The same code runs on CPU and GPU.
"""

import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from stoker import console
from stoker.errors import MachineError, UserError
from stoker.files import new_folder
from stoker.recipes.icecube.geometry import read_geometry, standard_geometry, write_geometry
from stoker.recipes.icecube.light import Detector, Light, join, point_light, track_light
from stoker.recipes.icecube.neutrinos import Interactions, draw_interactions, muons, showers
from stoker.recipes.icecube.readout import join_hits, noise_hits, photon_hits, read_out
from stoker.train.precision import vouch_for_products

# Small enough for a CPU's cache, large enough to fill a GPU.
DRAWS_PER_CHUNK = {"cpu": 1024, "cuda": 65_536}
FEWEST_PHOTONS = 9.0  # an event with less expected light does not reach eight coincident hits
ROWS_PER_GROUP = 131_072  # of a Parquet file; reads fastest at this size
BYTES_PER_EVENT = 1_500  # on disk, with head-room: to refuse a full disk before starting


@dataclass(frozen=True)
class Events:
    """Triggered events as flat columns: pulses of one event after those of the one before."""

    count: npt.NDArray[np.int64]  # (E,) pulses
    azimuth: npt.NDArray[np.float64]  # (E,) where the neutrino came from
    zenith: npt.NDArray[np.float64]  # (E,)
    energy: npt.NDArray[np.float32]  # (E,) GeV
    is_track: npt.NDArray[np.bool_]  # (E,)
    vertex: npt.NDArray[np.float32]  # (E, 3) m, of a cascade, or a point on the track
    sensor: npt.NDArray[np.int16]  # (P,)
    time: npt.NDArray[np.int64]  # (P,) ns
    charge: npt.NDArray[np.float64]  # (P,)
    auxiliary: npt.NDArray[np.bool_]  # (P,)

    def first(self, num_events: int) -> "Events":
        """The first events only."""
        num_pulses = int(self.count[:num_events].sum())
        pulses = {"sensor", "time", "charge", "auxiliary"}
        return Events(
            **{f.name: getattr(self, f.name)[: num_pulses if f.name in pulses else num_events] for f in fields(self)}
        )


def simulate(
    out: Path,
    *,
    num_events: int,
    num_files: int,
    seed: int,
    device: str = "cpu",
    geometry_path: Path | None = None,
    force: bool = False,
) -> None:
    """Writes `num_events` triggered events into the new folder `out`, spread over `num_files` files."""
    _check_counts(num_events, num_files, seed)
    geometry = read_geometry(geometry_path) if geometry_path else standard_geometry()
    detector = Detector(geometry, _device(device))
    vouch_for_products(detector.device)  # a run may follow in this process
    sizes = [num_events // num_files + (file < num_events % num_files) for file in range(num_files)]
    with new_folder(out, force=force, marker="train_meta.parquet") as partial:
        _check_room(partial, num_events)
        (partial / "train").mkdir()
        write_geometry(geometry, partial / "sensor_geometry.csv")
        with console.progress("simulate", num_events, "events") as bar:
            _write_files(partial, detector, sizes, seed, bar)


def simulate_events(detector: Detector, num_events: int, seed: tuple[int, ...]) -> Events:
    """Exactly `num_events` triggered events; the same seed gives the same events on the same kind of device."""
    with _chunk_pool(detector.device) as pool:
        return _collect(pool, detector, num_events, seed, lambda _: None)


def simulate_chunk(detector: Detector, num_draws: int, seed: tuple[int, ...]) -> Events:
    """The events among `num_draws` interactions that trigger."""
    device = detector.device
    generator = torch.Generator(device).manual_seed(
        int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> 1)
    )
    drawn = draw_interactions(num_draws, generator, device)
    light = join([point_light(detector, showers(drawn, generator)), track_light(detector, muons(drawn))])
    light, drawn_index = _bright_enough(light, num_draws)
    hits = join_hits(photon_hits(light, generator), noise_hits(len(drawn_index), generator, device))
    pulses = read_out(hits, len(drawn_index), generator)
    event, count = torch.unique_consecutive(pulses.event, return_counts=True)
    return _to_host(drawn, drawn_index[event], count, pulses.sensor, pulses.time, pulses.charge, pulses.auxiliary)


def _bright_enough(light: Light, num_draws: int) -> tuple[Light, Tensor]:
    """Leaves out events that cannot trigger, before the costly part; returns the kept ones' numbers too."""
    # Summed in integers: a GPU adds in any order, and one event more or less would change every draw after it.
    unit = 2**20
    total = torch.zeros(num_draws, device=light.mean.device, dtype=torch.int64)
    total.index_add_(0, light.event, (light.mean * unit).long())
    keep = total > FEWEST_PHOTONS * unit
    number = torch.cumsum(keep, 0) - 1
    pair = keep[light.event]
    rest = {f.name: getattr(light, f.name)[pair] for f in fields(light) if f.name != "event"}
    return Light(event=number[light.event[pair]], **rest), torch.nonzero(keep).squeeze(1)


def _to_host(drawn: Interactions, index: Tensor, count: Tensor, *pulses: Tensor) -> Events:
    sensor, time, charge, auxiliary = pulses
    came_from = -drawn.direction[index].double()
    azimuth = torch.remainder(torch.atan2(came_from[:, 1], came_from[:, 0]), 2 * torch.pi)
    return Events(
        count=count.cpu().numpy(),
        azimuth=azimuth.cpu().numpy(),
        zenith=torch.arccos(came_from[:, 2].clamp(-1, 1)).cpu().numpy(),
        energy=drawn.energy[index].cpu().numpy(),
        is_track=drawn.is_track[index].cpu().numpy(),
        vertex=drawn.position[index].cpu().numpy(),
        sensor=sensor.to(torch.int16).cpu().numpy(),
        time=time.cpu().numpy(),
        charge=charge.cpu().numpy(),
        auxiliary=auxiliary.cpu().numpy(),
    )


@contextmanager
def _chunk_pool(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """On a CPU one thread a core, each running single-threaded operations: chunks are independent of each other."""
    threads = torch.get_num_threads()
    num_workers = threads if device.type == "cpu" else 1
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        with ThreadPoolExecutor(num_workers, "simulate") as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _collect(
    pool: ThreadPoolExecutor, detector: Detector, num_events: int, seed: tuple[int, ...], done: Callable[[int], None]
) -> Events:
    """Chunks in their order until there are enough events; a few are worked on ahead."""
    num_draws = DRAWS_PER_CHUNK[detector.device.type]
    ahead: deque[Future[Events]] = deque()
    chunks: list[Events] = []
    have = number = 0
    while have < num_events:
        while len(ahead) < pool._max_workers + 1:
            ahead.append(pool.submit(simulate_chunk, detector, num_draws, (*seed, number)))
            number += 1
        chunks.append(ahead.popleft().result())
        done(min(len(chunks[-1].count), num_events - have))
        have += len(chunks[-1].count)
    for future in ahead:
        future.cancel()
    joined = {f.name: np.concatenate([getattr(chunk, f.name) for chunk in chunks]) for f in fields(Events)}
    return Events(**joined).first(num_events)


def _write_files(folder: Path, detector: Detector, sizes: list[int], seed: int, bar: console.Progress) -> None:
    """Files are written by other threads while the next ones are simulated; at most a few wait in memory."""
    room = threading.Semaphore(4)
    metas: list[Future[tuple[pa.Table, pa.Table]]] = []
    first_id = 0
    with _chunk_pool(detector.device) as chunks, ThreadPoolExecutor(4, "write") as writers:
        for file, size in enumerate(sizes):
            events = _collect(chunks, detector, size, (seed, file), bar.advance)
            event_id = first_id + 3 + np.cumsum(_id_gaps(seed, file, size))
            first_id = int(event_id[-1])
            room.acquire()
            future = writers.submit(_write_file, folder, file + 1, events, event_id)
            future.add_done_callback(lambda _: room.release())
            metas.append(future)
            for earlier in metas:
                if earlier.done():
                    earlier.result()  # a full disk stops the run here, not after the last file
        tables = [future.result() for future in metas]
    meta = pa.concat_tables(meta for meta, _ in tables)
    pq.write_table(meta, folder / "train_meta.parquet", write_page_checksum=True)
    pq.write_table(pa.concat_tables(truth for _, truth in tables), folder / "truth.parquet")


def _write_file(folder: Path, batch: int, events: Events, event_id: npt.NDArray[np.int64]) -> tuple[pa.Table, pa.Table]:
    """Writes `train/batch_K.parquet`; returns the file's rows of train_meta and truth."""
    columns: dict[str, Any] = {
        "sensor_id": events.sensor,
        "time": events.time,
        "charge": events.charge,
        "auxiliary": events.auxiliary,
        "event_id": np.repeat(event_id, events.count),
    }
    path = folder / "train" / f"batch_{batch}.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=ROWS_PER_GROUP, write_page_checksum=True)
    last = np.cumsum(events.count) - 1
    meta: dict[str, Any] = {
        "batch_id": np.full(len(event_id), batch, np.int64),
        "event_id": event_id,
        "first_pulse_index": last - events.count + 1,
        "last_pulse_index": last,
        "azimuth": events.azimuth,
        "zenith": events.zenith,
    }
    truth: dict[str, Any] = {
        "event_id": event_id,
        "energy": events.energy,
        "kind": pa.array(np.where(events.is_track, "track", "cascade")),
        "vertex_x": events.vertex[:, 0],
        "vertex_y": events.vertex[:, 1],
        "vertex_z": events.vertex[:, 2],
    }
    return pa.table(meta), pa.table(truth)


def _id_gaps(seed: int, file: int, size: int) -> npt.NDArray[np.int64]:
    """Ids of the real data rise with gaps; code that takes them for row numbers should fail here too."""
    return np.random.default_rng((seed, file, 1)).integers(1, 32, size)


def _check_counts(num_events: int, num_files: int, seed: int) -> None:
    for name, value, least in (("--events", num_events, 1), ("--files", num_files, 1), ("--seed", seed, 0)):
        if value < least:
            raise UserError(f"{name} is {value}; it must be at least {least}.")
    if num_files > num_events:
        raise UserError(f"{num_events} events cannot fill {num_files} files; ask for at most {num_events} files.")


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"--device {name!r} is no device; use cpu, cuda or cuda:N.") from error
    if device.type not in DRAWS_PER_CHUNK:
        raise UserError(f"--device {name!r} is not supported; use cpu, cuda or cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device {name!r} was asked for, and torch sees no GPU here. Leave the option out to use the CPU."
        )
    return device


def _check_room(folder: Path, num_events: int) -> None:
    free, needed = shutil.disk_usage(folder).free, num_events * BYTES_PER_EVENT
    if free < needed:
        raise MachineError(
            f"{num_events:,} events need about {needed / 1e9:.1f} GB and the disk of {folder.parent} has "
            f"{free / 1e9:.1f} GB free. Simulate fewer events, or write to another disk."
        )
