"""Models that learn, and models that cannot: one thing wrong in each."""

import copy
import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stoker.doctor.probe import Probe

COLUMNS, CLASSES, SAMPLES = 16, 4, 2048


def truth(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of a sensible size, and a class that depends on them."""
    dice = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, COLUMNS, generator=dice)
    weights = torch.randn(COLUMNS, CLASSES, generator=torch.Generator().manual_seed(99))
    return inputs, (inputs @ weights + 0.5 * torch.randn(SAMPLES, CLASSES, generator=dice)).argmax(1)


def network(outputs: int = CLASSES, width: int = 64, columns: int = COLUMNS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(columns, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs)
    )


def probe(
    inputs: torch.Tensor,
    labels: torch.Tensor,
    model: nn.Module | None = None,
    *,
    rate: float = 1e-3,
    shuffle: bool = True,
    loss: Any = F.cross_entropy,
    **more: Any,
) -> Probe:
    model = network(columns=inputs.shape[1]) if model is None else model
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=rate)
    loader = DataLoader(
        TensorDataset(inputs, labels), 64, shuffle=shuffle, drop_last=True, generator=torch.Generator().manual_seed(0)
    )

    def loss_of(batch: Any) -> torch.Tensor:
        return loss(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    return Probe(loader, step, model, loss=loss_of, optimizer=optimizer, **more)


def raw_inputs(wrong: bool) -> Probe:
    """Times up to 77,000 beside numbers around one: the seed's."""
    inputs, labels = truth()
    scale = torch.ones(COLUMNS)
    scale[0], scale[1] = 2e4, 300.0
    return probe(inputs * scale + 1e4 * (scale > 1000), labels) if wrong else probe(inputs, labels)


def identifiers(wrong: bool) -> Probe:
    inputs, labels = truth()
    inputs[:, 3] = torch.randint(0, 60, (SAMPLES,)).float() if wrong else inputs[:, 3]
    return probe(inputs, labels)


def not_a_number(wrong: bool) -> Probe:
    inputs, labels = truth()
    inputs[::200, 2] = math.nan if wrong else 0.0
    return probe(inputs, labels)


def leaked(wrong: bool) -> Probe:
    inputs, labels = truth()
    inputs[:, 5] = labels.float() if wrong else inputs[:, 5]
    return probe(inputs, labels)


def beyond_the_classes(wrong: bool) -> Probe:
    inputs, labels = truth()
    return probe(inputs, labels + (2 if wrong else 0))


def one_label(wrong: bool) -> Probe:
    inputs, labels = truth()
    return probe(inputs, torch.zeros_like(labels) if wrong else labels)


def rare_class(wrong: bool) -> Probe:
    inputs, labels = truth()
    rare = (torch.arange(SAMPLES) % 1000 == 0).long()
    return probe(inputs, rare if wrong else labels % 2, network(2))


def in_order(wrong: bool) -> Probe:
    inputs, labels = truth()
    order = labels.argsort() if wrong else torch.randperm(SAMPLES)
    return probe(inputs[order], labels[order], shuffle=False)


def listed_twice(wrong: bool) -> Probe:
    inputs, labels = truth()
    rows = torch.arange(SAMPLES) % (SAMPLES // 2) if wrong else torch.arange(SAMPLES)
    return probe(inputs[rows], labels[rows])


def judged_on_training(wrong: bool) -> Probe:
    inputs, labels = truth()
    other = (inputs, labels) if wrong else truth(1)
    return probe(inputs, labels, validation=DataLoader(TensorDataset(*other), 64))


def frozen_layer(wrong: bool) -> Probe:
    model = network()
    model[2].requires_grad_(not wrong)
    return probe(*truth(), model)


class Cut(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.body, self.head, self.wrong = network(32), nn.Linear(32, CLASSES), wrong

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        return self.head(hidden.detach() if self.wrong else hidden)


def detached(wrong: bool) -> Probe:
    torch.manual_seed(0)
    return probe(*truth(), Cut(wrong))


def dead_units(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    if wrong:
        with torch.no_grad():
            model[0].bias[:48] = -50.0
    return probe(*truth(), model)


def deep_and_plain(wrong: bool) -> Probe:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(COLUMNS, 32)]
    for _ in range(14):
        parts += [nn.Sigmoid(), nn.Linear(32, 32)] if wrong else [nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32)]
    return probe(*truth(), nn.Sequential(*parts, nn.Linear(32, CLASSES)))


def rate_too_high(wrong: bool) -> Probe:
    return probe(*truth(), rate=1.0 if wrong else 3e-3)


def rate_too_low(wrong: bool) -> Probe:
    return probe(*truth(), rate=1e-5 if wrong else 3e-3)


def others_labels(wrong: bool) -> Probe:
    inputs, labels = truth()
    return probe(inputs, labels[torch.randperm(SAMPLES)] if wrong else labels)


class Constant(nn.Module):
    """A head that forgets its input."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.body, self.head, self.wrong = network(32), nn.Linear(32, CLASSES), wrong

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs)
        return self.head(hidden.mean(0, keepdim=True).expand_as(hidden) if self.wrong else hidden)


def constant_answer(wrong: bool) -> Probe:
    torch.manual_seed(0)
    return probe(*truth(), Constant(wrong))


def numbered_otherwise(wrong: bool) -> Probe:
    """Validation labels in another order of classes."""
    inputs, labels = truth(1)
    labels = (labels + 1) % CLASSES if wrong else labels
    return probe(*truth(), validation=DataLoader(TensorDataset(inputs, labels), 64))


def two_swapped(wrong: bool) -> Probe:
    inputs, labels = truth(1)
    swapped = torch.tensor([0, 2, 1, 3])[labels] if wrong else labels
    return probe(*truth(), validation=DataLoader(TensorDataset(inputs, swapped), 64))


def optimizer_of_a_copy(wrong: bool) -> Probe:
    model = network()
    other = copy.deepcopy(model) if wrong else model
    made = probe(*truth(), model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        model.zero_grad()
        made.loss(batch).backward()  # type: ignore[misc]
        optimizer.step()

    return replace(made, step=step, optimizer=optimizer)


def accumulating(lost: bool = False, summed: bool = False) -> Probe:
    """Four batches a step."""
    made = probe(*truth())
    optimizer, count = made.optimizer, itertools.count(1)
    assert optimizer is not None

    def step(batch: Any) -> None:
        loss = made.loss(batch)  # type: ignore[misc]
        (loss if summed or lost else loss / 4).backward()
        if next(count) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        elif lost:
            optimizer.zero_grad()

    return replace(made, step=step)


def only_the_last(wrong: bool) -> Probe:
    return accumulating(lost=wrong)


def added_up(wrong: bool) -> Probe:
    return accumulating(summed=wrong)


def clipping(most: float) -> Probe:
    made = probe(*truth())
    optimizer, model = made.optimizer, made.model
    assert optimizer is not None
    assert model is not None

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        made.loss(batch).backward()  # type: ignore[misc]
        nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()

    return replace(made, step=step)


def clipped_short(wrong: bool) -> Probe:
    return clipping(1e-3 if wrong else 1.0)


def cosine_of_one(wrong: bool) -> Probe:
    """An angle whose slope is infinite for a few samples: the seed's."""
    inputs, _ = truth()
    towards = F.normalize(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2)), dim=1)

    def angle(answer: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        cosine = (F.normalize(answer, dim=1) * target).sum(1)
        straight_up = target[:, 2] > (0.99 if wrong else 1.0)
        return torch.arccos(torch.where(straight_up, 1.0 + 0.0 * cosine, 0.999 * cosine)).mean()

    return probe(inputs, towards, network(3), loss=angle)


# Nothing wrong.


def accumulates_well(wrong: bool) -> Probe:
    return accumulating()


def clips_now_and_then(wrong: bool) -> Probe:
    return clipping(0.5)


def learns_classes(wrong: bool) -> Probe:
    return probe(*truth(), rate=3e-3, validation=DataLoader(TensorDataset(*truth(1)), 64))


def learns_numbers(wrong: bool) -> Probe:
    inputs, _ = truth()
    return probe(inputs, inputs.square().sum(1, keepdim=True) / COLUMNS, network(1), rate=3e-3, loss=F.mse_loss)


def learns_slowly(wrong: bool) -> Probe:
    """Mostly noise: a hard task is no fault."""
    inputs, _ = truth()
    target = 0.3 * inputs[:, :1] + torch.randn(SAMPLES, 1, generator=torch.Generator().manual_seed(1))
    return probe(inputs, target, network(1), rate=3e-3, loss=F.mse_loss)


def learns_images(wrong: bool) -> Probe:
    dice = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (1024,), generator=dice)
    images = torch.rand(1024, 3, 8, 8, generator=dice)
    images[torch.arange(1024), labels % 3, :4] += 0.5
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, CLASSES)
    )
    return probe(images, labels, model)


def learns_with_dropout(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(COLUMNS, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, CLASSES))
    return probe(*truth(), model, rate=3e-3)


def learns_deeply(wrong: bool) -> Probe:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(32), nn.Linear(32, 32)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values + F.relu(self.inner(self.norm(values)))

    torch.manual_seed(0)
    return probe(*truth(), nn.Sequential(nn.Linear(COLUMNS, 32), *(Block() for _ in range(12)), nn.Linear(32, CLASSES)))


def learns_from_zero(wrong: bool) -> Probe:
    """A head that begins with zeros: no gradient passes it at the first step."""
    model = network()
    nn.init.zeros_(model[-1].weight)
    return probe(*truth(), model)


def learns_words(wrong: bool) -> Probe:
    torch.manual_seed(0)
    words = torch.randint(0, 100, (SAMPLES, 12))
    labels = (words < 50).float().mean(1).mul(CLASSES).long().clamp(max=CLASSES - 1)
    model = nn.Sequential(nn.Embedding(100, 16), nn.Flatten(), nn.Linear(192, CLASSES))
    return probe(words, labels, model, rate=1e-2)
