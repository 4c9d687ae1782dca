"""What a tar shard in the WebDataset layout holds: images with their byte ranges and classes, and what is wrong with it.

`KEY.jpg` has its class in `KEY.cls`, or is in a folder of that name. Python's own reader takes a damaged header in the
middle for the end of the archive, so the end is looked at here: two blocks of zeros, and nothing behind them.
"""

import hashlib
import json
import tarfile
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import BinaryIO

from stoker.data.cache import cache_folder
from stoker.data.locations import Location, identity, open_file, read_range, stat
from stoker.files import write_bytes

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
BLOCK = tarfile.BLOCKSIZE
VERSION = 1  # of what is kept of a tar
LONGEST_CLASS = 1000  # bytes of a .cls file
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstandard"}


@dataclass(frozen=True)
class TarImage:
    first: int  # byte of the archive
    count: int
    label: str
    name: str


def indexed_tar(path: Location) -> tuple[list[TarImage], list[str]]:
    """What `read_tar` finds; of a tar that lies elsewhere it is kept, as long as that has the same version."""
    found = stat(path)
    if found is None or not found.tag:
        return read_tar(path)
    name = hashlib.sha256(f"{VERSION} {identity(path)} {found.tag} {found.size}".encode()).hexdigest()[:32]
    kept = cache_folder() / "listings" / f"tar-{name}.json"
    try:
        images, problems = json.loads(kept.read_text())
        return [TarImage(*one) for one in images], [str(one) for one in problems]
    except (OSError, ValueError, TypeError):
        images, problems = read_tar(path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(kept, json.dumps([[astuple(one) for one in images], problems]).encode())
        return images, problems


def read_tar(path: Location) -> tuple[list[TarImage], list[str]]:
    """The images of a tar that have a class, and every problem in words."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, str] = {}
    problems: list[str] = []
    found = stat(path)
    size = 0 if found is None else found.size
    try:
        with open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                _look_at(tar, member, images, labels, problems)
            problems += _after(file, tar.offset, size)
    except tarfile.TarError as error:
        kind = COMPRESSED.get(read_range(path, 0, 2))
        problems.append(
            f"it is compressed ({kind}): unpack it first" if kind else f"it is no tar file, or not whole ({error})"
        )
    for name, (_, first, count) in list(images.items()):
        if first + count > size:
            del images[name]
            problems.append(f"{name} reaches beyond the end of the file")
    without = [name for name, (key, _, _) in images.items() if key not in labels and "/" not in key]
    problems += [f"{name} has no class, neither in a .cls file nor as a folder" for name in without]
    keys = {key for key, _, _ in images.values()}
    problems += [f"{key}.cls belongs to no image" for key in labels if key not in keys]
    listed = [
        TarImage(first, count, labels.get(key) or Path(key).parent.name, name)
        for name, (key, first, count) in images.items()
        if name not in set(without)
    ]
    return listed, problems


def _look_at(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    images: dict[str, tuple[str, int, int]],
    labels: dict[str, str],
    problems: list[str],
) -> None:
    key, ending = _split_key(member.name)
    if not member.isfile():
        return
    if member.name.lower().endswith(ENDINGS):
        if member.name in images:
            problems.append(f"{member.name} is in it twice")
        images[member.name] = (key, member.offset_data, member.size)
    elif ending == "cls":
        handle = tar.extractfile(member) if member.size <= LONGEST_CLASS else None
        try:
            label = handle.read().decode().strip() if handle else ""
        except UnicodeDecodeError:
            label = ""
        if label and label.isprintable() and "/" not in label:
            labels[key] = label
        else:
            problems.append(f"{member.name} ({member.size:,} bytes) is no name of a class")


def _after(file: BinaryIO, end: int, size: int) -> list[str]:
    """What is wrong from the first block on that is no header of a member."""
    file.seek(end)
    marker = file.read(2 * BLOCK)
    if marker[:BLOCK].strip(b"\0"):
        return [f"the header at byte {end:,} is damaged, and what comes after it ({size - end:,} bytes) is not found"]
    if len(marker) < 2 * BLOCK or marker.strip(b"\0"):
        return [f"it has no end marker at byte {end:,}: it was cut short there, or overwritten"]
    while part := file.read(1 << 20):
        if part.strip(b"\0"):
            return [f"there is more behind its end marker, from byte {end:,} on"]
    return []


def _split_key(name: str) -> tuple[str, str]:
    """What the files of a sample share, up to the first dot of their names, and what comes after it."""
    folder, slash, file = name.rpartition("/")
    stem, _, ending = file.partition(".")
    return f"{folder}{slash}{stem}", ending
