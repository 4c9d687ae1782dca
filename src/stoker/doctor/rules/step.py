"""Rules of the step itself: what it does besides computing, and what it computes that nobody needs."""

from stoker.doctor.finding import Finding
from stoker.doctor.measure import MORE, Measured
from stoker.doctor.rules.base import NOISE, ms, predicted, rule
from stoker.doctor.rules.loader import loader_cause

MANY = 400  # operations of a step: with fewer of them a larger batch is the cure, with more a smaller number of them
MOST = 0.95  # of a step that can be gained: something remains to be done
WHOLE = 0.95  # of the asymptotic rate, at which a batch is large enough


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
    change = "torch.optim.AdamW(..., fused=True), or any of torch's with foreach=True"
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
    share = _step_share(found, found.padding)
    sentence = f"{found.padding:.0%} of what is computed is padding."
    change = "sort samples into batches of similar length, or compute on flat, ragged batches (stoker.from_parquet)"
    return _without(found, "padding", share, sentence, change, (f"batches of {found.batch_bytes / 1e6:.1f} MB",))


@rule("precision")
def precision(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.operations is None or not found.wide_floats:
        return None
    share = _step_share(found, 0.5 * found.operations.product_share * found.operations.busy_share)
    evidence = (f"matrix products are {found.operations.product_share:.0%} of the operations' time",)
    return _without(
        found, "precision", share, "The model computes in float64.", "model.float(), and inputs as float32", evidence
    )


@rule("batch")
def batch(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.once_s is None or found.more_s is None:
        return None
    growing = max((found.more_s - found.once_s) / (MORE - 1), found.once_s / 64)
    fixed = max(0.0, found.once_s - growing)
    known = sum(found.lines.share(kind) for kind in ("logging", "checkpoint"))
    known += found.lines.share("optimizer") if optimizer(found) is not None else 0.0
    share = _step_share(found, max(0.0, fixed / found.once_s - known))
    many = found.operations is not None and found.operations.count >= MANY
    if share < 0.4 or many or loader_cause(found) is not None:
        return None
    times = min(64.0, max(2.0, WHOLE / (1 - WHOLE) * fixed / growing))
    after = (fixed + times * growing) / times  # for as many samples as now
    factor, low, high = predicted(found, max(0.0, found.run.mean - found.resident.mean) + after, spread=0.2)
    sentence = f"{share:.0%} of the step does not depend on how many samples it has: the batch is too small."
    change = (
        f"a batch of {round(times * found.samples):,} instead of {found.samples:,.0f}, and a learning rate to match"
    )
    evidence = (f"{ms(found.once_s)} a step, {ms(found.more_s)} with {MORE} times the samples",)
    return Finding("batch", share, sentence, change, evidence, factor, low, high, cost="it changes what is learnt")


@rule("host")
def host(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.operations is None:
        return None
    known = sum(found.lines.share(kind) for kind in ("logging", "checkpoint", "optimizer"))
    if found.graphs >= 2:
        return None
    share = _step_share(found, max(0.0, found.operations.host_share - known))
    if share < 0.15 or batch(found) is not None:
        return None
    operations = found.operations
    sentence = f"The host is the limit: {operations.count:,.0f} operations a step are called one by one."
    evidence = (
        *found.lines.top(3, "step"),
        f"{1 - operations.busy_share:.0%} of the step is Python between them, {operations.short_share:.0%} operations too "
        f"short to matter",
    )
    change = "compute whole batches instead of the loop on these lines; else torch.compile, or CUDA graphs"
    return _without(found, "host", share, sentence, change, evidence)


@rule("sync")
def sync(found: Measured) -> Finding | None:
    if found.run is None or found.operations is None or found.device != "cuda" or found.operations.reads < 1:
        return None
    share = _step_share(found, max(0.0, 1 - found.operations.busy_share)) if found.resident else 0.0
    sentence = f"The host asks the device for {found.operations.reads:.0f} numbers a step, and waits for each."
    change = "keep losses on the device, and read them every 50th step"
    return _without(found, "sync", share, sentence, change, tuple(found.lines.top(3)))


@rule("copy")
def copy(found: Measured) -> Finding | None:
    if found.run is None or found.resident is None or found.copied is None:
        return None
    share = max(0.0, found.copied.mean - found.resident.mean) / found.run.mean
    sentence = "Copying to the device holds the step up."
    change = "pin_memory=True, .to(device, non_blocking=True), and the next copy while this step computes"
    return _without(found, "copy", share, sentence, change, ()) if share >= NOISE else None


@rule("attention")
def attention(found: Measured) -> Finding | None:
    operations = found.operations
    if found.run is None or found.resident is None or operations is None or operations.fused_attention:
        return None
    share = _step_share(found, operations.softmax_share * operations.busy_share)
    if share < 0.1:
        return None
    sentence = "Attention writes its scores out: softmax of all pairs is an operation of its own."
    change = "torch.nn.functional.scaled_dot_product_attention"
    return _without(found, "attention", share, sentence, change, (f"softmax takes {operations.softmax_share:.0%}",))
