"""Kernels against the plain path in float64, on the CPU by Triton's interpreter; tests/gpu repeats it on a real GPU."""

import math

import pytest
import torch
from torch import Tensor

from stoker.recipes.icecube.attention import Bias, Segments, attend, segment_mean

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels instead")
LAYOUTS = [[1] * 40, [0, 3, 0, 1, 1, 33, 2, 0], [70, 1, 130], [5] * 13, [200], [0, 0]]


def random_bias(tokens: int, heads: int, generator: torch.Generator) -> Bias:
    where = torch.randn(tokens, 4, generator=generator, dtype=torch.float64) * 200
    table = torch.randn(heads, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    return Bias(where, table, 1 / 60)


def gradients(out: Tensor, weight: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_attention_and_its_gradients_equal_the_plain_path(lengths: list[int], with_bias: bool) -> None:
    from stoker.recipes.icecube import kernels

    generator = torch.Generator().manual_seed(len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens, heads, channels = int(offsets[-1]), 3, 16
    segments = Segments.of(offsets, tokens, block=32)
    qkv = torch.randn(tokens, 3, heads, channels, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(tokens, heads, channels, generator=generator, dtype=torch.float64)
    bias = random_bias(tokens, heads, generator) if with_bias else None
    inputs = [qkv] if bias is None else [qkv, bias.table]
    expected = gradients(attend(qkv, segments, bias), weight, inputs) if max(lengths) > 1 or bias is None else None
    single = [tensor.detach().float().requires_grad_() for tensor in inputs]
    where = None if bias is None else bias.spacetime.float()
    out = kernels.attend(
        single[0], segments.start, segments.end, where, None if bias is None else single[1], 1 / 60, segments.block
    )
    found = gradients(out, weight.float(), single)
    if expected is None:  # nobody attends to another: the plain path does not even look at the table
        assert torch.equal(found[0], qkv[:, 2].float())
        assert not found[2].any()
        return
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("lengths", LAYOUTS)
def test_means_of_segments_and_their_gradients(lengths: list[int]) -> None:
    from stoker.recipes.icecube import kernels

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    segments = Segments.of(offsets, int(offsets[-1]))
    values = torch.randn(int(offsets[-1]), 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(lengths), 12, dtype=torch.float64)
    expected = gradients(segment_mean(values, segments), weight, [values])
    single = values.detach().float().requires_grad_()
    found = gradients(kernels.mean(single, offsets, segments.number), weight.float(), [single])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_a_program_of_single_tokens_copies_their_values() -> None:
    from stoker.recipes.icecube import kernels

    offsets = torch.arange(65)
    segments = Segments.of(offsets, 64, block=32)
    qkv = torch.full((64, 3, 2, 16), math.nan)
    qkv[:, 2] = torch.randn(64, 2, 16)
    out = kernels.attend(qkv, segments.start, segments.end, None, None, 1.0, 32)
    assert torch.equal(out, qkv[:, 2])
