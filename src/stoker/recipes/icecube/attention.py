"""Attention inside segments of a flat array: every token sees the tokens of its own segment and no others.

On a GPU our own kernels do it (kernels.py). Elsewhere, and in float64, the plain path does, with the same numbers: segments
of similar length are padded to the same power of two and attend together, so the waste is bounded and no operation looks
at pairs of different segments. A model that is exported for other programs looks at all pairs, and masks them: that is
made of operations that every program knows.
"""

# T tokens, H heads, C channels a head, S segments
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Tokens that a program of the kernels takes: few where segments are short, as those of pulses by DOM are.
SHORT, LONG = 32, 64
# Widths of tokens that kernels for whole layers hold on the chip, and what the width of their feed-forward part must be a
# multiple of: the columns that a program takes at once.
LAYER_WIDTHS = {64: 64, 128: 64, 256: 256}

# Not torch.compiler.is_exporting(): in torch 2.11 that is true inside torch.compile as well.
_exporting = False


@contextmanager
def exporting() -> Iterator[None]:
    """Inside the block a model is made of operations that every program knows."""
    global _exporting
    before, _exporting = _exporting, True
    try:
        yield
    finally:
        _exporting = before


@dataclass(frozen=True)
class Segments:
    """Offsets, and what kernels want to know of each token or block."""

    offsets: Tensor  # (S + 1,) int64
    number: Tensor  # (T,) int64, the segment a token is in
    # int32: (2, T) where each token's segment begins and ends, if they are short; else (3, programs) the first row of a
    # block that lies inside one segment, and where that begins and ends
    bounds: Tensor
    block: int = LONG

    @classmethod
    def of(cls, offsets: Tensor, total: int, block: int = LONG) -> "Segments":
        """`total` is the number of tokens, given so that nobody waits for the device."""
        if _exporting:
            number = (torch.arange(total)[:, None] >= offsets[1:]).sum(1)
        else:
            number = repeat(torch.arange(len(offsets) - 1, device=offsets.device), offsets, total)
        if block == SHORT:
            bounds = torch.stack([offsets[number], offsets[number + 1]]).int()
        else:
            bounds = _blocks_inside(offsets, total, block)
        return cls(offsets, number, bounds, block)


def _blocks_inside(offsets: Tensor, total: int, block: int) -> Tensor:
    """(3, programs) of blocks that each lie inside a segment. Their number is known on the device alone: there are more
    than are needed, and those at the end are empty."""
    count = len(offsets) - 1
    if _exporting or not count:
        return offsets.new_zeros(3, 0).int()
    blocks = (offsets.diff() + block - 1) // block
    behind = blocks.cumsum(0)  # (S,) blocks up to the end of each segment
    program = torch.arange(-(-total // block) + count, device=offsets.device)
    segment = torch.searchsorted(behind, program, right=True)
    there, segment = segment < count, segment.clamp_max(count - 1)
    first = offsets[segment] + block * (program - (behind - blocks)[segment])
    return (torch.stack([first, offsets[segment], offsets[segment + 1]]) * there).int()


@dataclass(frozen=True)
class Bias:
    """Added to the scores of a head: piecewise linear in the signed space-time interval of two tokens.

    The interval is +sqrt(dt^2 - dx^2) where light could have come from one to the other and -sqrt(dx^2 - dt^2) where it
    could not; knots lie 1 / `per_unit` apart, the middle one at zero, and the outermost values continue.
    """

    spacetime: Tensor  # (T, 4) x, y, z, and time as a length
    table: Tensor  # (H, K)
    per_unit: float


def segment_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    """Softmax attention, (T, H, C) each; segment i holds the tokens offsets[i] .. offsets[i + 1]."""
    return attend(torch.stack([query, key, value], 1), Segments.of(offsets, len(query)))


def attend(qkv: Tensor, segments: Segments, bias: Bias | None = None) -> Tensor:
    """The same on queries, keys and values in one array (T, 3, H, C), with known segments and an optional bias."""
    if _exporting:
        return _all_pairs(qkv, segments, bias)
    if (fast := _kernels(qkv)) is None:
        query, key, value = qkv.unbind(1)
        return _plain_attention(query, key, value, segments.offsets, bias)
    spacetime, table, per_unit = (None, None, 1.0) if bias is None else (bias.spacetime, bias.table, bias.per_unit)
    return fast.attend(qkv, segments.bounds, spacetime, table, per_unit, segments.block)  # type: ignore[no-any-return]


def segment_mean(values: Tensor, segments: Segments) -> Tensor:
    """Mean over the rows of each segment: (T, C) -> (S, C); zero for an empty one."""
    if _exporting:
        lengths = segments.offsets.diff()
        member = torch.arange(len(lengths))[:, None] == segments.number
        return member.to(values.dtype) @ values / lengths.clamp_min(1)[:, None]
    if (fast := _kernels(values)) is not None:
        return fast.mean(values, segments.offsets, segments.number)  # type: ignore[no-any-return]
    lengths = segments.offsets.diff()
    total = values.new_zeros(len(lengths), values.shape[1]).index_add(0, segments.number, values)
    return total / lengths.clamp_min(1)[:, None]


def spread(values: Tensor, segments: Segments) -> Tensor:
    """Each segment's row for each of its tokens: (S, C) -> (T, C)."""
    if not _exporting and (fast := _kernels(values)) is not None:
        return fast.spread(values, segments.offsets, segments.number)  # type: ignore[no-any-return]
    return values[segments.number]


def repeat(values: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Each segment's value for each of its rows; `total` is their number, given so that nobody waits for the device."""
    return torch.repeat_interleave(values, offsets.diff(), dim=0, output_size=total)


def _kernels(tensor: Tensor) -> ModuleType | None:
    """Kernels for this tensor, if there are any: on GPUs, for all but float64, and widths that they know."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    width = tensor.shape[-1]
    if tensor.ndim == 4 and not (width >= 16 and width & (width - 1) == 0):
        return None
    from stoker.recipes.icecube import kernels  # needs Triton, which is of no use without a GPU

    return kernels


def layer_kernels(tokens: Tensor, heads: int, inner: int) -> ModuleType | None:
    """Kernels for whole parts of a layer on tokens (T, C): on GPUs, in 16 bits, and for sizes that they know."""
    width = tokens.shape[1]
    channels = width // heads
    if _exporting or tokens.dtype not in (torch.bfloat16, torch.float16):
        return None
    fits = width in LAYER_WIDTHS and inner > 0 and inner % LAYER_WIDTHS[width] == 0
    if not fits or channels < 16 or channels & (channels - 1):
        return None
    return _kernels(tokens)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, bias: Bias | None) -> Tensor:
    lengths = offsets.diff()
    # A token alone in its segment attends to itself: its value, without any arithmetic.
    out = value.clone()
    width = 2
    longest = int(lengths.max()) if len(lengths) else 0
    while width < 2 * longest:
        chosen = torch.nonzero((lengths > width // 2) & (lengths <= width)).squeeze(1)
        if len(chosen):
            index, inside = _padded_index(offsets[chosen], lengths[chosen], width)
            added = None if bias is None else _dense_bias(bias, index)
            mixed = _padded_attention(query[index], key[index], value[index], inside, added)
            out = out.index_put((index[inside],), mixed[inside])
        width *= 2
    return out


def _all_pairs(qkv: Tensor, segments: Segments, bias: Bias | None) -> Tensor:
    """All tokens as one segment, in which those of others are masked."""
    query, key, value = (part[None] for part in qkv.unbind(1))
    mask = (segments.number[:, None] == segments.number)[None, None]  # (1, 1, T, T)
    if bias is not None:
        index = torch.arange(len(qkv))[None]
        mask = _dense_bias(bias, index).to(qkv.dtype).masked_fill(~mask, float("-inf"))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)[0]


def _padded_index(first: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Token numbers (S, width), the last one repeated past the end, and where they lie inside the segment."""
    step = torch.arange(width, device=first.device)
    inside = step < lengths[:, None]
    return first[:, None] + torch.minimum(step, lengths[:, None] - 1), inside


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, inside: Tensor, added: Tensor | None) -> Tensor:
    """(S, width, H, C) in and out; padded keys are masked."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = inside[:, None, None, :]
    if added is not None:
        mask = added.to(query.dtype).masked_fill(~mask, float("-inf"))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2)


def _dense_bias(bias: Bias, index: Tensor) -> Tensor:
    """(S, H, width, width)"""
    spacetime = bias.spacetime[index]
    step = spacetime[:, :, None] - spacetime[:, None, :]
    square = step[..., 3].square() - step[..., :3].square().sum(-1)
    knots = bias.table.shape[1]
    root = square.sign() * square.abs().sqrt()
    place = (root * bias.per_unit + (knots - 1) / 2).clamp(0, knots - 1)
    low = place.floor().clamp_max(knots - 2).long()
    share = (place - low)[:, None]
    low_value, high_value = (bias.table[:, knot].transpose(0, 1) for knot in (low, low + 1))  # (S, H, width, width)
    return low_value * (1 - share) + high_value * share


Activation = Literal["relu2", "gelu"]


def activate(values: Tensor, activation: Activation) -> Tensor:
    return F.gelu(values) if activation == "gelu" else F.relu(values).square()


class EncoderLayer(nn.Module):
    """Pre-norm attention and feed-forward over segments.

    Without biases, and norms without weights: the next matrix can learn what they would, and their gradients are sums over
    all tokens, 2.4 of 36 ms in one profile on an H200.
    """

    def __init__(self, width: int, heads: int, expansion: float, dropout: float, activation: Activation) -> None:
        super().__init__()
        inner = int(width * expansion)
        self.heads, self.inner, self.activation = heads, inner, activation
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.mix = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, segments: Segments, bias: Bias | None = None) -> Tensor:  # (T, C)
        fast = layer_kernels(tokens, self.heads, self.inner)
        if fast is not None and not (self.training and self.dropout.p):
            return self._at_once(fast, tokens, segments, bias)
        qkv = self.qkv(self.norm(tokens)).view(len(tokens), 3, self.heads, -1)
        tokens = tokens + self.dropout(self.mix(attend(qkv, segments, bias).reshape(tokens.shape)))
        fed: Tensor = self.narrow(activate(self.widen(self.norm(tokens)), self.activation))
        return torch.add(tokens, self.dropout(fed))

    def _at_once(self, fast: Any, tokens: Tensor, segments: Segments, bias: Bias | None) -> Tensor:
        """The same in one operator, with much of what is wider than a token kept on the chip."""
        weights = fast.LayerWeights(self.qkv.weight, self.mix.weight, self.widen.weight, self.narrow.weight)
        options = {"heads": self.heads, "eps": self.norm.eps, "centred": True, "gelu": self.activation == "gelu"}
        return fast.layer(tokens, weights, segments, bias, **options)  # type: ignore[no-any-return]
