"""Frozen layers, rates that fall towards the first layer, and the end of patience."""

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

from stoker.errors import UserError
from stoker.runs.events import EventLog
from stoker.train.checkpoint import load_optimizer, optimizer_tensors
from stoker.train.config import TrainConfig
from stoker.train.guards import Patience
from stoker.train.layers import freeze, layer_numbers
from stoker.train.optim import build_optimizer, check_optimizer, step_unless
from stoker.train.schedule import checked


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


def test_stacks_are_found_wherever_they_stand() -> None:
    vit = layer_numbers(torchvision.models.vit_b_16(num_classes=5))
    assert vit["conv_proj.weight"] == vit["class_token"] == vit["encoder.pos_embedding"] == 0
    for block in range(12):
        own = {number for name, number in vit.items() if f".encoder_layer_{block}." in name}
        assert own == {block + 1}
    assert vit["encoder.ln.weight"] == 12
    assert vit["heads.head.weight"] == 13
    dense = layer_numbers(torchvision.models.densenet121(num_classes=5))
    assert dense["features.denseblock1.denselayer1.conv1.weight"] == 1
    assert dense["classifier.weight"] == max(dense.values()) > 58


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


class IntAdam(torch.optim.Optimizer):
    """Counts its steps with a number of Python, as older ones do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["rate"] = 0.9 ** state["step"]
            state["nothing"] = None
            parameter.data.sub_(self.param_groups[0]["lr"] * parameter.grad / (1 - state["rate"]))


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
        lambda parameters: IntAdam(parameters, lr=0.1),
        lambda parameters: torch.optim.RAdam(parameters, lr=0.1),
    ],
)
def test_what_any_optimizer_keeps_comes_back(make: Any) -> None:
    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            (model(torch.full((2, 3), 1.0 + step)) ** 2).sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = make(model.parameters())
    trained(model, optimizer, 3)
    other = nn.Linear(3, 4)
    other.load_state_dict(model.state_dict())
    again = make(other.parameters())
    load_optimizer(other, again, optimizer_tensors(model, optimizer), type(optimizer).__name__, "here")
    trained(model, optimizer, 3)
    trained(other, again, 3)
    assert torch.equal(model.weight, other.weight)
    assert all(type(a) is type(b) for one, two in zip(optimizer.state.values(), again.state.values(), strict=True)
               for a, b in ((one[key], two.get(key)) for key in one))  # fmt: skip


def test_what_cannot_be_driven_or_kept_is_said() -> None:
    model = nn.Linear(3, 1)
    for made, words in (
        (None, "is a NoneType"),
        (torch.optim.LBFGS(model.parameters()), "several times a step"),
        (torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1), "the model does not have"),
    ):
        with pytest.raises(UserError, match=words):
            check_optimizer(made, model)
    odd = torch.optim.SGD(model.parameters(), lr=0.1)
    odd.state[model.weight]["word"] = "text"
    with pytest.raises(UserError, match="keeps word, a str"):
        optimizer_tensors(model, odd)
    for schedule, words in (
        (lambda config, step, steps: None, "gives no number for step 0"),
        (lambda config, step: 1.0, "gives no number"),
        (lambda config, step, steps: math.nan, "gives nan for step 0"),
        (lambda config, step, steps: -1.0, "gives -1.0"),
    ):
        with pytest.raises(UserError, match=words):
            checked(schedule)(TrainConfig(), 0, 10)  # type: ignore[arg-type]
    assert checked(lambda config, step, steps: torch.tensor(0.5))(TrainConfig(), 0, 10) == 0.5  # type: ignore[arg-type, return-value]


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
