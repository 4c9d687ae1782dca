"""Runs and packed sets that are kept in an object store.

A run is trained in a folder of the cache, and what is written there is copied while it trains: a checkpoint counts when its
checksums are there, which come last, so that one in the store is complete or absent. Resuming takes whichever is further,
the working folder of this machine or the store.
"""

import hashlib
import json
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker import console
from stoker.data.cache import cache_folder, cache_lock
from stoker.data.locations import Location, named
from stoker.data.pack import PackRequest
from stoker.data.storage.urls import Found, Url
from stoker.errors import MachineError, UserError
from stoker.files import write_json
from stoker.launch.claim import Claim, claimed
from stoker.runs.folder import RunFolder
from stoker.train.checkpoint import CHECKSUMS

MARK = "elsewhere.json"  # of a working folder: where its run is kept
SYNCED = ".synced"  # all of it is in the store
EVERY_S = 5.0  # between two copies, at least
MANIFESTS = ("store.json", "images.json")


def working_root(root: Location) -> Path:
    """Where runs of this place are trained."""
    if not isinstance(root, Url):
        return root
    return cache_folder() / "runs" / hashlib.sha256(str(root).encode()).hexdigest()[:16]


def check_writable(root: Location) -> None:
    """Before anything else is done for a run: one small object, written and removed."""
    if not isinstance(root, Url):
        return
    if root.scheme in ("https", "http"):
        raise UserError(
            f"run.folder is {root}, and runs are not kept on web servers: name an object store or a folder."
        )
    from stoker.data.storage import objects

    place = root / f".stoker-{uuid.uuid4().hex}"
    objects.put(place, b"")
    objects.delete([place])


def keep_elsewhere(folder: RunFolder, root: Location) -> None:
    """Marks a new run as one that is kept in a store."""
    if isinstance(root, Url):
        write_json(folder.path / MARK, {"url": str(root / folder.path.name)})


def place_of(folder: RunFolder) -> Url | None:
    """The store that keeps a run; None: it stays here."""
    try:
        return Url.parse(json.loads((folder.path / MARK).read_text())["url"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder.path / MARK} is damaged: it should say where the run is kept ({error}).") from error


def here(path: str | Path) -> Path:
    """A run that a user names, as a folder of this machine: one that is kept in a store is copied first."""
    place = named(str(path)) if "://" in str(path) else Path(path)
    if not isinstance(place, Url):
        return place
    working = fetched(place.parent, place.name)
    if not (working / "config.yaml").is_file():
        raise UserError(f"{place} is no run: it holds no config.yaml.")
    return working


def latest(path: str | Path) -> Path:
    """The same, to go on with: a working folder of this machine may be behind what its store has."""
    return here(path if "://" in str(path) else str(place_of(RunFolder(Path(path))) or path))


def fetched(root: Location, name: str) -> Path:
    """The working folder of a run, with what the store has of it, where that is further than what is here."""
    working = RunFolder(working_root(root) / name)
    if not isinstance(root, Url):
        return working.path
    from stoker.data.storage import objects

    place = root / name
    stored = {one.name: one for one in objects.list_all(place)}
    with cache_lock(working.path, f"Another process copies {place}: waiting for it."):
        further = _last_step(stored) > _last_step(_files(working.path))
        if "config.yaml" in stored and (further or not working.config.is_file()):
            _download(place, working, stored)
    return working.path


def _download(place: Url, working: RunFolder, stored: Mapping[str, Found]) -> None:
    from stoker.data.storage.requests import requests

    whole = {name.rpartition("/")[0] for name in stored if name.endswith(f"/{CHECKSUMS}")}
    wanted = [
        name
        for name in stored
        if not name.startswith(".") and (not name.startswith("checkpoints/") or name.rpartition("/")[0] in whole)
    ]
    (working.path / SYNCED).unlink(missing_ok=True)
    with console.progress("copy the run", sum(stored[name].size for name in wanted), "bytes") as bar:
        for name in sorted(wanted, key=lambda name: (name.endswith(CHECKSUMS), name == "config.yaml", name)):
            one, target = stored[name], working.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}.copying")
            partial.unlink(missing_ok=True)
            requests().start(requests().copy(place / name, 0, one.size, one.tag, partial)).result()
            partial.replace(target)
            bar.advance(one.size)
    working.checkpoints.mkdir(exist_ok=True)
    keep_elsewhere(working, place.parent)
    (working.path / SYNCED).touch()  # until it is trained here


def _last_step(names: Mapping[str, Any]) -> int:
    steps = [
        name.split("/")[1][5:] for name in names if name.startswith("checkpoints/step-") and name.endswith(CHECKSUMS)
    ]
    return max((int(step) for step in steps if step.isdigit()), default=-1)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Names of what a run holds, and what changes with their content; nothing that is being written."""
    found = {}
    for path in folder.rglob("*") if folder.is_dir() else ():
        name = str(path.relative_to(folder))
        if (
            path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
            and name != "lock"
        ):
            state = path.stat()
            found[name] = (state.st_size, state.st_mtime_ns)
    return found


@contextmanager
def mirrored(folder: RunFolder) -> Iterator[None]:
    """While the block runs, and once more at its end, what is new in the run is copied to its store.

    No other machine trains it meanwhile.
    """
    place = place_of(folder)
    if place is None:
        yield
        return
    with claimed(folder.path, place) as claim:
        _check_latest(folder.path, place)
        console.say(f"kept in {place}")
        mirror = _Mirror(folder.path, place, claim)
        try:
            yield
        finally:
            mirror.close()


def _check_latest(folder: Path, place: Url) -> None:
    """Another machine may have gone on with it after this one fetched it, and before this one claimed it."""
    from stoker.data.storage import objects

    if _last_step({one.name: one for one in objects.list_all(place)}) > _last_step(_files(folder)):
        raise UserError(
            f"{place} was trained further on another machine just now: `stoker resume {place}` fetches that."
        )


class _Mirror:
    """One thread; an upload that fails is tried again with the next."""

    def __init__(self, folder: Path, place: Url, claim: Claim) -> None:
        self._folder, self._place, self._claim = folder, place, claim
        (folder / SYNCED).unlink(missing_ok=True)
        # What is here now may be there too: it is copied again, and removed there once it is removed here.
        self._sent = dict.fromkeys(_files(folder), (-1, -1))
        self._failed: Exception | None = None  # the latest copy, if it did
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="mirror", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        pause = EVERY_S
        while not self._ended.wait(pause) and not self._claim.is_lost:
            begin = time.monotonic()
            try:
                self._copy()
                self._failed = None
            except (UserError, MachineError, OSError) as error:
                self._failed = error
                console.say(f"The run is not being copied: {error}")
            pause = max(EVERY_S, 10 * (time.monotonic() - begin))

    def _copy(self) -> None:
        """Events and configuration first, then checkpoints, each with its checksums last; then what was removed."""
        from stoker.data.storage import objects
        from stoker.data.storage.upload import upload

        self._claim.check()
        now = _files(self._folder)
        changed = [name for name, state in now.items() if self._sent.get(name) != state]
        for last in (False, True):
            names = [name for name in changed if name.endswith(CHECKSUMS) is last]
            if last:
                self._claim.check()  # copying may have taken long
            upload(self._folder, self._place, [name for name in names if (self._folder / name).is_file()])
        gone = sorted(set(self._sent) - set(now), key=lambda name: not name.endswith(CHECKSUMS))
        for name in gone:
            with suppress(FileNotFoundError):
                objects.delete([self._place / name])
        self._sent = now

    def close(self) -> None:
        """Where the copy that is under way fails, which takes long, no other one is tried."""
        begin = time.monotonic()
        self._ended.set()
        self._thread.join()
        try:
            if self._failed is not None and time.monotonic() - begin > EVERY_S:
                raise self._failed
            self._copy()
            (self._folder / SYNCED).touch()
        except (UserError, MachineError, OSError) as error:
            self._claim.give_up()
            raise MachineError(
                f"{error} The run is whole in {self._folder}, and not all of it is in {self._place}: `stoker resume "
                f"{self._place}` on this machine goes on, and copies it."
            ) from error


def packed(request: PackRequest, pack: Callable[[PackRequest], Mapping[str, Any]]) -> Mapping[str, Any]:
    """A set that is to lie in a store is packed in the cache, then copied; what is there is never overwritten."""
    place: Location = request.out
    if not isinstance(place, Url):
        return pack(request)
    from stoker.data.storage import objects
    from stoker.data.storage.upload import upload_set

    work = cache_folder() / "packing" / hashlib.sha256(str(place).encode()).hexdigest()[:16] / place.name
    there = {one.name for one in objects.list_all(place)}
    if there & set(MANIFESTS) or (there and not work.exists()):  # else it is what we were copying when we were killed
        raise UserError(f"{place} exists already. Choose another name, or remove it to pack again.")
    work.parent.mkdir(parents=True, exist_ok=True)
    manifest = next((name for name in MANIFESTS if (work / name).is_file()), None)
    if manifest == MANIFESTS[0]:  # it was killed while it copied: a store that is whole is not packed again
        result: dict[str, Any] = {"path": str(place)}
    else:
        result = dict(pack(replace(request, out=work)))
    manifest = next((name for name in MANIFESTS if (work / name).is_file()), None)
    if manifest is None or "state" in result:
        return result
    upload_set(work, place, manifest)
    shutil.rmtree(work.parent)
    return {**result, "path": str(place)}
