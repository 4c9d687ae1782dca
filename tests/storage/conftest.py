"""What the tests of storage share: servers, and a set of events."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from servers import bucket, moto_port, other_bucket, s3rver_port

from stoker.cli import run as cli


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lines that are cut in the middle of a request leave sockets of the proxy to the garbage collector."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events")
    assert cli(["simulate", str(folder / "files"), "--events", "2000", "--files", "4", "--seed", "5"]) == 0
    os.environ.pop("STOKER_CACHE", None)
    assert cli(["pack", "icecube", str(folder / "files"), str(folder / "packed")]) == 0
    return folder


__all__ = ["bucket", "moto_port", "other_bucket", "s3rver_port"]  # fixtures
