"""Several processes: who we are under torchrun, and sums over all of us. Alone, everything here does nothing.

Gradients are summed once a step, flattened, after the last micro-batch. Every sample's loss is divided by the number of
samples of the whole step, so the sum over ranks is the gradient of the one big batch, whatever each rank's share is; a rank
with an empty micro-batch takes part with zeros. (DistributedDataParallel averages over ranks instead, which is only right
when all have equally many samples.)
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1
    local: int = 0  # number on this machine, chooses the GPU

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join(device_name: str) -> Ranks:
    """Joins the other processes that torchrun started, if any."""
    if "WORLD_SIZE" not in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ:
        return Ranks()
    ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        use_gpu = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
        if use_gpu:
            torch.cuda.set_device(ranks.local)
        dist.init_process_group("nccl" if use_gpu else "gloo", timeout=timedelta(minutes=10))
    return ranks


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors of one type by their sums over all ranks, in one message."""
    if not dist.is_initialized() or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    at = 0
    for tensor in tensors:
        tensor.copy_(flat[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()


def from_first(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """What every rank has, on every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def any_rank(flag: bool) -> bool:
    return any(gather(flag))
