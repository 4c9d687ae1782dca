"""What was seen of a model that learns, for the rules to look at."""

from dataclasses import dataclass, field

from stoker.data.agreement import Agreement
from stoker.doctor.learning.content import Contents


@dataclass(frozen=True)
class Feature:
    """One column of what reaches the first matrix product."""

    number: int
    mean: float
    spread: float
    largest: float
    skew: float
    bad_share: float  # of its values that are not finite
    whole: bool  # all of its values are whole numbers, of more than a few kinds
    constant: bool
    with_target: float = 0.0  # correlation with the target, where both have one value a sample


@dataclass(frozen=True)
class Layer:
    """A module with weights of its own."""

    name: str
    gradient: float | None  # norm relative to its weights'; None: no gradient arrives
    frozen: bool
    dead_share: float = 0.0  # of the columns of its input that are zero for every sample


@dataclass(frozen=True)
class Arm:
    """A learning rate, tried from the same weights on the same batches as all others."""

    rate: float
    gain: float  # how far the loss of the later batches lies below that of the weights as they were
    error: float  # of it
    norms: tuple[float, float, float]  # of gradients: median, 99 %, largest
    bad_layer: str | None = None  # the first whose gradient is not finite

    @property
    def is_bad(self) -> bool:
        return self.bad_layer is not None


@dataclass(frozen=True)
class Update:
    """One step of the optimizer."""

    batches: int  # since the one before
    size: float  # of its gradient along the mean of theirs: 1 where nothing is done to it
    with_mean: float  # cosine with that
    with_last: float  # cosine with the gradient of the last batch alone
    norm: float


@dataclass(frozen=True)
class Updates:
    made: tuple[Update, ...]
    unchanged: tuple[str, ...]  # layers that a dozen calls of the step leave as they were
    warms_up: bool = False  # the rate rises meanwhile


@dataclass(frozen=True)
class NotFinite:
    """A batch whose loss or gradient is not finite before anything was learnt."""

    batch: int  # its number
    samples: tuple[int, ...]  # their places in it
    of: int
    operation: str
    line: str
    backward: bool


@dataclass(frozen=True)
class Mixed:
    """Samples that a step mixes before the model sees them."""

    share: float  # of a sample itself, in the middle
    both_count: bool  # the label of the other one changes what is learnt


@dataclass
class Learning:
    features: list[Feature] = field(default_factory=list)
    features_of: str = ""  # the module whose input they are
    layers: list[Layer] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    best: Arm | None = None
    present: Arm | None = None  # with the rate of the run itself
    with_others_labels: tuple[float, float] | None = None  # gain beyond that with labels of other samples, its error
    rate: float | None = None  # of the run itself
    configured: float | None = None  # what a recipe's configuration calls that rate: it may be stated for another batch
    one_batch: tuple[float, float, int] | None = None  # loss of one batch before and after so many steps on it
    answers: float | None = None  # spread of the answers over samples, relative to their size, after that
    loss: float | None = None  # with the weights as they were
    know_nothing: float | None = None
    label_error: str | None = None  # what the loss itself says of the labels
    constant_labels: bool = False
    label_counts: dict[int, int] = field(default_factory=dict)  # by class
    order: float | None = None  # 1: batches are as mixed as chance makes them; more: they are not
    seen: int = 0  # samples that were looked at
    twice: int = 0  # of them that were there already
    agreement: Agreement | None = None  # of validation labels with training labels; None: not looked
    contents: Contents | None = None  # of a recipe's samples; None: not looked
    updates: Updates | None = None  # None: not looked
    mixed: Mixed | None = None  # None: samples reach the model as they are, or nobody can tell
    average: str | None = None  # averaged weights are used, unused, unchanged; None: unknown
    restored: tuple[float, float] | None = None  # rates: that of the optimizer when it was made, and of its checkpoint
    not_finite: NotFinite | None = None
    bad_batches: bool = False  # what was read is not finite already
    in_validation: int | None = None  # of them that are also in validation; None: not looked
    skipped: str = ""  # why rates were not tried
    trouble: str = ""  # what the step of the loop raised
    seconds: float = 0.0

    def row_of_rates(self) -> list[tuple[str, ...]]:
        """For people."""
        rows: list[tuple[str, ...]] = [("rate", "loss falls by", "gradient norm p50 / p99 / max", "")]
        for arm in [*self.arms, *([] if self.present is None else [self.present])]:
            note = "best" if arm is self.best else ("as it is" if arm is self.present else "")
            note = f"not finite, first in {arm.bad_layer}" if arm.is_bad else note
            rows.append(
                (
                    f"{arm.rate:.2g}",
                    f"{arm.gain:+.4g} +- {arm.error:.2g}",
                    " / ".join(f"{one:.3g}" for one in arm.norms),
                    note,
                )
            )
        return rows
