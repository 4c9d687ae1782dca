"""What was measured: the legs of a step, and all else that a rule may look at."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.doctor.answers import Answers
from stoker.doctor.calls import Calls
from stoker.doctor.learning.facts import Learning
from stoker.doctor.lines import Lines
from stoker.doctor.loaders import LoaderFacts, Split
from stoker.doctor.looks import DeviceFacts
from stoker.doctor.operations import Operations
from stoker.doctor.probe import num_cores


@dataclass(frozen=True)
class Leg:
    """Seconds of each step."""

    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.seconds))

    def interval(self, blocks: int = 8, draws: int = 400) -> tuple[float, float]:
        """5 to 95 % of the mean, by drawing stretches of neighbouring steps anew: batches come in bursts."""
        parts = [
            part.mean() for part in np.array_split(np.array(self.seconds), min(blocks, len(self.seconds))) if len(part)
        ]
        dice = np.random.default_rng(0)
        means = dice.choice(parts, (draws, len(parts))).mean(1)
        return float(np.quantile(means, 0.05)), float(np.quantile(means, 0.95))


@dataclass
class Measured:
    """All that a rule may look at. What could not be measured is None, and `troubles` says why."""

    name: str = ""
    device: str = "cpu"
    cores: int = field(default_factory=num_cores)
    samples: float = 0.0  # of a batch
    run: Leg | None = None
    wait_s: float = 0.0  # of a step of the run, for the loader
    gap_s: float = 0.0  # of a step, for the first batch of an epoch
    epoch_steps: int | None = None
    resident: Leg | None = None
    resident_cpu_s: float = 0.0  # CPU seconds of a resident step, over all threads
    given: Leg | None = None  # on a GPU: the same with batches as the loader gives them, which are copied in the step
    pinned_copy_s: float = 0.0  # what the copy of a batch takes from pinned memory
    launch_s: float | None = None  # on a GPU: until the host has launched a step, and could go on
    sync_s: float = 0.0  # of a step, that the host spends in lines in which it waits for the GPU
    pieces: int = 1  # micro-batches of a step
    once_s: float | None = None  # the resident step beside the next, in the middle
    more_s: float | None = None  # the step with MORE times the samples
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    drained_s: float | None = None  # a batch of the loader with nobody computing
    split: Split | None = None
    operations: Operations | None = None
    calls: Calls | None = None
    floor_s: float | None = None  # what the products of a step would take at this machine's best
    call_s: float = 0.0  # what launching one operation costs here
    lines: Lines = field(default_factory=Lines)
    graphs: int = 0  # made by torch.compile in steps that should have had none left to make
    graphs_s: float = 0.0  # of a step, for that
    reasons: tuple[str, ...] = ()  # of graphs that were made again
    padding: float = 0.0  # share of the largest tensor of a batch that is padding
    grown_bytes: float = 0.0  # of host memory, a step
    batch_bytes: int = 0
    free_bytes: int = 0
    gpu: DeviceFacts | None = None
    wide_floats: bool = False  # parameters or inputs in float64
    plain_layout: bool = False  # convolutions of images whose channels do not lie side by side
    settings: dict[str, Any] = field(default_factory=dict)  # of a recipe
    evaluation_share: float = 0.0  # of the wall clock, of a run's events
    checkpoint_share: float = 0.0
    drift: float = 0.0  # rate of the last third of a run over that of the first, less one
    decode_rate: float | None = None  # images/s that one thread can decode, of a recipe of images
    loss_scale: float | None = None  # of float16, at the end of a run
    storage: dict[str, float] = field(default_factory=dict)  # of data elsewhere, from a run's events
    network: float | None = None  # bytes/s that the store of the data gives this machine at most
    fetch_share: float = 0.0  # of what the loader's threads did: waiting for pieces
    slow_rank: tuple[int, float] | None = None  # its number, and how much longer it takes than the median
    learning: Learning | None = None
    answers: Answers | None = None  # of a watched model
    tried: dict[str, float] = field(default_factory=dict)  # seconds of a step with the change of a rule, where tried
    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0  # that measuring took
    first_s: float = 0.0  # until there was a first answer

    @property
    def rate(self) -> float | None:
        return self.samples / self.run.mean if self.run is not None else None

    @property
    def run_s(self) -> float:
        assert self.run is not None
        return self.run.mean

    @property
    def host_share(self) -> float:
        """Of a resident step: the device has nothing to do, or on a CPU, does nothing that matters."""
        if self.operations is None or self.resident is None:
            return 0.0
        if self.device == "cuda":
            return min(1.0, max(0.0, 1 - self.operations.busy_s / self.resident.mean))
        return self.operations.host_share
