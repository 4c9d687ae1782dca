"""What this machine can do at most, measured once and kept: matrix products, copies, a call, the disk, decoding, a store."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch

from stoker import console
from stoker.data.cache import cache_folder
from stoker.data.storage.urls import Url
from stoker.files import write_json
from stoker.runs.environment import cpu_name, gpu_names

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
REPEATS = 5
DISK_BYTES = 64 << 20


@dataclass(frozen=True)
class Ceilings:
    products: dict[str, float]  # FLOP/s by precision
    copy: float  # bytes/s of a copy in the device's memory, read and written
    call_s: float  # of an operation that does nothing
    disk: float | None = None  # bytes/s of a file that is not in memory
    decode: float | None = None  # images/s of one thread, JPEG of 375 by 500 pixels
    to_device: float | None = None  # bytes/s from pinned memory, on a GPU
    to_device_pageable: float | None = None


def ceilings(device: torch.device) -> Ceilings:
    """As they were measured on this machine, with these threads and this torch; measured now, if they never were."""
    key = "|".join([cpu_name(), str(torch.get_num_threads()), device.type, *gpu_names(), torch.__version__])
    path = cache_folder() / "ceilings.json"
    known = _read(path)
    if set(known.get(key, ())) != set(Ceilings.__dataclass_fields__):
        with console.progress("measure the machine", 1, "machine") as bar:
            known[key] = asdict(_measure(device))
            bar.advance()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known)
    return Ceilings(**known[key])


def network(place: Url) -> float | None:
    """Bytes/s from a store to this machine, as measured once; None: nothing there is large enough to tell."""
    from stoker.data.storage.objects import endpoint_of  # needs a client library
    from stoker.data.storage.speed import bytes_per_s

    key, path = f"{cpu_name()}|{endpoint_of(place)}|{place.scheme}://{place.host}", cache_folder() / "ceilings.json"
    known = _read(path)
    if key not in known:
        rate = bytes_per_s(place)
        if rate is None:
            return None
        known[key] = {"bytes_per_s": rate}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known)
    return float(known[key]["bytes_per_s"])


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
        return {key: value for key, value in found.items() if isinstance(value, dict)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _measure(device: torch.device) -> Ceilings:
    size = 8192 if device.type == "cuda" else 1024
    products = {}
    for name, kind in TYPES.items():
        left, right = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        products[name] = 2 * size**3 / _seconds(lambda left=left, right=right: left @ right, device)  # type: ignore[misc]
    block = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    other = torch.empty_like(block)
    copy = 2 * len(block) / _seconds(lambda: other.copy_(block), device)
    one = torch.zeros(1, device=device)
    call = _seconds(lambda: [one.add_(0) for _ in range(200)], device) / 200
    return Ceilings(products, copy, call, _disk(), _decode(), *_to_device(device))


def _decode() -> float:
    """Soft shapes with some noise: as many bytes as a photograph of that size has."""
    dice = np.random.default_rng(0)
    shapes = np.kron(dice.integers(0, 256, (15, 20, 3)), np.ones((25, 25, 1)))
    image = np.clip(shapes + dice.normal(0, 12, shapes.shape), 0, 255).astype(np.uint8)
    jpeg = simplejpeg.encode_jpeg(image, quality=90)
    return 1 / _seconds(lambda: simplejpeg.decode_jpeg(jpeg), torch.device("cpu"))


def _to_device(device: torch.device) -> tuple[float | None, float | None]:
    if device.type != "cuda":
        return None, None
    host = torch.empty(64 << 20, dtype=torch.uint8)
    there = torch.empty_like(host, device=device)
    pinned = host.pin_memory()
    quick, slow = (_seconds(lambda one=one: there.copy_(one, non_blocking=True), device) for one in (pinned, host))  # type: ignore[misc]
    return len(host) / quick, len(host) / slow


def _disk() -> float | None:
    """Of the disk that the cache lies on; the file's pages are dropped before it is read."""
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_folder()) as file:
            file.write(os.urandom(DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            begin = time.perf_counter()
            while file.read(1 << 20):
                pass
            return DISK_BYTES / (time.perf_counter() - begin)
    except OSError:
        return None


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    spent = []
    for number in range(REPEATS + 2):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= 2:
            spent.append(time.perf_counter() - begin)
    return statistics.median(spent)
