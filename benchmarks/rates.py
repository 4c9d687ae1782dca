"""The seed's table of learning rates, made again: its raw features beside normalised ones, 1e-5 to 1e-3, with errors.

A small transformer learns by its angle where a plane wave of light comes from, of pulses in a block of ice a kilometre wide:
time in nanoseconds, charge, auxiliary, place in metres, of the sizes that the seed's features had.
Every rate starts from the same weights on the same batches. Labels of other events must give no decision; a range that ends
too low must be extended.
"""

import argparse
from typing import Any

import torch
from measure import emit, line
from torch import Tensor, nn
from torch.nn import functional as F

from stoker.doctor.learning.arms import Trainer, try_rates
from stoker.doctor.learning.facts import Arm

RATES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
PULSES, COLUMNS = 32, 6
SIZE, LIGHT = 1000.0, 0.3  # metres, and metres a nanosecond


class Model(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(COLUMNS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.leave = nn.Linear(width, 3)

    def forward(self, pulses: Tensor, mask: Tensor) -> Tensor:
        hidden = self.body(self.enter(pulses), src_key_padding_mask=~mask)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(self.leave(mean), dim=1)


def waves(events: int) -> tuple[Tensor, Tensor, Tensor]:
    """(events, PULSES, COLUMNS) raw pulses, which of them there are, and (events, 3) directions."""
    dice = torch.Generator().manual_seed(0)
    towards = F.normalize(torch.randn(events, 3, generator=dice), dim=1)
    place = SIZE * (torch.rand(events, PULSES, 3, generator=dice) - 0.5)
    begin = 5_714 + 20_000 * torch.rand(events, 1, generator=dice)
    time = begin + (place * towards[:, None]).sum(2) / LIGHT + 20 * torch.randn(events, PULSES, generator=dice)
    charge = torch.exp(1.5 * torch.randn(events, PULSES, generator=dice))
    auxiliary = (torch.rand(events, PULSES, generator=dice) < 0.28).float()
    pulses = torch.cat([torch.stack([time, charge, auxiliary], 2), place], 2)
    return pulses, torch.ones(events, PULSES, dtype=torch.bool), towards


def normalised(pulses: Tensor, mask: Tensor) -> Tensor:
    """Charge by its logarithm, time and place beside the mean of the event; then mean zero and spread one."""
    changed = pulses.clone()
    changed[..., 1] = changed[..., 1].clamp_min(1e-3).log10()
    within = (changed * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    for column in (0, 3, 4, 5):
        changed[..., column] -= within[:, None, column]
    mean, spread = changed[mask].mean(0), changed[mask].std(0)
    return ((changed - mean) / spread) * mask[..., None]


def try_on(pulses: Tensor, mask: Tensor, towards: Tensor, steps: int, rates: tuple[float, ...]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Model()
    size = len(pulses) // steps
    batches = [
        tuple(one[size * number : size * (number + 1)] for one in (pulses, mask, towards)) for number in range(steps)
    ]

    def loss(batch: Any) -> Tensor:
        cosine = (model(batch[0], batch[1]) * batch[2]).sum(1)
        return torch.arccos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)).mean()

    trainer = Trainer(model, loss, lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate))
    return try_rates(trainer, batches, None, rates)


def tell(name: str, arms: list[Arm], best: Arm | None, tried: int) -> None:
    for arm in arms:
        p50, p99, top = arm.norms
        details = {"rate": arm.rate, "error": arm.error, "norm_p50": p50, "norm_p99": p99, "norm_max": top,
                   "bad_layer": arm.bad_layer, "best": arm is best}  # fmt: skip
        emit(line(f"loss falls by, {name}", [arm.gain], "rad", **details))
    emit(line(f"decision, {name}", [0.0 if best is None else best.rate], "rate", extended=len(arms) - tried))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of 64 events")
    options = parser.parse_args()
    pulses, mask, towards = waves(64 * options.steps)
    good = normalised(pulses, mask)
    for name, features in (("raw", pulses), ("normalised", good)):
        arms, best, _ = try_on(features, mask, towards, options.steps, RATES)
        tell(name, arms, best, len(RATES))
    order = torch.randperm(len(towards), generator=torch.Generator().manual_seed(1))
    arms, best, _ = try_on(good, mask, towards[order], options.steps, RATES)
    tell("normalised, labels of other events", arms, best, len(RATES))
    low = (1e-6, 3e-6, 1e-5)
    arms, best, _ = try_on(good, mask, towards, options.steps, low)
    tell("normalised, a range that ends too low", arms, best, len(low))


if __name__ == "__main__":
    main()
