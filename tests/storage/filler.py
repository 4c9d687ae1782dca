"""A process that reads a packed set as one of several ranks: `filler.py URL RANK NUM_RANKS`; prints checksums of steps."""

import sys
import zlib

import numpy as np

from stoker.data.batch import tensors_in
from stoker.data.loader import loader_of
from stoker.data.plan import Position
from stoker.launch.build import build_run
from stoker.launch.targets import resolve_target
from stoker.train.parallel import Ranks


def main() -> None:
    url, rank, num_ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    words = [
        "--data.path",
        url,
        "--run.device",
        "cpu",
        "--loader.window",
        "100",
        "--loader.batch_size",
        "32",
        *sys.argv[4:],
    ]
    found = resolve_target("icecube:demo", words)
    run = build_run(found.recipe, found.config, Ranks())
    loader = loader_of(run.data, found.config.loader, run.device, training=True, rank=rank, num_ranks=num_ranks)
    print("ready", flush=True)
    for step in loader.steps(Position(1), 2):
        crc = 0
        for batch in step.batches:
            for tensor in tensors_in(batch):
                crc = zlib.crc32(np.ascontiguousarray(tensor.numpy()).tobytes(), crc)
        print(crc, flush=True)


if __name__ == "__main__":
    main()
