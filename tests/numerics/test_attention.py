import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stoker.recipes.icecube import attention
from stoker.recipes.icecube.attention import segment_attention


def dense_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    """The plainest way: one segment after the other."""
    out = torch.zeros_like(value)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        scores = torch.einsum("qhc,khc->hqk", query[begin:end], key[begin:end]) / query.shape[-1] ** 0.5
        out[begin:end] = torch.einsum("hqk,khc->qhc", scores.softmax(-1), value[begin:end])
    return out


@settings(deadline=None, max_examples=40)
@given(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 70)), min_size=1, max_size=30), st.integers(0, 2**31))
def test_segments_of_any_length_equal_the_dense_reference(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    shape = (int(offsets[-1]), 2, 4)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    results = []
    for function in (segment_attention, dense_attention):
        out = function(*tensors, offsets)
        gradients = torch.autograd.grad((out * weight).sum(), tensors, allow_unused=True)
        zeros = [torch.zeros(shape, dtype=torch.float64) if g is None else g for g in gradients]
        results.append([out.detach(), *zeros])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 700])
def test_one_giant_segment(length: int) -> None:
    tensors = [torch.randn(length, 1, 8, dtype=torch.float64) for _ in range(3)]
    offsets = torch.tensor([0, length])
    torch.testing.assert_close(segment_attention(*tensors, offsets), dense_attention(*tensors, offsets))


def test_only_an_export_of_ours_looks_at_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch 2.11 every compiled model is told that it is being exported, and made of masks of all pairs it was slow or
    did not compile at all."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(attention, "_all_pairs", lambda *_: pytest.fail("all pairs"))
    tokens, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])
    plain = segment_attention(tokens, tokens, tokens, offsets)
    monkeypatch.undo()
    with attention.exporting():
        torch.testing.assert_close(segment_attention(tokens, tokens, tokens, offsets), plain)
