"""The seed's way to train its model, re-created to compare with: padded rows, eager float32, loops over events and DOMs.

A library of end_to_end.py. Pulses of a DOM are found with one mask each and packed greedily into rows of 512; attention
scores of whole rows are formed and masked; events are filled one by one into an array as long as the longest.
"""

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stoker.data.plan import MicroBatch

ROW = 512
ROWS_AT_ONCE = 64


class SeedModel(nn.Module):
    def __init__(self, xyz: Tensor, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.register_buffer("xyz", xyz / 500)
        self.width = width
        self.pulse_input = nn.Linear(4, width)
        encoder = {"dim_feedforward": 4 * width, "dropout": 0.0, "activation": "gelu", "batch_first": True}
        self.pulse_layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, **encoder), layers, enable_nested_tensor=False
        )
        self.place = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, width))
        self.dom_layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, norm_first=True, **encoder), layers, enable_nested_tensor=False
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3))
        self.heads = heads

    def forward(self, rows: Tensor, dom_of: Tensor, sensor: Tensor, event_of: Tensor, num_events: int) -> Tensor:
        doms = torch.zeros(len(sensor), self.width, device=rows.device)
        count = torch.zeros(len(sensor), 1, device=rows.device)
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part, dom = rows[first : first + ROWS_AT_ONCE], dom_of[first : first + ROWS_AT_ONCE]
            hidden = dom[:, :, None] != dom[:, None, :]
            mask = torch.zeros(hidden.shape, device=rows.device).masked_fill(hidden, float("-inf"))
            mixed = self.pulse_layers(self.pulse_input(part), mask=mask.repeat_interleave(self.heads, 0))
            real = dom >= 0
            doms = doms.index_add(0, dom[real], mixed[real])
            count = count.index_add(0, dom[real], torch.ones(int(real.sum()), 1, device=rows.device))
        doms = doms / count + self.place(self.xyz[sensor])
        longest = int(torch.bincount(event_of).max())
        packed = torch.zeros(num_events, longest, self.width, device=rows.device)
        padding = torch.ones(num_events, longest, dtype=torch.bool, device=rows.device)
        for event in range(num_events):
            mine = doms[event_of == event]
            packed[event, : len(mine)] = mine
            padding[event, : len(mine)] = False
        mixed = self.dom_layers(packed, src_key_padding_mask=padding)
        pooled = (mixed * ~padding[:, :, None]).sum(1) / (~padding).sum(1, keepdim=True)
        direction = self.head(pooled)
        return direction / (direction.norm(dim=1, keepdim=True) + 1e-8)


def collate(events: list[dict[str, np.ndarray]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows of 512 pulses (R, 512, 4), the DOM of each (-1: padding), sensor and event of each DOM."""
    rows: list[list[Tensor]] = [[]]
    owners: list[list[Tensor]] = [[]]
    filled, sensors, event_of = 0, [], []
    for number, event in enumerate(events):
        columns = [(event["time"] - 1e4) / 3e4, np.log10(event["charge"] + 1e-8) / 3, event["sensor_id"] / 5160]
        pulses = torch.from_numpy(np.stack([*columns, event["auxiliary"]], 1).astype(np.float32))
        sensor = torch.from_numpy(event["sensor_id"].astype(np.int64))
        for one in torch.unique(sensor):
            mine = pulses[sensor == one][:ROW]
            if filled + len(mine) > ROW:
                rows.append([])
                owners.append([])
                filled = 0
            rows[-1].append(mine)
            owners[-1].append(torch.full((len(mine),), len(sensors)))
            filled += len(mine)
            sensors.append(int(one))
            event_of.append(number)
    padded = [nn.functional.pad(torch.cat(row), (0, 0, 0, ROW - sum(map(len, row)))) for row in rows]
    owner = [nn.functional.pad(torch.cat(row), (0, ROW - sum(map(len, row))), value=-1) for row in owners]
    return torch.stack(padded), torch.stack(owner), torch.tensor(sensors), torch.tensor(event_of)


def events_per_s(
    source: Any, direction: Tensor, xyz: Tensor, rows: np.ndarray, steps: int, device: torch.device
) -> float:
    """Training steps of `rows` events, collated on the main thread as the seed did."""
    model = SeedModel(xyz).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    pulses = source.gather(MicroBatch(rows))

    def events() -> list[dict[str, np.ndarray]]:
        bounds = zip(pulses.offsets[:-1], pulses.offsets[1:], strict=True)
        return [{name: column[a:b] for name, column in pulses.columns.items()} for a, b in bounds]

    begin = time.perf_counter()
    for step in range(steps + 1):
        if step == 1:
            begin = time.perf_counter()
        batch = [tensor.to(device) for tensor in collate(events())]
        cosine = (model(*batch, num_events=len(rows)) * direction.to(device)).sum(1).clamp(-1 + 1e-7, 1 - 1e-7)
        loss = torch.arccos(cosine).mean()
        assert torch.isfinite(loss)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
    return steps * len(rows) / (time.perf_counter() - begin)
