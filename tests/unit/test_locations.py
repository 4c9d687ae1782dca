import os
from pathlib import Path

import pytest

from stoker.data.locations import identity, is_file, is_folder, list_folder, open_local, read, read_range, stat
from stoker.data.storage.urls import Url
from stoker.errors import UserError
from stoker.launch.targets import resolve_target
from stoker.settings import as_yaml

OPENS_DATA = ("data/parquet.py", "data/window.py", "data/store.py", "recipes/icecube/table.py",
              "recipes/icecube/events.py", "recipes/icecube/sources.py", "recipes/imagenet/sources.py")  # fmt: skip


def test_bytes_and_ranges(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(range(100)))
    assert read(file) == bytes(range(100))
    assert read_range(file, 10, 5) == bytes(range(10, 15))
    assert read_range(file, 95, 50) == bytes(range(95, 100))
    assert read_range(file, 200, 5) == b""
    found = stat(file)
    assert found is not None
    assert (found.size, found.is_folder, found.is_plain) == (100, False, True)
    assert stat(tmp_path / "absent") is None
    assert stat(file / "below") is None
    assert (is_file(file), is_folder(file), is_folder(tmp_path)) == (True, False, True)
    assert open_local(file) == file


def test_a_folder_is_listed_by_name_without_links_that_lead_nowhere(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).write_text(name)
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert list(list_folder(tmp_path)) == ["a", "b", "c", "link"]
    assert identity(tmp_path / "link") == identity(tmp_path / "a")


def test_pipes_are_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="no plain file"):
        read(tmp_path / "pipe")
    with pytest.raises(UserError, match="no plain file"):
        open_local(tmp_path / "pipe")


@pytest.mark.parametrize("url", ["s3://bucket/set", "https://host/set", "gs://bucket/a/b", "az://container/x"])
def test_a_url_is_a_place(url: str) -> None:
    for recipe in ("icecube", "imagenet"):
        config = resolve_target(recipe, ["--data.path", url]).config
        assert str(config.data.path) == url
        assert url in as_yaml(config)
        assert config.data.path / "a/b" == Url.parse(f"{url}/a//b/")
        assert (config.data.path / "a/b").parent == config.data.path / "a"
        assert str((config.data.path / "a/b").relative_to(config.data.path)) == "a/b"


@pytest.mark.parametrize(
    ("url", "words"),
    [("ftp://host/set", "no storage"), ("s3://key:secret@bucket/x", "user or a password"), ("s3:///x", "no bucket"),
     ("https://host/set?X-Amz-Signature=abc", "has a query"), ("s3://bucket/../x", "up and down by dots"),
     ("az://container/x?sv=1&sig=abc", "has a query"), ("s3://bucket/x?X-Amz-Signature=abc", "has a query")],
)  # fmt: skip
def test_urls_that_are_none_are_refused_without_what_they_hold(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as raised:
        resolve_target("icecube", ["--data.path", url])
    assert "secret" not in str(raised.value)
    assert "abc" not in str(raised.value)


@pytest.mark.parametrize("name", OPENS_DATA)
def test_what_opens_data_reads_through_locations_only(name: str) -> None:
    source = (Path(__file__).parents[2] / "src" / "stoker" / name).read_text()
    for word in (".read_bytes(", ".read_text(", ".glob(", ".iterdir(", "os.scandir", "os.walk", ".exists("):
        assert word not in source, word
