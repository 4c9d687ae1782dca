"""From measurements to findings: each rule is a pure function of `Measured` that finds its cause, or nothing.

A prediction is what the step takes once the cause is gone: the rest of the sum. Of causes that weigh the same, those
come first whose rule does: data before what is learnt of them.
"""

from stoker.doctor.finding import Finding, ranked
from stoker.doctor.measured import Measured
from stoker.doctor.rules import data, learning, loader, run, step, watched
from stoker.doctor.rules.base import RULES

__all__ = ["RULES", "data", "diagnose", "learning", "loader", "run", "step", "verdict", "watched"]


def diagnose(found: Measured) -> list[Finding]:
    """All findings worth a line, the costliest first."""
    return ranked([one for function in RULES.values() if (one := function(found)) is not None])


def verdict(found: Measured, findings: list[Finding]) -> str:
    """One sentence."""
    if findings:
        return findings[0].sentence
    if found.run is None and found.learning is not None:
        return "Healthy: it learns, and these rules find nothing that keeps it from it."
    if found.run is None:
        return "Nothing could be measured."
    bound = "its operations" if found.operations is None else _busiest(found)
    share = ""
    if found.floor_s is not None and found.floor_s < found.run.mean:
        share = f", which run at {found.floor_s / found.run.mean:.0%} of this machine's best"
    return (
        f"Healthy: nothing to gain that these rules know of. The step is limited by {bound}{share}.{_headroom(found)}"
    )


def _headroom(found: Measured) -> str:
    """How much of a faster step its loader could feed."""
    if found.drained_s is None or found.run is None or not found.loader.workers:
        return ""
    times = found.run.mean / max(found.drained_s, 1e-9)
    return f" Its loader could feed a step {times:.1f} times as fast." if times > 1.05 else " Its loader just keeps up."


def _busiest(found: Measured) -> str:
    assert found.operations is not None
    return ", ".join(f"{name} {share:.0%}" for name, share in found.operations.top[:3])
