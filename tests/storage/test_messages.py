"""What a user is told when a place cannot be read: one paragraph that says which mistake it is."""

import http.server
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
from servers import Bucket

from stoker.cli import run as cli


@pytest.fixture
def answering() -> Iterator[Any]:
    """A server that answers everything with one status and text."""

    class Handler(http.server.BaseHTTPRequestHandler):
        status, text = 200, "<html>hello</html>"

        def do_GET(self) -> None:
            self.send_response(self.status)
            self.send_header("Content-Length", str(len(self.text)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(self.text.encode())

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Handler.endpoint = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield Handler
    server.shutdown()
    thread.join()
    server.server_close()


def told(path: str, capsys: Any, recipe: str = "icecube:demo") -> tuple[int, str]:
    code = cli(["train", recipe, "--data.path", path, "--run.device", "cpu"])
    err = capsys.readouterr().err
    assert "Traceback" not in err
    return code, err


def test_mistakes_of_names(bucket: Bucket, capsys: Any) -> None:
    obstore.put(bucket.store, "mixed/readme.txt", b"hello")
    obstore.put(bucket.store, "mixed/train/one.dat", b"hello")
    for recipe in ("icecube:demo", "imagenet:demo"):
        code, err = told("s3://no-such-bucket/x", capsys, recipe)
        assert (code, "There is no bucket no-such-bucket" in err) == (2, True), err
        code, err = told("s3://bucket/empty/prefix", capsys, recipe)
        assert (code, "s3://bucket/empty/prefix does not exist" in err) == (2, True), err
    code, err = told("s3://bucket/mixed", capsys)
    assert (code, "lacks train_meta.parquet" in err) == (2, True), err
    code, err = told("s3://bucket/mixed", capsys, "imagenet:demo")
    assert (code, "s3://bucket/mixed holds no images" in err) == (2, True), err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(403, "AccessDenied", "Access to s3://bucket/x"), (403, "InvalidAccessKeyId", "are not accepted"),
     (403, "SignatureDoesNotMatch", "are not accepted"), (400, "ExpiredToken", "have expired")],
)  # fmt: skip
def test_mistakes_of_credentials(
    answering: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, status: int, code: str, words: str
) -> None:
    answering.status, answering.text = status, f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    _as_someone(monkeypatch, answering.endpoint)
    found, err = told("s3://bucket/x", capsys)
    assert found == 2
    assert words in err
    assert "a-secret" not in err


def test_an_endpoint_that_is_no_s3(answering: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _as_someone(monkeypatch, answering.endpoint)
    code, err = told("s3://bucket/x", capsys)
    assert code == 2
    assert "cannot send parts of files" in err
    assert "AWS_ENDPOINT_URL" in err


def test_an_endpoint_that_nobody_answers(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    _as_someone(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv("STOKER_STORAGE_WAIT_S", "1")
    code, err = told("s3://bucket/x", capsys)
    assert code == 1
    assert "http://127.0.0.1:9 does not answer" in err


def _as_someone(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFSOMEONE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-must-not-show")


@pytest.mark.parametrize("endpoint", ["nonsense", "http://user:a-secret@host", "ftp://host"])
def test_an_endpoint_that_is_no_address(monkeypatch: pytest.MonkeyPatch, capsys: Any, endpoint: str) -> None:
    _as_someone(monkeypatch, endpoint)
    code, err = told("s3://bucket/x", capsys)
    assert code == 2
    assert "AWS_ENDPOINT_URL is no address" in err
    assert "a-secret" not in err


def test_places_that_must_be_local(
    bucket: Bucket, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    obstore.put(bucket.store, "one/file", b"x")
    for words in (["fetch", "s3://bucket/one", "s3://bucket/two"], ["simulate", "s3://bucket/three"]):
        assert cli(words) == 2
        assert "writes to local folders only" in capsys.readouterr().err
    assert not list(tmp_path.glob("s3*"))
    obstore.put(bucket.store, "both/p", b"x")
    obstore.put(bucket.store, "both/p/q", b"x")
    for url in ("s3://bucket/both", "s3://bucket/both/p"):
        assert cli(["fetch", url, str(tmp_path / "out")]) == 2
        assert "a disk cannot hold both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "words"), [("s3://no-such-bucket/runs", "no bucket"), ("https://host/runs", "web servers")]
)
def test_a_run_that_could_not_be_kept_does_not_begin(
    bucket: Bucket, events: Path, capsys: Any, folder: str, words: str
) -> None:
    code = cli(
        ["train", "icecube:demo", "--data.path", str(events / "packed"), "--run.device", "cpu", "--run.folder", folder]
    )
    err = capsys.readouterr().err
    assert code == 2
    assert words in err
    assert "step" not in err


def test_a_web_server_has_no_listing(answering: Any, capsys: Any) -> None:
    answering.status, answering.text = 404, "not found"
    code, err = told(answering.endpoint + "/set", capsys, "imagenet:demo")
    assert code == 2
    assert "does not list what it holds" in err


class WebServer(http.server.SimpleHTTPRequestHandler):
    """Python's own, and with it parts of files."""

    ranges = True

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        path = Path(self.translate_path(self.path))
        if not (asked and self.ranges and path.is_file()):
            super().do_GET()
            return
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        content = path.read_bytes()
        part = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize("ranges", [True, False])
def test_packed_sets_on_a_web_server(events: Path, capsys: Any, tmp_path: Path, ranges: bool) -> None:
    handler = type("Handler", (WebServer,), {"ranges": ranges})
    make = partial(handler, directory=str(events / "packed"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), make)  # type: ignore[arg-type]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        words = ["--run.device", "cpu", "--train.steps", "2", "--run.folder", str(tmp_path)]
        code = cli(["train", "icecube:demo", "--data.path", f"http://127.0.0.1:{server.server_port}", *words])
        assert code == (0 if ranges else 2)
        assert ranges or "cannot send parts of files" in capsys.readouterr().err
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
