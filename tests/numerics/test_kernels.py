"""Kernels against the plain path in float64, on the CPU by Triton's interpreter; tests/gpu repeats it on a real GPU."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from stoker.recipes.icecube.attention import LONG, SHORT, Bias, Segments, attend, layer_kernels, segment_mean

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled kernels instead")
LAYOUTS = [[1] * 40, [0, 3, 0, 1, 1, 33, 2, 0], [70, 1, 130], [5] * 13, [200], [0, 0]]


def random_bias(tokens: int, heads: int, generator: torch.Generator) -> Bias:
    where = torch.randn(tokens, 4, generator=generator, dtype=torch.float64) * 200
    table = torch.randn(heads, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    return Bias(where, table, 1 / 60)


def gradients(out: Tensor, weight: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


@pytest.mark.parametrize("block", [SHORT, LONG])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_attention_and_its_gradients_equal_the_plain_path(lengths: list[int], with_bias: bool, block: int) -> None:
    from stoker.recipes.icecube import kernels

    generator = torch.Generator().manual_seed(len(lengths))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    tokens, heads, channels = int(offsets[-1]), 3, 16
    segments = Segments.of(offsets, tokens, block)
    qkv = torch.randn(tokens, 3, heads, channels, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(tokens, heads, channels, generator=generator, dtype=torch.float64)
    bias = random_bias(tokens, heads, generator) if with_bias else None
    inputs = [qkv] if bias is None else [qkv, bias.table]
    expected = gradients(attend(qkv, segments, bias), weight, inputs) if max(lengths) > 1 or bias is None else None
    single = [tensor.detach().float().requires_grad_() for tensor in inputs]
    where = None if bias is None else bias.spacetime.float()
    table = None if bias is None else single[1]
    out = kernels.attend(single[0], segments.bounds, where, table, 1 / 60, segments.block)
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


@pytest.mark.parametrize("channels", [3, 12])
def test_means_of_many_short_segments(channels: int) -> None:
    from stoker.recipes.icecube import kernels

    offsets = torch.tensor([0, *([1, 2, 0, 4] * 50)]).cumsum(0)
    segments = Segments.of(offsets, int(offsets[-1]))
    values = torch.randn(int(offsets[-1]), channels)
    found = kernels.mean(values, offsets, segments.number)
    torch.testing.assert_close(found, segment_mean(values, segments))


@pytest.mark.parametrize("lengths", LAYOUTS)
def test_rows_of_segments_are_spread_and_their_gradients_summed(lengths: list[int]) -> None:
    from stoker.recipes.icecube import kernels

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    segments = Segments.of(offsets, int(offsets[-1]))
    values = torch.randn(len(lengths), 12, requires_grad=True)
    weight = torch.randn(int(offsets[-1]), 12)
    expected = gradients(values[segments.number], weight, [values])
    found = gradients(kernels.spread(values, offsets, segments.number), weight, [values])
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [64, 256])  # kernels that walk over all columns, and kernels that take a tile each
@pytest.mark.parametrize("flat", [False, True])  # norms of the flat model, or layer norm
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("block", [SHORT, LONG])
def test_a_layer_and_its_gradients_equal_plain_operations(width: int, flat: bool, gelu: bool, block: int) -> None:
    from stoker.recipes.icecube import kernels

    generator, heads, inner = torch.Generator().manual_seed(0), width // 16, 256
    offsets = torch.tensor([0, 3, 0, 1, 1, 33, 2, 0, 70]).cumsum(0)
    count = int(offsets[-1])
    segments, bias = Segments.of(offsets, count, block), random_bias(count, heads, generator)
    shapes = (count, width), (3 * width, width), (width, width), (inner, width), (width, inner)
    inputs = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.1 if number else 1.0).requires_grad_()
        for number, shape in enumerate(shapes)
    ]
    weight = torch.randn(count, width, generator=generator, dtype=torch.float64)
    tokens, qkv, mix, widen, narrow = inputs
    product = (_normed(tokens, not flat) @ qkv.t()).view(count, 3, heads, width // heads)
    if flat:
        query, key, value = product.unbind(1)
        product = torch.stack([_normed(query, False), _normed(key, False), value], 1)
    middle = tokens + attend(product, segments, bias).reshape(count, width) @ mix.t()
    hidden = _normed(middle, not flat) @ widen.t()
    active = F.gelu(hidden) if gelu else F.relu(hidden).square()
    expected = gradients(middle + active @ narrow.t(), weight, [*inputs, bias.table])

    # Tokens in 16 bits (the interpreter knows only one kind of them), weights in 32.
    ours = [inputs[0].detach().half(), *(one.detach().float() for one in (*inputs[1:], bias.table))]
    ours = [one.requires_grad_() for one in ours]
    found = kernels.layer(
        ours[0], kernels.LayerWeights(*ours[1:5]), segments, Bias(bias.spacetime.float(), ours[5], bias.per_unit),
        heads=heads, eps=1e-5, centred=not flat, unit_eps=1e-5 if flat else None, gelu=gelu,
    )  # fmt: skip
    for one, exact in zip(gradients(found, weight.half(), ours), expected, strict=True):
        assert (one.double() - exact).norm() <= 3e-3 * exact.norm()


def test_a_layer_does_not_hide_a_number_that_is_none() -> None:
    from stoker.recipes.icecube import kernels

    segments = Segments.of(torch.tensor([0, 5]), 5, LONG)
    shapes = (192, 64), (64, 64), (128, 64), (64, 128)
    weights = [torch.randn(*shape) for shape in shapes]
    weights[2][3, 3] = math.nan
    tokens = torch.randn(5, 64).half()
    out = kernels.layer(tokens, kernels.LayerWeights(*weights), segments, None, heads=4, eps=1e-5, centred=True)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("width", "inner", "fits"), [(256, 1024, True), (256, 384, False), (128, 192, True), (128, 0, False)]
)
def test_only_sizes_that_kernels_cover_are_theirs(
    width: int, inner: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.recipes.icecube import attention, kernels

    monkeypatch.setattr(attention, "_kernels", lambda tensor: kernels)
    assert (layer_kernels(torch.zeros(1, width, dtype=torch.bfloat16), width // 32, inner) is kernels) == fits


def test_a_layer_of_no_tokens() -> None:
    from stoker.recipes.icecube import kernels

    segments = Segments.of(torch.zeros(3, dtype=torch.int64), 0, LONG)
    tokens = torch.zeros(0, 64, dtype=torch.float16, requires_grad=True)
    weights = [torch.randn(*shape, requires_grad=True) for shape in ((192, 64), (64, 64), (128, 64), (64, 128))]
    out = kernels.layer(tokens, kernels.LayerWeights(*weights), segments, None, heads=4, eps=1e-5, centred=True)
    out.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights)


def _normed(values: Tensor, centred: bool) -> Tensor:
    norm = F.layer_norm if centred else F.rms_norm
    return norm(values, values.shape[-1:], eps=1e-5)


def test_a_program_of_single_tokens_copies_their_values() -> None:
    from stoker.recipes.icecube import kernels

    offsets = torch.arange(65)
    segments = Segments.of(offsets, 64, SHORT)
    qkv = torch.full((64, 3, 2, 16), math.nan)
    qkv[:, 2] = torch.randn(64, 2, 16)
    out = kernels.attend(qkv, segments.bounds, None, None, 1.0, SHORT)
    assert torch.equal(out, qkv[:, 2])
