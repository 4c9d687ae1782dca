"""All that is looked at before a model learns for long: a minute at most, and everything is put back."""

import contextlib
import re
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, WeightedRandomSampler

from stoker.data.batch import num_bytes, tensor_bytes, tensors_in
from stoker.doctor.learning.arms import (
    ONE_BATCH_STEPS,
    RATES,
    Trainer,
    beyond_others_labels,
    learn_one_batch,
    try_rates,
)
from stoker.doctor.learning.content import contents_of
from stoker.doctor.learning.facts import Learning
from stoker.doctor.learning.habits import average_of, mixing_of
from stoker.doctor.learning.kept import chance_kept, model_kept
from stoker.doctor.learning.labels import labels_of, with_others_labels
from stoker.doctor.learning.layers import features, inputs_of_products, layers_of
from stoker.doctor.learning.meaning import agreement_of
from stoker.doctor.learning.not_finite import first_not_finite
from stoker.doctor.learning.samples import MOST_BATCHES, look_at_samples
from stoker.doctor.learning.updates import updates_of
from stoker.doctor.legs import on_device
from stoker.doctor.probe import Probe

LOOKED_AT = 4  # batches whose inputs and layers are looked at
MOST_ARMS, LEAST_ARMS = 24, 8  # batches of an arm
MOST_BYTES = 1 << 30  # of batches that are kept
CONTENT_S = 40.0  # at least, for looking at samples as they are stored
ARMS = len(RATES) + 5  # with the run's own, those of others' labels, and one that begins to learn
LEAST_STEPS = ARMS * LEAST_ARMS + 2 * ONE_BATCH_STEPS
PATIENCE, PATIENCE_S = 3.0, 60.0  # times what it may take, and seconds that nobody minds
SHARE = 4.0  # of it are in a second of a leg
OUT_OF_RANGE = re.compile(r"[Tt]arget .*out of bounds|class .*out of range|[Aa]ssertion .*n_classes")


def look(probe: Probe, seconds: float) -> Learning:
    """Needs a probe with a loss and a model; `seconds` is what learning rates may take."""
    assert isinstance(probe.model, nn.Module)
    with chance_kept(probe.model), model_kept(probe.model):
        return _look(probe, seconds)


def _look(probe: Probe, seconds: float) -> Learning:
    assert probe.loss is not None
    assert isinstance(probe.model, nn.Module)
    begin, found = time.perf_counter(), Learning(know_nothing=probe.know_nothing, rate=probe.rate)
    found.configured = probe.settings.get("train.lr")
    batches = _some_batches(probe)
    if not batches:
        raise ValueError("the loader gives no batch with a sample in it")
    look_at_samples(found, batches, probe.validation)
    _leave_out_what_is_meant(found, probe.loader)
    found.bad_batches = any(not bool(torch.isfinite(one).all()) for batch in batches for one in _inputs_of(batch))
    if probe.data is not None and probe.data.contents is not None:
        found.contents = contents_of(probe.data, max(seconds, CONTENT_S))
    if probe.validation is not None:
        found.agreement = agreement_of(batches, probe.validation, MOST_BATCHES)
    if not probe.model.training:  # else parts of it that are not are meant to be so
        probe.model.train()
    trainer = Trainer(probe.model, probe.loss, probe.new_optimizer)
    try:
        with trainer.put_back():
            each = _seconds_of_a_step(trainer, batches)
            trainer.losses(batches[:1], None)  # with the weights as they were
            found.not_finite = first_not_finite(probe.loss, probe.model, batches[: _at_most(MOST_ARMS, each, seconds)])
            _learn(probe, trainer, found, batches, each, seconds)
            trainer.losses(batches[:1], None)
            if not found.skipped and not probe.settings:
                _look_at_the_loop(probe, trainer, found, batches, seconds)
    except (IndexError, RuntimeError) as error:
        if OUT_OF_RANGE.search(str(error)) is None:
            raise
        found.label_error = " ".join(str(error).split())[:200]
    found.seconds = time.perf_counter() - begin
    return found


def _look_at_the_loop(probe: Probe, trainer: Trainer, found: Learning, batches: list[Any], seconds: float) -> None:
    """Somebody's step may do anything, and all else is known by now: what it raises is told."""
    average = contextlib.nullcontext() if probe.average is None else model_kept(probe.average)
    with average:
        trainer.losses(batches[:1], None)  # with the weights as they were
        try:
            found.updates = updates_of(probe, batches, seconds)
            trainer.losses(batches[:1], None)
            found.mixed = mixing_of(probe, batches[0])
            found.average = average_of(probe, batches, seconds)
        except Exception as error:
            found.trouble = f"the step itself: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _leave_out_what_is_meant(found: Learning, loader: Any) -> None:
    """Who draws samples by weight, or puts batches together in a way of their own, wants what that does."""
    if not isinstance(loader, DataLoader):
        return
    is_own = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    if is_own or isinstance(loader.sampler, WeightedRandomSampler):
        found.order, found.twice = None, 0


def _some_batches(probe: Probe) -> list[Any]:
    """A few dozen, unless they are large."""
    batches: list[Any] = []
    for batch in islice(probe.loader, MOST_BATCHES):
        if probe.samples_of(batch) == 0:
            continue
        batches.append(on_device(batch, probe))
        if len(batches) >= LEAST_ARMS and len(batches) * _bytes_of(batch) > MOST_BYTES:
            break
    return batches


def _inputs_of(batch: Any) -> list[Tensor]:
    """The largest of its numbers: masks may be infinite, and targets missing."""
    labels = labels_of(batch)
    found = [one for one in tensors_in(batch) if one.is_floating_point() and one is not labels]
    return sorted(found, key=tensor_bytes)[-1:]


def _bytes_of(batch: Any) -> int:
    return sum(map(num_bytes, getattr(batch, "batches", (batch,))))


def _at_most(count: int, each: float, seconds: float) -> int:
    """So many of them, or as many as half of the time allows."""
    return max(1, min(count, int(seconds / 2 / max(each, 1e-9))))


def _learn(probe: Probe, trainer: Trainer, found: Learning, batches: list[Any], each: float, seconds: float) -> None:
    assert probe.loss is not None
    looked_at = batches[: _at_most(LOOKED_AT, each, seconds)]
    with inputs_of_products(trainer.model) as inputs:
        for batch in looked_at:
            probe.loss(batch)
        if inputs:
            found.features_of, first = next(iter(inputs.items()))
            of_pixels = isinstance(trainer.model.get_submodule(found.features_of), nn.Conv2d | nn.Conv3d)
            found.features = features(first, looked_at, of_pixels=of_pixels)
    if each * LEAST_STEPS > max(PATIENCE * seconds, PATIENCE_S):
        found.skipped = (
            f"a step takes {each:.1f} s here, and learning rates need {LEAST_STEPS} of them: only data and layers were "
            f"looked at; --seconds {each * LEAST_STEPS / PATIENCE / SHARE:.0f} would do"
        )
    else:
        _try(probe, trainer, found, batches[: _num_batches(each, batches, seconds)])
    with inputs_of_products(trainer.model) as inputs:
        _backward(trainer.model, probe.loss, looked_at)
        found.layers = layers_of(trainer.model, inputs)
    if not found.skipped:
        loss, rate = probe.loss, _best_rate(found)
        # The best rate of a short trial may be one that only finds the mean quickly.
        rates = [rate, rate / 10, rate / 100, *([] if found.rate is None else [found.rate])]
        found.one_batch, found.answers = learn_one_batch(
            trainer, batches[0], rates, lambda: _spread_of_answers(trainer.model, loss, batches[0])
        )


def _try(probe: Probe, trainer: Trainer, found: Learning, some: list[Any]) -> None:
    """Rates, and the labels of others."""
    found.arms, found.best, found.present = try_rates(trainer, some, found.rate)
    found.loss = trainer.losses(some[:1], None)[0][0]
    rate = _best_rate(found)
    others = [with_others_labels(batch, number) for number, batch in enumerate(some)]
    if all(one is not None for one in others):
        found.with_others_labels = beyond_others_labels(trainer, some, others, rate)
    trainer.losses(some, rate / 10)  # a new model may begin with weights of zero, behind which no gradient is


def _best_rate(found: Learning) -> float:
    return found.best.rate if found.best is not None else 1e-3


def _seconds_of_a_step(trainer: Trainer, batches: list[Any]) -> float:
    """The second one, unless the first took long enough for its start not to matter."""
    spent = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        trainer.losses(batches[:1], 1e-4)
        spent = time.perf_counter() - begin
        if spent > 2.0:
            break
    return spent


def _num_batches(each: float, batches: list[Any], seconds: float) -> int:
    """As many for each rate as the time allows."""
    most = int((seconds - each * 2 * ONE_BATCH_STEPS) / max(each, 1e-6) / ARMS)
    return max(LEAST_ARMS, min(MOST_ARMS, most, len(batches)))


def _backward(model: nn.Module, loss: Callable[[Any], Tensor], batches: list[Any]) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    for batch in batches:
        loss(batch).backward()  # type: ignore[no-untyped-call]


def _spread_of_answers(model: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> float | None:
    """Over samples, relative to the size of the answers: next to nothing where a model always says the same."""
    seen: list[Tensor] = []
    hook = model.register_forward_hook(
        lambda module, inputs, answer: seen.append(answer.detach()) if isinstance(answer, Tensor) else None
    )
    try:
        with torch.no_grad():
            loss(batch)
    finally:
        hook.remove()
    if not seen or seen[0].ndim == 0 or len(seen[0]) < 2:
        return None
    answers = seen[0].double().reshape(len(seen[0]), -1)
    return float(answers.std(0).mean() / answers.abs().mean().clamp_min(1e-12))
