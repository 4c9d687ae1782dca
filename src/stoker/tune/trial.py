"""One trial: a target or a probe with some settings, measured in a process of its own.

Nothing of it stays: memory, compiled graphs and whatever it did to the machine go with the process, and if it runs out of
memory or hangs, that is its answer.
"""

import dataclasses
import getpass
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from stoker.data.processes import die_with_parent
from stoker.errors import UserError
from stoker.runs.environment import gpu_names

Leg = Literal["resident", "run", "largest", "rates", "learn", "facts"]
BATCHES = 6  # that a resident step rotates through
LOSSES = 8  # steps whose losses are compared
GRACE_S = 180.0  # beyond the seconds of the measurement, at the most: imports, data, compilation
MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Ask:
    target: str
    overrides: list[str]
    knobs: dict[str, Any]  # keys of a configuration; of a Tunable, which of its values
    leg: Leg
    seconds: float
    trusted: bool = False
    limit_s: float = 1e9  # after which it counts as hanging
    steps: int | None = None  # of the leg `learn`, at the most


@dataclass(frozen=True)
class Answer:
    rate: float = 0.0  # samples a second
    step_s: float = 0.0
    samples: float = 0.0  # of a step
    losses: list[float] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)  # bytes, by what they are for
    facts: dict[str, Any] = field(default_factory=dict)  # of the target: what its space and its key are made of
    rates: dict[str, Any] | None = None  # of the leg of that name
    error: str | None = None  # what went wrong
    out_of_memory: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None


def tried(ask: Ask, tick: Callable[[], None] = lambda: None) -> Answer:
    """Runs a trial and waits for it. Whatever it prints, its answer is in a file. `tick` is called every second."""
    limit = min(ask.limit_s, ask.seconds + GRACE_S)
    with tempfile.TemporaryDirectory(prefix="stoker-trial-", ignore_cleanup_errors=True) as folder:
        place, said = Path(folder) / "answer.json", Path(folder) / "said.txt"
        # A session of its own, so that it ends with all that it started; and it ends by itself if we do.
        with said.open("w") as err:
            process = subprocess.Popen(
                [sys.executable, "-m", "stoker.tune.trial", str(place)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=err,
                text=True,
                start_new_session=True,
                env=_environment(folder),
            )
        try:
            ended = _has_ended(process, json.dumps(dataclasses.asdict(ask)), limit, tick)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with suppress(OSError, ValueError, TypeError):
            return Answer(**json.loads(place.read_text()))
        if not ended:
            return Answer(error=f"not done after {limit:.0f} s")
        words = said.read_text(errors="replace")
    last = (words.strip().splitlines() or [f"ended with {process.returncode}"])[-1]
    without_memory = process.returncode == -signal.SIGKILL or any(word in words for word in MEMORY)
    return Answer(error=last[:300], out_of_memory=without_memory)


def _environment(folder: str) -> dict[str, str]:
    """Whatever a trial leaves among temporary files goes with it, but what it compiled for a CPU: the next ones need it."""
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # where torch keeps it
    kept = {} if gpu_names() else {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    return {**kept, **os.environ, "TMPDIR": folder}


def _has_ended(process: "subprocess.Popen[str]", given: str, limit_s: float, tick: Callable[[], None]) -> bool:
    """Within the limit; what it started itself may go on for longer."""
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        stdin.write(given)
    for _ in range(math.ceil(limit_s)):
        try:
            process.wait(1.0)
            return True
        except subprocess.TimeoutExpired:
            tick()
    return False


def words_of(knobs: Mapping[str, Any]) -> list[str]:
    """Settings as the command line has them."""
    return [f"--{key}={_word(value)}" for key, value in knobs.items()]


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _main() -> int:
    die_with_parent()
    ask = Ask(**json.loads(sys.stdin.read()))
    try:
        with redirect_stdout(sys.stderr):
            answer = _measured(ask)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    Path(sys.argv[1]).write_text(json.dumps(dataclasses.asdict(answer)))
    return 0


def _measured(ask: Ask) -> Answer:
    from stoker import console

    console.be_quiet()
    with _opened(ask) as (probe, facts):
        if ask.leg == "facts":
            return Answer(facts=facts)
        if ask.leg == "rates":
            from stoker.tune.rates import compare_rates

            return Answer(facts=facts, rates=compare_rates(probe, ask.seconds))
        if ask.leg == "learn":
            return Answer(facts=facts, losses=_learnt(probe, ask))
        return _timed(probe, ask, facts)


@contextmanager
def _opened(ask: Ask) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The probe, and what is known of it."""
    from stoker.doctor import legs
    from stoker.doctor.probe import probe_of
    from stoker.launch.targets import resolve_target

    tunable = find_tunable(ask.target)
    if tunable is not None:
        _same_chance()  # every trial begins with the same weights
        probe = tunable.probe(ask.knobs)
        # Who takes things out of a batch finds them there again.
        probe = dataclasses.replace(probe, step=legs.moving(probe.step), loss=probe.loss and legs.moving(probe.loss))
        facts = {"name": tunable.name, "device": probe.device.type, "has_loss": probe.loss is not None}
        yield probe, facts | {"ceilings": _ceilings(probe)}
        return
    target = resolve_target(ask.target, [*ask.overrides, *words_of(ask.knobs)], trusted=ask.trusted)
    with probe_of(target) as probe:
        yield probe, _facts(target, probe)


def _ceilings(probe: Any) -> dict[str, Any]:
    """Of the machine: measured by the first trial, and found by the others."""
    from stoker.doctor.ceilings import ceilings

    return dataclasses.asdict(ceilings(probe.device))


def _facts(target: Any, probe: Any) -> dict[str, Any]:
    loader = probe.loader.loader
    plan = loader.plan
    epochs, steps = target.config.train.epochs, target.config.train.steps
    planned = plan.steps_per_epoch() * epochs
    return {
        "name": target.config.recipe,
        "device": probe.device.type,
        "fixed_shapes": probe.fixed_shapes,
        "planned_steps": min(planned, steps) if steps else planned,
        "fingerprint": str((probe.data.description if probe.data else {}).get("fingerprint", "")),
        "largest_cost": int(plan.costs(_costliest(plan, 1)).sum()),
        "samples": len(plan),
        "optimizer": target.config.train.optimizer,
        "lr_scale": (probe.rate or target.config.train.lr) / target.config.train.lr,  # by train.lr_batch
        "has_loss": True,
        "batch_norm": any(type(module).__name__.startswith("BatchNorm") for module in probe.model.modules()),
        "batches_that_fit": loader.batches_that_fit(),
        "ram_bytes": target.config.loader.ram_bytes,
        "ceilings": _ceilings(probe),
    }


def find_tunable(words: str) -> Any:
    """`module:attribute` that is a Tunable, or None."""
    from stoker.doctor.probe import find_attribute
    from stoker.tune.space import Tunable

    found = find_attribute(words)
    return found if isinstance(found, Tunable) else None


def _timed(probe: Any, ask: Ask, facts: dict[str, Any]) -> Answer:
    import numpy as np
    import torch

    from stoker.doctor import legs

    given = list(islice(probe.loader, BATCHES))
    if not given:
        raise UserError("The loader gives not a single batch.")
    batches = [legs.on_device(batch, probe) for batch in given]
    samples = float(np.mean([probe.samples_of(batch) for batch in given]))
    losses = _losses(probe, batches)
    if probe.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if ask.leg == "largest":
        largest = _largest(probe)
        for _ in range(3):
            probe.step(largest)
        batches, samples = [largest], float(probe.samples_of(largest))
    legs.warm_up(probe, batches[0])
    spent = legs.repeated(probe, batches, ask.seconds if ask.leg != "run" else min(1.0, ask.seconds))
    step_s = float(np.mean(spent))
    rate = legs.rate_of(probe, ask.seconds) if ask.leg == "run" else samples / step_s
    return Answer(rate, step_s, samples, losses, _memory(probe, batches[0], samples), facts)


def _same_chance() -> None:
    import random

    import numpy as np
    import torch

    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (what loops of others use)
    random.seed(0)


def _losses(probe: Any, batches: list[Any]) -> list[float]:
    """Of a few steps in a row: settings of the step must not change them by more than they round."""
    if probe.loss is None:
        return []
    found = []
    _same_chance()
    for number in range(LOSSES):
        batch = batches[number % len(batches)]
        found.append(float(probe.loss(batch).detach()))
        probe.step(batch)
    return found


def _learnt(probe: Any, ask: Ask) -> list[float]:
    """Losses of batches before they are learnt from, at the rate of the configuration."""
    import time

    if probe.loss is None:
        raise UserError("The probe has no loss: what it learns cannot be compared.")
    found: list[float] = []
    begin = time.perf_counter()
    for batch in islice(probe.loader, ask.steps):
        found.append(float(probe.loss(batch).detach()))
        probe.step(batch)
        if time.perf_counter() - begin > ask.seconds:
            break
    return found


def _largest(probe: Any) -> Any:
    """A step of the samples that cost the most, in as many pieces as the plan makes of it."""
    from stoker.data.batch import to_device
    from stoker.data.plan import Position, Step

    if not probe.settings:
        raise UserError("Only a recipe knows what its samples cost.")
    loader = probe.loader.loader
    step = Step(_costliest(loader.plan, loader.plan.batch_size or 1024), Position(0), Position(0))
    step.micro_batches = loader.plan.deal(step, 1)[0]
    step.batches = tuple(to_device(loader.make(micro.rows), probe.device) for micro in step.micro_batches)
    return step


def _costliest(plan: Any, count: int) -> Any:
    import numpy as np

    rows = plan.subset.rows(np.arange(len(plan)))
    return rows[np.argsort(-plan.costs(rows), kind="stable")[:count]]


def _memory(probe: Any, batch: Any, samples: float) -> dict[str, float]:
    """Bytes by what they are for, as far as it can be told apart."""
    import psutil
    import torch

    from stoker.data.batch import num_bytes

    found: dict[str, float] = {}
    weights = _bytes(probe.model.parameters()) if probe.model is not None else 0
    state = probe.optimizer.state.values() if probe.optimizer is not None else ()
    moments = sum(_bytes(value for value in one.values() if torch.is_tensor(value)) for one in state)
    found |= {"weights": weights, "gradients": weights, "moments": moments, "batch": num_bytes(batch)}
    if probe.device.type == "cuda":
        found |= on_gpu(2 * weights + moments, samples)
    process = psutil.Process()
    others = sum(child.memory_info().rss for child in process.children(recursive=True))
    found |= {"this process": process.memory_info().rss, "its processes": others}
    if probe.settings:
        ahead = probe.settings.get("loader.look_ahead") or 0
        found |= {"batches made ahead": ahead * found["batch"], "RAM": psutil.virtual_memory().total}
        found["cache"] = probe.data.cache_bytes if probe.data is not None else 0
    return found


def on_gpu(kept: float, samples: float) -> dict[str, float]:
    """What a GPU holds besides what is `kept` from step to step."""
    import torch

    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    left = max(0.0, peak - kept)
    graphs: dict[str, float] = {}
    with suppress(RuntimeError):  # of an allocator that does not tell
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        pools = sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))
        graphs = {"of them in recorded graphs": pools}
    return {
        "activations": left,
        "activations a sample": left / max(1.0, samples),
        **graphs,
        "peak": peak,
        "held beyond the peak": reserved - peak,
        "workspaces and context": max(0, total - free - torch.cuda.memory_reserved()),  # and other processes
        "headroom": free,
        "total": total,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    sys.exit(_main())
