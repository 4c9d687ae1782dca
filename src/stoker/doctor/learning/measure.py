"""All that is looked at before a model learns for long: a minute at most, and everything is put back."""

import re
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from stoker.doctor.learning.arms import (
    ONE_BATCH_STEPS,
    RATES,
    Trainer,
    beyond_others_labels,
    learn_one_batch,
    try_rates,
)
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
OUT_OF_RANGE = re.compile(r"[Tt]arget .*out of bounds|class .*out of range|[Aa]ssertion .*n_classes")


def look(probe: Probe, seconds: float) -> Learning:
    """Needs a probe with a loss and a model; `seconds` is what learning rates may take."""
    assert probe.loss is not None
    assert isinstance(probe.model, nn.Module)
    begin, found = time.perf_counter(), Learning(know_nothing=probe.know_nothing, rate=probe.rate)
    batches = [on_device(batch, probe) for batch in islice(probe.loader, MOST_BATCHES)]
    look_at_samples(found, batches, probe.validation)
    if probe.validation is not None:
        found.agreement = agreement_of(batches, probe.validation, MOST_BATCHES)
    was_training = probe.model.training
    probe.model.train()
    trainer = Trainer(probe.model, probe.loss, probe.new_optimizer)
    try:
        with trainer.put_back():
            found.not_finite = first_not_finite(probe.loss, probe.model, batches[:MOST_ARMS])
            _learn(probe, trainer, found, batches, seconds)
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


def _learn(probe: Probe, trainer: Trainer, found: Learning, batches: list[Any], seconds: float) -> None:
    assert probe.loss is not None
    with inputs_of_products(trainer.model) as inputs:
        for batch in batches[:LOOKED_AT]:
            probe.loss(batch)
        if inputs:
            found.features_of, first = next(iter(inputs.items()))
            found.features = features(first, batches[:LOOKED_AT])
    some = batches[: _num_batches(trainer, batches, seconds)]
    found.arms, found.best, found.present = try_rates(trainer, some, found.rate)
    found.loss = trainer.losses(some[:1], None)[0][0]
    rate = found.best.rate if found.best is not None else 1e-3
    others = [with_others_labels(batch, number) for number, batch in enumerate(some)]
    if all(one is not None for one in others):
        found.with_others_labels = beyond_others_labels(trainer, some, others, rate)
    trainer.losses(some, rate / 10)  # a new model may begin with weights of zero, behind which no gradient is
    with inputs_of_products(trainer.model) as inputs:
        _backward(trainer.model, probe.loss, batches[:LOOKED_AT])
        found.layers = layers_of(trainer.model, inputs)
    found.one_batch = learn_one_batch(trainer, batches[0], rate)
    found.answers = _spread_of_answers(trainer.model, probe.loss, batches[0])


def _num_batches(trainer: Trainer, batches: list[Any], seconds: float) -> int:
    """As many for each rate as the time allows."""
    trainer.losses(batches[:1], 1e-4)
    begin = time.perf_counter()
    trainer.losses(batches[:2], 1e-4)
    each = (time.perf_counter() - begin) / min(2, len(batches))
    most = int((seconds - each * 2 * ONE_BATCH_STEPS) / max(each, 1e-6) / (len(RATES) + 5))
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
