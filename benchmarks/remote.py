"""How much of a local store's rate is left when it lies behind a network: the first epoch, and the second.

One run, one table. A packed store of simulated events on the disk, and the same store in s3rver (an S3 server from the npm
registry) behind a proxy that adds latency and limits the bandwidth. The consumer takes batches as a GPU would, at a fixed
number of bytes a second, so that server and proxy, which share the cores here, leave the loader some. Beside it the naive
way, one request a sample, and LitData streaming the same samples from the same server.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from measure import emit, line
from obstore.store import S3Store

from stoker.data.batch import num_bytes
from stoker.data.plan import Position
from stoker.data.storage.pieces import telemetry
from stoker.data.store import open_store
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.train.parallel import Ranks

PROXY = Path(__file__).parents[1] / "tests" / "storage" / "proxy.py"
KEYS = {"AWS_ACCESS_KEY_ID": "S3RVER", "AWS_SECRET_ACCESS_KEY": "S3RVER", "AWS_REGION": "us-east-1"}
BATCH = 512
SERVE = (
    "const S3rver = require('s3rver'); new S3rver({port: +process.argv[1], address: '127.0.0.1', silent: true, "
    "directory: process.argv[2], configureBuckets: [{name: 'bucket'}]}).run();"
)


@contextmanager
def served(s3rver: Path, folder: Path) -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = int(one.getsockname()[1])
    server = subprocess.Popen(["node", "-e", SERVE, str(port), str(folder)], cwd=s3rver)
    try:
        for _ in range(200):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield port
    finally:
        server.kill()


@contextmanager
def behind(port: int, latency_s: float, bandwidth: float) -> Iterator[str]:
    words = [sys.executable, str(PROXY), "--upstream", str(port), "--latency", str(latency_s)]
    proxy = subprocess.Popen([*words, "--bandwidth", str(bandwidth)], stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None
        yield f"http://127.0.0.1:{int(proxy.stdout.readline())}"
    finally:
        proxy.kill()


def upload(port: int, folder: Path, prefix: str) -> None:
    store: Any = S3Store("bucket", endpoint=f"http://127.0.0.1:{port}", client_options={"allow_http": True}, **_keys())
    for path in folder.rglob("*"):
        if path.is_file():
            obstore.put(store, f"{prefix}/{path.relative_to(folder)}", path)


def _keys() -> dict[str, str]:
    return {"access_key_id": "S3RVER", "secret_access_key": "S3RVER", "region": "us-east-1"}


def epochs(path: str, cache: Path, bytes_per_s: float, num: int, threads: int) -> list[dict[str, float]]:
    """Seconds of each epoch, from asking for the first batch; the first one begins with nothing in the cache."""
    os.environ["STOKER_CACHE"] = str(cache)
    words = [
        "--data.path",
        path,
        "--run.device",
        "cpu",
        "--loader.batch_size",
        str(BATCH),
        "--loader.threads",
        str(threads),
    ]
    found = resolve_target("icecube:demo", words)
    run = build_run(found.recipe, found.config, Ranks())
    results = []
    for epoch in range(num):
        begin, wait = time.perf_counter(), 0.0
        for step in run.training.steps(Position(0, epoch), epoch + 1):
            wait += step.wait_s
            time.sleep(num_bytes(step.batches[0]) / bytes_per_s)  # what was waited for is lost, as on a GPU
        told = telemetry() or {}
        results.append(
            {"seconds": time.perf_counter() - begin, "samples": len(run.training.plan), "wait_s": wait, **told}
        )
    return results


def naive_rate(endpoint: str, packed: Path, seconds: float) -> float:
    """Samples a second by one request each, the next when the last is there."""
    store: Any = S3Store("bucket", endpoint=endpoint, client_options={"allow_http": True}, **_keys())
    opened = open_store(packed)
    first, count = opened.table.columns["first"], opened.table.columns["count"]
    order, begin = np.random.default_rng(0).permutation(len(first)), time.perf_counter()
    for done, row in enumerate(order.tolist()):
        obstore.get_range(store, "packed/columns/time.bin", start=4 * int(first[row]), length=4 * int(count[row]))
        if time.perf_counter() - begin > seconds:
            return (done + 1) / (time.perf_counter() - begin)
    return len(order) / (time.perf_counter() - begin)


LITDATA_WRITE = """
import sys, numpy as np
from litdata import optimize
from stoker.data.store import open_store
store = open_store(__import__("pathlib").Path(sys.argv[1]))
first, count = store.table.columns["first"], store.table.columns["count"]
def sample(row):
    part = slice(int(first[row]), int(first[row]) + int(count[row]))
    return {name: np.ascontiguousarray(column[part]) for name, column in store.columns.items()}
if __name__ == "__main__":
    optimize(sample, list(range(len(first))), sys.argv[2], num_workers=2, chunk_bytes="8MB")
"""
LITDATA_READ = """
import json, shutil, sys, time, torch
from litdata import StreamingDataset, StreamingDataLoader
from litdata.streaming import downloader
downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # the server of this benchmark has no certificate
url, endpoint, cache, batch, bytes_per_s, threads = sys.argv[1:7]
keys = {"aws_access_key_id": "S3RVER", "aws_secret_access_key": "S3RVER", "region_name": "us-east-1"}
options = {"endpoint_url": endpoint, **keys}
data = StreamingDataset(url, cache_dir=cache, shuffle=True, storage_options=options, max_cache_size="100GB")
loader = StreamingDataLoader(data, batch_size=int(batch), num_workers=int(threads), collate_fn=lambda one: one, shuffle=True)
for epoch in range(2):
    begin, samples = time.perf_counter(), 0
    for batch in loader:
        merged = {name: torch.cat([torch.as_tensor(one[name]) for one in batch]) for name in batch[0]}
        samples += len(batch)
        time.sleep(sum(tensor.nbytes for tensor in merged.values()) / float(bytes_per_s))
    print(json.dumps({"seconds": time.perf_counter() - begin, "samples": samples}), flush=True)
"""


def litdata_epochs(litdata: Path, url: str, endpoint: str, work: Path, bytes_per_s: float, threads: int) -> list[Any]:
    cache = work / "litdata-cache"
    shutil.rmtree(cache, ignore_errors=True)
    (work / "read.py").write_text(LITDATA_READ)
    words = [url, endpoint, str(cache), str(BATCH), str(bytes_per_s), str(threads)]
    done = subprocess.run(
        [sys.executable, str(work / "read.py"), *words], capture_output=True, text=True, env=_with(litdata), check=False
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return [json.loads(row) for row in done.stdout.splitlines() if row.startswith("{")]


def _with(litdata: Path) -> dict[str, str]:
    return {**os.environ, **KEYS, "PYTHONPATH": f"{litdata}:{os.environ.get('PYTHONPATH', '')}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--s3rver", type=Path, required=True)  # a folder in which `npm install s3rver` was run
    parser.add_argument("--litdata", type=Path)  # a folder into which pip installed litdata
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--latencies", type=float, nargs="*", default=[0.03, 0.1])
    parser.add_argument("--bandwidth", type=float, default=200e6)
    parser.add_argument("--consumer", type=float, default=30e6)  # bytes of batches a second
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    os.environ.update(KEYS)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        packed = _made(work, words.events)
        with served(words.s3rver, work / "s3") as port:
            upload(port, packed, "packed")
            if words.litdata:
                (work / "write.py").write_text(LITDATA_WRITE)
                command = [sys.executable, str(work / "write.py"), str(packed), str(work / "chunks")]
                subprocess.run(command, check=True, env=_with(words.litdata), capture_output=True)
                upload(port, work / "chunks", "chunks")
            for latency in words.latencies:
                with behind(port, latency, words.bandwidth) as endpoint:
                    os.environ["AWS_ENDPOINT_URL"] = endpoint
                    _measure(words, work, packed, endpoint, latency)


def _made(work: Path, num_events: int) -> Path:
    from stoker.cli import run as cli

    os.environ["STOKER_CACHE"] = str(work / "making")
    assert cli(["simulate", str(work / "files"), "--events", str(num_events), "--files", "12"]) == 0
    assert cli(["pack", "icecube", str(work / "files"), str(work / "packed")]) == 0
    return work / "packed"


def _measure(words: argparse.Namespace, work: Path, packed: Path, endpoint: str, latency: float) -> None:
    """Local and remote in turns; a cache of its own for every repeat."""
    local: list[dict[str, float]] = []
    remote: list[list[dict[str, float]]] = []
    for repeat in range(words.repeats):
        local += epochs(str(packed), work / f"local-{repeat}", words.consumer, 2, words.threads)[1:]
        cache = work / f"cache-{latency}-{repeat}"
        remote.append(epochs("s3://bucket/packed", cache, words.consumer, 2, words.threads))
        shutil.rmtree(cache)
    base = statistics.median(one["samples"] / one["seconds"] for one in local)
    details = {
        "latency_ms": latency * 1e3,
        "bandwidth": words.bandwidth,
        "consumer_bytes_per_s": words.consumer,
        "samples": int(local[0]["samples"]),
        "local_samples_per_s": round(base, 1),
        "local_wait_s": round(statistics.median(one["wait_s"] for one in local), 3),
    }
    for number, name in enumerate(("cold", "warm")):
        rates = [one[number]["samples"] / one[number]["seconds"] / base for one in remote]
        last = {key: round(value, 3) for key, value in remote[-1][number].items()}
        emit(line(f"remote-{name}", rates, "of local", **details, last=last))
    emit(line("remote-naive", [naive_rate(endpoint, packed, 10.0) / base], "of local", **details))
    if words.litdata:
        found = [
            litdata_epochs(words.litdata, "s3://bucket/chunks", endpoint, work, words.consumer, words.threads)
            for _ in range(words.repeats)
        ]
        for number, name in enumerate(("cold", "warm")):
            rates = [one[number]["samples"] / one[number]["seconds"] / base for one in found if len(one) == 2]
            if rates:
                emit(line(f"remote-litdata-{name}", rates, "of local", **details))


if __name__ == "__main__":
    main()
