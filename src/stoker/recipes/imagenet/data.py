"""The data of a run: images, the order of an epoch, and the stages that make batches of them."""

from functools import partial

import torch

from stoker.data.bad_samples import BadSamples
from stoker.data.order import ExactOrder, Order, RepeatedOrder
from stoker.data.samples import ListSubset
from stoker.data.source import RunData
from stoker.data.stages import Stage
from stoker.errors import UserError
from stoker.recipe import RunConfig
from stoker.recipes.imagenet.broken import BrokenImages
from stoker.recipes.imagenet.content import contents_of
from stoker.recipes.imagenet.decoder import Decoder, room_bytes
from stoker.recipes.imagenet.model import check_name
from stoker.recipes.imagenet.probe import check_labels
from stoker.recipes.imagenet.subset import choose, data_root

# Host memory that a byte of JPEG needs on its way: its crop has two or three, and is copied.
BYTES_PER_BYTE = 8.0
THREADS_THAT_SCALE = 4  # more of them than this take turns with the interpreter: processes do not


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

    def order(seed: int, epoch: int) -> Order:
        exact = ExactOrder(len(chosen.training), seed, epoch)
        return RepeatedOrder(exact, config.repeats) if config.repeats > 1 else exact

    return RunData(
        table=table,
        training=ListSubset(chosen.training),
        validation=ListSubset(chosen.validation),
        order=order,
        stages=[Stage("decode", partial(decoder.make, True))],
        validation_stages=[Stage("decode", partial(decoder.make, False))],
        contents=partial(contents_of, chosen.images.reader),
        files_of=lambda rows: ", ".join(chosen.images.reader.name(int(row)) for row in rows[:3]),
        bad_samples=bad_samples,
        description={
            "path": str(data_root(run)),
            "classes": len(chosen.classes),
            "training": len(chosen.training),
            "validation": len(chosen.validation),
            "fingerprint": table.fingerprint,
        },
        bytes_per_cost=BYTES_PER_BYTE,
        cache_bytes=processes * room_bytes(config),
        repeated=config.repeats > 1,
        paired=bool(config.mixup or config.cutmix),
        facts={"classes": list(chosen.classes.names)},
    )
