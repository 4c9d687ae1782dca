"""Matrix products of tokens with what stands before and behind them: norms, activations, residuals and their gradients.

Plain products are cuBLAS's, which moves bytes at the rate of a copy here. These save the passes between them: a layer's wide
tensors, four times as large as its tokens, are written once and read once, and not again for every element-wise step.
"""

# T tokens, W channels, I inner channels, K channels summed over, O outputs
# M tokens of a program, B columns that it holds at a time, S channels of a step
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.recipes.icecube.kernels.norm import COUNTS, norm, norm_rows, through_norm

Sizes = dict[int, dict[str, int]]  # of a program, by the width of the tokens


@triton.jit
def _activate(before, GELU: tl.constexpr):
    if GELU:
        return before * 0.5 * (1.0 + tl.erf(before * 0.7071067811865476))
    # A number that is none stays none: somebody looks for it later.
    kept = tl.maximum(before, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return kept * kept


@triton.jit
def _slope(kept, GELU: tl.constexpr):
    """Of the activation: from what came before it (GELU), or from its own value, whose root it is a multiple of."""
    if GELU:
        density = tl.exp(-0.5 * kept * kept) * 0.3989422804014327
        return 0.5 * (1.0 + tl.erf(kept * 0.7071067811865476)) + kept * density
    return 2.0 * tl.sqrt(kept)


@triton.jit(do_not_specialize=COUNTS)
def _norm_activate_kernel(
    tokens, weight, normed, scales, before, out, num_tokens, eps,
    W: tl.constexpr, O: tl.constexpr, M: tl.constexpr, B: tl.constexpr, CENTRED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < num_tokens)[:, None]
    channel = tl.arange(0, W)
    at = row.to(tl.int64)[:, None] * W + channel[None, :]
    unit, scale = norm_rows(tl.load(tokens + at, mask=inside, other=0.0), eps, W, CENTRED)
    tl.store(normed + at, unit, mask=inside)
    tl.store(scales + row, scale, mask=row < num_tokens)
    for first in range(0, O, B):
        column = first + tl.arange(0, B)
        product = tl.dot(unit, tl.load(weight + column[None, :] * W + channel[:, None]))
        to = row.to(tl.int64)[:, None] * O + column[None, :]
        if GELU:
            tl.store(before + to, product.to(out.dtype.element_ty), mask=inside)
        tl.store(out + to, _activate(product, GELU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _activate_kernel(
    values, weight, before, out, num_tokens,
    K: tl.constexpr, O: tl.constexpr, M: tl.constexpr, B: tl.constexpr, S: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """A tile of rows and columns a program; those of the same rows run side by side."""
    row = (tl.program_id(0) // (O // B)) * M + tl.arange(0, M)
    column = (tl.program_id(0) % (O // B)) * B + tl.arange(0, B)
    inside = (row < num_tokens)[:, None]
    total = tl.zeros([M, B], tl.float32)
    for first in range(0, K, S):
        channel = first + tl.arange(0, S)
        given = tl.load(values + row.to(tl.int64)[:, None] * K + channel[None, :], mask=inside, other=0.0)
        total = tl.dot(given, tl.load(weight + column[None, :] * K + channel[:, None]), total)
    to = row.to(tl.int64)[:, None] * O + column[None, :]
    if GELU:
        tl.store(before + to, total.to(out.dtype.element_ty), mask=inside)
    tl.store(out + to, _activate(total, GELU).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _slope_kernel(
    d_out, weight, kept, d_before, num_tokens,
    K: tl.constexpr, O: tl.constexpr, M: tl.constexpr, B: tl.constexpr, S: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """Through a product and the activation before it: weight (K, O)."""
    row = (tl.program_id(0) // (O // B)) * M + tl.arange(0, M)
    column = (tl.program_id(0) % (O // B)) * B + tl.arange(0, B)
    inside = (row < num_tokens)[:, None]
    total = tl.zeros([M, B], tl.float32)
    for first in range(0, K, S):
        channel = first + tl.arange(0, S)
        given = tl.load(d_out + row.to(tl.int64)[:, None] * K + channel[None, :], mask=inside, other=0.0)
        total = tl.dot(given, tl.load(weight + channel[:, None] * O + column[None, :]), total)
    to = row.to(tl.int64)[:, None] * O + column[None, :]
    slope = _slope(tl.load(kept + to, mask=inside, other=0.0).to(tl.float32), GELU)
    tl.store(d_before + to, (total * slope).to(d_before.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _feed_backward_kernel(
    d_out, widen, narrow, normed, scales, kept, d_before, d_tokens, num_tokens,
    W: tl.constexpr, I: tl.constexpr, M: tl.constexpr, B: tl.constexpr, CENTRED: tl.constexpr, GELU: tl.constexpr,
):  # fmt: skip
    """`_slope_kernel` and `_through_norm_kernel` in one walk over the inner channels."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < num_tokens)[:, None]
    channel = tl.arange(0, W)
    at = row.to(tl.int64)[:, None] * W + channel[None, :]
    given = tl.load(d_out + at, mask=inside, other=0.0)
    total = tl.zeros([M, W], tl.float32)
    for first in range(0, I, B):
        inner = first + tl.arange(0, B)
        to = row.to(tl.int64)[:, None] * I + inner[None, :]
        slope = _slope(tl.load(kept + to, mask=inside, other=0.0).to(tl.float32), GELU)
        wide = tl.dot(given, tl.load(narrow + channel[:, None] * I + inner[None, :])) * slope
        wide = wide.to(d_before.dtype.element_ty)
        tl.store(d_before + to, wide, mask=inside)
        total = tl.dot(wide, tl.load(widen + inner[:, None] * W + channel[None, :]), total)
    unit = tl.load(normed + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row, mask=row < num_tokens, other=0.0)
    total = through_norm(total, unit, scale, W, CENTRED) + given.to(tl.float32)
    tl.store(d_tokens + at, total.to(d_tokens.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _add_kernel(
    tokens, values, weight, out, num_tokens, W: tl.constexpr, K: tl.constexpr, M: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < num_tokens)[:, None]
    channel = tl.arange(0, W)
    total = tl.zeros([M, W], tl.float32)
    for first in range(0, K, S):
        inner = first + tl.arange(0, S)
        given = tl.load(values + row.to(tl.int64)[:, None] * K + inner[None, :], mask=inside, other=0.0)
        total = tl.dot(given, tl.load(weight + channel[None, :] * K + inner[:, None]), total)
    at = row.to(tl.int64)[:, None] * W + channel[None, :]
    total += tl.load(tokens + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=COUNTS)
def _through_norm_kernel(
    d_product, weight, normed, scales, d_out, d_tokens, num_tokens,
    W: tl.constexpr, O: tl.constexpr, M: tl.constexpr, S: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < num_tokens)[:, None]
    channel = tl.arange(0, W)
    total = tl.zeros([M, W], tl.float32)
    for first in range(0, O, S):
        column = first + tl.arange(0, S)
        given = tl.load(d_product + row.to(tl.int64)[:, None] * O + column[None, :], mask=inside, other=0.0)
        total = tl.dot(given, tl.load(weight + column[:, None] * W + channel[None, :]), total)
    at = row.to(tl.int64)[:, None] * W + channel[None, :]
    unit = tl.load(normed + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scales + row, mask=row < num_tokens, other=0.0)
    beside = tl.load(d_out + at, mask=inside, other=0.0).to(tl.float32)
    total = through_norm(total, unit, scale, W, CENTRED) + beside
    tl.store(d_tokens + at, total.to(d_tokens.dtype.element_ty), mask=inside)


def norm_activate(
    tokens: Tensor, weight: Tensor, eps: float, *, centred: bool, gelu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """activation(norm(tokens) @ weight.t()); the normed tokens, their scales, the activation and what came before it.

    The last is empty for squared ReLU, whose slope is known from its value.
    """
    (count, width), wide = tokens.shape, len(weight)
    assert wide % (TILED if width in TILED else WALKED)[width]["B"] == 0, "else columns would be left out"
    out = tokens.new_empty(count, wide)
    before = torch.empty_like(out) if gelu else tokens.new_empty(0)
    if width in TILED:
        normed, scales = norm(tokens, eps, centred=centred)
        sizes = TILED[width]
        if count:
            _activate_kernel[(triton.cdiv(count, sizes["M"]) * (wide // sizes["B"]),)](
                normed, weight, before, out, count, K=width, O=wide, GELU=gelu, **sizes
            )
        return normed, scales, out, before
    normed, scales = torch.empty_like(tokens), tokens.new_empty(count, dtype=torch.float32)
    if count:
        sizes = WALKED[width]
        _norm_activate_kernel[(triton.cdiv(count, sizes["M"]),)](
            tokens, weight, normed, scales, before, out, count, eps,
            W=width, O=wide, CENTRED=centred, GELU=gelu, **sizes,
        )  # fmt: skip
    return normed, scales, out, before


def through_feed_forward(
    d_out: Tensor,
    widen: Tensor,
    narrow: Tensor,
    normed: Tensor,
    scales: Tensor,
    kept: Tensor,
    *,
    centred: bool,
    gelu: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the tokens and of what came before the activation; `kept` is what its slope needs."""
    (count, width), wide = normed.shape, len(widen)
    d_before, d_tokens = torch.empty_like(kept), torch.empty_like(normed)
    if not count:
        return d_tokens, d_before
    if width not in TILED:
        sizes = BACKWARD[width]
        _feed_backward_kernel[(triton.cdiv(count, sizes["M"]),)](
            d_out, widen, narrow, normed, scales, kept, d_before, d_tokens, count,
            W=width, I=wide, CENTRED=centred, GELU=gelu, **sizes,
        )  # fmt: skip
        return d_tokens, d_before
    sizes = SLOPE[width]
    _slope_kernel[(triton.cdiv(count, sizes["M"]) * (wide // sizes["B"]),)](
        d_out, narrow, kept, d_before, count, K=width, O=wide, GELU=gelu, **sizes
    )
    return through_norm_product(d_before, widen, normed, scales, d_out, centred=centred), d_before


def add_product(tokens: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """tokens + values @ weight.t()"""
    (count, width), out, sizes = tokens.shape, torch.empty_like(tokens), ROWS[tokens.shape[1]]
    if count:
        _add_kernel[(triton.cdiv(count, sizes["M"]),)](
            tokens, values, weight, out, count, W=width, K=weight.shape[1], **sizes
        )
    return out


def through_norm_product(
    d_product: Tensor, weight: Tensor, normed: Tensor, scales: Tensor, d_out: Tensor, *, centred: bool
) -> Tensor:
    """d_out + the gradient of tokens, from that of the product of their norm with `weight` (O, W)."""
    (count, width), d_tokens, sizes = normed.shape, torch.empty_like(normed), ROWS[normed.shape[1]]
    if count:
        _through_norm_kernel[(triton.cdiv(count, sizes["M"]),)](
            d_product, weight, normed, scales, d_out, d_tokens, count, W=width, O=len(weight), CENTRED=centred, **sizes
        )
    return d_tokens


def weight_gradient(d_out: Tensor, values: Tensor) -> Tensor:
    """d_out.t() @ values, summed and kept in float32."""
    if d_out.is_cuda:
        return torch.mm(d_out.t(), values, out_dtype=torch.float32)
    return d_out.t().float() @ values.float()


def narrowed(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Weights in as many bits as the tokens have, by one kernel for all."""
    made = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(made, list(weights))
    return made


# The fastest on an H200 of 14 sizes each, for the tokens of 4,096 events. Tokens of 256 channels take too much of a
# multiprocessor's memory for a program that walks over all columns.
WALKED: Sizes = {width: {"M": 64, "B": 64, "num_warps": 4, "num_stages": 2} for width in (64, 128)}
TILED: Sizes = {256: {"M": 128, "B": 256, "S": 64, "num_warps": 8, "num_stages": 3}}
BACKWARD: Sizes = {width: {"M": 64, "B": 32, "num_warps": 4, "num_stages": 3} for width in (64, 128)}
SLOPE: Sizes = {256: {"M": 64, "B": 128, "S": 64, "num_warps": 4, "num_stages": 3}}
ROWS: Sizes = {
    64: {"M": 64, "S": 64, "num_warps": 4, "num_stages": 3},
    128: {"M": 64, "S": 64, "num_warps": 4, "num_stages": 3},
    256: {"M": 128, "S": 64, "num_warps": 8, "num_stages": 4},
}
