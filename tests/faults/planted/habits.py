"""Loops that get wrong what no single batch shows: mixed labels, averages, checkpoints; and odd loops that are right."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from planted.learning import CLASSES, network, probe, truth
from stoker.doctor.probe import Probe


def mixing(hard: bool) -> Probe:
    """As most write it: a share from a beta distribution, and the batch mixed with itself in another order."""
    made = probe(*truth(), rate=3e-3)
    model, optimizer = made.model, made.optimizer
    assert model is not None
    assert optimizer is not None

    def step(batch: Any) -> None:
        inputs, labels = batch
        share, order = float(np.random.beta(0.4, 0.4)), torch.randperm(len(inputs))  # noqa: NPY002
        share = min(0.9, max(0.1, share))
        answers = model(share * inputs + (1 - share) * inputs[order])
        loss = F.cross_entropy(answers, labels)
        if not hard:
            loss = share * loss + (1 - share) * F.cross_entropy(answers, labels[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return replace(made, step=step)


def mixes_with_one_label(wrong: bool) -> Probe:
    return mixing(hard=wrong)


def averaging(judged: str, updated: bool = True) -> Probe:
    made = probe(*truth(), rate=3e-3)
    model, inner = made.model, made.step
    assert model is not None
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    others = truth(1)[0]

    def step(batch: Any) -> None:
        inner(batch)
        if updated:
            average.update_parameters(model)

    def evaluate() -> None:
        with torch.no_grad():
            if judged == "lent":
                own = {name: value.clone() for name, value in model.state_dict().items()}
                model.load_state_dict(average.module.state_dict())
                model(others)
                model.load_state_dict(own)
            else:
                model(others)
                if judged == "both":
                    average(others)

    return replace(made, step=step, average=average, evaluate=evaluate)


def averages_for_nothing(wrong: bool) -> Probe:
    return averaging("model" if wrong else "both")


def never_averages(wrong: bool) -> Probe:
    return averaging("both", updated=not wrong)


def resumed(then: float, now: float, *, schedule: bool = False) -> Probe:
    """A checkpoint of a run with another rate, loaded after the optimizer was made."""
    before = probe(*truth(), rate=then)
    if schedule:
        torch.optim.lr_scheduler.CosineAnnealingLR(before.optimizer, 100)  # type: ignore[arg-type]
    for batch in itertools.islice(before.loader, 3):
        before.step(batch)
    made = probe(*truth(), rate=now)
    assert made.model is not None
    assert before.model is not None
    assert made.optimizer is not None
    assert before.optimizer is not None
    made.model.load_state_dict(before.model.state_dict())
    made.optimizer.load_state_dict(before.optimizer.state_dict())
    return made


def old_rate_comes_back(wrong: bool) -> Probe:
    return resumed(2e-3 if wrong else 1e-3, 1e-3, schedule=True)


def too_large_for_half(wrong: bool) -> Probe:
    """Squares of distances in float16: 300 squared is infinite."""
    inputs, labels = truth()

    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network(8)

        def forward(self, values: Tensor) -> Tensor:
            far = 300.0 + self.body(values)
            squared = (far.half() if wrong else far) ** 2
            return squared.float()[:, :CLASSES] / 300.0 - 300.0

    torch.manual_seed(0)
    return probe(inputs, labels, Distances())


# Nothing wrong.


def mixes_both_labels(wrong: bool) -> Probe:
    return mixing(hard=False)


def lends_its_average(wrong: bool) -> Probe:
    return averaging("lent")


def goes_on_with_its_schedule(wrong: bool) -> Probe:
    return resumed(1e-3, 1e-3, schedule=True)


def rare_in_training_only(wrong: bool) -> Probe:
    """Nine of ten training samples are of one class; validation has as many of each, sorted."""
    inputs, labels = truth()
    rows = torch.cat([torch.nonzero(labels == 0)[:, 0], torch.nonzero(labels > 0)[:160, 0]])
    others, theirs = truth(1)
    order = theirs.argsort()
    validation = DataLoader(TensorDataset(others[order], theirs[order]), 64)
    return probe(inputs[rows], labels[rows], rate=3e-3, validation=validation)


def accumulates_sixteen(wrong: bool) -> Probe:
    made = probe(*truth())
    optimizer, count = made.optimizer, itertools.count(1)
    assert optimizer is not None

    def step(batch: Any) -> None:
        (made.loss(batch) / 16).backward()  # type: ignore[misc]
        if next(count) % 16 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return replace(made, step=step)


def few_long_sequences(wrong: bool) -> Probe:
    """Eight samples a batch, of which a column can follow the target by chance."""
    dice = torch.Generator().manual_seed(5)
    values = torch.randn(64, 200, 6, generator=dice)
    target = values[:, :, :2].mean(1).sum(1, keepdim=True) * 10 + 0.1 * torch.randn(64, 1, generator=dice)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network(1, columns=6)

        def forward(self, given: Tensor) -> Tensor:
            return self.inner(given).mean(1)

    torch.manual_seed(0)
    model = Mean()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(values, target), 8, shuffle=True, generator=torch.Generator().manual_seed(0))

    def loss_of(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    return Probe(loader, step, model, loss=loss_of, optimizer=optimizer)


def sets_its_rate_by_hand(wrong: bool) -> Probe:
    """As many loops do, and some steps are behind it."""
    made = probe(*truth(), rate=3e-3)
    inner, count, optimizer = made.step, itertools.count(), made.optimizer
    assert optimizer is not None

    def step(batch: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (0.5 + 0.5 * np.cos(0.01 * next(count)))
        inner(batch)

    for batch in itertools.islice(made.loader, 3):
        step(batch)
    return replace(made, step=step)


def rates_of_their_own(wrong: bool) -> Probe:
    """A body that is fine-tuned slowly, and a new head."""
    made = probe(*truth())
    model, loss = made.model, made.loss
    assert isinstance(model, nn.Sequential)
    assert loss is not None
    optimizer = torch.optim.AdamW([{"params": model[:-1].parameters(), "lr": 1e-5}, {"params": model[-1].parameters()}])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    return replace(made, step=step, optimizer=optimizer)


def masks_that_are_all_alike(wrong: bool) -> Probe:
    """Tokens beside a mask of the same size."""
    dice = torch.Generator().manual_seed(3)

    def some(seed: int) -> list[dict[str, Tensor]]:
        dice.manual_seed(seed)
        tokens = torch.randint(0, 100, (1024, 12), generator=dice)
        labels = (tokens < 50).float().mean(1).mul(CLASSES).long().clamp(max=CLASSES - 1)
        return [
            {"attention_mask": torch.ones(12), "input_ids": one, "labels": label}
            for one, label in zip(tokens, labels, strict=True)
        ]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Flatten(), nn.Linear(192, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(some(3), 64, shuffle=True, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]

    def loss_of(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["input_ids"]), batch["labels"])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    validation = DataLoader(some(4), 64)  # type: ignore[arg-type]
    return Probe(loader, step, model, loss=loss_of, optimizer=optimizer, validation=validation)


def drops_sparse_inputs(wrong: bool) -> Probe:
    """A column in twenty is on, and some of them are dropped before the model sees them."""
    dice = torch.Generator().manual_seed(7)
    inputs = (torch.rand(2048, 200, generator=dice) < 0.05).float()
    weights = torch.randn(200, CLASSES, generator=dice)
    made = probe(inputs, (inputs @ weights).argmax(1), rate=3e-3)
    model, optimizer = made.model, made.optimizer
    assert model is not None
    assert optimizer is not None

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(F.dropout(batch[0], 0.1) * 0.9), batch[1]).backward()
        optimizer.step()

    return replace(made, step=step)


def judges_what_is_inside(wrong: bool) -> Probe:
    """The averaged model is called without its wrapper."""
    made = averaging("both")
    average = made.average
    assert isinstance(average, AveragedModel)
    return replace(made, evaluate=lambda: average.module(truth(1)[0]))


def few_classes_a_batch(wrong: bool) -> Probe:
    """As losses of pairs want them: two of four classes, by a sampler of one's own."""
    inputs, labels = truth()
    rows = [torch.nonzero(labels == one)[:, 0].tolist() for one in range(CLASSES)]
    dice = np.random.default_rng(0)
    batches = []
    for _ in range(40):
        chosen = dice.permutation(CLASSES)[:2]
        batches.append([int(row) for one in chosen for row in dice.choice(rows[one], 32, replace=False)])
    made = probe(inputs, labels, rate=3e-3)
    return replace(made, loader=DataLoader(TensorDataset(inputs, labels), batch_sampler=batches))
