"""What the doctor says: a cause, how much of the step it costs, the evidence, what to change, and what that will gain."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LAST = ("batch",)  # what changes more than the speed comes after all that does not
NOTICE, WARNING, CRITICAL = 0.05, 0.10, 0.20  # shares of the step time


@dataclass(frozen=True)
class Finding:
    rule: str
    share: float  # of the time of a step that the cause costs, or of memory where it is a matter of that
    sentence: str
    change: str  # keys of a configuration, or a line of code
    evidence: tuple[str, ...] = ()
    factor: float | None = None  # predicted rate over the present one; None: no change of the rate is promised
    low: float | None = None  # of the factor
    high: float | None = None
    cost: str = ""  # what the change costs
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, for --apply
    of: str = "speed"  # or learning: then `share` only says how serious it is

    @property
    def severity(self) -> str:
        for name, least in (("critical", CRITICAL), ("warning", WARNING), ("notice", NOTICE)):
            if self.share >= least:
                return name
        return "fine"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "severity": self.severity}

    def lines(self, rate: float | None) -> list[str]:
        """For people."""
        share = f" ({self.share:.0%})" if self.of == "speed" else ""
        head = f"{self.severity.upper()} {self.rule}{share}: {self.sentence}"
        found = [head, *(f"    {one}" for one in self.evidence), f"    change: {self.change}"]
        if self.factor is not None and self.low is not None and self.high is not None:
            rates = f", from {rate:,.0f} to {rate * self.factor:,.0f} samples/s" if rate else ""
            found.append(f"    predicted: {self.factor:.2f} x ({self.low:.2f} to {self.high:.2f}){rates}")
        return [*found, *([f"    costs: {self.cost}"] if self.cost else [])]


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """What costs most comes first, after all that keeps a run from learning; what costs nothing is not worth a line."""
    worth = (one for one in findings if one.share >= NOTICE)
    return sorted(worth, key=lambda one: (one.of == "speed", one.rule in LAST, -one.share))
