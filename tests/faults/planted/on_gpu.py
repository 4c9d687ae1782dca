"""Loops on a GPU, each with one thing wrong, or right. Written after the rules but for the first four."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stoker.doctor.probe import Probe

GPU = torch.device("cuda")


def step_of(model: nn.Module, *, half: bool = True, read: bool = False, non_blocking: bool = False) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        inputs, targets = (one.to(GPU, non_blocking=non_blocking) for one in batch)
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            loss = F.mse_loss(model(inputs).squeeze(-1).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if read and loss.item() > 1e9:
            raise ValueError("diverged")

    return step


def wide(width: int = 4096, layers: int = 4, features: int = 1024) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Linear(features, width), nn.GELU()]
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*parts, nn.Linear(width, 1)).to(GPU)


def there(size: int, *shape: int) -> list[Any]:
    """Batches that lie on the GPU."""
    return [(torch.randn(size, *shape, device=GPU), torch.randn(size, device=GPU)) for _ in range(6)]


def single_precision(wrong: bool) -> Probe:
    model = wide()
    return Probe(there(4096, 1024), step_of(model, half=not wrong), model)


def reads_the_loss(wrong: bool) -> Probe:
    """Many small layers: without the reading the host would be ahead of the GPU."""
    model = wide(4096, 24)
    step = step_of(model)

    def reading(batch: Any) -> None:
        step(batch)
        if wrong:
            for parameter in model.parameters():
                parameter.grad.norm().item()

    return Probe(there(256, 1024), reading, model)


def pageable(wrong: bool) -> Probe:
    model = wide(2048, 2, 8192)
    data = TensorDataset(torch.randn(8192, 8192), torch.randn(8192))
    batches = list(DataLoader(data, 2048))
    if not wrong:
        batches = [[one.pin_memory() for one in batch] for batch in batches]
    return Probe(batches, step_of(model, non_blocking=not wrong), model)


def few_samples(wrong: bool) -> Probe:
    model = wide(1024, 6)
    return Probe(there(16 if wrong else 1024, 1024), step_of(model), model)


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv, self.out, self.head = nn.Linear(256, 768), nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            query, key, value = (
                one.unflatten(-1, (4, 64)).transpose(1, 2) for one in self.qkv(tokens).chunk(3, dim=-1)
            )
            if self.fused:
                mixed = F.scaled_dot_product_attention(query, key, value)
            else:
                scores = query @ key.transpose(-1, -2) / 8
                mixed = torch.softmax(scores, -1).to(value.dtype) @ value
            tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(tokens).mean(1)


def scores_written(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = Attention(fused=not wrong).to(GPU)
    return Probe(there(16, 1024, 256), step_of(model), model)


class Ragged(nn.Module):
    """Means over samples of different length."""

    def __init__(self, in_python: bool) -> None:
        super().__init__()
        self.in_python = in_python
        self.embed, self.head = nn.Linear(64, 512), nn.Linear(512, 1)

    def forward(self, batch: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        values, sizes = batch
        hidden = self.embed(values).relu()
        if self.in_python:
            pooled = [part.mean(0) for part in hidden.split(sizes)]
            return self.head(torch.stack(pooled))
        lengths = torch.tensor(sizes, device=GPU)
        owner = torch.repeat_interleave(torch.arange(len(sizes), device=GPU), lengths, output_size=len(values))
        total = torch.zeros(len(sizes), 512, device=GPU, dtype=hidden.dtype).index_add(0, owner, hidden)
        return self.head(total / lengths[:, None])


def loop_over_samples(wrong: bool) -> Probe:
    torch.manual_seed(0)
    sizes = torch.randint(10, 60, (1024,)).tolist()
    model = Ragged(wrong).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        loss = F.mse_loss(model((batch[0].to(GPU), sizes)).squeeze(-1), batch[1].to(GPU))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batches = [(torch.randn(sum(sizes), 64, device=GPU), torch.randn(1024, device=GPU)) for _ in range(4)]
    return Probe(batches, step, model, num_samples=lambda batch: len(batch[1]))


def convolutions(width: int = 128) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(6):
        parts += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1)).to(GPU)


def channels_first(wrong: bool) -> Probe:
    model, batches = convolutions(), there(128, 3, 64, 64)
    if not wrong:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batches = [(one.contiguous(memory_format=torch.channels_last), two) for one, two in batches]
    return Probe(batches, step_of(model), model)


def between_steps(wrong: bool) -> Probe:
    from planted.loops import Samples

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.GELU(), nn.Linear(2048, 1)).to(GPU)
    workers = 0 if wrong else 16  # one a core
    loader = DataLoader(Samples(16384, work=1000), 256, num_workers=workers, persistent_workers=not wrong)
    return Probe(loader, step_of(model), model)


# Nothing wrong.


def healthy_wide(wrong: bool) -> Probe:
    model = wide(8192, 4)
    return Probe(there(8192, 1024), step_of(model), model)


def healthy_channels_last(wrong: bool) -> Probe:
    return channels_first(False)


def healthy_attention(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = Attention(fused=True).to(GPU)
    return Probe(there(64, 1024, 256), step_of(model), model)
