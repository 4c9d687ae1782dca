"""More loops, written after the rules were fixed: no threshold was chosen with them."""

import csv
import io
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import lightning
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from planted.loops import FEATURES, Samples, crunch, mlp, ready, trained
from stoker.doctor.probe import Probe, lightning_probe


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, width: int, chatty: bool = False) -> None:
        super().__init__()
        self.model, self.chatty = mlp(width), chatty

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.mse_loss(self.model(inputs).squeeze(-1), targets)
        if self.chatty:
            for name, parameter in self.named_parameters():
                print(name, parameter.norm().item(), parameter.flatten()[:300].tolist(), file=NOWHERE)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


NOWHERE = Nowhere()


def lightning_zero_workers(wrong: bool) -> Probe:
    workers = 0 if wrong else 1
    loader = DataLoader(Samples(work=1200), 64, shuffle=True, num_workers=workers, persistent_workers=not wrong)
    return lightning_probe(Module(1024), loader)


def lightning_prints(wrong: bool) -> Probe:
    return lightning_probe(Module(256, chatty=wrong), ready().loader)


def slow_generator(wrong: bool) -> Probe:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            for batch in ready().loader:  # type: ignore[attr-defined]
                if wrong:
                    crunch(200_000)
                yield batch

    probe = ready()
    return Probe(Stream(), probe.step, probe.model)


class Events(nn.Module):
    """Attention inside events of different size: event by event, or all at once with a mask."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.one_by_one = one_by_one
        self.qkv, self.head = nn.Linear(FEATURES, 96), nn.Linear(32, 1)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, sizes = batch
        query, key, value = self.qkv(tokens).chunk(3, -1)
        if not self.one_by_one:
            inside = torch.arange(tokens.shape[1]) < sizes[:, None]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=inside[:, None, :])
            return self.head((mixed * inside[:, :, None]).sum(1) / sizes[:, None])
        pooled = []
        for row, size in enumerate(sizes.tolist()):
            scores = (query[row, :size] @ key[row, :size].T / 32**0.5).softmax(-1)
            pooled.append((scores @ value[row, :size]).mean(0))
        return self.head(torch.stack(pooled))


def ragged_attention(wrong: bool) -> Probe:
    torch.manual_seed(0)
    sizes = torch.randint(13, 17, (256,))
    batches = [((torch.randn(256, 16, FEATURES), sizes), torch.randn(256)) for _ in range(6)]
    model = Events(wrong)
    return Probe(batches, trained(model), model, num_samples=lambda batch: len(batch[1]))


def lists_to_tensors(wrong: bool) -> Probe:
    def collate(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.tensor([values.tolist() for values, _ in samples])
        return inputs, torch.tensor([float(target) for _, target in samples])

    model = mlp(128)
    loader = DataLoader(Samples(), 256, shuffle=True, collate_fn=collate if wrong else None)
    return Probe(loader, trained(model), model)


def csv_every_step(wrong: bool) -> Probe:
    probe = ready(256)
    file = tempfile.TemporaryFile("w+", newline="")  # noqa: SIM115
    writer = csv.writer(file)

    def step(batch: Any) -> None:
        loss = probe.step(batch)
        if wrong:
            for number in range(150):
                writer.writerow([number, float(loss), *range(20)])
            file.flush()

    return Probe(probe.loader, step, probe.model)


def activations_saved(wrong: bool) -> Probe:
    probe = ready(512)

    def step(batch: Any) -> None:
        probe.step(batch)
        if wrong:
            with tempfile.TemporaryFile() as file:
                np.save(file, np.random.default_rng(0).random((256, 2048)))

    return Probe(probe.loader, step, probe.model)


def sgd_by_hand(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), *(nn.Linear(16, 16) for _ in range(150)), nn.Linear(16, 1))
    fused = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        loss = F.mse_loss(model(batch[0]).squeeze(-1), batch[1])
        model.zero_grad()
        loss.backward()
        if not wrong:
            fused.step()
            return
        for _, parameter in model.named_parameters():
            norm = parameter.grad.norm().item()
            parameter.data = parameter.data - 1e-4 * parameter.grad / max(1.0, norm)

    return Probe(ready(size=1024).loader, step, model)


def keeps_graphs(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = mlp(256)
    losses = []

    def step(batch: Any) -> None:
        loss = F.mse_loss(model(batch[0]).squeeze(-1), batch[1])
        losses.append(loss if wrong else loss.item())  # with the activations of the whole step behind it

    return Probe(ready(size=256).loader, step, model)


def one_image_at_a_time(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3 if one == 0 else 16, 16, 3, padding=1) for one in range(12)), nn.Flatten(), nn.LazyLinear(1)
    )
    size = 1 if wrong else 32
    batches = [(part, part.mean((1, 2, 3))) for part in torch.randn(256, 3, 8, 8).split(size)]
    model(batches[0][0])
    return Probe(batches, trained(model), model)


def wide_images(wrong: bool) -> Probe:
    torch.manual_seed(0)
    kind = torch.float64 if wrong else torch.float32
    model = nn.Sequential(
        nn.Conv2d(3, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(1)
    )
    model = model.to(kind)
    batches = [(torch.randn(32, 3, 24, 24, dtype=kind), torch.randn(32, dtype=kind)) for _ in range(6)]
    model(batches[0][0])
    return Probe(batches, trained(model), model)


class Shards(Dataset[Any]):
    """Forty files, of which four are kept open."""

    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shard = index // 200
        if shard not in self.kept:
            crunch(15_000)
            if len(self.kept) == 4:
                self.kept.pop(next(iter(self.kept)))
            self.kept[shard] = torch.randn(200, FEATURES, generator=torch.Generator().manual_seed(shard))
        row = self.kept[shard][index % 200]
        return row, row.sum()


def thrashing(wrong: bool) -> Probe:
    model = mlp(256)
    return Probe(DataLoader(Shards(), 64, shuffle=wrong), trained(model), model)


def bucket_far_away(wrong: bool) -> Probe:
    model = mlp(256)
    loader = DataLoader(
        Samples(sleep_s=0.003), 32, shuffle=True, num_workers=1 if wrong else 16, persistent_workers=True
    )
    return Probe(loader, trained(model), model)


class Link:
    """Storage that gives one sample at a time, whoever asks."""

    def __init__(self, seconds: float) -> None:
        self.lock, self.seconds = multiprocessing.get_context("fork").Lock(), seconds

    def fetch(self) -> None:
        with self.lock:
            time.sleep(self.seconds)


class Far(Dataset[Any]):
    def __init__(self, link: Link | None) -> None:
        self.link, self.values = link, torch.randn(4096, FEATURES)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.link is not None:
            self.link.fetch()
        return self.values[index], self.values[index].sum()


def narrow_link(wrong: bool) -> Probe:
    model = mlp(256)
    loader = DataLoader(Far(Link(0.001) if wrong else None), 32, shuffle=True, num_workers=2, persistent_workers=True)
    return Probe(loader, trained(model), model)


def padded_little_used(wrong: bool) -> Probe:
    torch.manual_seed(0)
    length = 200 if wrong else 40
    batches = []
    for _ in range(6):
        tokens = torch.zeros(32, length, FEATURES)
        tokens[:, :40] = torch.randn(32, 40, FEATURES)
        batches.append((tokens, torch.randn(32, length)))
    model = mlp(384)
    return Probe(batches, trained(model), model)


# Nothing wrong.


def healthy_lightning(wrong: bool) -> Probe:
    return lightning_probe(Module(1536), ready(size=512).loader)


def healthy_recurrent(wrong: bool) -> Probe:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.GRU(FEATURES, 256, batch_first=True), nn.Linear(256, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(inputs)[0][:, -1])

    model = Recurrent()
    batches = [(torch.randn(64, 24, FEATURES), torch.randn(64)) for _ in range(6)]
    return Probe(batches, trained(model), model)


def healthy_deep(wrong: bool) -> Probe:
    torch.manual_seed(0)
    model = mlp(768, 14)
    return Probe(ready(size=384).loader, trained(model), model)


def healthy_slow_storage(wrong: bool) -> Probe:
    """Far away, and asked early enough."""
    model = mlp(1536, 4)
    loader = DataLoader(Samples(sleep_s=0.0005), 128, shuffle=True, num_workers=4, persistent_workers=True)
    return Probe(loader, trained(model), model)


def healthy_logs_now_and_then(wrong: bool) -> Probe:
    probe = ready(1024)
    count = iter(range(1 << 30))

    def step(batch: Any) -> None:
        loss = probe.step(batch)
        if next(count) % 50 == 0:
            print(f"{loss.item():.4f}", time.time(), file=NOWHERE)

    return Probe(probe.loader, step, probe.model)
