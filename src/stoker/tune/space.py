"""What can be tuned: keys of a recipe's configuration, or arguments of somebody's probe, and the values to try."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil

from stoker import settings
from stoker.doctor.probe import Probe
from stoker.errors import UserError

Stage = Literal["step", "batch", "loader", "lr"]
STAGES: tuple[Stage, ...] = ("step", "batch", "loader", "lr")
AHEAD = (2, 4, 8, 16, 32)  # micro-batches


@dataclass(frozen=True)
class Knob:
    name: str  # key of a configuration, or argument of a probe
    stage: Stage
    values: tuple[Any, ...]  # from the least to the most


@dataclass(frozen=True)
class Choice:
    """One of the values of somebody's knob, which may be anything: told apart by its place among them."""

    number: int
    value: Any = field(compare=False)

    def __str__(self) -> str:
        return str(self.value)


def plain(value: Any) -> Any:
    """As JSON and YAML have it."""
    value = value.value if isinstance(value, Choice) else value
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@dataclass(frozen=True)
class Tunable:
    """A loop of one's own: `make(**knobs)` gives a Probe, whose loader and step are made with them.

    `knobs` are the values to try, the first of each being what is used today. Those of `loader` change where batches come
    from, all others how a step is computed.
    """

    make: Callable[..., Probe]
    knobs: Mapping[str, tuple[Any, ...]]
    loader: tuple[str, ...] = ("num_workers", "prefetch_factor", "pin_memory")
    name: str = "probe"

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise UserError(f"The make of a Tunable is a {type(self.make).__name__}, and must be a function.")
        for name, values in self.knobs.items():
            if not isinstance(values, tuple | list | range):
                raise UserError(
                    f"The values of {name} are a {type(values).__name__}, and must be a tuple or list, today's value first."
                )
        empty = [name for name, values in self.knobs.items() if not len(values)]
        if not self.knobs or empty:
            raise UserError(
                f"A Tunable needs values to try: knobs={{'num_workers': (0, 1, 2)}}, say. "
                f"{', '.join(empty) or 'It'} has none."
            )

    def space(self) -> list[Knob]:
        return [Knob(name, "loader" if name in self.loader else "step", self._choices(name)) for name in self.knobs]

    def now(self) -> dict[str, Choice]:
        return {name: self._choices(name)[0] for name in self.knobs}

    def _choices(self, name: str) -> tuple[Choice, ...]:
        return tuple(Choice(number, value) for number, value in enumerate(self.knobs[name]))

    def probe(self, numbers: Mapping[str, int]) -> Probe:
        """With these of its values, and the first of all others."""
        made = self.make(**{name: values[numbers.get(name, 0)] for name, values in self.knobs.items()})
        if not isinstance(made, Probe):
            raise UserError(f"The make of {self.name} gives a {type(made).__name__}, and must give a stoker.Probe.")
        return made


def space_of(config: Any, *, on_gpu: bool, fixed_shapes: bool, batches_that_fit: int | None = None) -> list[Knob]:
    """Of a recipe's configuration: those that it has, and that this machine can use.

    `batches_that_fit`: in the RAM budget, which is a knob only where it holds the look-ahead back.
    """
    cores = len(os.sched_getaffinity(0))
    known = settings.kept_values(config)
    knobs = [Knob("train.precision", "step", ("bf16", "fp32")), Knob("train.compile", "step", (False, True))]
    if on_gpu and fixed_shapes:
        knobs.append(Knob("train.cuda_graphs", "step", (False, True)))
    knobs += [
        Knob("loader.threads", "loader", ladder(cores)),
        Knob("data.processes", "loader", (0, *ladder(cores))),
        Knob("loader.look_ahead", "loader", AHEAD),
    ]
    if batches_that_fit is not None and batches_that_fit < known.get("loader.look_ahead", 0):
        knobs.append(Knob("loader.ram_bytes", "loader", _larger(known["loader.ram_bytes"])))
    if on_gpu:
        knobs.append(Knob("data.decode_on_gpu", "loader", (False, True)))
    knobs.append(Knob("data.mode", "loader", ("direct", "packed", *(("resident",) if on_gpu else ()))))
    return [knob for knob in knobs if knob.name in known]


def _larger(num_bytes: int) -> tuple[int, ...]:
    """Budgets up to half of what is free now."""
    most = psutil.virtual_memory().available // 2
    return (num_bytes, *(num_bytes * times for times in (2, 4, 8) if num_bytes * times <= most))


def ladder(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `most`."""
    found = [1]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return tuple(dict.fromkeys([*found, most]))
