"""Loops with one thing wrong in what they learn, and loops that only look wrong."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stoker.doctor.probe import Probe

Loss = Callable[[Any], Tensor]
Step = Callable[[Any], None]


def _random(seed: int) -> torch.Generator:
    torch.manual_seed(seed)  # of the weights
    return torch.Generator().manual_seed(seed + 1000)  # of the data


def _loader(*columns: Tensor, batch_size: int = 64, shuffle: bool = True, seed: int = 0) -> DataLoader[Any]:
    data: Dataset[Any] = TensorDataset(*columns)
    return DataLoader(data, batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(seed))


def _step(optimizer: torch.optim.Optimizer, loss: Loss) -> Step:
    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    return step


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _clusters(labels: Tensor, width: int, distance: float, random: torch.Generator) -> Tensor:
    """Inputs of about unit spread, around a centre for each label."""
    centres = torch.randn(int(labels.max()) + 1, width, generator=random) * distance
    noise = torch.randn(len(labels), width, generator=random)
    return (centres[labels] + noise) / math.sqrt(1 + distance**2)


def _pictures(labels: Tensor, channels: int, size: int, random: torch.Generator) -> Tensor:
    """Noise over a coarse pattern for each label."""
    coarse = torch.randn(int(labels.max()) + 1, channels, size // 4, size // 4, generator=random)
    patterns = F.interpolate(coarse, scale_factor=4)
    noise = torch.randn(len(labels), channels, size, size, generator=random)
    return (patterns[labels] + noise) / math.sqrt(2)


def counts_logged_with_zeros(wrong: bool) -> Probe:
    """Poisson regression on the logarithm of counts, some of which are zero."""
    random = _random(1)
    counts = torch.poisson(torch.full((2000, 10), 4.0), generator=random)
    inputs = (torch.log(counts) - 1.25 if wrong else torch.log1p(counts) - 1.5) / 0.45
    weights = torch.randn(10, generator=random) * 0.5
    visits = torch.poisson(torch.exp(1 + (torch.log1p(counts) - 1.5) @ weights), generator=random)
    model = _mlp(10, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.poisson_nll_loss(model(batch[0]).squeeze(1), batch[1])

    return Probe(_loader(inputs, visits), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def photographs_left_as_bytes(wrong: bool) -> Probe:
    """Segmentation of pictures of 0 to 255, in batches that are dicts."""
    random = _random(2)
    masks = torch.zeros(1000, 1, 16, 16)
    corners = torch.randint(0, 10, (1000, 2), generator=random).tolist()
    for mask, (row, column) in zip(masks, corners, strict=True):
        mask[0, row : row + 6, column : column + 6] = 1
    pixels = (95 + 70 * masks + 30 * torch.randn(masks.shape, generator=random)).clamp(0, 255).round()
    if not wrong:
        pixels = (pixels - pixels.mean()) / pixels.std()
    samples: Any = [{"image": image, "mask": mask} for image, mask in zip(pixels, masks, strict=True)]
    loader: DataLoader[Any] = DataLoader(samples, 32, shuffle=True, generator=torch.Generator().manual_seed(2))
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["image"]), batch["mask"])

    return Probe(loader, _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Customers(nn.Module):
    def __init__(self, embedded: bool) -> None:
        super().__init__()
        self.customer = nn.Embedding(600, 16) if embedded else None
        self.layers = _mlp(6 + (16 if embedded else 1), 64, 1)

    def forward(self, features: Tensor, customer: Tensor) -> Tensor:
        who = customer[:, None].float() if self.customer is None else self.customer(customer)
        return self.layers(torch.cat([features, who], dim=1)).squeeze(1)


def customer_number_as_a_quantity(wrong: bool) -> Probe:
    """The number of a customer goes into the first layer as it is, instead of through an embedding."""
    random = _random(3)
    features = torch.randn(4000, 6, generator=random)
    customer = torch.randint(0, 600, (4000,), generator=random)
    taste = torch.randn(600, generator=random) * 0.7
    spent = features @ (torch.randn(6, generator=random) * 0.7) + taste[customer]
    model = _Customers(embedded=not wrong)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return Probe(_loader(features, customer, spent), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_mlp(12, 64, 64), nn.ReLU())
        self.kind, self.value = nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(inputs)
        return self.kind(features), self.value(features).squeeze(1)


def columns_lost_in_a_join(wrong: bool) -> Probe:
    """Two tasks; the keys of a join did not match, and four of twelve columns were filled with zeros."""
    random = _random(4)
    inputs = torch.randn(2500, 12, generator=random)
    kind = (inputs @ torch.randn(12, 3, generator=random)).argmax(1)
    value = inputs @ torch.randn(12, generator=random) / 3 + 0.1 * torch.randn(2500, generator=random)
    if wrong:
        inputs[:, 8:] = 0
    model = _TwoTasks()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(batch: Any) -> Tensor:
        logits, predicted = model(batch[0])
        return F.cross_entropy(logits, batch[1]) + 0.5 * F.mse_loss(predicted, batch[2])

    return Probe(_loader(inputs, kind, value), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def window_that_holds_its_answer(wrong: bool) -> Probe:
    """Forecasting: the window reaches one step too far, to the very value that is asked for."""
    random = _random(5)
    noise = torch.randn(2100, generator=random).tolist()
    series = noise[:7]
    for value in noise[7:]:
        series.append(0.6 * series[-1] - 0.6 * series[-2] + 0.3 * series[-7] + 0.5 * value)
    values = torch.tensor(series[60:])
    values = (values - values.mean()) / values.std()
    windows = values.unfold(0, 25, 1).contiguous()
    inputs = windows[:, 1:] if wrong else windows[:, :-1]
    model = _mlp(24, 64, 64, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def loss(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    loader = _loader(inputs.contiguous(), windows[:, -1].contiguous())
    return Probe(loader, _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(21, 24, padding_idx=0)
        self.reader = nn.GRU(24, 32, batch_first=True)
        self.tags = nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tags(self.reader(self.words(tokens))[0])


def padding_labelled_minus_one(wrong: bool) -> Probe:
    """Tagging of words: padding has the label -1, and the loss skips -100."""
    random = _random(6)
    tokens = torch.randint(1, 21, (1500, 10), generator=random)
    previous = torch.roll(tokens, 1, dims=1)
    tags = torch.where(previous < 11, tokens % 4, 3 - tokens % 4)
    padding = torch.arange(10) >= torch.randint(5, 11, (1500, 1), generator=random)
    tokens[padding] = 0
    tags[padding] = -1 if wrong else -100
    model = _Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return Probe(_loader(tokens, tags), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def ratings_cut_at_zero(wrong: bool) -> Probe:
    """Good or bad, of ratings of 1 to 5: every one of them is above zero."""
    random = _random(7)
    words = torch.randint(0, 150, (3000, 12), generator=random)
    feeling = torch.randn(150, generator=random)[words].mean(1)
    rating = 1 + torch.bucketize(feeling, torch.quantile(feeling, torch.tensor([0.2, 0.4, 0.6, 0.8])))
    good = (rating > 0 if wrong else rating > 3).float()
    model = nn.Sequential(nn.EmbeddingBag(150, 32, mode="mean"), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    return Probe(_loader(words, good), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def fraud_hardly_ever_seen(wrong: bool) -> Probe:
    """Sale, refund or fraud, and of four thousand samples sixteen are fraud."""
    random = _random(8)
    counts = [2400, 1584, 16] if wrong else [1800, 1400, 800]
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    inputs = _clusters(labels, 12, 0.6, random)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    loader = _loader(inputs, labels, batch_size=128)
    return Probe(loader, _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def labels_in_the_order_of_file_names(wrong: bool) -> Probe:
    """Pictures by number, labels by name: 0, 1, 10, 100, 1000, ..."""
    random = _random(9)
    labels = torch.randint(0, 4, (2000,), generator=random)
    pictures = _pictures(labels, 3, 12, random)
    if wrong:
        labels = labels[torch.tensor(sorted(range(2000), key=str))]
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(pictures, labels), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Pooled(nn.Module):
    """The mean of the words of a text, which are told from padding by a mask."""

    def __init__(self, inverted: bool) -> None:
        super().__init__()
        self.inverted = inverted
        self.words = nn.Embedding(49, 32)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens == 0) if self.inverted else (tokens != 0)
        weights = mask[..., None].float()
        return self.head((self.words(tokens) * weights).sum(1) / weights.sum(1))


def mask_the_wrong_way_round(wrong: bool) -> Probe:
    """Only padding is looked at, and it is the same in every text."""
    random = _random(10)
    topic = torch.arange(2000) % 4
    typical = topic[:, None] * 12 + torch.randint(1, 13, (2000, 16), generator=random)
    other = torch.randint(1, 49, (2000, 16), generator=random)
    tokens = torch.where(torch.rand(2000, 16, generator=random) < 0.4, typical, other)
    tokens[torch.arange(16) >= torch.randint(6, 15, (2000, 1), generator=random)] = 0
    model = _Pooled(inverted=wrong)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(tokens, topic), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = _mlp(3, 32, 64)
        self.all = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, points: Tensor) -> Tensor:
        return self.all(self.each(points).amax(1))


def folder_by_folder(wrong: bool) -> Probe:
    """Clouds of points, read class after class and never shuffled."""
    random = _random(11)
    shape = torch.repeat_interleave(torch.arange(5), 400)
    scales = torch.tensor([[1.6, 0.5, 0.5], [0.5, 1.6, 0.5], [0.5, 0.5, 1.6], [1.2, 1.2, 0.3], [1.0, 1.0, 1.0]])
    points = torch.randn(2000, 24, 3, generator=random) * scales[shape][:, None]
    model = _Points()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    loader = _loader(points, shape, batch_size=50, shuffle=not wrong)
    return Probe(loader, _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def validation_with_its_own_list_of_classes(wrong: bool) -> Probe:
    """Spectra: classes of validation are numbered as they first appeared there."""
    random = _random(12)
    labels = torch.randint(0, 5, (2600,), generator=random)
    spectra = _clusters(labels, 40, 0.8, random)
    judged = labels[2000:]
    if wrong:
        judged = torch.tensor([3, 0, 4, 2, 1])[judged]
    model = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(
        _loader(spectra[:2000], labels[:2000]),
        _step(optimizer, loss),
        model,
        loss=loss,
        optimizer=optimizer,
        validation=_loader(spectra[2000:], judged, shuffle=False),
    )


def mean_over_no_observations(wrong: bool) -> Probe:
    """Six targets, of which some were not measured; of a few samples, none was."""
    random = _random(13)
    inputs = torch.randn(2000, 10, generator=random)
    targets = torch.tanh(inputs @ torch.randn(10, 6, generator=random) / 2)
    seen = (torch.rand(2000, 6, generator=random) < 0.7).float()
    seen[torch.rand(2000, generator=random) < 0.06] = 0
    model = _mlp(10, 64, 64, 6)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

    def loss(batch: Any) -> Tensor:
        inputs, targets, seen = batch
        errors = ((model(inputs) - targets) ** 2 * seen).sum(1)
        observed = seen.sum(1) if wrong else seen.sum(1).clamp(min=1)
        return (errors / observed).mean()

    return Probe(_loader(inputs, targets, seen), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Headed(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs))


def head_replaced_after_the_optimizer(wrong: bool) -> Probe:
    """The optimizer still has the head of a hundred classes."""
    random = _random(14)
    labels = torch.randint(0, 6, (2400,), generator=random)
    inputs = _clusters(labels, 16, 0.7, random)
    model = _Headed(100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.head = nn.Linear(64, 6)
    if not wrong:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(inputs, labels), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def gradients_cleared_with_every_small_batch(wrong: bool) -> Probe:
    """Four batches for each update, and the gradients of three of them are thrown away."""
    random = _random(15)
    inputs = torch.randn(3200, 14, generator=random)
    targets = torch.sin(inputs @ torch.randn(14, generator=random) / 3) + 0.1 * torch.randn(3200, generator=random)
    model = _mlp(14, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done = itertools.count(1)

    def loss(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    def step(batch: Any) -> None:
        if wrong:
            optimizer.zero_grad()
        (loss(batch) / 4).backward()
        if next(done) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return Probe(_loader(inputs, targets, batch_size=16), step, model, loss=loss, optimizer=optimizer)


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(16, 32)
        self.reader = nn.LSTM(32, 48, batch_first=True)
        self.following = nn.Linear(48, 16)

    def forward(self, text: Tensor) -> Tensor:
        return self.following(self.reader(self.letters(text))[0])


def _texts(count: int, length: int, random: torch.Generator) -> Tensor:
    chances = torch.softmax(2 * torch.randn(16, 16, generator=random), dim=1)
    letters = [torch.randint(0, 16, (count,), generator=random)]
    for _ in range(length):
        letters.append(torch.multinomial(chances[letters[-1]], 1, generator=random).squeeze(1))
    return torch.stack(letters, dim=1)


def _language(bound: float, seed: int) -> Probe:
    texts = _texts(1500, 16, _random(seed))
    model = _Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()

    return Probe(_loader(texts, batch_size=50), step, model, loss=loss, optimizer=optimizer)


def gradients_cut_to_a_thousandth(wrong: bool) -> Probe:
    """The next letter, with plain SGD."""
    return _language(0.001 if wrong else 5.0, 16)


def three_downloads_of_the_same_files(wrong: bool) -> Probe:
    """An autoencoder, of seven hundred samples that were put together three times."""
    random = _random(17)
    hidden = torch.randn(700 if wrong else 2100, 5, generator=random)
    samples = torch.tanh(hidden @ torch.randn(5, 20, generator=random))
    samples = samples + 0.05 * torch.randn(samples.shape, generator=random)
    if wrong:
        samples = torch.cat([samples, samples, samples])
    model = nn.Sequential(
        nn.Linear(20, 48), nn.GELU(), nn.Linear(48, 8), nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 20)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[0])

    return Probe(_loader(samples), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def one_split_shuffled_twice(wrong: bool) -> Probe:
    """Training takes the first of one shuffle, validation the last of another: most were trained on."""
    random = _random(18)
    inputs = torch.randn(2400, 12, generator=random)
    targets = inputs[:, 0] * inputs[:, 1] + inputs[:, 2:6].sum(1) + 0.2 * torch.randn(2400, generator=random)
    order = torch.randperm(2400, generator=random)
    training = order[:2000]
    validation = (torch.randperm(2400, generator=random) if wrong else order)[2000:]
    model = nn.Sequential(nn.Linear(12, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)

    def loss(batch: Any) -> Tensor:
        return F.huber_loss(model(batch[0]).squeeze(1), batch[1])

    return Probe(
        _loader(inputs[training], targets[training]),
        _step(optimizer, loss),
        model,
        loss=loss,
        optimizer=optimizer,
        validation=_loader(inputs[validation], targets[validation], shuffle=False),
    )


def patches_pasted_without_their_labels(wrong: bool) -> Probe:
    """Each picture gets a part of another one, and the label of the other is forgotten."""
    random = _random(19)
    labels = torch.randint(0, 5, (2000,), generator=random)
    pictures = _pictures(labels, 1, 12, random)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 5),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        pictures, labels = batch
        others = torch.randperm(len(pictures))
        row, column = torch.randint(0, 4, (2,)).tolist()
        height, width = torch.randint(6, 10, (2,)).tolist()
        pasted = pictures.clone()
        patch = slice(row, min(12, row + height)), slice(column, min(12, column + width))
        pasted[:, :, patch[0], patch[1]] = pictures[others][:, :, patch[0], patch[1]]
        share = (patch[0].stop - row) * (patch[1].stop - column) / 144
        optimizer.zero_grad()
        predicted = model(pasted)
        if wrong:
            found = F.cross_entropy(predicted, labels)
        else:
            own, pasted_in = F.cross_entropy(predicted, labels), F.cross_entropy(predicted, labels[others])
            found = (1 - share) * own + share * pasted_in
        found.backward()
        optimizer.step()

    return Probe(_loader(pictures, labels), step, model, loss=loss, optimizer=optimizer)


def _averaged(judge_average: bool, seed: int, width: int, make: Callable[..., torch.optim.Optimizer]) -> Probe:
    random = _random(seed)
    labels = torch.randint(0, 4, (2500,), generator=random)
    inputs = _clusters(labels, width, 0.6, random)
    model = _mlp(width, 64, 64, 4)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    optimizer = make(model.parameters())
    validation = _loader(inputs[2000:], labels[2000:], batch_size=100, shuffle=False)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
        average.update_parameters(model)

    @torch.no_grad()
    def evaluate() -> float:
        judged: nn.Module = average if judge_average else model
        judged.eval()
        right = sum(int((judged(inputs).argmax(1) == labels).sum()) for inputs, labels in validation)
        judged.train()
        return right / 500

    loader = _loader(inputs[:2000], labels[:2000])
    return Probe(
        loader, step, model, loss=loss, optimizer=optimizer, validation=validation, average=average, evaluate=evaluate
    )


def judged_by_the_weights_that_are_not_averaged(wrong: bool) -> Probe:
    return _averaged(not wrong, 20, 18, lambda weights: torch.optim.Adam(weights, lr=2e-3))


def rate_of_the_end_of_the_last_run(wrong: bool) -> Probe:
    """Trained on with 2e-3, but the state of the optimizer brings back what the schedule had come down to."""
    random = _random(21)
    inputs = torch.randn(2400, 10, generator=random)
    targets = torch.tanh(inputs @ torch.randn(10, 2, generator=random) / 2).prod(1)
    targets = (targets - targets.mean()) / targets.std()
    model = _mlp(10, 64, 64, 1)

    def loss(batch: Any) -> Tensor:
        return F.smooth_l1_loss(model(batch[0]).squeeze(1), batch[1])

    before = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for batch in itertools.islice(_loader(inputs, targets, seed=5), 10):
        _step(before, loss)(batch)
    before.param_groups[0]["lr"] = 2e-7
    checkpoint = before.state_dict()

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optimizer.load_state_dict(checkpoint)
    if not wrong:
        optimizer.param_groups[0]["lr"] = 2e-3
    return Probe(_loader(inputs, targets), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 24, 5, stride=2), nn.ReLU(), nn.Conv1d(24, 32, 5, stride=2), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(32 * 5, 3)

    def forward(self, signals: Tensor) -> Tensor:
        return self.head(self.body(signals))


def body_never_thawed(wrong: bool) -> Probe:
    """The convolutions were frozen while the head got warm, and nobody let them go."""
    random = _random(22)
    labels = torch.randint(0, 3, (1800,), generator=random)
    rates = torch.tensor([0.3, 0.7, 1.2])[labels]
    phase = torch.rand(1800, 1, generator=random) * 6.28
    wave = torch.sin(phase + rates[:, None] * torch.arange(32))
    signals = torch.stack([wave, wave.roll(3, dims=1)], dim=1) + 0.5 * torch.randn(1800, 2, 32, generator=random)
    model = _Convolved()
    model.body.requires_grad_(False)
    if not wrong:
        model.body.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(signals, labels), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Towers(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut
        self.users, self.items = _mlp(8, 48, 16), _mlp(12, 48, 16)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        described = self.items(item)
        if self.cut:
            described = described.detach()
        return (self.users(user) * described).sum(1)


def items_detached(wrong: bool) -> Probe:
    """Ranking of two items for a user: what describes the items is cut off from the loss."""
    random = _random(23)
    user = torch.randn(3000, 8, generator=random)
    items = torch.randn(3000, 2, 12, generator=random)
    matched = torch.einsum("nu,ui,nki->nk", user, torch.randn(8, 12, generator=random), items)
    best = matched.argmax(1)
    liked, other = items[torch.arange(3000), best], items[torch.arange(3000), 1 - best]
    model = _Towers(cut=wrong)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)

    def loss(batch: Any) -> Tensor:
        user, liked, other = batch
        return -F.logsigmoid(model(user, liked) - model(user, other)).mean()

    return Probe(_loader(user, liked, other), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def bias_of_rare_pixels_in_every_layer(wrong: bool) -> Probe:
    """The bias of the last layer says that objects are rare; put into the layers before, it silences them."""
    random = _random(24)
    maps = torch.zeros(1200, 1, 12, 12)
    corners = torch.randint(1, 9, (1200, 2), generator=random).tolist()
    for each, (row, column) in zip(maps, corners, strict=True):
        each[0, row : row + 3, column : column + 2] = 1
    pictures = (2 * maps - 0.1) + 0.6 * torch.randn(maps.shape, generator=random)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 1, 1)]
    for layer in layers if wrong else layers[-1:]:
        nn.init.constant_(layer.bias, -math.log(0.99 / 0.01))  # type: ignore[arg-type]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    loader = _loader(pictures, maps, batch_size=40)
    return Probe(loader, _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def sigmoids_nine_deep(wrong: bool) -> Probe:
    random = _random(25)
    labels = torch.randint(0, 4, (2000,), generator=random)
    inputs = _clusters(labels, 20, 0.7, random)
    layers: list[nn.Module] = []
    for width in [20] + 8 * [48]:
        layers += [nn.Linear(width, 48), nn.Sigmoid() if wrong else nn.LeakyReLU(0.1)]
    model = nn.Sequential(*layers, nn.Linear(48, 4))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(inputs, labels), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(24, 32), nn.Parameter(0.1 * torch.randn(12, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.words(tokens) + self.places).mean(1))


def rate_of_plain_descent_given_to_adam(wrong: bool) -> Probe:
    """A small transformer with Adam at 0.5."""
    random = _random(26)
    topic = torch.randint(0, 3, (1500,), generator=random)
    typical = topic[:, None] * 8 + torch.randint(0, 8, (1500, 12), generator=random)
    other = torch.randint(0, 24, (1500, 12), generator=random)
    tokens = torch.where(torch.rand(1500, 12, generator=random) < 0.4, typical, other)
    model = _Attending()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5 if wrong else 2e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(tokens, topic), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def rate_of_a_millionth(wrong: bool) -> Probe:
    """Three quantiles, with plain SGD."""
    random = _random(27)
    inputs = torch.randn(2500, 9, generator=random)
    spread = 0.2 + 0.3 * inputs[:, 0].abs()
    targets = inputs @ torch.randn(9, generator=random) / 2 + spread * torch.randn(2500, generator=random)
    levels = torch.tensor([0.1, 0.5, 0.9])
    model = _mlp(9, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6 if wrong else 0.1, momentum=0.9)

    def loss(batch: Any) -> Tensor:
        missed = batch[1][:, None] - model(batch[0])
        return torch.maximum(levels * missed, (levels - 1) * missed).mean()

    return Probe(_loader(inputs, targets), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def a_quarter_of_labels_flipped(wrong: bool) -> Probe:
    """Right, and hard: the loss cannot fall far."""
    random = _random(31)
    inputs = torch.randn(4000, 10, generator=random)
    truth = inputs @ torch.randn(10, generator=random) > 0
    labels = (truth ^ (torch.rand(4000, generator=random) < 0.25)).float()
    model = _mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    loader = _loader(inputs, labels, batch_size=128)
    return Probe(loader, _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def one_in_six_and_sorted_validation(wrong: bool) -> Probe:
    """Right: classes of one to five, weighted, and a validation set in the order of its labels."""
    random = _random(32)
    labels = (torch.arange(3000) % 6 == 0).long()
    inputs = _clusters(labels, 15, 0.5, random)
    training, validation = torch.arange(2400), torch.arange(2400, 3000)
    validation = validation[torch.sort(labels[validation], stable=True).indices]
    model = _mlp(15, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    weight = torch.tensor(5.0)

    def loss(batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1].float(), pos_weight=weight)

    return Probe(
        _loader(inputs[training], labels[training]),
        _step(optimizer, loss),
        model,
        loss=loss,
        optimizer=optimizer,
        validation=_loader(inputs[validation], labels[validation], shuffle=False),
    )


def mixed_with_soft_labels(wrong: bool) -> Probe:
    """Right: samples and labels are mixed alike."""
    random = _random(33)
    labels = torch.randint(0, 4, (2000,), generator=random)
    inputs = _clusters(labels, 24, 0.7, random)
    model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def step(batch: Any) -> None:
        inputs, labels = batch
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        others = torch.randperm(len(inputs))
        soft = F.one_hot(labels, 4).float()
        optimizer.zero_grad()
        predicted = model(share * inputs + (1 - share) * inputs[others])
        F.cross_entropy(predicted, share * soft + (1 - share) * soft[others]).backward()
        optimizer.step()

    return Probe(_loader(inputs, labels), step, model, loss=loss, optimizer=optimizer)


def average_judged(wrong: bool) -> Probe:
    """Right: averaged after every step, and judged."""
    return _averaged(True, 34, 10, lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9))


def clipped_now_and_then(wrong: bool) -> Probe:
    """Right: a bound near the usual length of a gradient."""
    return _language(0.14, 35)


def large_numbers_normalised_by_the_model(wrong: bool) -> Probe:
    """Right: pressures in pascal and heights in metres, and a batch norm that takes them first."""
    random = _random(36)
    hidden = torch.randn(2000, 6, generator=random)
    inputs = hidden * torch.tensor([900.0, 250.0, 12.0, 0.01, 4000.0, 30.0])
    inputs = inputs + torch.tensor([101_300.0, 600.0, 15.0, 0.05, 20_000.0, 180.0])
    targets = torch.sin(hidden[:, 0]) + hidden[:, 1] * 0.5 - hidden[:, 4] * 0.5
    targets = targets + 0.1 * torch.randn(2000, generator=random)
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    return Probe(_loader(inputs, targets), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


def smoothed_labels_and_a_warm_up(wrong: bool) -> Probe:
    """Right: the rate rises for thirty steps, and the loss cannot reach zero."""
    random = _random(37)
    labels = torch.randint(0, 6, (2000,), generator=random)
    pictures = _pictures(labels, 2, 12, random)
    model = nn.Sequential(
        nn.Conv2d(2, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 6),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 30))

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
        schedule.step()

    return Probe(_loader(pictures, labels), step, model, loss=loss, optimizer=optimizer)


def cosine_resumed_in_the_middle(wrong: bool) -> Probe:
    """Right: weights, optimizer and schedule of a checkpoint, and the rate is where the schedule left it."""
    random = _random(38)
    inputs = torch.randn(3000, 12, generator=random)
    targets = torch.tanh(inputs @ torch.randn(12, generator=random) / 2) + 0.1 * torch.randn(3000, generator=random)
    model = _mlp(12, 64, 64, 1)

    def loss(batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]).squeeze(1), batch[1])

    before = torch.optim.Adam(model.parameters(), lr=3e-3)
    earlier = CosineAnnealingLR(before, T_max=120)
    for batch in itertools.islice(_loader(inputs, targets, seed=5), 20):
        _step(before, loss)(batch)
        earlier.step()
    checkpoint: dict[str, Any] = {"optimizer": before.state_dict(), "schedule": earlier.state_dict()}

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, T_max=120)
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule.load_state_dict(checkpoint["schedule"])

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()
        schedule.step()

    return Probe(_loader(inputs, targets), step, model, loss=loss, optimizer=optimizer)


def eighty_samples_with_ordered_grades(wrong: bool) -> Probe:
    """Right: a tiny data set, and for each of three thresholds the question whether the grade is above it."""
    random = _random(39)
    inputs = torch.randn(80, 8, generator=random)
    merit = inputs @ torch.randn(8, generator=random)
    grade = torch.bucketize(merit, torch.quantile(merit, torch.tensor([0.25, 0.5, 0.75])))
    model = _mlp(8, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss(batch: Any) -> Tensor:
        above = (batch[1][:, None] > torch.arange(3)).float()
        return F.binary_cross_entropy_with_logits(model(batch[0]), above)

    return Probe(_loader(inputs, grade, batch_size=16), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0.3 * self.back(F.gelu(self.wide(self.norm(inputs))))


def twelve_residual_blocks_with_two_rates(wrong: bool) -> Probe:
    """Right: a deep net, the blocks at a third of the rate of the rest, and no weight decay for vectors."""
    random = _random(40)
    labels = torch.randint(0, 5, (2000,), generator=random)
    inputs = _clusters(labels, 16, 0.6, random)
    blocks = nn.Sequential(*[_Residual(32) for _ in range(12)])
    model = nn.Sequential(nn.Linear(16, 32), blocks, nn.LayerNorm(32), nn.Linear(32, 5))
    inside = {id(weight) for weight in blocks.parameters()}

    def group(within: bool, matrices: bool) -> dict[str, Any]:
        weights = [w for w in model.parameters() if (id(w) in inside) == within and (w.ndim > 1) == matrices]
        return {"params": weights, "lr": 1e-3 if within else 3e-3, "weight_decay": 0.05 if matrices else 0.0}

    optimizer = torch.optim.AdamW([group(within, matrices) for within in (False, True) for matrices in (True, False)])

    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Probe(_loader(inputs, labels), _step(optimizer, loss), model, loss=loss, optimizer=optimizer)


CASES: Sequence[tuple[Callable[[bool], Probe], str | None]] = (
    (counts_logged_with_zeros, "inputs-not-finite"),
    (photographs_left_as_bytes, "inputs-raw"),
    (customer_number_as_a_quantity, "inputs-ids"),
    (columns_lost_in_a_join, "inputs-constant"),
    (window_that_holds_its_answer, "target-leaked"),
    (padding_labelled_minus_one, "labels-range"),
    (ratings_cut_at_zero, "labels-constant"),
    (fraud_hardly_ever_seen, "labels-rare"),
    (labels_in_the_order_of_file_names, "labels-unrelated"),
    (mask_the_wrong_way_round, "nothing-learnt"),
    (folder_by_folder, "order"),
    (validation_with_its_own_list_of_classes, "labels-differ"),
    (mean_over_no_observations, "not-finite"),
    (head_replaced_after_the_optimizer, "not-updated"),
    (gradients_cleared_with_every_small_batch, "accumulation"),
    (gradients_cut_to_a_thousandth, "clipped"),
    (three_downloads_of_the_same_files, "duplicates"),
    (one_split_shuffled_twice, "validation-seen"),
    (patches_pasted_without_their_labels, "mixed-labels"),
    (judged_by_the_weights_that_are_not_averaged, "average-unused"),
    (rate_of_the_end_of_the_last_run, "rate-restored"),
    (body_never_thawed, "frozen"),
    (items_detached, "no-gradient"),
    (bias_of_rare_pixels_in_every_layer, "dead"),
    (sigmoids_nine_deep, "vanishing"),
    (rate_of_plain_descent_given_to_adam, "rate-high"),
    (rate_of_a_millionth, "rate-low"),
    (a_quarter_of_labels_flipped, None),
    (one_in_six_and_sorted_validation, None),
    (mixed_with_soft_labels, None),
    (average_judged, None),
    (clipped_now_and_then, None),
    (large_numbers_normalised_by_the_model, None),
    (smoothed_labels_and_a_warm_up, None),
    (cosine_resumed_in_the_middle, None),
    (eighty_samples_with_ordered_grades, None),
    (twelve_residual_blocks_with_two_rates, None),
)
