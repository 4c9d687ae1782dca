"""The name of a place in an object store: `s3://bucket/key`, `gs://`, `az://`, `https://`."""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pydantic_core import core_schema

SIGNED = re.compile(r"[?&](sig|x-amz-|x-goog-|awsaccesskeyid|token|se=|sv=)", re.IGNORECASE)
SCHEMES = ("s3", "gs", "az", "https", "http")


class Url:
    """Joins and splits as a path does. It never holds a secret: those come from the environment."""

    __slots__ = ("host", "key", "scheme")

    def __init__(self, scheme: str, host: str, key: str = "") -> None:
        self.scheme = scheme
        self.host = host  # bucket, container or server
        self.key = key  # without a slash at either end

    @classmethod
    def parse(cls, text: str) -> "Url":
        """Raises ValueError with a sentence for the user."""
        scheme, _, rest = text.strip().partition("://")
        scheme = scheme.lower()
        if scheme not in SCHEMES:
            known = ", ".join(f"{name}://" for name in SCHEMES[:-1])
            raise ValueError(f"{scheme}:// is no storage that can be read; {known} and local paths are")
        host, _, key = rest.partition("/")
        if "@" in host:
            raise ValueError(
                f"the {scheme}:// URL holds a user or a password: leave them out, credentials are taken from the environment"
            )
        if SIGNED.search(key) or (scheme in ("https", "http") and "?" in key):
            raise ValueError(
                f"the {scheme}:// URL has a query, which may hold a signature: a run would keep it. Name the plain address"
            )
        if not host:
            raise ValueError(f"{text} names no bucket: {scheme}://BUCKET/FOLDER")
        return cls(scheme, host, _clean(key))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"Url({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Url) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: "Url") -> bool:
        return str(self) < str(other)

    @classmethod
    def __get_pydantic_core_schema__(cls, kind: Any, handler: Any) -> Any:
        return core_schema.is_instance_schema(cls)

    def __truediv__(self, name: "str | PurePosixPath") -> "Url":
        return Url(self.scheme, self.host, _clean(f"{self.key}/{name}"))

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.host

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def parent(self) -> "Url":
        return Url(self.scheme, self.host, self.key.rpartition("/")[0])

    def relative_to(self, folder: "Url") -> PurePosixPath:
        return PurePosixPath(self.key).relative_to(folder.key or ".")

    def expanduser(self) -> "Url":
        return self


@dataclass(frozen=True, slots=True)
class Found:
    """An object of a listing."""

    name: str  # from the folder on that was listed
    size: int
    tag: str  # of its version: another content has another one


def _clean(key: str) -> str:
    parts = [part for part in key.split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise ValueError(f"{key} goes up and down by dots, which no object store knows: name the place itself")
    return "/".join(parts)
