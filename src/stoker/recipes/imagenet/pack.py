"""`stoker pack imagenet`: images in a few large shards, as they are, shrunk once or decoded.

A shard is the bytes of its images one after the other; the sample table beside them knows where each begins. Shards are
written in parallel and appear only when they are whole, so a killed pack goes on where it was.
"""

import io
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import simplejpeg
from PIL import Image

from stoker import console
from stoker.data import checksums
from stoker.data.bad_samples import BadSamples
from stoker.data.cache import free_bytes
from stoker.data.order import ExactOrder
from stoker.data.pack import PackRequest
from stoker.data.ragged import Array, Indices
from stoker.data.samples import SampleTable, new_table
from stoker.errors import MachineError, UserError
from stoker.files import file_lock, new_file, said_if_full, write_bytes, write_json
from stoker.recipes.imagenet.broken import BrokenImages
from stoker.recipes.imagenet.config import PackOptions
from stoker.recipes.imagenet.decode import JPEG, Broken, Pixels, as_raw, decode, raw_bytes, size_of
from stoker.recipes.imagenet.sources import LABELS, MANIFEST, VERSION, open_images, read_manifest
from stoker.recipes.imagenet.subset import Chosen, choose_images

SHARD_BYTES = 128 << 20  # of the source, in one shard
DECODED = 8  # times the source, that pixels take at most, or about
AHEAD = 64  # images that threads encode before they are written
LOOKED_AT = 400  # images, to say how much pixels will take
QUALITY = 90
ASKED = "pack.json"  # what is being packed, until it is done


R = TypeVar("R")


@dataclass(frozen=True)
class _Shard:
    name: str
    part: int
    rows: Indices


def pack(request: PackRequest) -> Mapping[str, Any]:
    options: PackOptions = request.options
    _check(options)
    # The subset and the held-out share are those of `stoker train` with its defaults.
    images = open_images(request.source, keep_damaged=options.broken == "skip")
    chosen = choose_images(images, options.max_classes, options.max_per_class, 0, 0.1)
    shards = _shards(chosen, request.shuffled, SHARD_BYTES // (DECODED if options.decoded else 1))
    asked = _asked(request, chosen)
    if (request.out / MANIFEST).is_file():
        if read_manifest(request.out)["plan"] != asked:
            raise UserError(f"{request.out} holds another packed set (source, size, quality, order or subset differ).")
    else:
        if options.decoded:
            _say_size(request, chosen, shards)
        _claim(request.out, asked)
        with said_if_full(lambda: f"{request.out} stays, with the shards that are whole, and will be used."):
            _write_shards(request, chosen, shards)
            with file_lock(request.out / "lock", may_vanish=True):
                if not all(_index_path(request.out, shard).exists() for shard in shards):
                    return {"path": str(request.out), "state": "other ranks are still at work"}
                if not (request.out / MANIFEST).is_file():
                    _complete(request.out, chosen, shards, asked, request.num_threads)
    packed = open_images(request.out)
    result: dict[str, Any] = {
        "path": str(request.out),
        "samples": len(packed.table),
        "shards": len(packed.table.shards),
        "bytes": int(packed.table.columns["count"].sum(dtype=np.int64)),
        "left_out": sum(len(shard.rows) for shard in shards) - len(packed.table),
    }
    if request.verify:
        result["images_verified"] = verify(request, chosen, shards, packed.table)
    return result


def _check(options: PackOptions) -> None:
    if options.keep and (options.short_side is not None or options.quality is not None):
        raise UserError(
            "--keep packs the original bytes; --short-side and --quality shrink them. Use one or the other."
        )
    if options.decoded and (options.keep or options.quality is not None):
        raise UserError("--decoded packs pixels; --keep and --quality are for JPEG. Use one or the other.")
    if options.short_side is None and options.quality is not None:
        raise UserError("--quality is for shrunk images: give --short-side too.")
    if options.quality is not None and not 1 <= options.quality <= 100:
        raise UserError(f"--quality is {options.quality}; it runs from 1 to 100.")
    if options.short_side is not None and options.short_side < 8:
        raise UserError(f"--short-side is {options.short_side}; it must be at least 8 pixels.")
    if options.max_classes is not None and options.max_classes < 2:
        raise UserError(f"--max-classes is {options.max_classes}; telling classes apart needs at least two.")


def verify(request: PackRequest, chosen: Chosen, shards: list[_Shard], table: SampleTable) -> int:
    """Every packed image against its source: the same bytes, or what shrinking makes of them, and the same label."""
    threads = request.num_threads
    columns = table.columns

    def check(shard: _Shard) -> int:
        index = np.load(_index_path(request.out, shard))
        content = (request.out / shard.name).read_bytes()
        for row, first, count, crc in zip(index["row"], index["first"], index["count"], index["crc"], strict=True):
            packed = content[first : first + count]
            expected = _encode(chosen.images.reader.read(int(row)), request.options)
            if packed != expected or zlib.crc32(packed) != crc:
                raise UserError(
                    f"{request.out / shard.name}: the image at byte {first} is not what "
                    f"{chosen.images.reader.name(int(row))} should have become. Remove it with its .npz, and pack again."
                )
        return len(index["row"])

    with ThreadPoolExecutor(threads, "verify") as pool, console.progress("verify", len(table), "images") as bar:
        total = 0
        for count in pool.map(check, shards):
            total += count
            bar.advance(count)
    kept = np.concatenate([np.load(_index_path(request.out, shard))["row"] for shard in shards])
    labels = chosen.label[np.asarray(chosen.images.table.columns["label"])[kept]]
    if (labels != columns["label"]).any():
        raise UserError(f"{request.out} holds labels that are not those of {request.source}.")
    return total


def _say_size(request: PackRequest, chosen: Chosen, shards: list[_Shard]) -> None:
    """What pixels will take on disk, from the headers of some images; an error where that is more than there is."""
    rows = np.concatenate([shard.rows for shard in shards])
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).astype(np.int64)]
    sizes = []
    for row in some.tolist():
        with suppress(Broken, OSError):
            height, width = _shrunk_size(*size_of(chosen.images.reader.read(row)), request.options)
            sizes.append(raw_bytes(height, width))
    if not sizes:
        return  # said image by image
    needed, free = int(np.mean(sizes) * len(rows)), free_bytes(request.out)
    words = f"{len(rows):,} images take about {needed / 1e9:.3g} GB decoded, by the size of {len(sizes)} of them"
    done = sum((request.out / shard.name).stat().st_size for shard in shards if (request.out / shard.name).is_file())
    if needed - done > free:
        raise UserError(
            f"{words}; {request.out} has room for {free / 1e9:,.1f} GB. Name another disk, shrink them with "
            f"--short-side, or leave --decoded out."
        )
    console.say(f"{words}; {free / 1e9:,.1f} GB are free.")


def _shards(chosen: Chosen, shuffled: int | None, shard_bytes: int) -> list[_Shard]:
    """Images in their order, or in a random one, cut into shards of about so many bytes of the source."""
    found: list[_Shard] = []
    sizes = np.asarray(chosen.images.table.columns["count"]).astype(np.int64)
    for part, rows in enumerate((chosen.training, chosen.validation)):
        if shuffled is not None:
            rows = rows[ExactOrder(len(rows), shuffled, part).take(0, len(rows))]
        number = (np.cumsum(sizes[rows]) - 1) // shard_bytes
        for one in np.unique(number):
            name = f"{('train', 'val')[part]}-{len(found):05d}.bin"
            found.append(_Shard(name, part, rows[number == one]))
    return found


def _asked(request: PackRequest, chosen: Chosen) -> dict[str, Any]:
    """All that the result depends on."""
    options: PackOptions = request.options
    return {
        "source": chosen.images.table.fingerprint,
        "short_side": options.short_side,
        "quality": options.quality,
        "shuffled": request.shuffled,
        "max_classes": options.max_classes,
        "max_per_class": options.max_per_class,
        **({"decoded": True} if _gives_pixels(request, chosen) else {}),  # sets that are older do not say
    }


def _gives_pixels(request: PackRequest, chosen: Chosen) -> bool:
    options: PackOptions = request.options
    return options.decoded or (chosen.images.decoded and options.short_side is None)


def _claim(out: Path, asked: dict[str, Any]) -> None:
    """Makes the folder, or sees that what is in it belongs to the same pack."""
    path = out / ASKED
    if not out.exists() or all(entry.name.startswith(".") for entry in out.iterdir()):
        out.mkdir(parents=True, exist_ok=True)
        write_json(path, asked)
        return
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if found != asked:
        raise UserError(f"{out} is not empty and not the beginning of this pack. Remove it, or name another folder.")


def _write_shards(request: PackRequest, chosen: Chosen, shards: list[_Shard]) -> None:
    mine = [
        shard for shard in shards[request.rank :: request.num_ranks] if not _index_path(request.out, shard).exists()
    ]
    threads = request.num_threads
    total = sum(len(shard.rows) for shard in mine)
    broken = BrokenImages(chosen.images.reader, request.options.broken, BadSamples())
    with ThreadPoolExecutor(threads, "pack") as pool, console.progress("pack", total, "images") as bar:
        for shard in mine:
            _write_shard(request, chosen, shard, broken, pool, bar)


def _write_shard(
    request: PackRequest,
    chosen: Chosen,
    shard: _Shard,
    broken: BrokenImages,
    pool: ThreadPoolExecutor,
    bar: console.Progress,
) -> None:
    """One shard, its images encoded by all threads; the index, written last, says that it is whole."""
    reader = chosen.images.reader

    def encoded(row: int) -> bytes | None:
        broken.saw(1)
        try:
            return _encode(reader.read(row), request.options)
        except Broken as error:
            broken.add(row, str(error))
            return None
        except OSError as error:  # not the image's fault: a pack without it would look whole
            raise MachineError(f"{reader.name(row)} cannot be read: {error}. Run the same command to go on.") from error

    rows, counts, crcs = [], [], []
    with new_file(request.out / shard.name) as file:
        for row, content in zip(shard.rows.tolist(), _in_order(pool, encoded, shard.rows.tolist()), strict=True):
            bar.advance()
            if content is not None:
                rows.append(row)
                counts.append(len(content))
                crcs.append(zlib.crc32(content))
                file.write(content)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]) if counts else np.zeros(0)
    index: dict[str, Array] = {
        "row": np.array(rows, np.int64),
        "first": first.astype(np.int64),
        "count": np.array(counts, np.int64),
        "crc": np.array(crcs, np.int64),
    }
    sink = io.BytesIO()
    np.savez(sink, **index)  # type: ignore[arg-type]
    write_bytes(_index_path(request.out, shard), sink.getvalue())


def _in_order(pool: ThreadPoolExecutor, work: Callable[[int], R], rows: list[int]) -> Iterator[R]:
    """Results as they are needed, a few made ahead: images that are decoded are large."""
    ahead: deque[Future[R]] = deque()
    for row in rows:
        ahead.append(pool.submit(work, row))
        if len(ahead) > AHEAD:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def _encode(content: bytes, options: PackOptions) -> bytes:
    """The bytes to store: as they are, shrunk where the shorter side is longer than asked for, or pixels."""
    height, width = size_of(content)  # a broken header shows here
    tall, wide = _shrunk_size(height, width, options)
    if (tall, wide) == (height, width):
        if options.decoded:
            return as_raw(np.ascontiguousarray(decode(content)))
        if options.short_side is None or content[:3] == JPEG:
            return content
        return _as_jpeg(np.ascontiguousarray(decode(content)), options)
    # The scaled decoder leaves twice of what is needed for the good filter.
    pixels = decode(content, 2 * tall, 2 * wide)
    shrunk = np.asarray(Image.fromarray(pixels).resize((wide, tall), Image.Resampling.LANCZOS))
    return as_raw(shrunk) if options.decoded else _as_jpeg(shrunk, options)


def _shrunk_size(height: int, width: int, options: PackOptions) -> tuple[int, int]:
    if options.short_side is None or min(height, width) <= options.short_side:
        return height, width
    scale = options.short_side / min(height, width)
    return round(height * scale), round(width * scale)


def _as_jpeg(pixels: Pixels, options: PackOptions) -> bytes:
    return bytes(simplejpeg.encode_jpeg(pixels, quality=options.quality or QUALITY))


def _complete(out: Path, chosen: Chosen, shards: list[_Shard], asked: dict[str, Any], threads: int) -> None:
    """The table over all shards, then the manifest: with it the set is whole."""
    indices = [np.load(_index_path(out, shard)) for shard in shards]
    source = chosen.images.table.columns
    counts = [len(index["row"]) for index in indices]
    rows = np.concatenate([index["row"] for index in indices])
    columns: dict[str, Array] = {
        "shard": np.repeat(np.arange(len(shards)), counts).astype(np.int32),
        "first": np.concatenate([index["first"] for index in indices]),
        "count": np.concatenate([index["count"] for index in indices]),
        "id": np.asarray(source["id"])[rows],
        "label": chosen.label[np.asarray(source["label"])[rows]].astype(np.int32),
        "part": np.repeat([shard.part for shard in shards], counts).astype(np.int8),
    }
    fingerprint = f"packed {zlib.crc32(np.concatenate([index['crc'] for index in indices]).tobytes()):08x} {len(rows)}"
    with new_table(out / "samples", len(rows), LABELS, [shard.name for shard in shards], fingerprint) as writer:
        writer.append(columns)
    names = [name for shard in shards for name in (shard.name, _index_path(out, shard).name)]
    names += sorted(f"samples/{path.name}" for path in (out / "samples").iterdir())
    content = {"version": VERSION, "classes": list(chosen.classes.names), "plan": asked}
    checksums.write_manifest(out / MANIFEST, {**content, "files": checksums.checksums(out, names, threads)})
    for name in (ASKED, "lock"):
        (out / name).unlink(missing_ok=True)


def _index_path(out: Path, shard: _Shard) -> Path:
    return out / shard.name.replace(".bin", ".npz")
