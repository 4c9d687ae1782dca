"""Rules of the loader. One cause is named, and not all of its shadows: `loader_cause` shares the stall out."""

from dataclasses import dataclass

from stoker.doctor.finding import NOTICE, Finding
from stoker.doctor.loaders import Split
from stoker.doctor.measured import Measured
from stoker.doctor.rules.base import NOISE, ms, predicted, rule

WORKERS = (0, 1, 2, 4, 8, 16, 32)
NO_GAIN = 0.9  # of the step with a change: it was tried, and gains nothing worth it
ENOUGH = 0.03  # of the step; a worker more that gains less is not worth its memory


@dataclass(frozen=True)
class Stall:
    """How long a step of the run waits for batches, or is slowed by their making, beside a step on resident ones."""

    seconds: float
    share: float


def stall_of(found: Measured) -> Stall | None:
    if found.run is None or found.resident is None:
        return None
    seconds = max(0.0, found.run.mean - found.gap_s - found.resident.mean)
    # Not all that is slower than resident batches waits for others: the consumer must have been seen waiting, or the
    # making must be able to take that much of the cores.
    made = 0.0 if found.split is None else max(found.split.cold_s, found.split.warm_s) + found.split.collate_s
    is_stall = found.wait_s > 0.3 * seconds or ((found.loader.workers or 0) > 0 and made > 0.3 * seconds)
    certain = found.run.interval()[0] - found.gap_s > found.resident.interval()[1]
    share = seconds / found.run.mean
    return Stall(seconds, share) if is_stall and certain and share >= NOISE else None


def with_workers(found: Measured, workers: int) -> float:
    """A step's seconds with so many workers: the step, the workers' pace, or all cores together, whichever is slowest."""
    assert found.resident is not None
    assert found.split is not None
    busy, latency = found.split.busy_s, found.split.latency_s
    if workers == 0:
        return found.resident.mean + busy + latency
    pace = _pace(found, workers) + _handing_over(found)
    cores = (busy + found.resident_cpu_s) / found.cores if found.device == "cpu" else 0.0
    return max(found.resident.mean, pace, cores)


def _pace(found: Measured, workers: int) -> float:
    """Seconds between the batches of so many workers with nobody beside them."""
    assert found.split is not None
    busy, latency = found.split.busy_s, found.split.latency_s
    return max(busy / min(workers, found.cores), (busy + latency) / workers)


def _handing_over(found: Measured) -> float:
    """What a batch costs beyond its making: from one process to another. Seen where there are workers already."""
    workers = found.loader.workers or 0
    if found.loader.kind != "DataLoader" or workers == 0 or found.drained_s is None:
        return 0.0
    return max(0.0, found.drained_s - _pace(found, workers))


def best_workers(found: Measured) -> int:
    times = {number: with_workers(found, number) for number in WORKERS if number <= max(2, 8 * found.cores)}
    best = min(times.values())
    return next(number for number, seconds in times.items() if seconds <= best * (1 + ENOUGH))


def loader_cause(found: Measured) -> str | None:
    """One name for what makes the loader slow."""
    stall, split, facts = stall_of(found), found.split, found.loader
    if _stands_in_its_way(found):
        return "workers-many"
    if stall is None or stall.share < 0.05 or facts.kind == "batches that are there":
        return None
    if _interpreter_is_shared(found, stall):
        return "interpreter"
    if split is None:
        return "loader"
    made = max(split.cold_s, split.warm_s) + split.collate_s
    if not facts.workers and made < 0.4 * stall.seconds:  # it cannot be what the run waits for
        return None
    if _order_is_dear(split, stall) and found.tried.get("shuffle", 0.0) < NO_GAIN * found.run_s:
        return "shuffle"
    if split.cold_s > 2 * split.warm_s and split.cold_s - split.warm_s > 0.3 * stall.seconds:
        return "cold-storage"
    if split.latency_s > split.busy_s:
        more = found.tried.get("fetch-latency")
        return "fetch-latency" if more is None or more < NO_GAIN * found.run_s else "fetch-bandwidth"
    if split.collate_s > 0.4 * split.busy_s:
        return "collate"
    if facts.kind == "DataLoader" and facts.workers == 0:
        return "workers-zero"
    if facts.workers is not None and best_workers(found) > facts.workers:
        return "workers-few"
    return "preparation"


def _order_is_dear(split: Split, stall: Stall) -> bool:
    if split.sequential_s is None:
        return False
    return split.warm_s > 2 * split.sequential_s and split.warm_s > 0.3 * stall.seconds


def _stands_in_its_way(found: Measured) -> bool:
    """More than two workers a core, that nobody keeps waiting, and a run slower than its step, or slow to begin an epoch."""
    if found.split is None or found.run is None or found.resident is None:
        return False
    many = (found.loader.workers or 0) > 2 * found.cores and found.split.latency_s < 2 * found.split.busy_s
    return many and found.run.mean > 1.1 * found.resident.mean


def _interpreter_is_shared(found: Measured, stall: Stall) -> bool:
    """Beside a GPU: the loader could give batches much faster than they are asked for, and nobody waits for most of the time
    that is lost. So its threads slow down the one that launches kernels."""
    if found.device != "cuda" or found.loader.key != "loader.threads" or found.drained_s is None:
        return False
    assert found.resident is not None
    return found.drained_s < 0.6 * found.resident.mean and found.wait_s < 0.5 * stall.seconds


def _stall_evidence(found: Measured) -> tuple[str, ...]:
    assert found.run is not None
    assert found.resident is not None
    words = [
        f"a step takes {ms(found.run.mean)}, on batches that are there {ms(found.resident.mean)}; "
        f"{ms(found.wait_s)} of it are waiting"
    ]
    if found.split is not None:
        split = found.split
        words.append(
            f"a batch takes one thread {ms(split.warm_s + split.collate_s)}: {ms(split.cpu_s)} computing, "
            f"{ms(split.latency_s)} waiting for storage, {ms(split.collate_s)} collating; the first time "
            f"{ms(split.cold_s)}"
        )
    if found.drained_s is not None:
        words.append(
            f"the loader alone gives a batch every {ms(found.drained_s)}, with {found.loader.workers or 0} workers"
        )
    if found.decode_rate is not None:
        words.append(
            f"one core decodes {found.decode_rate:,.0f} JPEGs of 375 by 500 pixels a second, {found.cores} at most "
            f"{found.cores * found.decode_rate:,.0f}"
        )
    if found.network:
        takes = f": {ms(found.batch_bytes / found.network)} a batch" if found.batch_bytes else ""
        words.append(f"the store gives this machine {found.network / 1e6:,.0f} MB/s at most{takes}")
    return tuple(words)


def _stall_finding(found: Measured, name: str, sentence: str, change: str, after_s: float, **more: object) -> Finding:
    stall = stall_of(found)
    assert stall is not None
    factor, low, high = predicted(found, found.tried.get(name, after_s + found.gap_s))
    share, sentence = _as_tried(found, name, stall.share, sentence)
    return Finding(name, share, sentence, change, _stall_evidence(found), factor, low, high, **more)  # type: ignore[arg-type]


def _as_tried(found: Measured, name: str, share: float, sentence: str) -> tuple[float, str]:
    """What a cause costs is no more than what its cure was seen to gain."""
    if name not in found.tried:
        return share, sentence
    gained = max(NOTICE, 1 - found.tried[name] / found.run_s)
    told = sentence if gained > NOTICE else f"{sentence} The change was tried, and gains nothing on this machine."
    return min(share, gained), told


def _workers_change(found: Measured, workers: int) -> tuple[str, dict[str, object]]:
    if found.loader.kind == "stoker":
        return f"--{found.loader.key} {workers}", {found.loader.key: workers}
    return f"DataLoader(..., num_workers={workers}, persistent_workers=True)", {}


@rule("workers-zero")
def workers_zero(found: Measured) -> Finding | None:
    if loader_cause(found) != "workers-zero":
        return None
    workers = max(1, best_workers(found))
    change, keys = _workers_change(found, workers)
    sentence = "Batches are made between the steps, by the process that trains: num_workers is 0."
    return _stall_finding(found, "workers-zero", sentence, change, with_workers(found, workers), keys=keys)


@rule("workers-few")
def workers_few(found: Measured) -> Finding | None:
    if loader_cause(found) != "workers-few":
        return None
    workers = best_workers(found)
    change, keys = _workers_change(found, workers)
    sentence = f"{found.loader.workers} workers cannot keep up; {workers} would."
    return _stall_finding(found, "workers-few", sentence, change, with_workers(found, workers), keys=keys)


@rule("workers-many")
def workers_many(found: Measured) -> Finding | None:
    if loader_cause(found) != "workers-many":
        return None
    workers = max(1, best_workers(found))
    change, keys = _workers_change(found, workers)
    sentence = f"{found.loader.workers} workers share {found.cores} cores, and stand in each other's way."
    assert found.run is not None
    assert found.resident is not None
    factor, low, high = predicted(found, found.tried.get("workers-many", with_workers(found, workers)))
    share, sentence = _as_tried(found, "workers-many", 1 - found.resident.mean / found.run.mean, sentence)
    return Finding("workers-many", share, sentence, change, _stall_evidence(found), factor, low, high, keys=keys)


@rule("fetch-latency")
def fetch_latency(found: Measured) -> Finding | None:
    if loader_cause(found) != "fetch-latency":
        return None
    assert found.split is not None
    workers = max(1, best_workers(found))
    change, keys = _workers_change(found, workers)
    sentence = "Samples wait for storage and not for a processor: more of them must be asked for at once."
    more = f"{change}; or pack the data set once onto a local disk"
    return _stall_finding(found, "fetch-latency", sentence, more, with_workers(found, workers), keys=keys)


@rule("fetch-bandwidth")
def fetch_bandwidth(found: Measured) -> Finding | None:
    if loader_cause(found) != "fetch-bandwidth":
        return None
    assert found.split is not None
    assert found.resident is not None
    sentence = "Samples wait for storage, and more of them at once do not come faster: its bandwidth is the limit."
    change = "copy or pack the data set once onto a local disk (`stoker pack`), or store smaller samples"
    workers = max(1, min(found.loader.workers or 0, found.cores))
    after = max(found.resident.mean, found.split.busy_s / workers)
    if not found.loader.workers:
        after = found.resident.mean + found.split.busy_s
    return _stall_finding(found, "fetch-bandwidth", sentence, change, after)


@rule("cold-storage")
def cold_storage(found: Measured) -> Finding | None:
    if loader_cause(found) != "cold-storage":
        return None
    assert found.split is not None
    assert found.resident is not None
    ratio = found.split.cold_s / max(found.split.warm_s, 1e-9)
    sentence = (
        f"The first read of a sample takes {ratio:.1f} times as long as the second: storage is cold, or loads lazily."
    )
    change = "copy the data to a local disk before training, in parallel (`stoker pack`), or read every file once"
    after = with_workers(found, found.loader.workers or 0)
    return _stall_finding(
        found, "cold-storage", sentence, change, after, cost="the first epoch only, if memory holds the rest"
    )


@rule("shuffle")
def shuffle(found: Measured) -> Finding | None:
    if loader_cause(found) != "shuffle":
        return None
    split = found.split
    assert split is not None
    assert split.sequential_s is not None
    assert found.resident is not None
    ratio = split.warm_s / max(split.sequential_s, 1e-9)
    sentence = f"Samples in random order cost {ratio:.0f} times what neighbours cost: each of them opens its file anew."
    change = (
        "stoker.from_parquet(...) or `stoker pack` (any order costs the same there), or shuffle inside blocks of a file"
    )
    beside = found.loader.workers or 0
    after = max(
        found.resident.mean,
        split.sequential_s / max(1, min(beside, found.cores)) + (0 if beside else found.resident.mean),
    )
    return _stall_finding(found, "shuffle", sentence, change, after)


@rule("collate")
def collate(found: Measured) -> Finding | None:
    if loader_cause(found) != "collate":
        return None
    split = found.split
    assert split is not None
    assert found.resident is not None
    share = split.collate_s / split.busy_s
    sentence = f"Collating takes {share:.0%} of making a batch: putting samples together is a loop in Python."
    workers = found.loader.workers or 0
    rest = split.warm_s / max(1, min(workers, found.cores))
    after = found.resident.mean + rest if workers == 0 else max(found.resident.mean, rest)
    return _stall_finding(
        found, "collate", sentence, "collate with one torch.stack, cat or pad_sequence a field", after
    )


@rule("interpreter")
def interpreter(found: Measured) -> Finding | None:
    if loader_cause(found) != "interpreter":
        return None
    assert found.resident is not None
    assert found.split is not None
    workers = max(1, round(2 * found.split.warm_s / found.resident.mean))  # twice what the step needs
    sentence = "The loader keeps up; its threads take the interpreter from the one that launches kernels."
    keys = {"loader.threads": workers} if workers < (found.loader.workers or 0) else {}
    change = f"--loader.threads {workers}, or fewer and larger pieces" if keys else "fewer and larger pieces of a step"
    return _stall_finding(found, "interpreter", sentence, change, found.resident.mean, keys=keys)


@rule("preparation")
def preparation(found: Measured) -> Finding | None:
    if loader_cause(found) != "preparation":
        return None
    stall = stall_of(found)
    assert stall is not None
    assert found.resident is not None
    sentence = "Making batches is the limit, and more workers would not help: all cores are at it."
    change = "do less a sample: smaller images, cheaper decoding, work in whole batches, or augmentation on the GPU"
    return _stall_finding(found, "preparation", sentence, change, found.resident.mean)


@rule("loader")
def loader(found: Measured) -> Finding | None:
    if loader_cause(found) != "loader":
        return None
    assert found.resident is not None
    made_of = "it is an iterable that does not show what it is made of"
    if found.loader.kind == "DataLoader":
        made_of = f"a DataLoader with {found.loader.workers} workers"
        made_of += "" if found.drained_s is not None else "; `stoker doctor module:probe` looks into it"
    sentence = f"The loader is the limit; {made_of}."
    change = "make batches in other threads or processes: stoker.from_dataset(...), or a DataLoader with workers"
    return _stall_finding(found, "loader", sentence, change, found.resident.mean)


@rule("epoch-gap")
def epoch_gap(found: Measured) -> Finding | None:
    if found.run is None or found.gap_s / found.run.mean < 0.05 or loader_cause(found) in ("workers-many",):
        return None
    share = found.gap_s / found.run.mean
    per_epoch = found.gap_s * (found.epoch_steps or 1)
    per = f"{ms(per_epoch)} of waiting" if found.epoch_steps else "waiting"
    sentence = f"Every epoch begins with {per} for its first batch."
    change = (
        "persistent_workers=True" if not found.loader.persistent else "prefetch the next epoch before this one ends"
    )
    evidence = (
        f"{found.epoch_steps or 'few'} steps an epoch; workers outlive it: {'yes' if found.loader.persistent else 'no'}",
    )
    factor, low, high = predicted(found, found.tried.get("epoch-gap", found.run.mean - found.gap_s))
    share, sentence = _as_tried(found, "epoch-gap", share, sentence)
    return Finding("epoch-gap", share, sentence, change, evidence, factor, low, high)


@rule("prefetch-memory")
def prefetch_memory(found: Measured) -> Finding | None:
    needed = found.loader.made_ahead * found.batch_bytes
    if found.free_bytes == 0 or needed < 0.25 * found.free_bytes:
        return None
    share = needed / found.free_bytes
    sentence = f"Batches made ahead may take {needed / 1e9:.1f} GB, and {found.free_bytes / 1e9:.1f} GB are free."
    evidence = (
        f"{found.loader.workers} workers x {found.loader.ahead} batches x {found.batch_bytes / 1e6:.1f} MB",
        "making more ahead rides out variance and never raises the mean rate",
    )
    return Finding("prefetch-memory", min(1.0, share), sentence, "fewer workers, or prefetch_factor=2", evidence)
