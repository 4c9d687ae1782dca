"""Several processes: who we are under torchrun, and sums over all of us. Alone, everything here does nothing.

Gradients are summed once a step, flattened, after the last micro-batch. Every sample's loss is divided by the number of
samples of the whole step, so the sum over ranks is the gradient of the one big batch, whatever each rank's share is; a rank
with an empty micro-batch takes part with zeros. (DistributedDataParallel averages over ranks instead, which is only right
when all have equally many samples.)

Processes first meet at a small store of keys, open their data, and only then join a group: processes that decode are forked
before NCCL is up, and packing may take longer than any message between ranks is waited for.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from stoker import console
from stoker.errors import MachineError
from stoker.runs.environment import environment_number

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # of a message between ranks: none is far ahead of the others once training began
BEAT_S = 1.0  # how often the process that opens data says how far it is
STALLED_S = 1800.0  # without any progress: then whatever it does hangs


class LostRank(MachineError):
    """Another process of the run ended, and said itself why."""


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    count: int = 1
    local: int = 0  # number on this machine, chooses the GPU
    store: Any = field(
        default=None, repr=False, compare=False
    )  # keys that all processes see; None: there is one process

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def meet() -> Ranks:
    """Finds the other processes that torchrun started, if any; `join` makes them a group."""
    if "WORLD_SIZE" not in os.environ or "TORCHELASTIC_RUN_ID" not in os.environ:
        return Ranks()
    rank, count, local = (environment_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    with _named_if_lost():
        store, _, _ = next(rendezvous("env://", rank, count, timeout=TIMEOUT))
    return Ranks(rank, count, local, store)


def join(ranks: Ranks, device_name: str) -> None:
    """From here on messages can be sent. Everything that forks processes comes before."""
    if ranks.store is None or dist.is_initialized():
        return
    use_gpu = device_name == "cuda" or (device_name == "auto" and torch.cuda.is_available())
    if use_gpu:
        torch.cuda.set_device(ranks.local)
    group = PrefixStore("group", ranks.store)
    with _named_if_lost():
        dist.init_process_group(
            "nccl" if use_gpu else "gloo", store=group, rank=ranks.rank, world_size=ranks.count, timeout=TIMEOUT
        )


def told_by_first(ranks: Ranks, key: str, value: str) -> str:
    """What rank 0 has, on every rank, before they have joined."""
    if ranks.store is None:
        return value
    if ranks.is_first:
        ranks.store.set(key, value)
    with _named_if_lost():
        found: bytes = ranks.store.get(key)
    return found.decode()


def first_of_machine_first(ranks: Ranks, work: Callable[[], T]) -> T:
    """The first process of each machine makes what is missing in the cache; the others find it there.

    They wait for as long as it makes progress, however long that takes.
    """
    if ranks.store is None:
        return work()
    machine = os.environ.get("GROUP_RANK", "0")
    done, beat = f"opened/{machine}", f"progress/{machine}"
    if ranks.local == 0:
        with _progress_told(ranks.store, beat):
            result = work()
        ranks.store.set(done, "1")
        return result
    with _named_if_lost():
        _wait_for(ranks.store, done, beat)
    return work()


@contextmanager
def _progress_told(store: Any, key: str) -> Iterator[None]:
    """Says every second how far the work inside the block is."""
    ended = threading.Event()

    def tell() -> None:
        try:
            while not ended.wait(BEAT_S):
                store.set(key, str(console.work_done()))
        except RuntimeError:
            return  # nobody listens any more; the work itself will notice

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait_for(store: Any, done: str, beat: str) -> None:
    latest, since = None, time.monotonic()
    while not store.check([done]):
        told = store.get(beat) if store.check([beat]) else None
        if told != latest:
            latest, since = told, time.monotonic()
        if time.monotonic() - since > STALLED_S:
            raise MachineError(
                f"The first process of this machine opens the data and has made no progress for {STALLED_S / 60:.0f} "
                f"minutes. Is the disk or the network still there?"
            )
        time.sleep(0.1)


@contextmanager
def _named_if_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LostRank(f"Another process of this run ended, or cannot be reached: {reason}") from error


def sum_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Replaces tensors of one type by their sums over all ranks, in one message."""
    if not dist.is_initialized() or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    with _named_if_lost():
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
    with _named_if_lost():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gather(value: Any) -> list[Any]:
    """What every rank has, on every rank."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    with _named_if_lost():
        dist.all_gather_object(found, value)
    return found


def any_rank(flag: bool) -> bool:
    return any(gather(flag))
