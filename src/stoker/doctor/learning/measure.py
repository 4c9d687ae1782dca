"""All that is looked at before a model learns for long: a minute at most, and everything is put back."""

import re
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from stoker.data.batch import num_bytes, tensors_in
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
from stoker.doctor.learning.labels import with_others_labels
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
    assert probe.loss is not None
    assert isinstance(probe.model, nn.Module)
    begin, found = time.perf_counter(), Learning(know_nothing=probe.know_nothing, rate=probe.rate)
    batches = _some_batches(probe)
    look_at_samples(found, batches, probe.validation)
    read = [one for batch in batches for one in tensors_in(batch) if one.is_floating_point()]
    found.bad_batches = any(not bool(torch.isfinite(one).all()) for one in read)
    if probe.data is not None and probe.data.contents is not None:
        found.contents = contents_of(probe.data, max(seconds, CONTENT_S))
    if probe.validation is not None:
        found.agreement = agreement_of(batches, probe.validation, MOST_BATCHES)
    was_training = probe.model.training
    probe.model.train()
    trainer = Trainer(probe.model, probe.loss, probe.new_optimizer)
    try:
        with trainer.put_back():
            each = _seconds_of_a_step(trainer, batches)
            found.not_finite = first_not_finite(probe.loss, probe.model, batches[: _at_most(MOST_ARMS, each, seconds)])
            _learn(probe, trainer, found, batches, each, seconds)
            trainer.losses(batches[:1], None)
            found.updates = updates_of(probe, batches)
    except (IndexError, RuntimeError) as error:
        if OUT_OF_RANGE.search(str(error)) is None:
            raise
        found.label_error = " ".join(str(error).split())[:200]
    finally:
        probe.model.train(was_training)
    found.seconds = time.perf_counter() - begin
    return found


def _some_batches(probe: Probe) -> list[Any]:
    """A few dozen, unless they are large."""
    batches: list[Any] = []
    for batch in islice(probe.loader, MOST_BATCHES):
        batches.append(on_device(batch, probe))
        if len(batches) >= LEAST_ARMS and len(batches) * _bytes_of(batch) > MOST_BYTES:
            break
    return batches


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
        found.one_batch = learn_one_batch(trainer, batches[0], _best_rate(found))
        found.answers = _spread_of_answers(trainer.model, probe.loss, batches[0])


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
