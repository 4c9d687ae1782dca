"""Norms without weights: of the rows that a program holds, and as a kernel of its own."""

# T tokens, W channels; M tokens of a program
import torch
import triton
import triton.language as tl
from torch import Tensor

# Numbers of tokens are new in every batch: a kernel that knew of one that sixteen divides it would be compiled twice.
COUNTS = ["num_tokens"]


@triton.jit
def norm_rows(tile, eps, W: tl.constexpr, CENTRED: tl.constexpr):
    """Rows of (M, W) with a root mean square of 1, about their means if `CENTRED`, and what they were multiplied with."""
    wide = tile.to(tl.float32)
    if CENTRED:
        wide -= (tl.sum(wide, 1) / W)[:, None]
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / W + eps)
    return (wide * scale[:, None]).to(tile.dtype), scale


@triton.jit
def through_norm(gradient, unit, scale, W: tl.constexpr, CENTRED: tl.constexpr):
    """The gradient before `norm_rows` from the one behind it; all float32."""
    inner = gradient - unit * (tl.sum(gradient * unit, 1) / W)[:, None]
    if CENTRED:
        inner -= (tl.sum(gradient, 1) / W)[:, None]
    return inner * scale[:, None]


@triton.jit(do_not_specialize=COUNTS)
def _norm_kernel(
    tokens, normed, scales, num_tokens, eps, W: tl.constexpr, M: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = (row < num_tokens)[:, None]
    at = row.to(tl.int64)[:, None] * W + tl.arange(0, W)[None, :]
    unit, scale = norm_rows(tl.load(tokens + at, mask=inside, other=0.0), eps, W, CENTRED)
    tl.store(normed + at, unit, mask=inside)
    tl.store(scales + row, scale, mask=row < num_tokens)


def norm(tokens: Tensor, eps: float, *, centred: bool) -> tuple[Tensor, Tensor]:
    """(T, W) normed, and (T,) what each row was multiplied with."""
    count, width = tokens.shape
    normed, scales = torch.empty_like(tokens), tokens.new_empty(count, dtype=torch.float32)
    if count:
        _norm_kernel[(triton.cdiv(count, 8),)](
            tokens, normed, scales, count, eps, W=width, M=8, CENTRED=centred, num_warps=1
        )
    return normed, scales
