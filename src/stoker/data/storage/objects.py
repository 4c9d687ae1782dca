"""Talking to object stores through obstore: one client a bucket, and their errors in words that a user can act on.

Credentials are those of the environment (AWS_ACCESS_KEY_ID and so on, GOOGLE_*, AZURE_STORAGE_*), never of a URL or a
configuration, and nothing that is said or raised here holds them. AWS_ENDPOINT_URL names a server that speaks S3.
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from stoker.data.storage.urls import Found, Url
from stoker.errors import MachineError, UserError

T = TypeVar("T")
CONNECT_S, SILENT_S, LONGEST_S = 5, 10, 600  # to reach a server, between two parts of its answer, and in all
WRITTEN_AT_ONCE = 4  # parts of an object
ENDPOINT = re.compile(r"https?://[^/@\s]+/?[^@\s]*")
PROVIDERS = ("AWS_", "GOOGLE_", "AZURE_")  # of names in the environment that say where and as whom
LISTED_AT_ONCE, DEEPEST = 32, 3  # folders, and levels that are looked through for so many
SECRETS = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS", re.IGNORECASE)  # in names of the environment
PUBLIC = re.compile(r"FILE|PATH|_URI$|_URL$|ENDPOINT", re.IGNORECASE)  # of those, what holds no secret
# A server that is too busy, gone, or broke off: asked again it may answer.
PASSING = re.compile(
    r"HTTP error|status code: (5\d\d|429|408)|SlowDown|timed? ?out|connection|reset|broken pipe|"
    r"error (sending|decoding|reading)|"
    r"content.range|requested \d+\.\.\d+, got|unexpected|incomplete|end of file",
    re.IGNORECASE,
)
THROTTLED = re.compile(r"status code: (503|429)|SlowDown|TooManyRequests", re.IGNORECASE)


class ShortAnswer(Exception):
    """A server sent another number of bytes than was asked for."""


@lru_cache(maxsize=64)
def _client(scheme: str, host: str, process: int, environment: int, *, writing: bool) -> Any:
    endpoint = endpoint_of(Url(scheme, host))
    plain = scheme == "http" or endpoint.startswith("http://")
    plain = plain or os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() == "true"
    client_options: Any = {
        "allow_http": plain,
        "connect_timeout": timedelta(seconds=CONNECT_S),
        # A server says nothing while it is sent something.
        "read_timeout": timedelta(seconds=LONGEST_S if writing else SILENT_S),
        "timeout": timedelta(seconds=LONGEST_S),
    }
    # We try again ourselves: how often, and what a server says about it, is part of what a run reports.
    options: Any = {"client_options": client_options, "retry_config": {"max_retries": 0}}
    if scheme == "s3":
        if endpoint:
            options["endpoint"] = endpoint
        if not os.environ.get("AWS_REGION") and not os.environ.get("AWS_DEFAULT_REGION"):
            options["region"] = "us-east-1"
        return S3Store(host, **options)
    if scheme == "gs":
        return GCSStore(host, **options)
    if scheme == "az":
        return AzureStore(host, **options)
    return HTTPStore.from_url(f"{scheme}://{host}", **options)


def client(url: Url, *, writing: bool = False) -> Any:
    """The store that holds a place, one a process."""
    with InWords(url):
        ours = tuple((name, value) for name, value in os.environ.items() if name.startswith(PROVIDERS))
        return _client(url.scheme, url.host, os.getpid(), hash(ours), writing=writing)


def endpoint_of(url: Url) -> str:
    """Where a bucket is looked for, if not at the provider itself: part of what an object is."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") if url.scheme == "s3" else ()
    name = next((name for name in names if os.environ.get(name)), None)
    if name is not None and not ENDPOINT.fullmatch(os.environ[name]):
        raise UserError(
            f"{name} is no address of a server: http://HOST:PORT or https://HOST, without a user or a password."
        )
    return os.environ[name] if name else ""


def head(url: Url) -> Found | None:
    """None: there is no such object."""
    try:
        return _patiently(url, lambda: _found(obstore.head(client(url), url.key), url.parent))
    except FileNotFoundError:
        return None
    except UserError:
        if url.scheme not in ("https", "http"):
            list_folder(url.parent)  # the answer to this has a body that says why
        raise


def get(url: Url) -> bytes:
    """All of a small object, as it is now; raises FileNotFoundError."""
    return _patiently(url, lambda: bytes(obstore.get(client(url), url.key).bytes()))


def list_folder(url: Url) -> tuple[list[str], list[Found]]:
    """Names of the folders in it, and its objects."""
    _must_list(url)
    listed: Any = _patiently(url, lambda: obstore.list_with_delimiter(client(url), url.key or None))
    folders = [prefix.rstrip("/").rpartition("/")[2] for prefix in listed["common_prefixes"]]
    return folders, [_found(one, url) for one in listed["objects"] if _is_below(one["path"], url)]


def list_all(url: Url) -> Iterator[Found]:
    """Every object below a folder, with names from there on, many folders of it side by side."""
    folders = [url]
    with ThreadPoolExecutor(LISTED_AT_ONCE, "list") as pool:
        for _ in range(DEEPEST):  # down to where there are enough folders to share out
            level = list(pool.map(list_folder, folders))
            for folder, (_, objects) in zip(folders, level, strict=True):
                yield from (_below(one, folder, url) for one in objects)
            folders = [folder / name for folder, (names, _) in zip(folders, level, strict=True) for name in names]
            if not folders or len(folders) >= LISTED_AT_ONCE:
                break
        for found in pool.map(lambda folder: _list_below(folder, url), folders):
            yield from found


def _list_below(folder: Url, root: Url) -> list[Found]:
    def listed() -> list[Found]:
        pages: Any = obstore.list(client(folder), folder.key, chunk_size=1000)
        return [_found(one, root) for page in pages for one in page if not one["path"].endswith("/")]

    return _patiently(folder, listed)


def _below(one: Found, folder: Url, root: Url) -> Found:
    return one if folder == root else Found(f"{folder.key[len(root.key) :].lstrip('/')}/{one.name}", one.size, one.tag)


def put(url: Url, content: Any) -> None:
    """Complete or absent, as object stores promise. A local file that has vanished meanwhile raises FileNotFoundError."""
    try:
        _patiently(
            url, lambda: obstore.put(client(url, writing=True), url.key, content, max_concurrency=WRITTEN_AT_ONCE)
        )
    except FileNotFoundError as error:
        if isinstance(content, Path) and not content.exists():
            raise
        raise told(url, error) from None


def delete(urls: list[Url]) -> None:
    if urls:
        _patiently(urls[0], lambda: obstore.delete(client(urls[0]), [url.key for url in urls]))


def _patiently(url: Url, ask: Callable[[], T]) -> T:
    """Asks again while the trouble may pass."""
    from stoker.data.storage.requests import Patience  # it knows how long, and needs the words of this module

    patience = Patience(url)
    while True:
        try:
            return ask()
        except (BaseError, OSError) as error:
            patience.wait(error)


def _must_list(url: Url) -> None:
    if url.scheme in ("https", "http"):
        raise UserError(
            f"{url} is on a web server, which does not list what it holds: only packed sets (`stoker pack`), whose manifest "
            f"names their files, can be read from there."
        )


def _is_below(path: str, url: Url) -> bool:
    return path.rstrip("/") != url.key and not path.endswith("/")  # some servers list the folder itself


def _found(meta: Any, folder: Url) -> Found:
    name = meta["path"][len(folder.key) :].lstrip("/") if folder.key else meta["path"]
    tag = str(meta.get("e_tag") or meta.get("version") or meta["last_modified"])
    return Found(name, int(meta["size"]), tag)


def may_pass(error: BaseException) -> bool:
    """Whether asking again may help."""
    if isinstance(error, ShortAnswer | TimeoutError):
        return True
    if isinstance(error, FileNotFoundError | PermissionDeniedError | UnauthenticatedError | PreconditionError):
        return False
    return (
        isinstance(error, BaseError | OSError) and PASSING.search(_first_line(error)) is not None and not _final(error)
    )


def _final(error: BaseException) -> bool:
    return re.search(r"NoSuchBucket|ExpiredToken|status code: (400|401|403|404)", str(error)) is not None


def is_throttled(error: BaseException) -> bool:
    return THROTTLED.search(_first_line(error)) is not None


class InWords:
    """Errors of a store inside the block become one paragraph each."""

    def __init__(self, url: Url) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, BaseError | NotFoundError | ValueError) and not isinstance(error, UserError):
            raise told(self._url, error) from None  # the original names headers and configuration


def told(url: Url, error: BaseException) -> UserError | MachineError:
    """What went wrong, and what to do."""
    words, place = str(error), _place(url)
    if "NoSuchBucket" in words:
        return UserError(f"There is no bucket {url.host}{place}. Is its name right, and is it in this account?")
    if isinstance(error, FileNotFoundError) or "NoSuchKey" in words:
        return UserError(f"There is no {url}{place}.")
    if "ExpiredToken" in words or "TokenRefreshRequired" in words:
        return UserError(
            f"The credentials for {url} have expired{place}. Renew them (AWS_SESSION_TOKEN) and start again."
        )
    if any(code in words for code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure")):
        return UserError(
            f"The credentials in the environment are not accepted for {url}{place}: key or secret are wrong there."
        )
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or "AccessDenied" in words:
        return UserError(
            f"Access to {url} is denied{place}: the credentials in the environment may not read it, or there are none "
            f"(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; AWS_SKIP_SIGNATURE=true reads public buckets without)."
        )
    if isinstance(error, PreconditionError):
        return UserError(f"{url} was changed while it was being read. Start again, and leave it alone meanwhile.")
    if re.search(r"169\.254\.169\.254|instance metadata|missing.*(credential|account|bearer)", words, re.IGNORECASE):
        return UserError(
            f"There are no credentials for {url} in the environment. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or "
            f"GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and its key), or AWS_SKIP_SIGNATURE=true for "
            f"public buckets."
        )
    if "non-partial" in words or "Range request not supported" in words:
        hint = " Is AWS_ENDPOINT_URL right?" if url.scheme == "s3" else ""
        return UserError(f"{_server(url)} cannot send parts of files, which reading from afar needs.{hint}")
    if re.search(r"invalid (XML|list)|list response|deserialize|Got invalid", words, re.IGNORECASE):
        return UserError(f"{_server(url)} does not answer as an S3 server does. Is AWS_ENDPOINT_URL right?")
    if may_pass(error):
        return MachineError(f"{_server(url)} does not answer for {url}: {without_secrets(_first_line(error))}")
    return UserError(f"{url} cannot be read: {without_secrets(_first_line(error))}")


def _place(url: Url) -> str:
    return f" at {endpoint_of(url)}" if endpoint_of(url) else ""


def _server(url: Url) -> str:
    return endpoint_of(url) or f"{url.scheme}://{url.host}"


def _first_line(error: BaseException) -> str:
    """Without obstore's debug output behind it."""
    return str(error).partition("\n\nDebug source")[0].replace("\n", " ").strip()[:600] or type(error).__name__


def without_secrets(text: str) -> str:
    for name, value in os.environ.items():
        if len(value) >= 4 and SECRETS.search(name) and not PUBLIC.search(name):
            text = text.replace(value, "***")
    return text
