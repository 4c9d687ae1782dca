"""LAMB against timm's, steps that are skipped, and how a rate follows the number of samples a step."""

import pytest
import timm.optim
import torch
from torch import nn

from stoker.data.order import ExactOrder, RepeatedOrder
from stoker.errors import UserError
from stoker.train.config import TrainConfig
from stoker.train.optim import build_optimizer, parameter_groups, step_unless
from stoker.train.schedule import scaled_lr


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


def gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_lamb_takes_the_steps_of_timms() -> None:
    config = TrainConfig(optimizer="lamb", lr=5e-3, weight_decay=0.02)
    ours, theirs = make_model(), make_model()
    mine = build_optimizer(ours, config)
    decayed, plain = parameter_groups(theirs)
    groups = [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
    reference = timm.optim.Lamb(groups, lr=5e-3, max_grad_norm=None, trust_clip=False, always_adapt=False)
    for step in range(8):
        gradients(ours, step)
        gradients(theirs, step)
        step_unless(mine, torch.zeros(()))
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_lamb_skips_a_bad_step_without_a_trace() -> None:
    config = TrainConfig(optimizer="lamb", lr=5e-3, weight_decay=0.02)
    whole, skipping = make_model(), make_model()
    first, second = build_optimizer(whole, config), build_optimizer(skipping, config)
    for step in range(6):
        gradients(whole, step)
        step_unless(first, torch.zeros(()))
        gradients(skipping, step)
        step_unless(second, torch.zeros(()))
        for parameter in skipping.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        step_unless(second, torch.ones(()))
    for a, b in zip(whole.parameters(), skipping.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_rate_is_stated_for_a_number_of_samples() -> None:
    assert scaled_lr(TrainConfig(lr=0.1), 1024)[0] == 0.1
    lr, rule = scaled_lr(TrainConfig(lr=0.1, lr_batch=256), 1024)
    assert lr == pytest.approx(0.4)
    assert "0.1 for 256 samples a step, linear to 1024" in rule
    assert scaled_lr(TrainConfig(lr=0.1, lr_batch=256, lr_rule="sqrt"), 1024)[0] == pytest.approx(0.2)
    with pytest.raises(UserError, match="cuts steps by cost"):
        scaled_lr(TrainConfig(lr=0.1, lr_batch=256), None)


def test_a_repeated_order_names_each_sample_as_often_as_asked() -> None:
    order = RepeatedOrder(ExactOrder(100, 0, 0), 3)
    whole = order.take(0, 100)
    assert (whole[:99].reshape(-1, 3) == whole[:99:3, None]).all()
    assert len(set(whole.tolist())) == 34
    for start, stop in ((0, 7), (5, 11), (98, 100)):
        assert (order.take(start, stop) == whole[start:stop]).all()
