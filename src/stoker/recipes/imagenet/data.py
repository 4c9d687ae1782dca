"""The data of a run: images, the order of an epoch, and the stages that make batches of them."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from stoker.data.bad_samples import BadSamples
from stoker.data.order import ExactOrder, Order, RepeatedOrder
from stoker.data.samples import ListSubset
from stoker.data.source import EpochOrder, RunData
from stoker.data.stages import Stage
from stoker.data.storage.blocks import block_bytes
from stoker.data.storage.orders import (
    Choice,
    block_rows,
    check_budget,
    choose_order,
    fetch_stage,
    fetched_ahead,
    remote_order,
)
from stoker.data.storage.urls import Url
from stoker.errors import UserError
from stoker.recipe import RunConfig
from stoker.recipes.imagenet.broken import BrokenImages
from stoker.recipes.imagenet.content import contents_of
from stoker.recipes.imagenet.decoder import Decoder, room_bytes
from stoker.recipes.imagenet.model import check_name
from stoker.recipes.imagenet.probe import check_labels
from stoker.recipes.imagenet.sources import Images, RangeReader
from stoker.recipes.imagenet.subset import choose, data_root

# Host memory that a byte of JPEG needs on its way: its crop has two or three, and is copied.
BYTES_PER_BYTE = 8.0
BYTES_PER_PIXEL = 2.0  # where pixels are stored: the crop, and a copy of it
THREADS_THAT_SCALE = 4  # more of them than this take turns with the interpreter: processes do not


def _order(run: RunConfig, images: Images, training: ListSubset) -> tuple[EpochOrder, Choice]:
    """Every sample at any place of the epoch, unless storage asks for a window."""
    root, asked = data_root(run), run.loader.order
    kind: Choice = "exact" if asked == "auto" else asked
    in_blocks = isinstance(images.reader, RangeReader)
    table = images.table
    if isinstance(root, Url):
        num_bytes = int(table.columns["count"].sum(dtype=np.int64))
        kind = choose_order(asked, num_bytes, in_blocks=in_blocks)
        if kind == "window":
            check_budget(table, training, num_bytes, run.loader)
    if kind == "exact":
        return lambda seed, epoch: ExactOrder(len(training), seed, epoch), kind
    if not in_blocks:
        raise UserError(
            f"loader.order is {kind}, and {root} has a file for each image: an exact order costs nothing there."
        )
    blocks = block_rows(np.asarray(table.columns["shard"]), np.asarray(table.columns["first"]), block_bytes())
    return remote_order(kind, replace(table, blocks=blocks), training, run.loader, str(root)), kind


def open_data(run: RunConfig, device: torch.device) -> RunData:
    check_name(run.model)  # before anything that takes long
    chosen, config = choose(run), run.data
    if run.loader.bad_shards != "stop":
        raise UserError("loader.bad_shards is not for images: data.broken says what an image does that cannot be read.")
    if run.loader.sample_cost is not None:
        raise UserError(
            "loader.sample_cost thins samples that are too long, and an image cannot be thinned: leave it out."
        )
    table = chosen.images.table
    if config.check_labels:
        threads = run.loader.num_threads
        check_labels(chosen.images, chosen.classes, chosen.label, chosen.training, chosen.validation, threads)
    bad_samples = BadSamples()
    broken = BrokenImages(chosen.images.reader, config.broken, bad_samples)
    processes = config.processes
    if processes is None:
        threads = run.loader.num_threads
        processes = threads if device.type == "cuda" or threads > THREADS_THAT_SCALE else 0
    if config.decode_on_gpu and (device.type != "cuda" or not processes):
        raise UserError(
            f"data.decode_on_gpu helps processes beside a GPU; this run is on {device.type} with {processes} processes."
        )
    decoder = Decoder(run, chosen, broken, processes, device)
    training = ListSubset(chosen.training)
    order_once, kind = _order(run, chosen.images, training)

    def order(seed: int, epoch: int) -> Order:
        once = order_once(seed, epoch)
        return RepeatedOrder(once, config.repeats) if config.repeats > 1 else once

    reader = chosen.images.reader
    remote = isinstance(data_root(run), Url)

    fetch = [fetch_stage(lambda micro: reader.places(micro.rows))] if remote else []
    ahead = None
    if isinstance(reader, RangeReader) and remote:
        ahead = fetched_ahead(
            reader.places, kept_for=run.loader.window if kind == "window" else None, rows_of=reader.rows_of
        )
    elif remote:
        ahead = fetched_ahead(reader.places, kept_for=1)  # a file a sample: it comes once an epoch

    return RunData(
        table=table,
        training=training,
        validation=ListSubset(chosen.validation),
        order=order,
        stages=[*fetch, Stage("decode", partial(decoder.make, True))],
        validation_stages=[*fetch, Stage("decode", partial(decoder.make, False))],
        contents=partial(contents_of, chosen.images.reader),
        files_of=lambda rows: ", ".join(chosen.images.reader.name(int(row)) for row in rows[:3]),
        bad_samples=bad_samples,
        description={
            "path": str(data_root(run)),
            "classes": len(chosen.classes),
            "training": len(chosen.training),
            "validation": len(chosen.validation),
            "fingerprint": table.fingerprint,
            **({"order": kind} if kind != "exact" else {}),
        },
        ahead=ahead,
        honours=frozenset({"order", "window"} if kind != "exact" else {"order"}),
        bytes_per_cost=BYTES_PER_PIXEL if chosen.images.decoded else BYTES_PER_BYTE,
        cache_bytes=processes * room_bytes(config),
        repeated=config.repeats > 1,
        paired=bool(config.mixup or config.cutmix),
        facts={"classes": list(chosen.classes.names)},
    )
