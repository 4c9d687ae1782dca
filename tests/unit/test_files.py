import os
from pathlib import Path

import pytest

from stoker.errors import UserError
from stoker.files import new_folder, write_bytes


def test_a_folder_appears_only_when_its_block_ends_well(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fail_half_way() -> None:
        with new_folder(out, force=False, marker="m") as partial:
            (partial / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []
    with new_folder(out, force=False, marker="m") as partial:
        (partial / "m").write_text("x")
        assert not out.exists()
    assert (out / "m").read_text() == "x"


def test_an_existing_folder_is_kept_without_force_and_replaced_with_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "m").write_text("old")
    with pytest.raises(UserError, match="--force"), new_folder(out, force=False, marker="m"):
        pass
    with new_folder(out, force=True, marker="m") as partial:
        (partial / "m").write_text("new")
        assert (out / "m").read_text() == "old"
    assert (out / "m").read_text() == "new"


def test_force_never_replaces_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis").write_text("years of work")
    with pytest.raises(UserError, match="by hand"), new_folder(out, force=True, marker="m"):
        pass
    assert (out / "thesis").exists()


def test_leftovers_of_a_killed_process_are_removed_and_those_of_a_living_one_kept(tmp_path: Path) -> None:
    dead, alive = tmp_path / ".out.partial-99999999", tmp_path / f".out.partial-{os.getppid()}"
    dead.mkdir()
    alive.mkdir()
    with new_folder(tmp_path / "out", force=False, marker="m"):
        pass
    assert not dead.exists()
    assert alive.exists()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_bytes(path, b"old")
    with pytest.raises(TypeError):
        write_bytes(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
