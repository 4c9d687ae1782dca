"""More models that learn, and more that cannot, written without a look at the rules that must tell them apart."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, RandomSampler, TensorDataset

from planted.learning import network
from stoker.doctor.probe import Probe

# What the setups are made of.


class Records(Dataset[dict[str, Tensor]]):
    """Samples that are dictionaries, as many loaders give them."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(data: Dataset[Any], size: int = 64, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(data, size, shuffle=shuffle, drop_last=True, generator=dice(0))


def plain(
    loader: DataLoader[Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    **more: Any,
) -> Probe:
    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    return Probe(loader, step, model, loss=loss_of, optimizer=optimizer, **more)


def momentum(model: nn.Module, rate: float) -> torch.optim.SGD:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=rate, momentum=0.9)


def table(seed: int = 0, samples: int = 3072, columns: int = 10, noise: float = 0.3) -> tuple[Tensor, Tensor]:
    """Measurements around one, and a number of unit size that bends with them."""
    chance, fixed = dice(seed), dice(7)
    features = torch.randn(samples, columns, generator=chance)
    weights = torch.randn(columns, 2, generator=fixed) / math.sqrt(columns)
    hidden = features @ weights
    target = hidden[:, :1] + 0.7 * torch.sin(2 * hidden[:, 1:])
    return features, target + noise * torch.randn(samples, 1, generator=chance)


def pictures(
    seed: int = 0, samples: int = 2048, classes: int = 6, channels: int = 1, size: int = 12, kind: int = 3
) -> tuple[Tensor, Tensor]:
    """Smooth patterns, one of a class, under noise; `kind` says which patterns."""
    chance = dice(seed)
    coarse = torch.randn(classes, channels, 4, 4, generator=dice(kind))
    patterns = F.interpolate(coarse, size=(size, size), mode="bilinear")
    labels = torch.randint(0, classes, (samples,), generator=chance)
    strength = 0.5 + torch.rand(samples, 1, 1, 1, generator=chance)
    noise = torch.randn(samples, channels, size, size, generator=chance)
    return 0.48 * strength * patterns[labels] + 0.95 * noise, labels


def windows(
    seed: int = 0, samples: int = 2048, classes: int = 5, steps: int = 20, channels: int = 3
) -> tuple[Tensor, Tensor]:
    """Recordings (samples, steps, channels) that drift as their class does."""
    chance = dice(seed)
    drift = torch.randn(classes, steps, channels, generator=dice(11)).cumsum(1) / math.sqrt(steps / 2)
    labels = torch.randint(0, classes, (samples,), generator=chance)
    return 0.6 * drift[labels] + 1.2 * torch.randn(samples, steps, channels, generator=chance), labels


def sentences(seed: int = 0, samples: int = 2048, length: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens of 1 to 48, padded with 0, what is no padding, and which of four groups of tokens leads."""
    chance = dice(seed)
    labels = torch.randint(0, 4, (samples,), generator=chance)
    tokens = torch.randint(1, 49, (samples, length), generator=chance)
    own = labels[:, None] * 12 + torch.randint(1, 13, (samples, length), generator=chance)
    tokens = torch.where(torch.rand(samples, length, generator=chance) < 0.3, own, tokens)
    lengths = torch.randint(length // 2, length + 1, (samples, 1), generator=chance)
    mask = (torch.arange(length) < lengths).long()
    return tokens * mask, mask, labels


class Convolutions(nn.Module):
    """A small network for pictures of 12 by 12, without any batch norm."""

    def __init__(self, classes: int = 6, channels: int = 1, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.head = nn.Linear(2 * width * 9, classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(F.relu(self.first(images)), 2)
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return self.head(hidden.flatten(1))


class Recurrent(nn.Module):
    def __init__(self, channels: int, outputs: int, width: int = 48) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, width, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, values: Tensor) -> Tensor:
        return self.head(self.lstm(values)[0][:, -1])


class Attentive(nn.Module):
    """A transformer of two layers over tokens or over vectors, averaged over what is no padding."""

    def __init__(self, stem: nn.Module, outputs: int, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.stem = stem
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.stem(values)
        if mask is None:
            return self.head(self.encoder(hidden).mean(1))
        hidden = self.encoder(hidden, src_key_padding_mask=mask == 0)
        return self.head((hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True))


# What goes in.


def raw_hits_in_transformer(wrong: bool) -> Probe:
    """Energies up to 1e6 and seconds of the day, as the detector wrote them."""
    chance = dice(0)
    exponent = 6 * torch.rand(2048, 12, generator=chance)
    seconds = 86400 * torch.rand(2048, 12, generator=chance)
    place = torch.randn(2048, 12, 2, generator=chance)
    score = (exponent - 3).mean(1) / 0.5 + place[:, :, 0].mean(1) / 0.29
    labels = torch.bucketize(score, score.quantile(torch.tensor([1 / 3, 2 / 3])))
    energy, time = (10**exponent, seconds) if wrong else ((exponent - 3) / 1.73, (seconds - 43200) / 24900)
    hits = torch.cat([energy[:, :, None], time[:, :, None], place], 2)
    torch.manual_seed(0)
    model = Attentive(nn.Linear(4, 32), 3)
    return plain(
        batches(Records(hits=hits, labels=labels)),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda batch: F.cross_entropy(model(batch["hits"]), batch["labels"]),
    )


def raw_readings_in_lstm(wrong: bool) -> Probe:
    """Pascals, kelvins and turns a minute; the healthy one standardises them."""
    readings, _ = windows()
    target = readings[:, -6:, 0].mean(1, keepdim=True) + 0.5 * readings[:, :, 1].mean(1, keepdim=True)
    raw = readings * torch.tensor([900.0, 12.0, 450.0]) + torch.tensor([101325.0, 288.0, 2400.0])
    torch.manual_seed(0)
    model = Recurrent(3, 1)
    return plain(
        batches(Records(readings=raw if wrong else readings, target=target)),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.mse_loss(model(batch["readings"]), batch["target"]),
    )


class Rater(nn.Module):
    """Of some features, and of who rates where that is given as an index."""

    def __init__(self, users: int, columns: int, embedded: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(users, 8) if embedded else None
        self.layers = network(1, columns=columns + (8 if embedded else 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = batch["features"]
        return self.layers(features if self.users is None else torch.cat([features, self.users(batch["user"])], 1))


def user_as_number(wrong: bool) -> Probe:
    """Ratings of 200 users: the user's number is a column of floats, or goes through an embedding."""
    chance = dice(0)
    features, target = table(samples=4096)
    user = torch.randint(0, 200, (4096,), generator=chance)
    target = 0.8 * target + 0.6 * torch.randn(200, 1, generator=chance)[user]
    data = (
        Records(features=torch.cat([features, user[:, None].float()], 1), target=target)
        if wrong
        else Records(features=features, user=user, target=target)
    )
    torch.manual_seed(0)
    model = Rater(200, features.shape[1], not wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return plain(batches(data), model, optimizer, lambda batch: F.mse_loss(model(batch), batch["target"]))


class Pooled(nn.Module):
    """The mean over what each sensor saw."""

    def __init__(self, sensors: int | None, columns: int, classes: int) -> None:
        super().__init__()
        self.sensors = None if sensors is None else nn.Embedding(sensors, 8)
        self.each = nn.Sequential(nn.Linear(columns + (0 if sensors is None else 8), 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(64, classes))

    def forward(self, values: Tensor, sensor: Tensor | None = None) -> Tensor:
        if self.sensors is not None:
            values = torch.cat([values, self.sensors(sensor)], 2)
        return self.head(self.each(values).mean(1))


def sensor_as_number(wrong: bool) -> Probe:
    """Pulses of an array of 86 sensors, each with its sensor's number in a column, or embedded."""
    chance = dice(1)
    pulses = torch.randn(3072, 10, 3, generator=chance)
    sensor = torch.randint(0, 86, (3072, 10), generator=chance)
    side = torch.randn(86, generator=chance)
    labels = ((pulses[:, :, 0] + side[sensor]).mean(1) > 0).long()
    torch.manual_seed(0)
    model = Pooled(None, 4, 2) if wrong else Pooled(86, 3, 2)
    given = (torch.cat([pulses, sensor[:, :, None].float()], 2),) if wrong else (pulses, sensor)
    return plain(
        batches(TensorDataset(*given, labels)),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.cross_entropy(model(*batch[:-1]), batch[-1]),
    )


def log_of_zero(wrong: bool) -> Probe:
    """Counts in pixels, some of them none at all: their logarithm is -inf, that of one more is not."""
    chance = dice(0)
    patterns, labels = pictures(classes=4)
    counts = torch.poisson(10 * torch.exp(0.2 * patterns.clamp(-3, 3)), generator=chance)
    images = (counts.log() if wrong else counts.log1p()) - 2.3
    torch.manual_seed(0)
    model = Convolutions(4)
    return plain(
        batches(TensorDataset(images / 0.4, labels)),
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def price_among_inputs(wrong: bool) -> Probe:
    """A column computed from the price that is to be foretold: another currency, less the fee."""
    features, target = table()
    features[:, 6] = (0.37 * target + 1.2).squeeze(1) if wrong else features[:, 6]
    model = network(1, columns=features.shape[1])
    return plain(
        batches(Records(features=features, target=target)),
        model,
        torch.optim.RMSprop(model.parameters(), lr=1e-3),
        lambda batch: F.smooth_l1_loss(model(batch["features"]), batch["target"]),
    )


def window_with_answer(wrong: bool) -> Probe:
    """A forecast from a window that ends one step too late: its last value is the answer."""
    chance = dice(0)
    noise = torch.randn(3072, 40, generator=chance)
    values = [noise[:, 0], noise[:, 1]]
    for now in range(2, 40):
        values.append(0.6 * values[-1] - 0.7 * values[-2] + 0.7 * noise[:, now])
    series = torch.stack(values, 1)
    series = series / series.std()
    seen = series[:, 16:33] if wrong else series[:, 15:32]
    torch.manual_seed(0)
    model = Recurrent(1, 1, 32)
    return plain(
        batches(TensorDataset(seen[:, :, None].clone(), series[:, 32:33].clone())),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.mse_loss(model(batch[0]), batch[1]),
    )


# What is asked for.


def classes_from_one(wrong: bool) -> Probe:
    """Five classes called 1 to 5, as in the file they came from."""
    values, labels = windows()
    torch.manual_seed(0)
    model = Recurrent(3, 5)
    return plain(
        batches(Records(values=values, labels=labels + (1 if wrong else 0))),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.cross_entropy(model(batch["values"]), batch["labels"]),
    )


def fraud_is_rare(wrong: bool) -> Probe:
    """One payment of a thousand is fraud; one of five in the healthy one."""
    features, score = table(samples=6000, noise=0.1)
    share = 0.001 if wrong else 0.2
    target = (score > score.quantile(1 - share)).float()
    model = network(1, columns=features.shape[1])
    return plain(
        batches(TensorDataset(features, target)),
        model,
        torch.optim.RMSprop(model.parameters(), lr=1e-3),
        lambda batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
    )


def one_kind_is_rare(wrong: bool) -> Probe:
    """Five kinds of pictures, and four pictures of the last one among four thousand."""
    images, labels = pictures(samples=5120, classes=5)
    order = (labels == 4).nonzero().squeeze(1)
    keep = torch.ones(len(labels), dtype=torch.bool)
    keep[order[4:]] = not wrong
    torch.manual_seed(0)
    model = Convolutions(5)
    return plain(
        batches(Records(image=images[keep], labels=labels[keep])),
        model,
        momentum(model, 0.02),
        lambda batch: F.cross_entropy(model(batch["image"]), batch["labels"]),
    )


def shuffled_classes(wrong: bool) -> Probe:
    """Two files, one of recordings and one of labels, of which one was shuffled."""
    values, labels = windows()
    labels = labels[torch.randperm(len(labels), generator=dice(5))] if wrong else labels
    torch.manual_seed(0)
    model = Recurrent(3, 5)
    return plain(
        batches(Records(values=values, labels=labels)),
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        lambda batch: F.cross_entropy(model(batch["values"]), batch["labels"]),
    )


def shuffled_numbers(wrong: bool) -> Probe:
    """A regression on another row's target."""
    features, target = table()
    target = target[torch.randperm(len(target), generator=dice(5))] if wrong else target
    model = network(1, columns=features.shape[1])
    return plain(
        batches(TensorDataset(features, target)),
        model,
        momentum(model, 0.03),
        lambda batch: F.mse_loss(model(batch[0]), batch[1]),
    )


# In which order, and how often.


def sorted_by_target(wrong: bool) -> Probe:
    """A table that the database gave in order of the price, read from the top."""
    features, target = table()
    order = target.squeeze(1).argsort()
    model = network(1, columns=features.shape[1])
    return plain(
        batches(Records(features=features[order], target=target[order]), shuffle=not wrong),
        model,
        momentum(model, 0.01),
        lambda batch: F.mse_loss(model(batch["features"]), batch["target"]),
    )


def shard_listed_twice(wrong: bool) -> Probe:
    """Three shards, and the second is in the list twice."""
    images, labels = pictures(samples=2304)
    shards = [TensorDataset(images[one::3], labels[one::3]) for one in range(3)]
    torch.manual_seed(0)
    model = Convolutions()
    return plain(
        batches(ConcatDataset([*shards, shards[1]] if wrong else shards)),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def drawn_again_and_again(wrong: bool) -> Probe:
    """An epoch of 2048 that a sampler draws from 200 samples, with replacement."""
    tokens, mask, labels = sentences()
    data = Records(input_ids=tokens, attention_mask=mask, labels=labels)
    loader = batches(data)
    if wrong:
        few = Records(input_ids=tokens[:200], attention_mask=mask[:200], labels=labels[:200])
        sampler = RandomSampler(few, replacement=True, num_samples=2048, generator=dice(0))
        loader = DataLoader(few, 64, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = Attentive(nn.Embedding(49, 32), 4)
    return plain(
        loader,
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        lambda batch: F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]),
    )


# What it is judged on.


def tenth_of_validation_seen(wrong: bool) -> Probe:
    """A split by two files that share a few samples: one validation sample of ten is one of training."""
    features, target = table()
    others, answers = table(seed=1, samples=640)
    if wrong:
        others[::10], answers[::10] = features[:64], target[:64]
    model = network(1, columns=features.shape[1])
    return plain(
        batches(Records(features=features, target=target)),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.mse_loss(model(batch["features"]), batch["target"]),
        validation=DataLoader(Records(features=others, target=answers), 64),
    )


def validated(renamed: Tensor) -> Probe:
    """A CNN whose validation set calls class `i` by the name `renamed[i]`."""
    images, labels = pictures()
    others, answers = pictures(seed=1, samples=768)
    torch.manual_seed(0)
    model = Convolutions()
    return plain(
        batches(TensorDataset(images, labels)),
        model,
        momentum(model, 0.02),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        validation=DataLoader(TensorDataset(others, renamed[answers]), 64),
    )


def classes_in_other_order(wrong: bool) -> Probe:
    """Folders sorted by name for training and by date for validation."""
    return validated(torch.tensor([2, 5, 0, 1, 3, 4]) if wrong else torch.arange(6))


def two_classes_swapped(wrong: bool) -> Probe:
    """Classes 1 and 4 changed places in the validation set; the other four did not."""
    return validated(torch.tensor([0, 4, 2, 3, 1, 5]) if wrong else torch.arange(6))


# How the step is taken.


def optimizer_of_copy(wrong: bool) -> Probe:
    """The optimizer holds the weights of the copy that was meant for averaging."""
    values, labels = windows()
    torch.manual_seed(0)
    model = Recurrent(3, 5)
    average = copy.deepcopy(model)
    return plain(
        batches(TensorDataset(values, labels)),
        model,
        torch.optim.Adam((average if wrong else model).parameters(), lr=3e-3),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def head_replaced_later(wrong: bool) -> Probe:
    """Four classes rather than ten: the head is exchanged after the optimizer was made, or before."""
    images, labels = pictures(classes=4)
    torch.manual_seed(0)
    model, head = Convolutions(10), nn.Linear(288, 4)
    if not wrong:
        model.head = head
    optimizer = momentum(model, 0.02)
    model.head = head
    return plain(
        batches(Records(image=images, labels=labels)),
        model,
        optimizer,
        lambda batch: F.cross_entropy(model(batch["image"]), batch["labels"]),
    )


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, *, forgets: bool, divides: bool) -> Probe:
    """Four batches of 16 for every step."""
    values, labels = windows()
    count = itertools.count(1)

    def loss_of(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        if forgets:
            optimizer.zero_grad()
        loss = loss_of(batch)
        (loss / 4 if divides else loss).backward()
        if next(count) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return Probe(batches(TensorDataset(values, labels), 16), step, model, loss=loss_of, optimizer=optimizer)


def accumulation_forgets(wrong: bool) -> Probe:
    """Gradients are set to zero before each of the four batches: only the last one counts."""
    torch.manual_seed(0)
    model = Recurrent(3, 5)
    return accumulated(model, torch.optim.Adam(model.parameters(), lr=3e-3), forgets=wrong, divides=True)


def accumulation_adds_up(wrong: bool) -> Probe:
    """The four losses are summed and not divided, under a rate that is meant for their mean."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 64), nn.ReLU(), nn.Linear(64, 5))
    return accumulated(model, momentum(model, 0.05), forgets=False, divides=not wrong)


def clipped(loader: DataLoader[Any], model: nn.Module, optimizer: Any, loss_of: Any, norm: float) -> Probe:
    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()

    return Probe(loader, step, model, loss=loss_of, optimizer=optimizer)


def always_clipped(wrong: bool) -> Probe:
    """Delays in minutes: gradients have a norm of some five, and are clipped at 0.05; at 100 in the healthy one."""
    features, target = table(columns=16)
    model = network(1, columns=16)
    return clipped(
        batches(Records(features=features, target=6 * target), 32),
        model,
        momentum(model, 0.003),
        lambda batch: F.mse_loss(model(batch["features"]), batch["target"]),
        0.05 if wrong else 100.0,
    )


def momentum_rate_high(wrong: bool) -> Probe:
    """SGD with momentum at 2 in the place of 0.02."""
    images, labels = pictures(channels=3)
    torch.manual_seed(0)
    model = Convolutions(channels=3)
    return plain(
        batches(TensorDataset(images, labels)),
        model,
        momentum(model, 2.0 if wrong else 0.02),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def adam_rate_low(wrong: bool) -> Probe:
    """Adam at 2e-6 in the place of 2e-3."""
    tokens, mask, labels = sentences()
    torch.manual_seed(0)
    model = Attentive(nn.Embedding(49, 32), 4)
    return plain(
        batches(Records(input_ids=tokens, attention_mask=mask, labels=labels)),
        model,
        torch.optim.Adam(model.parameters(), lr=2e-6 if wrong else 2e-3),
        lambda batch: F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]),
    )


# How the model is built.


def dead_channels(wrong: bool) -> Probe:
    """28 of 32 channels of the second convolution lie behind a bias of -40."""
    images, labels = pictures()
    torch.manual_seed(0)
    model = Convolutions()
    if wrong:
        with torch.no_grad():
            model.second.bias[4:] = -40.0
    return plain(
        batches(TensorDataset(images, labels)),
        model,
        torch.optim.RMSprop(model.parameters(), lr=5e-4),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


class Stack(nn.Module):
    """Twenty layers, one behind the other; the healthy ones add to what they get."""

    def __init__(self, layers: list[nn.Module], activation: Callable[[Tensor], Tensor], residual: bool) -> None:
        super().__init__()
        self.layers, self.activation, self.residual = nn.ModuleList(layers), activation, residual

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            inner = self.activation(layer(values))
            values = values + 0.3 * inner if self.residual else inner
        return values


def deep_tanh(wrong: bool) -> Probe:
    """Twenty layers of tanh, with nothing past them."""
    features, target = table()
    torch.manual_seed(0)
    stack = Stack([nn.Linear(48, 48) for _ in range(20)], torch.tanh, residual=not wrong)
    model = nn.Sequential(nn.Linear(10, 48), stack, nn.Linear(48, 1))
    return plain(
        batches(Records(features=features, target=target)),
        model,
        momentum(model, 0.01),
        lambda batch: F.mse_loss(model(batch["features"]), batch["target"]),
    )


def deep_sigmoid(wrong: bool) -> Probe:
    """Twenty convolutions, each through a sigmoid; the healthy ones are residual, with ReLU."""
    images, labels = pictures(classes=4)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(20)]
    stack = Stack(layers, torch.sigmoid if wrong else torch.relu, residual=not wrong)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 2, padding=1), stack, nn.Flatten(), nn.Linear(288, 4))
    return plain(
        batches(TensorDataset(images, labels)),
        model,
        momentum(model, 0.01),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


def first_convolution_frozen(wrong: bool) -> Probe:
    """Left over from fine-tuning: the first convolution, of random weights, takes no gradient."""
    images, labels = pictures(channels=3)
    torch.manual_seed(0)
    model = Convolutions(channels=3)
    model.first.requires_grad_(not wrong)
    return plain(
        batches(Records(image=images, labels=labels)),
        model,
        momentum(model, 0.02),
        lambda batch: F.cross_entropy(model(batch["image"]), batch["labels"]),
    )


class Codebook(nn.Module):
    """An encoder that chooses among 32 codes: the best one, or a mixture of all."""

    def __init__(self, hard: bool) -> None:
        super().__init__()
        self.encoder, self.codes, self.head = network(32, columns=10), nn.Embedding(32, 16), nn.Linear(16, 1)
        self.hard = hard

    def forward(self, features: Tensor) -> Tensor:
        scores = self.encoder(features)
        return self.head(self.codes(scores.argmax(1)) if self.hard else scores.softmax(1) @ self.codes.weight)


def codes_by_argmax(wrong: bool) -> Probe:
    """An argmax between encoder and codes, which no gradient passes."""
    torch.manual_seed(0)
    model = Codebook(wrong)
    return plain(
        batches(TensorDataset(*table())),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.mse_loss(model(batch[0]), batch[1]),
    )


class Quantised(nn.Module):
    """A code of four bits a number: rounded, with the gradient of what was rounded or with none."""

    def __init__(self, straight_through: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = network(24, columns=10), network(1, columns=24)
        self.straight_through = straight_through

    def forward(self, features: Tensor) -> Tensor:
        code = self.encoder(features).tanh()
        rounded = torch.round(8 * code) / 8
        return self.decoder(code + (rounded - code).detach() if self.straight_through else rounded)


def rounded_code(wrong: bool) -> Probe:
    """Rounding has a gradient of zero everywhere."""
    torch.manual_seed(0)
    model = Quantised(not wrong)
    return plain(
        batches(Records(features=table()[0], target=table()[1])),
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        lambda batch: F.smooth_l1_loss(model(batch["features"]), batch["target"]),
    )


class Encoded(nn.Module):
    """A convolution over time whose answer is computed with or without gradients."""

    def __init__(self, without: bool) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(3, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 5, padding=2))
        self.head, self.without = nn.Linear(32 * 5, 5), without

    def forward(self, values: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.without):
            hidden = F.adaptive_avg_pool1d(self.encoder(values.transpose(1, 2)).relu(), 5)
        return self.head(hidden.flatten(1))


def encoder_without_gradient(wrong: bool) -> Probe:
    """The encoder's no_grad of an evaluation was left in."""
    torch.manual_seed(0)
    model = Encoded(wrong)
    return plain(
        batches(TensorDataset(*windows())),
        model,
        momentum(model, 0.03),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


# Where numbers end.


def angle_of_nothing(wrong: bool) -> Probe:
    """Corrections to guessed directions; those of the calibration are exact, and arccos has no slope at one."""
    chance = dice(0)
    features = torch.randn(3072, 8, generator=chance)
    truth = F.normalize(torch.randn(3072, 3, generator=chance), dim=1)
    error = 0.2 + 0.6 * torch.rand(3072, 1, generator=chance)
    calibrated = torch.arange(3072) % 20 == 0
    truth[calibrated], error[calibrated] = torch.tensor([0.0, 0.0, 1.0]), 0.0
    guess = F.normalize(truth + error * (features @ torch.randn(8, 3, generator=dice(9)) / math.sqrt(8)), dim=1)
    model = network(3, columns=8)

    def loss_of(batch: Any) -> Tensor:
        direction = F.normalize(batch["guess"] + batch["error"] * model(batch["features"]), dim=1)
        cosine = (direction * batch["target"]).sum(1)
        return (cosine if wrong else cosine.clamp(-1 + 1e-6, 1 - 1e-6)).acos().mean()

    data = Records(features=features, guess=guess, error=error, target=truth)
    return plain(batches(data), model, torch.optim.Adam(model.parameters(), lr=2e-3), loss_of)


class AttentionPool(nn.Module):
    """Each element has a say by its score; those that are padding have none."""

    def __init__(self, nothing: float) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(5, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.score, self.head, self.nothing = nn.Linear(48, 1), nn.Linear(48, 3), nothing

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        hidden = self.each(values)
        scores = self.score(hidden).squeeze(2).masked_fill(~mask, self.nothing)
        return self.head((scores.softmax(1)[:, :, None] * hidden).sum(1))


def nothing_to_attend_to(wrong: bool) -> Probe:
    """Events of up to ten hits, a few without any: a softmax over nothing but -inf; the healthy one has -1e9."""
    chance = dice(0)
    lengths = torch.randint(1, 11, (2048, 1), generator=chance)
    lengths[::25] = 0
    mask = torch.arange(10) < lengths
    hits = torch.randn(2048, 10, 5, generator=chance) * mask[:, :, None]
    score = hits[:, :, 0].sum(1) / lengths.squeeze(1).clamp(min=1)
    labels = torch.bucketize(score, torch.tensor([-0.2, 0.2]))
    torch.manual_seed(0)
    model = AttentionPool(-math.inf if wrong else -1e9)
    return plain(
        batches(Records(hits=hits, mask=mask, labels=labels)),
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        lambda batch: F.cross_entropy(model(batch["hits"], batch["mask"]), batch["labels"]),
    )


class Standardised(nn.Module):
    """Divides each channel of a window by its own deviation."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(3, 24, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(192, 5))
        self.least = least

    def forward(self, values: Tensor) -> Tensor:
        values = values.transpose(1, 2)
        centred = values - values.mean(2, keepdim=True)
        return self.layers(centred / (values.std(2, keepdim=True) + self.least))


def flat_channel(wrong: bool) -> Probe:
    """A sensor that says nothing in some windows has a deviation of zero."""
    values, labels = windows()
    values[::30, :, 1] = 0.0
    torch.manual_seed(0)
    model = Standardised(0.0 if wrong else 1e-2)
    return plain(
        batches(TensorDataset(values, labels)),
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


# Answers that do not depend on the question.


class Mixed(nn.Module):
    """A GRU of which the mean is taken over time, or over the batch as well."""

    def __init__(self, over_batch: bool) -> None:
        super().__init__()
        self.gru, self.head, self.over_batch = nn.GRU(3, 40, batch_first=True), nn.Linear(40, 5), over_batch

    def forward(self, values: Tensor) -> Tensor:
        hidden = self.gru(values)[0]
        pooled = hidden.mean((0, 1), keepdim=True).squeeze(1) if self.over_batch else hidden.mean(1)
        return self.head(pooled.expand(len(values), -1))


def mean_over_batch(wrong: bool) -> Probe:
    """Pooled over one dimension too many: the same answer for the whole batch."""
    torch.manual_seed(0)
    model = Mixed(wrong)
    values, labels = windows()
    return plain(
        batches(Records(values=values, labels=labels)),
        model,
        torch.optim.RMSprop(model.parameters(), lr=2e-3),
        lambda batch: F.cross_entropy(model(batch["values"]), batch["labels"]),
    )


def normalised_away(wrong: bool) -> Probe:
    """A norm with a group for each channel, of one pixel: its bias alone remains, and no gradient passes it."""
    images, labels = pictures(classes=4)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 6),
        nn.GroupNorm(32 if wrong else 4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    return plain(
        batches(TensorDataset(images, labels)),
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
    )


# Nothing wrong.


def healthy_lstm(wrong: bool) -> Probe:
    values, labels = windows(seed=4, classes=4, steps=24)
    torch.manual_seed(0)
    model = Recurrent(3, 4)
    return plain(
        batches(Records(values=values, labels=labels)),
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda batch: F.cross_entropy(model(batch["values"]), batch["labels"]),
    )


def healthy_transformer(wrong: bool) -> Probe:
    """Padded tokens with a mask, and some dropout."""
    tokens, mask, labels = sentences(seed=4)
    torch.manual_seed(0)
    model = Attentive(nn.Embedding(49, 48, padding_idx=0), 4, 48, 0.1)
    return plain(
        batches(Records(input_ids=tokens, attention_mask=mask, labels=labels), 32),
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01),
        lambda batch: F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"]),
    )


def healthy_large_targets(wrong: bool) -> Probe:
    """Prices of some 300,000 in the batch, standardised within the loss."""
    features, target = table(seed=4)
    prices = 3e5 + 8e4 * target
    centre, size = prices.mean(), prices.std()
    model = network(1, columns=features.shape[1])
    return plain(
        batches(Records(features=features, target=prices)),
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        lambda batch: F.mse_loss(model(batch["features"]), (batch["target"] - centre) / size),
    )


def healthy_accumulation(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = Recurrent(3, 5, 40)
    return accumulated(model, torch.optim.AdamW(model.parameters(), lr=4e-3), forgets=False, divides=True)


def healthy_clipping(wrong: bool) -> Probe:
    """Clipped at 1.0, which some of the gradients pass."""
    values, labels = windows(seed=8, classes=6)
    torch.manual_seed(0)
    model = Recurrent(3, 6)
    return clipped(
        batches(TensorDataset(values, labels), 32),
        model,
        momentum(model, 0.05),
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        1.0,
    )


def healthy_fine_tuning(wrong: bool) -> Probe:
    """Learnt on other pictures, with a new head at a rate of its own, and judged on pictures it has not seen."""
    torch.manual_seed(0)
    model = Convolutions(8)
    images, labels = pictures(classes=8, kind=21)
    first = momentum(model, 0.02)
    for _ in range(3):
        for batch in batches(TensorDataset(images, labels)):
            first.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            first.step()
    model.head = nn.Linear(288, 5)
    body = [*model.first.parameters(), *model.second.parameters()]
    optimizer = torch.optim.AdamW([{"params": body, "lr": 3e-4}, {"params": model.head.parameters()}], lr=2e-3)
    return plain(
        batches(TensorDataset(*pictures(classes=5))),
        model,
        optimizer,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        validation=DataLoader(TensorDataset(*pictures(seed=1, samples=512, classes=5)), 64),
    )


def healthy_warm_up(wrong: bool) -> Probe:
    """The rate rises through the first 50 steps, within the step."""
    values, labels = windows(seed=4)
    torch.manual_seed(0)
    model = Attentive(nn.Linear(3, 32), 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 50))

    def loss_of(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()
        schedule.step()

    return Probe(batches(TensorDataset(values, labels)), step, model, loss=loss_of, optimizer=optimizer)


def healthy_several_labels(wrong: bool) -> Probe:
    """Each picture shows any of five things, and the rarest is on one of ten."""
    chance = dice(6)
    shares = torch.tensor([0.5, 0.4, 0.3, 0.2, 0.1])
    target = (torch.rand(2048, 5, generator=chance) < shares).float()
    things = F.interpolate(torch.randn(5, 1, 4, 4, generator=chance), size=(12, 12), mode="bilinear").flatten(1)
    images = (target @ things).reshape(-1, 1, 12, 12) + 0.5 * torch.randn(2048, 1, 12, 12, generator=chance)
    torch.manual_seed(0)
    model = Convolutions(5)
    return plain(
        batches(Records(image=images, target=target)),
        model,
        torch.optim.RMSprop(model.parameters(), lr=5e-4),
        lambda batch: F.binary_cross_entropy_with_logits(model(batch["image"]), batch["target"]),
    )


def healthy_counts(wrong: bool) -> Probe:
    """Counts from none to a hundred, by the likelihood of a Poisson distribution."""
    features, score = table(seed=4, noise=0.0)
    counts = torch.poisson(torch.exp(score + 1), generator=dice(4))
    model = network(1, columns=features.shape[1])
    return plain(
        batches(TensorDataset(features, counts)),
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        lambda batch: F.poisson_nll_loss(model(batch[0]), batch[1]),
    )


CASES: tuple[tuple[Callable[[bool], Probe], str | None], ...] = (
    (raw_hits_in_transformer, "inputs-raw"),
    (raw_readings_in_lstm, "inputs-raw"),
    (user_as_number, "inputs-ids"),
    (sensor_as_number, "inputs-ids"),
    (log_of_zero, "inputs-not-finite"),
    (price_among_inputs, "target-leaked"),
    (window_with_answer, "target-leaked"),
    (classes_from_one, "labels-range"),
    (fraud_is_rare, "labels-rare"),
    (one_kind_is_rare, "labels-rare"),
    (shuffled_classes, "labels-unrelated"),
    (shuffled_numbers, "labels-unrelated"),
    (sorted_by_target, "order"),
    (shard_listed_twice, "duplicates"),
    (drawn_again_and_again, "duplicates"),
    (tenth_of_validation_seen, "validation-seen"),
    (classes_in_other_order, "labels-differ"),
    (two_classes_swapped, "labels-differ"),
    (optimizer_of_copy, "not-updated"),
    (head_replaced_later, "not-updated"),
    (accumulation_forgets, "accumulation"),
    (accumulation_adds_up, "accumulation"),
    (always_clipped, "clipped"),
    (momentum_rate_high, "rate-high"),
    (adam_rate_low, "rate-low"),
    (dead_channels, "dead"),
    (deep_tanh, "vanishing"),
    (deep_sigmoid, "vanishing"),
    (first_convolution_frozen, "frozen"),
    (codes_by_argmax, "no-gradient"),
    (rounded_code, "no-gradient"),
    (encoder_without_gradient, "no-gradient"),
    (angle_of_nothing, "not-finite"),
    (nothing_to_attend_to, "not-finite"),
    (flat_channel, "not-finite"),
    (mean_over_batch, "nothing-learnt"),
    (normalised_away, "nothing-learnt"),
    (healthy_lstm, None),
    (healthy_transformer, None),
    (healthy_large_targets, None),
    (healthy_accumulation, None),
    (healthy_clipping, None),
    (healthy_fine_tuning, None),
    (healthy_warm_up, None),
    (healthy_several_labels, None),
    (healthy_counts, None),
)
