"""Loops as people write them, each with one thing wrong, or right: `wrong` says which. A new fault is ten lines."""

import io
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from stoker.doctor.probe import Probe

FEATURES = 64


class Samples(Dataset[Any]):
    """Numbers, each made in a way that costs something: `work` is a matrix product, `sleep_s` waiting for a disk."""

    def __init__(self, size: int = 4096, work: int = 0, sleep_s: float = 0.0, first_s: float = 0.0) -> None:
        self.size, self.work, self.sleep_s, self.first_s = size, work, sleep_s, first_s
        self.seen: set[int] = set()
        self.values = torch.randn(size, FEATURES, generator=torch.Generator().manual_seed(0))
        self.targets = self.values.sum(1)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        if self.first_s and index not in self.seen:
            self.seen.add(index)
            time.sleep(self.first_s)
        if self.work:
            crunch(self.work)
        return self.values[index], self.targets[index]


def crunch(size: int) -> float:
    """Honest work for a processor, in Python."""
    total = 0.0
    for number in range(size):
        total += number * 0.5
    return total


def mlp(width: int = 512, layers: int = 3) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Linear(FEATURES, width), nn.ReLU()]
    for _ in range(layers - 2):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 1))


def trained(model: nn.Module, before: Callable[[Any], Any] = lambda batch: batch) -> Callable[[Any], torch.Tensor]:
    """The plain step of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> torch.Tensor:
        inputs, targets = before(batch)
        loss = F.mse_loss(model(inputs).squeeze(-1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def plain(dataset: Any, batch_size: int = 256, width: int = 512, layers: int = 3, **options: Any) -> Probe:
    torch.manual_seed(0)
    model = mlp(width, layers)
    return Probe(DataLoader(dataset, batch_size, shuffle=True, **options), trained(model), model)


def ready(width: int = 512, size: int = 256) -> Probe:
    """Batches that are there: only the step can be slow."""
    torch.manual_seed(0)
    model = mlp(width)
    batches = [(part, part.sum(1)) for part in torch.randn(6 * size, FEATURES).split(size)]
    return Probe(batches, trained(model), model)


def zero_workers(wrong: bool) -> Probe:
    return plain(Samples(work=1500), 64, 1024, num_workers=0 if wrong else 1, persistent_workers=not wrong)


def many_workers(wrong: bool) -> Probe:
    return plain(Samples(work=1500), 64, num_workers=24 if wrong else 2, persistent_workers=True)


def far_storage(wrong: bool) -> Probe:
    return plain(Samples(sleep_s=0.002), 64, num_workers=2 if wrong else 16, persistent_workers=True)


def lazy_disk(wrong: bool) -> Probe:
    return plain(Samples(size=40_000, first_s=0.002 if wrong else 0.0), 64)


class Files(Dataset[Any]):
    """Samples of many files, of which the last one that was opened is kept."""

    def __init__(self, in_blocks: bool) -> None:
        self.in_blocks, self.opened, self.content = in_blocks, -1, torch.zeros(0)

    def __len__(self) -> int:
        return 8192

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index // 256 != self.opened:
            self.opened = index // 256
            self.content = torch.randn(256, FEATURES, generator=torch.Generator().manual_seed(self.opened))
            crunch(20_000)  # decoding the file
        row = self.content[index % 256]
        return row, row.sum()


class Blocks(torch.utils.data.Sampler[int]):
    """Files in random order, and samples in random order inside them."""

    def __iter__(self) -> Iterator[int]:
        dice = np.random.default_rng(0)
        for block in dice.permutation(32):
            yield from (block * 256 + dice.permutation(256)).tolist()

    def __len__(self) -> int:
        return 8192


def shuffled_files(wrong: bool) -> Probe:
    model = mlp()
    sampler = None if wrong else Blocks()
    return Probe(DataLoader(Files(wrong), 64, shuffle=wrong, sampler=sampler), trained(model), model)


def slow_collate(wrong: bool) -> Probe:
    def one_by_one(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.zeros(len(samples), FEATURES)
        for row, (values, _) in enumerate(samples):
            for column in range(FEATURES):
                inputs[row, column] = values[column]
        return inputs, torch.stack([target for _, target in samples])

    return plain(Samples(), 64, collate_fn=one_by_one if wrong else None)


class LoopModel(nn.Module):
    """Means over samples of different length: sample by sample, or all at once."""

    def __init__(self, in_python: bool) -> None:
        super().__init__()
        self.in_python = in_python
        self.embed, self.head = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, offsets = batch
        hidden = self.embed(values).relu()
        if not self.in_python:
            sizes = offsets.diff()
            owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
            return self.head(torch.zeros(len(sizes), 64).index_add(0, owner, hidden) / sizes[:, None])
        pooled = []
        for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            pooled.append(hidden[first:last].mean(0))
        return self.head(torch.stack(pooled))


def python_loop(wrong: bool) -> Probe:
    torch.manual_seed(0)
    sizes = torch.randint(4, 12, (400,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
    batches = [((torch.randn(int(sizes.sum()), 8), offsets), torch.randn(400)) for _ in range(6)]
    model = LoopModel(wrong)
    return Probe(batches, trained(model), model, num_samples=lambda batch: len(batch[1]))


def prints(wrong: bool) -> Probe:
    probe = ready(256)
    sink = io.StringIO()

    def step(batch: Any) -> None:
        loss = probe.step(batch)
        if wrong:
            for parameter in probe.model.parameters():  # type: ignore[union-attr]
                print(loss.item(), parameter.detach().flatten()[:200].tolist(), file=sink)

    return Probe(probe.loader, step, probe.model)


def slow_logger(wrong: bool) -> Probe:
    probe = ready()

    class Service:
        def log(self, values: dict[str, float]) -> None:
            time.sleep(0.01)  # a server far away

    service = Service()

    def step(batch: Any) -> None:
        loss = probe.step(batch)
        if wrong:
            service.log({"loss": loss.item()})

    return Probe(probe.loader, step, probe.model)


def saves_every_step(wrong: bool) -> Probe:
    probe = ready(1024, 128)

    def step(batch: Any) -> None:
        probe.step(batch)
        if wrong:
            with tempfile.TemporaryFile() as file:
                torch.save(probe.model.state_dict(), file)  # type: ignore[union-attr]

    return Probe(probe.loader, step, probe.model)


class Pieces(nn.Module):
    """One layer whose weights lie in hundreds of small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.randn(FEATURES) * 0.1 for _ in range(400))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ torch.stack(list(self.pieces)).T).relu().sum(1, keepdim=True)


def optimizer_loop(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = Pieces()
    fused = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]

    def step(batch: Any) -> None:
        inputs, targets = batch
        loss = F.mse_loss(model(inputs).squeeze(-1), targets)
        model.zero_grad()
        loss.backward()
        if not wrong:
            fused.step()
            return
        with torch.no_grad():
            for p, (first, second) in zip(model.parameters(), moments, strict=True):
                first.mul_(0.9).add_(p.grad, alpha=0.1)
                second.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.sub_(1e-4 * (first / 0.1) / ((second / 0.001).sqrt() + 1e-8 * p.grad.numel() ** 0))

    return Probe(ready(size=2048).loader, step, model)


def small_batch(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = mlp(256, 8)
    data = torch.randn(4096, FEATURES)
    size = 2 if wrong else 128
    batches = [(part, part.sum(1)) for part in data.split(size)]
    return Probe(batches, trained(model), model)


def padded(wrong: bool) -> Probe:
    """Sequences of 16 tokens on average, padded to the longest of all, or to the batch's."""
    torch.manual_seed(0)
    lengths = torch.randint(8, 24, (512,)).sort().values
    batches = []
    for part in lengths.split(64):
        longest = 128 if wrong else int(part.max())
        tokens = torch.zeros(len(part), longest, FEATURES)
        for row, length in enumerate(part.tolist()):
            tokens[row, :length] = torch.randn(length, FEATURES)
        batches.append((tokens, tokens.sum((1, 2))))
    batches = [batches[number] for number in (3, 7, 0, 5, 2, 6, 1, 4)]
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        tokens, targets = batch
        loss = F.mse_loss(model[-1](model[:-1](tokens).mean(1)).squeeze(-1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Probe(batches, step, model)


def doubles(wrong: bool) -> Probe:
    torch.manual_seed(0)
    kind = torch.float64 if wrong else torch.float32
    model = mlp(1024).to(kind)
    batches = [(torch.randn(256, FEATURES, dtype=kind), torch.randn(256, dtype=kind)) for _ in range(6)]
    return Probe(batches, trained(model), model)


def recompiles(wrong: bool) -> Probe:
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 10_000
    model = mlp(64)
    compiled = torch.compile(lambda inputs: model(inputs) * 2, dynamic=False, backend="aot_eager")
    sizes = range(200, 568) if wrong else [210] * 6  # as many as the first of them
    batches = [(torch.randn(size, FEATURES), torch.randn(size)) for size in sizes]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        inputs, targets = batch
        loss = F.mse_loss(compiled(inputs).squeeze(-1), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return Probe(batches, step, model, num_samples=lambda batch: len(batch[1]))


def hoards(wrong: bool) -> Probe:
    probe = ready()
    history = []

    def step(batch: Any) -> None:
        loss = probe.step(batch)
        if wrong:
            history.append((loss, torch.ones(1 << 17)))  # half a megabyte a step

    return Probe(probe.loader, step, probe.model)


def ahead_of_memory(wrong: bool) -> Probe:
    """Batches of 16 MB, made ahead by the dozen."""
    dataset = torch.utils.data.TensorDataset(torch.randn(512, 1 << 15), torch.randn(512))
    model = nn.Linear(1 << 15, 1)
    loader = DataLoader(dataset, 128, num_workers=1, prefetch_factor=1600 if wrong else 2, persistent_workers=True)
    return Probe(loader, trained(model), model)


def epoch_gap(wrong: bool) -> Probe:
    return plain(Samples(size=512, work=300), 64, num_workers=1, persistent_workers=not wrong)


# Nothing wrong: some of them are slow, because what they compute takes long.


def healthy_products(wrong: bool) -> Probe:
    return plain(Samples(), 512, 2048)


def healthy_workers(wrong: bool) -> Probe:
    return plain(Samples(work=100), 256, 1536, num_workers=1, persistent_workers=True)


def healthy_images(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(1),
    )
    model(torch.randn(1, 3, 32, 32))
    batches = [(torch.randn(64, 3, 32, 32), torch.randn(64)) for _ in range(8)]
    return Probe(batches, trained(model), model)


def healthy_sequence(wrong: bool) -> Probe:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.TransformerEncoder(layer, 2), nn.Linear(128, 1))
    batches = [(torch.randn(32, 64, FEATURES), torch.randn(32, 64)) for _ in range(6)]
    return Probe(batches, trained(model), model)
