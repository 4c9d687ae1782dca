"""Rules of the step itself: what it does besides computing, and what it computes that nobody needs."""

import torch

from stoker.doctor.finding import Finding
from stoker.doctor.measured import Measured
from stoker.doctor.rules.base import NOISE, ms, predicted, rule
from stoker.doctor.rules.loader import loader_cause

MANY = 400  # operations of a step: with fewer of them a larger batch is the cure, with more a smaller number of them
HOPED = 0.5  # of what calling operations costs, that torch.compile takes away where there is no loop to blame
MOST = 0.96  # of a step that can be gained: something remains to be done
WHOLE = 0.95  # of the asymptotic rate, at which a batch is large enough
FUSED = 0.15  # of its time that attention needs where its scores are not written out
MORE = 4  # times the samples, of the step beside which one is measured
ROOM = 0.1  # of free memory that a larger batch may take
FULL = 0.92  # of a GPU's memory: another shape may not find room


def _step_share(found: Measured, share_of_resident: float) -> float:
    """Of a run's step, what is that share of a resident one."""
    assert found.run is not None
    assert found.resident is not None
    return min(MOST, share_of_resident * found.resident.mean / found.run.mean)


def _without(
    found: Measured, name: str, share: float, sentence: str, change: str, evidence: tuple[str, ...]
) -> Finding:
    """A finding about a part of the step that can go as a whole."""
    assert found.run is not None
    factor, low, high = predicted(found, found.run.mean * (1 - share))
    return Finding(name, share, sentence, change, evidence, factor, low, high)


def _beside_training(found: Measured, kind: str, sentence: str, change: str) -> Finding | None:
    """What a step does that is no training, by the lines it is in."""
    if found.run is None or found.resident is None:
        return None
    share = _step_share(found, found.lines.share(kind))
    return _without(found, kind, share, sentence, change, tuple(found.lines.top(3, kind))) if share >= 0.02 else None


@rule("logging")
def logging(found: Measured) -> Finding | None:
    change = "log every 50th step, and only then ask for numbers"
    return _beside_training(found, "logging", "Printing or logging holds every step up.", change)


@rule("checkpoint")
def checkpoint(found: Measured) -> Finding | None:
    change = "save every few hundred steps, from a copy and in another thread"
    return _beside_training(found, "checkpoint", "A checkpoint is written inside the step.", change)


@rule("optimizer")
def optimizer(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None:
        return None
    share = _step_share(found, found.lines.share("optimizer"))
    if share < 0.15 or (found.operations is not None and found.operations.fused_optimizer):
        return None
    sentence = (
        f"The optimizer takes {found.lines.share('optimizer'):.0%} of the step: parameter by parameter, in Python."
    )
    change = "the same optimizer of torch with fused=True" + (", or foreach=True" if found.device == "cuda" else "")
    # A fused one reads and writes each number once; a tenth of a loop's time is on the safe side.
    return _without(found, "optimizer", 0.9 * share, sentence, change, tuple(found.lines.top(3, "optimizer")))


@rule("recompile")
def recompile(found: Measured) -> Finding | None:
    if found.run is None or found.graphs < 2:
        return None
    share = min(0.999, found.graphs_s / found.run.mean) if found.graphs_s else 0.05
    steps = len(found.run.seconds) + len(found.resident.seconds if found.resident else ())
    sentence = f"torch.compile made {found.graphs} graphs again in {steps} steps that should need none."
    change = "torch.compile(..., dynamic=True), torch._dynamo.mark_dynamic, or batches of few shapes"
    return _without(found, "recompile", share, sentence, change, found.reasons)


@rule("padding")
def padding(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.padding < 0.2:
        return None
    share = _tried_share(found, "padding") if "padding" in found.tried else _step_share(found, found.padding)
    sentence = f"{found.padding:.0%} of what is computed is padding."
    change = "sort samples into batches of similar length, or compute on flat, ragged batches (stoker.from_parquet)"
    return _without(found, "padding", share, sentence, change, (f"batches of {found.batch_bytes / 1e6:.1f} MB",))


def _tried_share(found: Measured, name: str) -> float:
    """Of the run's step, what a change takes away that was tried."""
    assert found.run is not None
    return max(0.0, 1 - found.tried[name] / found.run.mean)


@rule("precision")
def precision(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.operations is None:
        return None
    products = found.operations.product_share * (1 - found.host_share)
    evidence = (f"matrix products are {found.operations.product_share:.0%} of the operations' time",)
    if found.wide_floats:
        share, sentence = _step_share(found, 0.5 * products), "The model computes in float64."
        share = _tried_share(found, "precision") if "precision" in found.tried else share
        return _without(found, "precision", share, sentence, "model.float(), and inputs as float32", evidence)
    narrow = found.device != "cuda" or found.calls is None or found.calls.product_share(torch.float32) < 0.05
    if narrow:
        return None
    # Until it has been tried all of the products' time may be won, and then what was.
    share = _tried_share(found, "precision") if "precision" in found.tried else _step_share(found, 0.8 * products)
    sentence = "Matrix products run in float32, for which this GPU has its slow units."
    change = 'with torch.autocast("cuda", torch.bfloat16): around the forward pass'
    return _without(found, "precision", share, sentence, change, evidence)


@rule("layout")
def layout(found: Measured) -> Finding | None:
    """A matter of trying: some networks gain a third, others lose."""
    if found.run is None or found.device != "cuda" or not found.plain_layout:
        return None
    share = _tried_share(found, "layout") if "layout" in found.tried else 0.05
    sentence = "Convolutions get images whose channels do not lie side by side, and rearrange them."
    change = "model.to(memory_format=torch.channels_last), and the images too"
    return _without(found, "layout", share, sentence, change, ())


@rule("batch")
def batch(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.once_s is None or found.more_s is None:
        return None
    growing, fixed = _growing_and_fixed(found)
    share = _step_share(found, max(0.0, fixed / found.once_s - _known_lines(found)))
    many = found.operations is not None and found.operations.count >= MANY
    if share < 0.4 or many or loader_cause(found) is not None:
        return None
    times = better_times(found)
    after = (fixed + times * growing) / times  # for as many samples as now
    after = found.tried.get("batch", max(0.0, found.run.mean - found.resident.mean) + after)
    factor, low, high = predicted(found, after, spread=0.2)
    if factor < 1.1:
        return None
    sentence = f"{share:.0%} of the step does not depend on how many samples it has: the batch is too small."
    change = (
        f"a batch of {round(times * found.samples):,} instead of {found.samples:,.0f}, and a learning rate to match"
    )
    # Whoever does something else in every step, such as judging the model, sees it there.
    evidence = (
        f"{ms(found.once_s)} a step, {ms(found.more_s)} with {MORE} times the samples",
        *found.lines.top(3, "step"),
    )
    return Finding("batch", share, sentence, change, evidence, factor, low, high, cost="it changes what is learnt")


def _known_lines(found: Measured) -> float:
    """Of a resident step: lines that other rules name."""
    known = found.lines.share("logging") + found.lines.share("checkpoint")
    return known + (found.lines.share("optimizer") if optimizer(found) is not None else 0.0)


def _uncompiled_share(found: Measured) -> float:
    """Of a resident step: attention that nobody compiled. It is the host that takes its time."""
    if found.calls is None or not found.calls.uncompiled:
        return 0.0
    places = {place for place in found.calls.uncompiled if place is not None}
    return max(found.calls.attention_share, found.lines.share_with_backward(places))


def _growing_and_fixed(found: Measured) -> tuple[float, float]:
    """Seconds of a step that its samples cost, and those that it costs anyway."""
    assert found.once_s is not None
    assert found.more_s is not None
    growing = max((found.more_s - found.once_s) / (MORE - 1), found.once_s / 64)
    return growing, max(0.0, found.once_s - growing)


def better_times(found: Measured) -> int:
    """How many times the samples a batch should have."""
    growing, fixed = _growing_and_fixed(found)
    room = ROOM * found.free_bytes / max(1, found.batch_bytes) if found.free_bytes else 64.0
    return max(2, round(min(64.0, room, WHOLE / (1 - WHOLE) * fixed / growing)))


@rule("pieces")
def pieces(found: Measured) -> Finding | None:
    """A recipe of ours cuts a step so that it fits into memory, and every piece is launched anew."""
    if found.run is None or found.operations is None or found.launch_s is None or found.gpu is None or found.pieces < 2:
        return None
    after = max(found.operations.busy_s, found.launch_s / found.pieces)
    share, present = 1 - after / found.run.mean, found.settings.get("loader.micro_cost")
    if share < 0.15 or present is None or found.gpu.used_bytes * found.pieces > FULL * found.gpu.total_bytes:
        return None
    cost = int(present) * found.pieces
    sentence = (
        f"The host is the limit: a step is cut into {found.pieces} pieces, and the GPU has room for it as a whole."
    )
    launches = f"launching {found.operations.count:,.0f} kernels takes the host {ms(found.launch_s)} a step"
    room = f"{found.gpu.used_bytes / 2**30:.1f} of {found.gpu.total_bytes / 2**30:.1f} GiB of the GPU's memory are used"
    factor, low, high = predicted(found, after)
    return Finding(
        "pieces",
        share,
        sentence,
        f"--loader.micro_cost {cost}",
        (_idle(found), launches, room),
        factor,
        low,
        high,
        cost="memory",
        keys={"loader.micro_cost": cost},
    )


@rule("host")
def host(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.operations is None:
        return None
    if found.graphs >= 2 or pieces(found) is not None:
        return None
    known, elsewhere = _known_lines(found), _uncompiled_share(found)
    share = _step_share(found, max(0.0, found.host_share * (1 - elsewhere) - _by_reads(found) - known))
    if share < 0.15 or batch(found) is not None:
        return None
    operations = found.operations
    sentence = "The host is the limit: "
    sentence += (
        f"{operations.count:,.0f} operations a step are called one by one." if operations.count >= 1 else "Python."
    )
    # Lines that log, save or update have rules of their own, as long as those speak.
    slow = optimizer(found) is not None
    places = {place for place, kind in found.lines.places.items() if slow or kind != "optimizer"}
    loops = [] if found.calls is None else found.calls.busiest_lines(known=places)
    if not loops:
        share *= HOPED
    elif found.calls is not None:
        # The change takes the loops away with their small kernels, and no other call.
        number = sum(found.calls.looped(places).values())
        small = (1 - found.host_share) * operations.short_share / (operations.busy_share or 1.0)
        small = small if found.device == "cuda" and number >= MANY else 0.0
        looped = number / max(1, found.calls.num_placed)
        share = min(MOST, (1.0 if looped > 0.9 else looped) * (share + _step_share(found, small * (1 - elsewhere))))
    evidence = (*found.lines.top(3, "step"), *loops, _idle(found))
    change = "compute whole batches instead of the loop on these lines; else torch.compile, or CUDA graphs"
    return _without(found, "host", share, sentence, change, evidence)


def _idle(found: Measured) -> str:
    assert found.operations is not None
    operations = found.operations
    if found.device == "cuda":
        launches = f"; launching alone takes {ms(operations.count * found.call_s)}" if found.call_s else ""
        return f"the GPU computes for {ms(operations.busy_s)} of a step of {ms(_resident_s(found))}{launches}"
    return (
        f"{1 - operations.busy_share:.0%} of the step is Python between them, {operations.short_share:.0%} operations too "
        f"short to matter"
    )


def _resident_s(found: Measured) -> float:
    assert found.resident is not None
    return found.resident.mean


def _by_reads(found: Measured) -> float:
    """Of a resident step on a GPU: lost by reading numbers, and by the operations that are there for nothing else."""
    waiting = _by_waiting(found)
    if not waiting or found.calls is None:
        return waiting
    return waiting + max(0.0, found.host_share - waiting) * found.calls.read_share


def _by_waiting(found: Measured) -> float:
    """The host could have launched ahead instead of waiting for a number."""
    if found.device != "cuda" or found.operations is None or found.launch_s is None or found.operations.wait_s <= 0:
        return 0.0
    if "sync" in found.tried and found.run is not None:
        return max(0.0, (found.run.mean - found.tried["sync"]) / _resident_s(found))
    launching = max(0.0, found.launch_s - max(found.operations.wait_s, found.sync_s))
    without = max(found.operations.busy_s, launching)
    return max(0.0, 1 - without / _resident_s(found))


@rule("sync")
def sync(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.operations is None or found.calls is None:
        return None
    times = sum(found.calls.syncs.values())
    if not times:
        return None
    sentence = f"The host waits for the GPU {times:,} times inside a step, and launches nothing meanwhile."
    change = "keep numbers on the GPU (losses, masks, sizes), and read them every 50th step"
    evidence = (*found.calls.sync_lines(), _idle(found))
    return _without(found, "sync", _step_share(found, _by_reads(found)), sentence, change, evidence)


@rule("copy")
def copy(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.given is None:
        return None
    copied = max(0.0, found.given.mean - found.resident.mean)
    share = copied / found.run.mean
    if share < NOISE or found.given.interval()[0] <= found.resident.interval()[1]:
        return None
    size = f"{found.batch_bytes / 1e6:.1f} MB a batch"
    if found.pinned_copy_s < 0.7 * copied:
        sentence = f"Copying {size} to the GPU holds the step up: it does not come from pinned memory."
        change, after = "pin_memory=True, and .to(device, non_blocking=True)", _pinned_and_ahead(found)
    else:
        sentence = f"Copying {size} to the GPU takes its time, pinned or not."
        change, after = "copy the next batch in a stream of its own while this step computes, or smaller types", 0.0
    evidence = (f"{ms(copied)} a step; {ms(found.pinned_copy_s)} at the best rate from pinned memory",)
    factor, low, high = predicted(found, found.run.mean - copied + after)
    return Finding("copy", share, sentence, change, evidence, factor, low, high)


def _pinned_and_ahead(found: Measured) -> float:
    """Seconds above a resident step: the GPU copies, then computes, and the host does not wait for either."""
    busy = found.operations.busy_s if found.operations is not None else _resident_s(found)
    return max(0.0, found.pinned_copy_s + busy - _resident_s(found))


@rule("attention")
def attention(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.calls is None:
        return None
    # Of the time that the device computes; the rest of a step belongs to other rules, unless attention keeps the host busy.
    whole = _uncompiled_share(found) or found.calls.attention_share * (1 - found.host_share)
    share = _step_share(found, (1 - FUSED) * whole)
    if share < 0.1:
        return None
    sentence = "Attention writes its scores out: every pair of places is computed, kept and read again."
    change = "torch.nn.functional.scaled_dot_product_attention"
    if found.calls.uncompiled:
        sentence = "flex_attention is not compiled: all pairs, operation by operation, launched by the host."
        change = "torch.compile(flex_attention) with a block mask, or scaled_dot_product_attention"
    return _without(found, "attention", share, sentence, change, tuple(found.calls.attention_lines()))


@rule("memory-limit")
def memory_limit(found: Measured) -> Finding | None:
    gpu = found.gpu
    if gpu is None or (gpu.used_bytes < FULL * gpu.total_bytes and not gpu.retries):
        return None
    share = gpu.used_bytes / gpu.total_bytes
    sentence = f"{share:.0%} of the GPU's memory is used: a longer sample may not find room."
    evidence = (f"{gpu.used_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB; emptied {gpu.retries} times",)
    change = "a smaller batch (of ours: --loader.micro_cost), checkpointed activations, or bfloat16"
    return Finding("memory-limit", 0.1 if gpu.retries else 0.06, sentence, change, evidence)


@rule("throttled")
def throttled(found: Measured) -> Finding | None:
    gpu = found.gpu
    if found.run is None or gpu is None or not gpu.slowed or gpu.clock is None or gpu.clock > 0.9:
        return None
    share = _step_share(found, (1 - gpu.clock) * (1 - found.host_share)) if found.resident else 0.0
    sentence = f"The GPU runs at {gpu.clock:.0%} of its clock: heat or the board's power hold it back."
    return _without(found, "throttled", share, sentence, "look after its cooling and its power limit", ())
