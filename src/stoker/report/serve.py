"""The page of a run while it trains, on this machine's loopback only: two addresses, nothing written, no file handed out."""

import hashlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from stoker.errors import UserError
from stoker.report.page import as_json, page, page_data

EVERY_S = 2.0
HOST = "127.0.0.1"


class PageServer:
    """Serves the page at / and its values at /data.json; they are read anew at most once in EVERY_S."""

    def __init__(self, title: str, read: Callable[[], list[dict[str, Any]]], port: int = 0) -> None:
        self._title, self._read, self._lock = title, read, threading.Lock()
        self._latest: tuple[float, dict[str, Any]] | None = None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                """Every page asks every two seconds."""

        try:
            self._server = ThreadingHTTPServer((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"Port {port} of {HOST} cannot be had ({error}). Name another: --port N.") from error
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self._server.server_port}/"

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        port = self._server.server_port
        # A page of somebody else could name us by a host of its own: only ours are answered.
        if request.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            return request.send_error(403)
        if request.path == "/":
            text = page(self._title, self._values())
            return _send(request, text, "text/html; charset=utf-8")
        if request.path == "/data.json":
            return _send(request, as_json(self._values()), "application/json")
        return request.send_error(404)

    def _values(self) -> dict[str, Any]:
        with self._lock:
            now = time.monotonic()
            if self._latest is None or now - self._latest[0] >= EVERY_S:
                runs = self._read()
                version = hashlib.sha256(as_json(runs).encode()).hexdigest()[:16]
                self._latest = now, page_data(runs, live_s=EVERY_S, version=version)
            return self._latest[1]


def _send(request: BaseHTTPRequestHandler, text: str, kind: str) -> None:
    body = text.encode()
    request.send_response(200)
    for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")):
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
