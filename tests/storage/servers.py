"""Real servers that speak S3, on the loopback: moto's always, s3rver where Node is."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

sys.path.insert(0, str(Path(__file__).parent))
from proxy import Proxy

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDFORTESTS0001",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests-0002",
    "AWS_REGION": "us-east-1",
}


class Bucket:
    """A bucket of a server, and a proxy before it that tests set faults on."""

    name = "bucket"

    def __init__(self, port: int) -> None:
        self.port = port
        self.proxy = Proxy(port)
        options = {"allow_http": True}
        self.store = S3Store(self.name, endpoint=f"http://127.0.0.1:{port}", client_options=options, region="us-east-1",
                             access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
                             secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"])  # fmt: skip

    def upload(self, folder: Path, prefix: str) -> str:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                obstore.put(self.store, f"{prefix}/{path.relative_to(folder)}", path)
        return f"s3://{self.name}/{prefix}"

    def names(self, prefix: str) -> list[str]:
        return [one["path"] for page in obstore.list(self.store, prefix) for one in page]


@pytest.fixture(scope="session")
def moto_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = _free_port()
    words = [sys.executable, "-c", _MOTO, str(port)]
    yield from _served(words, port, tmp_path_factory.mktemp("moto"))


_MOTO = """
import logging, sys
from werkzeug.serving import make_server, WSGIRequestHandler
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
logging.getLogger("werkzeug").setLevel(logging.ERROR)
WSGIRequestHandler.protocol_version = "HTTP/1.1"
app = DomainDispatcherApplication(create_backend_app)
make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True).serve_forever()
"""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _served(words: list[str], port: int, folder: Path, **options: object) -> Iterator[int]:
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log, env={**os.environ, **KEYS}, **options)  # type: ignore[call-overload]
        try:
            for _ in range(600):
                with_socket = socket.socket()
                try:
                    with_socket.connect(("127.0.0.1", port))
                    break
                except OSError:
                    assert server.poll() is None, (folder / "log").read_text()
                    time.sleep(0.05)
                finally:
                    with_socket.close()
            yield port
        finally:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def s3rver_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Another implementation, from the npm registry; STOKER_S3RVER names a folder that has it."""
    folder = os.environ.get("STOKER_S3RVER")
    if folder is None or shutil.which("node") is None:
        pytest.skip("needs Node and STOKER_S3RVER=FOLDER, where `npm install s3rver` was run")
    port, data = _free_port(), tmp_path_factory.mktemp("s3rver")
    script = (
        "const S3rver = require('s3rver'); new S3rver({port: +process.argv[1], address: '127.0.0.1', silent: true, "
        "directory: process.argv[2], configureBuckets: [{name: 'bucket'}]}).run();"
    )
    yield from _served(["node", "-e", script, str(port), str(data)], port, data, cwd=folder)


def _make_bucket(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{Bucket.name}", method="PUT")
    with contextlib.suppress(urllib.error.HTTPError):  # it is there
        urllib.request.urlopen(request).read()


@pytest.fixture
def bucket(moto_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """Reached through its proxy, with keys in the environment and a cache of its own."""
    _make_bucket(moto_port)
    yield from _used(Bucket(moto_port), monkeypatch, tmp_path)


@pytest.fixture
def other_bucket(s3rver_port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    for name, value in (("AWS_ACCESS_KEY_ID", "S3RVER"), ("AWS_SECRET_ACCESS_KEY", "S3RVER")):
        monkeypatch.setitem(KEYS, name, value)
    yield from _used(Bucket(s3rver_port), monkeypatch, tmp_path)


def _used(made: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.proxy.endpoint)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    yield made
    made.proxy.close()


def write_tars(source: Path, out: Path) -> None:
    """Class folders as tar shards, one a side."""
    out.mkdir()
    for part in ("train", "val"):
        with tarfile.open(out / f"{part}-000.tar", "w") as tar:
            for path in sorted((source / part).rglob("*.jpg")):
                tar.add(path, f"{path.parent.name}/{path.name}")
