"""Every kind of event that a run writes, with its fields. docs/events.md says the same for people, and a test compares them.

A field that was added later has a default, so that older runs can be read; one that changes its meaning, or goes, takes a
new VERSION and a line in `upgraded`.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Event:
    """What all of them have."""

    kind: ClassVar[str]
    time: float = 0.0  # seconds since 1970, when it was written


@dataclass(frozen=True, kw_only=True)
class Start(Event):
    """A process takes the run on."""

    kind = "start"
    resumed_from: str | None = None  # name of a checkpoint of this run
    forked_from: str | None = None  # path of a checkpoint of another run
    data: dict[str, Any] = field(default_factory=dict)  # path, numbers of samples, fingerprint, split
    parameters: int = 0  # of the model
    steps: int = 0  # that the run will have; an estimate where steps are cut by cost
    device: str = ""
    precision: str = ""
    ranks: int = 1
    know_nothing: float | None = None  # loss of a model that has learnt nothing
    changed: dict[str, Any] = field(default_factory=dict)  # keys that differ from the preset -> what the preset has


@dataclass(frozen=True, kw_only=True)
class Shuffle(Event):
    """How well the order of the first two epochs is mixed."""

    kind = "shuffle"
    lag1: float  # correlation of neighbours in the sequence; 0 for a true shuffle
    lag1_error: float  # standard error of that correlation under a true shuffle
    shards_per_batch: float  # distinct shards in a batch, mean
    shards_expected: float  # the same for a true shuffle
    chi2_z: float  # position in the epoch against place in storage: standard deviations from independence
    displacement: float | None = None  # mean distance a sample moves between two epochs; 1: as in a true shuffle


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """The steps since the last event of this kind. Evaluating, saving and compiling are in none of its times."""

    kind = "step"
    step: int  # the last of them
    epoch: int
    consumed: int  # samples of the epoch that are done
    samples_crc32: int  # of the rows of the last step: two runs that agree in it saw the same samples
    lr: float
    loss: float  # mean over the samples of all these steps
    grad_norm: float  # of the last step, before clipping
    bad: int  # steps that were skipped
    samples_per_s: float
    wait_share: float  # of the time, waiting for batches
    host_bytes: int = 0  # memory of this process
    cpu_share: float | None = None  # of all cores of the machine, busy since the last event of this kind
    device_bytes: int = 0  # of the GPU's memory, the most that tensors took so far
    device_busy: float | None = None  # of the last moments, a kernel ran on the GPU: NVML's figure
    step_ms: list[float] = field(default_factory=list)  # how long each of them took, by the clock of the host
    copy_s: float = 0.0  # copying their batches to the device, which overlaps with computing
    loss_scale: float | None = None  # of fp16, at the last step
    rank_ms: list[float] = field(
        default_factory=list
    )  # of each rank, a step by its host without waiting for the others


@dataclass(frozen=True, kw_only=True)
class LoaderTimes(Event):
    """What the loader did since the last event of this kind."""

    kind = "loader"
    step: int
    seconds: float
    wait_s: float  # of the consumer
    wait_p50_ms: float
    wait_p99_ms: float
    ready: float  # mean number of micro-batches that lay ready when the next was asked for
    stages: dict[str, dict[str, float]]  # name -> busy_s, p50_ms, p99_ms, bytes, count
    storage: dict[str, float] = field(default_factory=dict)  # of data elsewhere: what docs/storage.md lists


@dataclass(frozen=True, kw_only=True)
class Norms(Event):
    """Of each parameter at one step."""

    kind = "norms"
    step: int
    gradient: dict[str, float]
    update_ratio: dict[str, float]  # how far the step moved it, relative to its size


@dataclass(frozen=True, kw_only=True)
class Evaluation(Event):
    """The model judged on the validation samples."""

    kind = "evaluation"
    step: int
    metric: str  # the one that the run is judged by
    goal: str  # min or max
    score: float  # its value, of the weights that count
    weights: str = "raw"  # which those are: raw, or averaged
    metrics: dict[str, float] = field(default_factory=dict)  # all of them; those of averaged weights begin with ema_
    seconds: float = 0.0
    host_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint was handed to its writer."""

    kind = "checkpoint"
    step: int
    seconds: float = 0.0  # that training stood still for it


@dataclass(frozen=True, kw_only=True)
class NotSaved(Event):
    """A checkpoint was due and not written."""

    kind = "not_saved"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Compilation(Event):
    """A step in which torch.compile made new graphs."""

    kind = "compilation"
    step: int
    graphs: int
    seconds: float  # of that step, nearly all of it compiling
    reasons: list[str] = field(default_factory=list)  # the guards that failed, where a graph had been made before


@dataclass(frozen=True, kw_only=True)
class BadStep(Event):
    """A step whose loss or gradient was not finite: skipped, and written down."""

    kind = "bad_step"
    step: int
    samples: list[int]  # ids
    bundle: str  # folder below bad_steps/, enough to replay it
    in_a_row: int


@dataclass(frozen=True, kw_only=True)
class Spike(Event):
    """A loss far above those before it."""

    kind = "spike"
    step: int
    loss: float
    mean: float
    sigma: float


@dataclass(frozen=True, kw_only=True)
class Stuck(Event):
    """The loss is still that of a model that has learnt nothing."""

    kind = "stuck"
    step: int
    loss: float
    know_nothing: float


@dataclass(frozen=True, kw_only=True)
class OutOfPatience(Event):
    """No evaluation was better for as long as train.patience allows: the run ends here."""

    kind = "out_of_patience"
    step: int
    best_step: int
    best_score: float


@dataclass(frozen=True, kw_only=True)
class Found(Event):
    """What the doctor says of the run when it has ended, where the events alone leave no doubt."""

    kind = "finding"
    rule: str
    share: float  # of the time that the cause costs
    sentence: str
    change: str


@dataclass(frozen=True, kw_only=True)
class LeftOut(Event):
    """Samples that cannot be read and are used no more."""

    kind = "left_out"
    step: int
    what: str  # shard or image
    name: str
    samples: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class End(Event):
    """A process is through with the run."""

    kind = "end"
    state: str  # finished, stopped or failed
    reason: str | None = None


KINDS: dict[str, type[Event]] = {one.kind: one for one in Event.__subclasses__()}


def upgraded(event: dict[str, Any]) -> dict[str, Any]:
    """An event of any version as one of this version."""
    if event.get("version") is not None:
        return event
    if event["event"] == "evaluation":  # of version 1: metrics stood among the fields
        known = {"event", "time", "step", "metric", "goal", "score", "weights", "seconds", "host_bytes"}
        metrics = {key: value for key, value in event.items() if key not in known}
        fields = {key: value for key, value in event.items() if key in known}
        return {"score": event.get(str(event.get("metric"))), **fields, "metrics": metrics}
    if event["event"] == "quarantine":
        return {**event, "event": "left_out", "what": "shard", "name": event.get("file")}
    return event
