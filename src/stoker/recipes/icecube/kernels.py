"""Triton kernels for attention and means inside segments, as PyTorch operators with gradients.

A program takes a block of tokens and one head, and walks over the tokens of the segments that the block touches: nobody
looks at pairs of different segments beyond the edges of a block, and nothing is padded. Who attends to whom is symmetric,
so the backward pass of a block needs the same walk: its tokens are queries and keys at once, and no program writes to
another's tokens.

Imported only where there is a GPU (or under TRITON_INTERPRET=1): see attention.py for the path of a CPU.
"""

# T tokens, H heads, C channels a head, S segments; M tokens of a program, N tokens of a tile it walks over
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)


@triton.jit
def _interval(spacetime, row, col, row_inside, col_inside, knots: tl.constexpr, per_unit):
    """(M, N) place on the axis of knots of the signed space-time interval between tokens: time-like to the right."""
    square = tl.zeros([row.shape[0], col.shape[0]], tl.float32)
    for axis in tl.static_range(4):
        a = tl.load(spacetime + row.to(tl.int64) * 4 + axis, mask=row_inside, other=0.0)
        b = tl.load(spacetime + col.to(tl.int64) * 4 + axis, mask=col_inside, other=0.0)
        step = a[:, None] - b[None, :]
        if axis == 3:
            square += step * step
        else:
            square -= step * step
    root = tl.where(square < 0, -1.0, 1.0) * tl.sqrt(tl.abs(square))
    middle = (knots - 1) / 2
    return tl.minimum(tl.maximum(root * per_unit + middle, 0.0), knots - 1.0)


@triton.jit
def _bias(place, table, knots: tl.constexpr):
    """Piecewise linear between the knots."""
    bias = tl.zeros_like(place)
    for knot in range(knots):
        bias += tl.load(table + knot).to(tl.float32) * tl.maximum(1.0 - tl.abs(place - knot), 0.0)
    return bias


@triton.jit
def _attend_kernel(
    qkv, out, lse, start, end, spacetime, table, num_tokens, scale, per_unit,
    H: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KNOTS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = row < num_tokens
    begin = tl.load(start + row, mask=inside, other=num_tokens)
    stop = tl.load(end + row, mask=inside, other=0)
    channel = tl.arange(0, C)
    at = row.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
    to = row.to(tl.int64)[:, None] * (H * C) + head * C + channel[None, :]
    if tl.max(stop - begin, 0) <= 1:
        # Tokens alone in their segments see themselves: their values, without arithmetic.
        tl.store(out + to, tl.load(qkv + at + 2 * H * C, mask=inside[:, None]), mask=inside[:, None])
    else:
        low, high = tl.min(begin, 0), tl.max(stop, 0)
        query = tl.load(qkv + at, mask=inside[:, None], other=0.0)
        most = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, C], tl.float32)
        for first in range(low, high, N):
            col = first + tl.arange(0, N)
            there = col < high
            near = col.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
            key = tl.load(qkv + near + H * C, mask=there[:, None], other=0.0)
            value = tl.load(qkv + near + 2 * H * C, mask=there[:, None], other=0.0)
            score = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
            if KNOTS > 0:
                place = _interval(spacetime, row, col, inside, there, KNOTS, per_unit)
                score += _bias(place, table + head * KNOTS, KNOTS) * 1.4426950408889634
            visible = (col[None, :] >= begin[:, None]) & (col[None, :] < stop[:, None])
            score = tl.where(visible, score, float("-inf"))
            now = tl.maximum(most, tl.max(score, 1))
            safe = tl.where(now == float("-inf"), 0.0, now)
            weight = tl.exp2(score - safe[:, None])
            shrink = tl.exp2(most - safe)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=EXACT)
            most = now
        total = tl.where(inside, total, 1.0)
        tl.store(out + to, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
        tl.store(lse + head.to(tl.int64) * num_tokens + row, most + tl.log2(total), mask=inside)


@triton.jit
def _delta_kernel(out, d_out, delta, num_tokens, H: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """Sum over channels of the output times its gradient."""
    head = tl.program_id(1)
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = row < num_tokens
    at = row.to(tl.int64)[:, None] * (H * C) + head * C + tl.arange(0, C)[None, :]
    a = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(d_out + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * num_tokens + row, tl.sum(a * b, 1), mask=inside)


@triton.jit
def _attend_backward_kernel(
    qkv, d_out, lse, delta, d_qkv, d_table, start, end, spacetime, table, num_tokens, scale, per_unit,
    H: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KNOTS: tl.constexpr, R: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0) * M + tl.arange(0, M)
    inside = row < num_tokens
    begin = tl.load(start + row, mask=inside, other=num_tokens)
    stop = tl.load(end + row, mask=inside, other=0)
    channel = tl.arange(0, C)
    at = row.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
    to = row.to(tl.int64)[:, None] * (H * C) + head * C + channel[None, :]
    far = inside[:, None]
    d_mixed = tl.load(d_out + to, mask=far, other=0.0)
    if tl.max(stop - begin, 0) <= 1:
        tl.store(d_qkv + at + 2 * H * C, d_mixed, mask=far)
        tl.store(d_qkv + at, tl.zeros([M, C], d_qkv.dtype.element_ty), mask=far)
        tl.store(d_qkv + at + H * C, tl.zeros([M, C], d_qkv.dtype.element_ty), mask=far)
    else:
        low, high = tl.min(begin, 0), tl.max(stop, 0)
        query = tl.load(qkv + at, mask=far, other=0.0)
        key = tl.load(qkv + at + H * C, mask=far, other=0.0)
        value = tl.load(qkv + at + 2 * H * C, mask=far, other=0.0)
        by_head = head.to(tl.int64) * num_tokens
        my_lse = tl.load(lse + by_head + row, mask=inside, other=0.0)
        my_delta = tl.load(delta + by_head + row, mask=inside, other=0.0)
        d_query = tl.zeros([M, C], tl.float32)
        d_key = tl.zeros([M, C], tl.float32)
        d_value = tl.zeros([M, C], tl.float32)
        d_knots = tl.zeros([R], tl.float32)
        for first in range(low, high, N):
            col = first + tl.arange(0, N)
            there = col < high
            near = col.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
            near_out = col.to(tl.int64)[:, None] * (H * C) + head * C + channel[None, :]
            other_query = tl.load(qkv + near, mask=there[:, None], other=0.0)
            other_key = tl.load(qkv + near + H * C, mask=there[:, None], other=0.0)
            other_value = tl.load(qkv + near + 2 * H * C, mask=there[:, None], other=0.0)
            other_d = tl.load(d_out + near_out, mask=there[:, None], other=0.0)
            other_lse = tl.load(lse + by_head + col, mask=there, other=0.0)
            other_delta = tl.load(delta + by_head + col, mask=there, other=0.0)
            visible = (col[None, :] >= begin[:, None]) & (col[None, :] < stop[:, None])
            # As queries: what they gave to the keys of the tile.
            score = tl.dot(query, tl.trans(other_key), input_precision=EXACT) * scale
            # As keys: what the queries of the tile gave to them.
            given = tl.dot(key, tl.trans(other_query), input_precision=EXACT) * scale
            place = tl.zeros([M, N], tl.float32)
            if KNOTS > 0:
                place = _interval(spacetime, row, col, inside, there, KNOTS, per_unit)
                bias = _bias(place, table + head * KNOTS, KNOTS) * 1.4426950408889634
                score += bias
                given += bias  # the interval is the same seen from both ends
            weight = tl.where(visible, tl.exp2(score - my_lse[:, None]), 0.0)
            d_weight = tl.dot(d_mixed, tl.trans(other_value), input_precision=EXACT)
            d_score = weight * (d_weight - my_delta[:, None])
            d_query += tl.dot(d_score.to(other_key.dtype), other_key, input_precision=EXACT)
            weight = tl.where(visible, tl.exp2(given - other_lse[None, :]), 0.0)
            d_value += tl.dot(weight.to(other_d.dtype), other_d, input_precision=EXACT)
            d_weight = tl.dot(value, tl.trans(other_d), input_precision=EXACT)
            d_given = weight * (d_weight - other_delta[None, :])
            d_key += tl.dot(d_given.to(other_query.dtype), other_query, input_precision=EXACT)
            if KNOTS > 0:
                for knot in range(KNOTS):
                    hat = tl.maximum(1.0 - tl.abs(place - knot), 0.0)
                    d_knots += tl.where(tl.arange(0, R) == knot, tl.sum(tl.sum(d_score * hat, 1), 0), 0.0)
        # Scores were scaled for exp2; their gradient is that of natural scores.
        natural = scale * 0.6931471805599453
        tl.store(d_qkv + at, (d_query * natural).to(d_qkv.dtype.element_ty), mask=far)
        tl.store(d_qkv + at + H * C, (d_key * natural).to(d_qkv.dtype.element_ty), mask=far)
        tl.store(d_qkv + at + 2 * H * C, d_value.to(d_qkv.dtype.element_ty), mask=far)
        if KNOTS > 0:
            tl.atomic_add(d_table + head * KNOTS + tl.arange(0, R), d_knots, mask=tl.arange(0, R) < KNOTS)


@triton.jit
def _mean_kernel(values, offsets, out, num_channels, R: tl.constexpr, C: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    begin, stop = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    channel = tl.arange(0, C)
    real = channel < num_channels
    total = tl.zeros([C], tl.float32)
    for first in range(begin, stop, R):
        row = first + tl.arange(0, R)
        at = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
        total += tl.sum(tl.load(values + at, mask=(row < stop)[:, None] & real[None, :], other=0.0).to(tl.float32), 0)
    total /= tl.maximum(stop - begin, 1).to(tl.float32)
    tl.store(out + segment * num_channels + channel, total.to(out.dtype.element_ty), mask=real)


@torch.library.custom_op("stoker::attend", mutates_args=())
def _attend(
    qkv: Tensor, start: Tensor, end: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int
) -> tuple[Tensor, Tensor]:
    tokens, _, heads, channels = qkv.shape
    out = qkv.new_empty(tokens, heads, channels)
    lse = qkv.new_empty(heads, tokens, dtype=torch.float32)
    if tokens:
        _attend_kernel[(triton.cdiv(tokens, block), heads)](
            qkv, out, lse, start, end, spacetime, table, tokens, LOG2_E / math.sqrt(channels), per_unit,
            H=heads, C=channels, M=block, N=_tile(block), KNOTS=_knots(table), EXACT=_precision(qkv),
            num_warps=_warps(block),
        )  # fmt: skip
    return out, lse


@_attend.register_fake
def _(
    qkv: Tensor, start: Tensor, end: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int
) -> tuple[Tensor, Tensor]:
    tokens, _, heads, channels = qkv.shape
    return qkv.new_empty(tokens, heads, channels), qkv.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("stoker::attend_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, start: Tensor, end: Tensor,
    spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, _, heads, channels = qkv.shape
    d_qkv, knots = torch.empty_like(qkv), _knots(table)
    d_table = qkv.new_zeros(heads if knots else 0, knots, dtype=torch.float32)
    if tokens:
        d_out = d_out.contiguous()
        delta = torch.empty_like(lse)
        _delta_kernel[(triton.cdiv(tokens, 64), heads)](out, d_out, delta, tokens, H=heads, C=channels, M=64)
        _attend_backward_kernel[(triton.cdiv(tokens, block), heads)](
            qkv, d_out, lse, delta, d_qkv, d_table, start, end, spacetime, table, tokens,
            LOG2_E / math.sqrt(channels), per_unit,
            H=heads, C=channels, M=block, N=_tile(block), KNOTS=knots, R=triton.next_power_of_2(max(2, knots)),
            EXACT=_precision(qkv), num_warps=_warps(block),
        )  # fmt: skip
    return d_qkv, d_table


@_attend_backward.register_fake
def _(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, start: Tensor, end: Tensor,
    spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    knots = _knots(table)
    return torch.empty_like(qkv), qkv.new_empty(qkv.shape[2] if knots else 0, knots, dtype=torch.float32)


def _save_attend(ctx, inputs, output):
    qkv, start, end, spacetime, table, ctx.per_unit, ctx.block = inputs
    ctx.save_for_backward(qkv, *output, start, end, spacetime, table)


def _attend_gradient(ctx, d_out, _):
    qkv, out, lse, start, end, spacetime, table = ctx.saved_tensors
    d_qkv, d_table = _attend_backward(d_out, qkv, out, lse, start, end, spacetime, table, ctx.per_unit, ctx.block)
    return d_qkv, None, None, None, None if table is None else d_table.to(table.dtype), None, None


_attend.register_autograd(_attend_gradient, setup_context=_save_attend)


@torch.library.custom_op("stoker::segment_mean", mutates_args=())
def _mean(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    channels = values.shape[1]
    out = values.new_empty(len(offsets) - 1, channels)
    if len(out):
        _mean_kernel[(len(out),)](
            values.contiguous(), offsets, out, channels, R=4, C=triton.next_power_of_2(channels), num_warps=1
        )
    return out


@_mean.register_fake
def _(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, values.shape[1])


def _save_mean(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _mean_gradient(ctx, d_out):
    offsets, number = ctx.saved_tensors
    return (d_out / offsets.diff().clamp_min(1)[:, None])[number].to(d_out.dtype), None, None


_mean.register_autograd(_mean_gradient, setup_context=_save_mean)


def attend(
    qkv: Tensor, start: Tensor, end: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int
) -> Tensor:
    """(T, 3, H, C) -> (T, H, C); `start` and `end` (T,) int32 bound each token's segment."""
    out: Tensor = _attend(qkv.contiguous(), start, end, spacetime, table, per_unit, block)[0]
    return out


def mean(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    """(T, C) -> (S, C); `number` (T,) is each token's segment."""
    out: Tensor = _mean(values, offsets, number)
    return out


def _knots(table: Tensor | None) -> int:
    return 0 if table is None else table.shape[1]


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # tf32 is ignored where numbers have 16 bits


# Of blocks of 16 to 128 tokens and tiles of 16 to 64, with 1 to 8 warps, these were the fastest on an H200, forward and
# backward together, with the pulses of 4,096 events by DOM (blocks of 32) and their DOMs by event (blocks of 64).
def _tile(block: int) -> int:
    return block // 2


def _warps(block: int) -> int:
    return 4 if block >= 64 else 2
