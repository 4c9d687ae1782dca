"""Files and folders that are either complete or absent: written under a temporary name, renamed at the end."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from stoker import console
from stoker.errors import MachineError, UserError


@contextmanager
def new_folder(out: Path, *, force: bool, marker: str) -> Iterator[Path]:
    """Yields an empty folder beside `out` that becomes `out` when the block ends without an error.

    An existing `out` is an error unless `force`, and even then it is replaced only if it is empty or holds `marker`,
    the file that shows it was made by the same command.
    """
    if out.exists():
        _check_replaceable(out, force=force, marker=marker)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(out)
    partial = _partial_name(out, os.getpid())
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            old = out.with_name(f".{out.name}.replaced-{os.getpid()}")
            out.rename(old)
            partial.rename(out)
            shutil.rmtree(old)
        else:
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file atomically and durably: after a power cut it holds the old content or the new, never a part."""
    with new_file(path) as file:
        file.write(content)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, that takes its place when the block ends well, atomically and durably."""
    partial = _partial_name(path, os.getpid())
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_regular(path: Path) -> None:
    """Refuses what is there and no plain file: a pipe would be waited for, and a device may never end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is {'a folder' if path.is_dir() else 'no plain file'}, and a file is needed there.")


@contextmanager
def file_lock(lock: Path, waiting: str | None = None, *, may_vanish: bool = False) -> Iterator[None]:
    """One process at a time inside the block; the lock dies with its process. `waiting` is said to those who wait.

    A lock `may_vanish` lies in a folder that whoever finishes the work renames: then there is nothing left to lock.
    """
    if not may_vanish:
        lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = lock.open("a")
    except FileNotFoundError:
        if not may_vanish:
            raise
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                console.say(waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def said_if_full(stays: Callable[[], str]) -> Iterator[None]:
    """A full disk as an error that says what is left of the work, and what becomes of it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise MachineError(
            f"The disk is full ({error}). {stays()} Make room and run the same command again."
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """A rename survives a power cut only after its folder was synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial_name(out: Path, pid: int) -> Path:
    return out.with_name(f".{out.name}.partial-{pid}")


def _check_replaceable(out: Path, *, force: bool, marker: str) -> None:
    if not force:
        raise UserError(f"{out} exists already. Choose another name, or add --force to replace it.")
    made_by_us = (out / marker).is_file()
    empty = out.is_dir() and not any(out.iterdir())
    if not (made_by_us or empty):
        raise UserError(
            f"{out} exists and does not look like something this command wrote (it holds no {marker}), so --force "
            f"will not replace it. Remove it by hand if that is what you want."
        )


def _remove_leftovers(out: Path) -> None:
    """Parts that a killed process left behind; those of a living one are not touched."""
    for path in out.parent.glob(f".{out.name}.partial-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
