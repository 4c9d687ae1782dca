"""A loop whose labels belong to other samples, for benchmarks/tune.py: no rate learns anything from it."""

import os

import torch

import stoker


def make(width: int = 32) -> stoker.Probe:
    generator = torch.Generator().manual_seed(int(os.environ.get("SHUFFLED_SEED", "0")))
    x = torch.randn(4096, 16, generator=generator)
    y = (x[:, 0] > 0).long()[torch.randperm(4096, generator=generator)]
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        optimizer.zero_grad()
        loss(batch).backward()
        optimizer.step()

    return stoker.Probe(list(zip(x.split(64), y.split(64), strict=True)), step, model, loss=loss, optimizer=optimizer)


loop = stoker.Tunable(make, {"width": (32,)}, name="shuffled labels")
