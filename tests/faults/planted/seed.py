"""The seed's own training, re-created plainly: float32, attention that nobody compiled, a loop over events.

Pulses of a batch lie in rows of 512; those of one DOM see each other. DOMs are then filled event by event into an array as
long as the longest event. `cured` says how many of its faults are gone: 1 the attention, 2 the loop too, 3 the precision.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from stoker.doctor.probe import Probe

ROW, EVENTS, WIDTH, HEADS, LAYERS = 512, 256, 128, 4, 4


class Layer(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor, group: Tensor) -> Tensor:
        parts = self.qkv(self.first(tokens)).chunk(3, -1)
        query, key, value = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in parts)
        if self.fused:
            inside = (group[:, :, None] == group[:, None, :])[:, None]
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=inside)
        else:

            def same_group(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return torch.where(group[b, i] == group[b, j], score, -float("inf"))

            mixed = flex_attention(query, key, value, score_mod=same_group)
        tokens = tokens + self.out(mixed.transpose(1, 2).flatten(2))
        return tokens + self.inner(self.second(tokens))


class SeedModel(nn.Module):
    def __init__(self, cured: int) -> None:
        super().__init__()
        self.cured = cured
        self.enter, self.head = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.pulse_layers = nn.ModuleList(Layer(cured >= 1) for _ in range(LAYERS))
        self.dom_layers = nn.ModuleList(Layer(cured >= 1) for _ in range(LAYERS))

    def forward(self, pulses: Tensor, dom: Tensor, event: Tensor) -> Tensor:
        """pulses (R, ROW, 4), dom of each (R, ROW; -1: none), event of each DOM (D)."""
        tokens = self.enter(pulses)
        for layer in self.pulse_layers:
            tokens = layer(tokens, dom)
        real = dom >= 0
        doms = torch.zeros(len(event), WIDTH, device=pulses.device).index_add(0, dom[real], tokens[real].float())
        filled, group = self._by_event(doms, event)
        for layer in self.dom_layers:
            filled = layer(filled, group)
        return F.normalize(self.head(filled.mean(1).float()), dim=-1, eps=1e-6)

    def _by_event(self, doms: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
        count = torch.bincount(event, minlength=EVENTS)
        longest = int(count.max())
        filled = torch.zeros(EVENTS, longest, WIDTH, device=doms.device)
        group = torch.full((EVENTS, longest), -1, device=doms.device)
        if self.cured >= 2:
            place = torch.arange(len(event), device=doms.device) - (count.cumsum(0) - count)[event]
            filled[event, place] = doms
            group[event, place] = 0
            return filled, group
        for number in range(EVENTS):
            mine = doms[event == number]
            filled[number, : len(mine)] = mine
            group[number, : len(mine)] = 0
        return filled, group


def events(device: torch.device, count: int = 4, seed: int = 0) -> list[Any]:
    """Batches of events of the size that IceCube's have: 62 DOMs, of which three in four have one pulse."""
    dice = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        num_doms = torch.empty(EVENTS).log_normal_(3.7, 0.8, generator=dice).clamp(5, 400).long()
        event = torch.repeat_interleave(torch.arange(EVENTS), num_doms)
        sizes = torch.ones(len(event), dtype=torch.long)
        many = torch.rand(len(event), generator=dice) < 0.22
        sizes[many] = torch.randint(2, 16, (int(many.sum()),), generator=dice)
        dom = torch.repeat_interleave(torch.arange(len(event)), sizes)
        rows = -(-len(dom) // ROW)
        dom = F.pad(dom, (0, rows * ROW - len(dom)), value=-1).view(rows, ROW)
        pulses = torch.randn(rows, ROW, 4, generator=dice)
        towards = F.normalize(torch.randn(EVENTS, 3, generator=dice), dim=-1)
        batches.append(tuple(one.to(device) for one in (pulses, dom, event, towards)))
    return batches


def probe(cured: int) -> Probe:
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = SeedModel(cured).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(batch: Any) -> None:
        pulses, dom, event, towards = batch
        with torch.autocast("cuda", torch.bfloat16, enabled=cured >= 3):
            cosine = (model(pulses, dom, event) * towards).sum(1).clamp(-1 + 1e-7, 1 - 1e-7)
        optimizer.zero_grad()
        torch.arccos(cosine).mean().backward()
        optimizer.step()

    return Probe(events(device), step, model, num_samples=lambda batch: EVENTS, name=f"seed, {cured} cured")


def seeds_own(wrong: bool) -> Probe:
    return probe(0 if wrong else 1)


def seeds_loop(wrong: bool) -> Probe:
    return probe(1 if wrong else 2)
