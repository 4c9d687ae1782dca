"""Rules that take a whole run to see: memory, evaluations, checkpoints, a rate that falls, a rank that lags behind."""

from collections import defaultdict

from stoker.doctor.finding import Finding
from stoker.doctor.measured import Measured
from stoker.doctor.rules.base import SERIOUS, of_learning, rule

COLLAPSED = 1.0  # of a scale that begins at 65,536


@rule("memory-creep")
def memory_creep(found: Measured) -> Finding | None:
    if found.grown_bytes < 1 << 17 or found.free_bytes == 0 or found.run is None:
        return None
    steps = found.free_bytes / found.grown_bytes
    sentence = f"Host memory grows by {found.grown_bytes / 1e6:.2f} MB every step."
    evidence = (
        f"{found.free_bytes / 1e9:.1f} GB are free: full after {steps:,.0f} steps, {steps * found.run.mean / 60:,.0f} min",
    )
    change = "keep numbers, not tensors: losses.append(loss.item()) or .detach(), and clear lists"
    share = 0.5 if steps < 100_000 else 0.1
    return Finding("memory-creep", share, sentence, change, evidence)


@rule("evaluation")
def evaluation(found: Measured) -> Finding | None:
    share = found.evaluation_share
    if share < 0.15:
        return None
    sentence = f"{share:.0%} of the time goes into evaluating."
    change = "--train.evaluate_every a larger number, or fewer validation samples"
    factor = 1 / (1 - 0.8 * share)
    return Finding("evaluation", share, sentence, change, (), factor, 0.9 * factor, 1.1 * factor)


@rule("saving")
def saving(found: Measured) -> Finding | None:
    share = found.checkpoint_share
    if share < 0.05:
        return None
    factor = 1 / (1 - 0.9 * share)
    change = "--train.save_every a larger number"
    return Finding(
        "saving",
        share,
        f"{share:.0%} of the time goes into checkpoints.",
        change,
        (),
        factor,
        0.9 * factor,
        1.1 * factor,
    )


@rule("drift")
def drift(found: Measured) -> Finding | None:
    if found.drift > -0.1:
        return None
    sentence = f"The last third of the run is {-found.drift:.0%} slower than the first."
    change = "look at memory, temperature and what else the machine does; `stoker doctor TARGET` measures the legs"
    factor = 1 / (1 + found.drift)
    return Finding("drift", -found.drift, sentence, change, (), factor, 0.9 * factor, 1.1 * factor)


@rule("fetch")
def fetch(found: Measured) -> Finding | None:
    if not found.storage or found.run is None or found.fetch_share < 0.5:
        return None
    share = found.wait_s / found.run_s
    if share < 0.05:
        return None
    told = defaultdict(float, found.storage)
    rate = told["bytes"] / max(told["seconds"], 1e-9) / 1e6
    sentence = f"{share:.0%} of the time is spent waiting for data that lie elsewhere, which come at {rate:,.0f} MB/s."
    used, budget = told["cache_bytes"] / 1e9, told["budget_bytes"] / 1e9
    evidence = (
        f"{told['requests']:,.0f} requests; {told['retries']:,.0f} tried again, {told['throttled']:,.0f} refused",
        f"99 % of them within {told['latency_p99_ms']:,.0f} ms; {told['at_a_time']:.0f} at a time",
        f"{told['hits']:,.0f} pieces were in the cache, {told['misses']:,.0f} were not; {used:,.1f} of {budget:,.1f} GB",
    )
    change = "`stoker fetch SOURCE DIR` before the run"
    if told["cache_bytes"] > 0.8 * told["budget_bytes"]:
        change = "a larger STOKER_CACHE_BYTES: pieces are fetched again in every epoch"
    factor = 1 / (1 - min(share, 0.99))
    return Finding("fetch", share, sentence, change, evidence, factor, 0.7 * factor, factor)


@rule("waiting")
def waiting(found: Measured) -> Finding | None:
    """Of a run that is only known by its events."""
    if found.run is None or found.resident is not None or fetch(found) is not None:
        return None
    share = found.wait_s / found.run_s
    if share < 0.05:
        return None
    sentence = f"{share:.0%} of the time is spent waiting for batches."
    change = (
        "`stoker doctor CONFIG`, with the run's config.yaml, says what the loader is slow in, and what would cure it"
    )
    factor = 1 / (1 - min(share, 0.99))
    return Finding("waiting", share, sentence, change, (), factor, 0.7 * factor, factor)


@rule("scale-collapsed")
def scale_collapsed(found: Measured) -> Finding | None:
    if found.loss_scale is None or found.loss_scale > COLLAPSED:
        return None
    sentence = f"The loss scale of float16 has fallen to {found.loss_scale:.3g}: gradients overflow at every scale."
    change = "--train.precision bf16 (or fp32); then look for what grows: `stoker doctor RUN` replays bad steps"
    return of_learning("scale-collapsed", SERIOUS, sentence, change)


@rule("straggler")
def straggler(found: Measured) -> Finding | None:
    if found.slow_rank is None or found.slow_rank[1] < 0.1:
        return None
    rank, more = found.slow_rank
    sentence = f"Rank {rank} takes {more:.0%} longer than the others, who wait for it."
    return Finding("straggler", more / (1 + more), sentence, f"look at the machine and the data of rank {rank}", ())
