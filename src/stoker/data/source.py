"""The seam between storage and everything above it: what reads samples, and what a recipe hands over when it opens data."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.data.bad_samples import BadSamples
from stoker.data.order import Order
from stoker.data.plan import MicroBatch, Plan, Step
from stoker.data.ragged import Indices, Ragged
from stoker.data.samples import SampleTable, Subset
from stoker.data.stages import Stage

EpochOrder = Callable[[int, int], Order]  # (seed, epoch) -> the order of a subset in that epoch


class Source(Protocol):
    """Reads samples: the plan's micro-batches say which, and for which epoch."""

    def gather(self, micro: MicroBatch) -> Ragged:
        """These samples, in an order of the source's choice, which the answer tells."""

    def files_of(self, rows: Indices) -> str:
        """The files that hold these samples, for messages."""


class Ahead(Protocol):
    """Brings what planned steps will need, where samples lie elsewhere."""

    def through(self, planned: Iterator[Step]) -> Iterator[Step]:
        """The same steps; what the next ones need is on its way when a step comes out."""

    def finished(self, step: Step, plan: Plan) -> None:
        """The batches of a step are made."""

    def anew(self) -> "Ahead":
        """The same for another loader."""

    def closed(self) -> None:
        """No further step is asked for."""

    def telemetry(self) -> dict[str, float]:
        """What was fetched since the last reading."""


@dataclass(frozen=True)
class Content:
    """A sample as it is stored, for whoever looks for the same one twice."""

    key: bytes = b""  # the same where samples are
    # Bits that are nearly the same where samples look alike, then as many that say which of them are more than chance, each
    # in words of eight bytes; none: nobody can tell.
    likeness: bytes = b""
    trouble: str = ""  # why it cannot be read


@dataclass(frozen=True)
class RunData:
    """Samples to train on and samples never trained on, and how they become batches."""

    table: SampleTable
    training: Subset
    validation: Subset
    order: EpochOrder  # of the training samples
    stages: Sequence[Stage]  # the first gets a MicroBatch, the last gives a batch
    files_of: Callable[[Indices], str]  # files of some rows, for messages
    description: Mapping[str, Any]  # goes into the events
    bytes_per_cost: float  # host memory that a unit of cost needs on its way
    facts: Mapping[str, Any] = field(default_factory=dict)  # JSON that the run keeps, all that a task is built from
    loose_facts: frozenset[str] = frozenset()  # of them, those that other data may say otherwise
    bad_samples: BadSamples = field(default_factory=BadSamples)
    cache_bytes: int = 0  # of the RAM budget that the source keeps for itself
    validation_stages: Sequence[Stage] | None = None  # where they differ from those of training
    contents: Callable[[Indices], Iterable[Content]] | None = None  # of some rows, in their order
    # Of loader's sample_cost, bad_shards and window, those that mean something here.
    honours: frozenset[str] = frozenset()
    repeated: bool = False  # the training order names samples several times
    paired: bool = False  # a training sample has a partner in its micro-batch
    ahead: Ahead | None = None  # where samples lie elsewhere
