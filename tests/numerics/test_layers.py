"""Frozen layers, rates that fall towards the first layer, and the end of patience."""

import math
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from stoker.errors import UserError
from stoker.runs.events import EventLog
from stoker.train.config import TrainConfig
from stoker.train.guards import Patience
from stoker.train.layers import freeze, layer_numbers
from stoker.train.optim import build_optimizer, step_unless


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2))


def test_frozen_layers_do_not_move_neither_do_their_statistics() -> None:
    model = small().train()
    assert freeze(model, ["0", "1"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(model, TrainConfig())
    model.eval()
    model.train()  # as after an evaluation
    model(torch.randn(8, 3, 4, 4)).square().mean().backward()
    step_unless(optimizer, torch.zeros(()))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"3.weight", "3.bias"}
    assert model[3].training


def test_all_but_the_head_is_frozen() -> None:
    model = timm.create_model("resnet10t", num_classes=5)
    frozen = freeze(model, ["!fc"])
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {"fc.weight", "fc.bias"}
    assert len(frozen) == len(list(model.parameters())) - 2


@pytest.mark.parametrize(("names", "words"), [(["nothing"], "There are 0, 1, 3"), (["0", "1", "3"], "leaves nothing")])
def test_what_cannot_be_frozen_is_said(names: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        freeze(small(), names)


@pytest.mark.parametrize(
    ("name", "last", "together"),
    [
        ("resnet18", 9, ("conv1.weight", "bn1.weight")),
        ("vit_tiny_patch16_224", 13, ("cls_token", "pos_embed", "patch_embed.proj.weight")),
    ],
)
def test_layers_are_numbered_from_the_first_to_the_head(name: str, last: int, together: tuple[str, ...]) -> None:
    model = timm.create_model(name, num_classes=5)
    numbers = layer_numbers(model)
    assert {numbers[one] for one in together} == {0}
    assert max(numbers.values()) == last
    head = "fc.weight" if name == "resnet18" else "head.weight"
    assert [one for one, number in numbers.items() if number == last and one.endswith("weight")] == [head]
    if name.startswith("vit"):
        assert numbers["blocks.3.mlp.fc1.weight"] == 4
        assert numbers["norm.weight"] == 12  # with the last block


def test_each_layer_learns_at_its_share_of_the_rate() -> None:
    model = timm.create_model("resnet18", num_classes=5)
    optimizer = build_optimizer(model, TrainConfig(lr=0.1, layer_decay=0.5))
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    numbers = layer_numbers(model)
    assert len(rates) == len(numbers)
    for name, parameter in model.named_parameters():
        assert rates[id(parameter)] == pytest.approx(0.1 * 0.5 ** (9 - numbers[name]))


def test_an_optimizer_of_others_skips_a_bad_step() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    before = model.weight.detach().clone()
    step_unless(optimizer, torch.ones(()))
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    step_unless(optimizer, torch.zeros(()))
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("goal", "scores", "lost"),
    [
        ("min", [3, 2, 2, 2], True),
        ("min", [3, 2, 2, 1], False),
        ("max", [3, 2, 2], True),
        ("max", [1, 2, 3], False),
        ("min", [math.nan, math.nan, 1], False),
        ("min", [1, math.nan, math.nan], True),
    ],
)
def test_patience_ends_after_two_evaluations_that_are_no_better(
    tmp_path: Path, goal: str, scores: list[float], lost: bool
) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        patience = Patience(2, goal, log)
        for step, score in enumerate(scores):
            assert not patience.is_lost
            patience.look_at(step, score)
    assert patience.is_lost == lost
