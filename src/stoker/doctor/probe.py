"""What the doctor can drive: a loader and a step, of a recipe or of anybody's own loop."""

import dataclasses
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from stoker import console
from stoker.data.batch import tensors_in
from stoker.data.device import feed
from stoker.data.plan import Position, Step
from stoker.data.source import RunData
from stoker.errors import UserError
from stoker.launch.build import build_run
from stoker.launch.targets import BUILT_IN, OWN, Target
from stoker.runs.events import EventLog
from stoker.train.engine import Engine
from stoker.train.parallel import Ranks
from stoker.train.precision import autocast, same_sums
from stoker.train.task import has_fixed_shapes


@dataclass(frozen=True)
class Probe:
    """`loader` can be iterated anew, and gives batches as training gets them; `step` trains on one.

    A batch that is on the device already must pass through `step` unharmed: `batch.to(device)` does not mind.
    """

    loader: Iterable[Any]
    step: Callable[[Any], Any]
    model: nn.Module | None = None
    num_samples: Callable[[Any], int] | None = None  # of a batch; None: the length of its first tensor
    name: str = "probe"
    settings: dict[str, Any] = field(default_factory=dict)  # of a recipe: its resolved configuration
    make: Callable[[Any], Any] | None = None  # one batch, made here and now, of a recipe's loader: takes its step
    loss: Callable[[Any], Tensor] | None = None  # of a batch, to learn from; without it nothing is said of learning
    optimizer: torch.optim.Optimizer | None = None  # that `step` uses: its kind and its rate are looked at
    validation: Iterable[Any] | None = None  # batches that must not be among those of `loader`
    average: nn.Module | None = None  # averaged weights that `step` updates
    evaluate: Callable[[], Any] | None = None  # judges as the loop does; which weights it calls is looked at
    know_nothing: float | None = None  # the loss of a model that has learnt nothing
    make_optimizer: Callable[[float], torch.optim.Optimizer] | None = None  # of a recipe, by its rate
    data: RunData | None = None  # of a recipe: where its samples come from
    fixed_shapes: bool = False  # of a recipe: whether all batches have one shape

    def samples_of(self, batch: Any) -> int:
        if self.num_samples is not None:
            return max(0, int(self.num_samples(batch)))
        first = next((tensor for tensor in tensors_in(batch) if tensor.ndim), None)
        return 1 if first is None else len(first)

    @property
    def rate(self) -> float | None:
        if self.optimizer is None:
            return None
        # What a schedule of torch begins with. Groups with rates of their own have none that could be tried for all.
        rates = {float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups}
        return max(rates) if len(rates) == 1 or self.make_optimizer is not None else None

    def new_optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """One of the kind that the loop uses, with nothing learnt."""
        if self.make_optimizer is not None:
            return self.make_optimizer(rate)
        if self.optimizer is None:
            return torch.optim.AdamW(parameters, lr=rate)
        known = inspect.signature(type(self.optimizer)).parameters
        options = {key: value for key, value in self.optimizer.defaults.items() if key in known}
        return type(self.optimizer)(parameters, **{**options, "lr": rate})

    @property
    def device(self) -> torch.device:
        parameter = next(self.model.parameters(), None) if isinstance(self.model, nn.Module) else None
        return torch.device("cpu") if parameter is None else parameter.device


def find_attribute(words: str) -> Any:
    """What `module:attribute` names, from this directory on; None: it is no such name, or a recipe that is built in."""
    name, _, attribute = words.partition(":")
    if not OWN.fullmatch(words) or name in BUILT_IN:
        return None
    sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(name), attribute.partition(":")[0], None)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UserError(f"There is no module {name} to take the probe {words!r} from.") from error
        raise UserError(f"The module {name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"The module {name} cannot be imported: {type(error).__name__}: {error}") from error


def find_probe(words: str) -> Probe | None:
    """`module:attribute` that is a Probe, or a function that makes one; None: it is something else, such as a recipe."""
    found = find_attribute(words)
    if not callable(found) or isinstance(found, type):
        return found if isinstance(found, Probe) else None
    try:
        made = found()
    except (Exception, SystemExit) as error:
        raise UserError(f"The probe {words} cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Probe):
        raise UserError(f"{words} gives a {type(made).__name__}, and a probe must be a stoker.Probe.")
    return made


@contextmanager
def probe_of(target: Target) -> Iterator[Probe]:
    """A recipe as it would be trained, in a folder that is thrown away: nothing of a run is touched."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="stoker-doctor-")))
        run = build_run(target.recipe, target.config, Ranks())
        if target.recipe.initialise is not None:
            target.recipe.initialise(target.config, run.task)
        log = stack.enter_context(EventLog(folder / "events.jsonl"))
        stack.enter_context(same_sums(run.device, exact=run.config.deterministic))
        engine = Engine(run, folder, log)
        engine.rehearse()

        def train(step: Step) -> None:
            lr = run.lr_at(engine.config, min(engine.step, engine.total - 1), engine.total)
            result = engine.compute(step, stop_asked=False)
            engine.stepper.update(result, lr)
            engine.advance(step, result, None)
            if engine.step % engine.config.log_every == 0:
                console.be_quiet()
                engine.log_interval(lr)
                console.be_quiet(False)

        def loss(step: Step) -> Tensor:
            total = torch.zeros((), device=run.device)
            with autocast(engine.precision, run.device):
                for batch in step.batches:
                    total = total + run.task.losses(run.task.predict(batch), batch).sum()
            return total / step.num_samples

        yield Probe(
            loader=_Steps(run.training, run.seed, run.device),
            step=train,
            model=run.task.model,
            num_samples=lambda step: step.num_samples,
            name=target.config.recipe,
            settings=run.settings,
            make=lambda step: [run.training.make(micro.rows) for micro in step.micro_batches],
            loss=loss,
            optimizer=engine.optimizer,
            know_nothing=run.task.know_nothing_loss,
            data=run.data,
            fixed_shapes=has_fixed_shapes(run.task),
            make_optimizer=lambda rate: run.make_optimizer(engine.model, dataclasses.replace(engine.config, lr=rate)),
        )


@dataclass
class _Steps:
    """Steps of a run from its beginning, with their batches on the device."""

    loader: Any
    seed: int
    device: torch.device

    def __iter__(self) -> Iterator[Step]:
        return feed(self.loader.steps(Position(self.seed), None), self.device)

    def __len__(self) -> int:
        return int(self.loader.plan.steps_per_epoch())


def lightning_probe(module: Any, loader: Iterable[Any]) -> Probe:
    """A LightningModule and its training loader, stepped as automatic optimization does."""
    configured = module.configure_optimizers()
    while isinstance(configured, tuple | list):
        configured = configured[0]
    optimizer = configured["optimizer"] if isinstance(configured, dict) else configured
    module.train()

    def step(batch: Any) -> None:
        answer = module.training_step(module.transfer_batch_to_device(batch, module.device, 0), 0)
        loss = answer["loss"] if isinstance(answer, dict) else answer
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Probe(loader, step, module, name=type(module).__name__)


def trainer_probe(trainer: Any) -> Probe:
    """A Hugging Face Trainer, stepped as its own loop does: forward, backward, clipped, updated."""
    loader = trainer.get_train_dataloader()
    trainer.create_optimizer()
    # Its loop would set it: what a loss is divided by.
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    trainer.model.to(trainer.args.device)
    trainer.model.train()

    done, every = itertools.count(1), trainer.args.gradient_accumulation_steps

    def step(batch: Any) -> None:
        trainer.training_step(trainer.model, batch)
        if next(done) % every:
            return
        if trainer.args.max_grad_norm:
            nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()

    return Probe(loader, step, trainer.model, name=type(trainer.model).__name__)


def num_cores() -> int:
    return len(os.sched_getaffinity(0))
