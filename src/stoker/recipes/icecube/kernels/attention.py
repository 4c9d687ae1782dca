"""Attention inside segments of a flat array, nothing padded.

A program takes a block of tokens and one head. Where segments are long a block lies inside one of them, and the program
walks over that segment. Where they are short a block holds many, and the program walks over all that it touches, each token
looking at its own. Who attends to whom is symmetric, so the backward pass of a block needs the same walk: its tokens are
queries and keys at once, and no program writes to another's tokens.
"""

# T tokens, H heads, C channels a head, K knots; M tokens of a program, N tokens of a tile it walks over
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.recipes.icecube.kernels.norm import COUNTS, norm_rows, through_norm

LOG2_E = math.log2(math.e)


@triton.jit
def _block(bounds, num_tokens, M: tl.constexpr, INSIDE: tl.constexpr):
    """The rows of a program, which of them are its own, where their segments begin and end, and what it walks over.

    `INSIDE`: bounds (3, programs) are the first row of a block and its segment; else (2, T) the segment of each token.
    """
    program = tl.program_id(0)
    if INSIDE:
        programs = tl.num_programs(0)
        low, high = tl.load(bounds + programs + program), tl.load(bounds + 2 * programs + program)
        row = tl.load(bounds + program) + tl.arange(0, M)
        inside = row < high
        begin, stop = tl.full([M], 0, tl.int32) + low, tl.full([M], 0, tl.int32) + high
    else:
        row = program * M + tl.arange(0, M)
        inside = row < num_tokens
        begin = tl.load(bounds + row, mask=inside, other=num_tokens)
        stop = tl.load(bounds + num_tokens + row, mask=inside, other=0)
        low, high = tl.min(begin, 0), tl.max(stop, 0)
    alone = tl.max(stop - begin, 0) <= 1
    return row, inside, begin, stop, low, high, alone


@triton.jit
def _visible(col, begin, stop, inside, high, INSIDE: tl.constexpr):
    """(M, N) whether a row sees a column."""
    if INSIDE:
        return (col < high)[None, :] & inside[:, None]
    return (col[None, :] >= begin[:, None]) & (col[None, :] < stop[:, None])


@triton.jit
def _events(spacetime, token, inside):
    """x, y, z and time of tokens."""
    at = spacetime + token.to(tl.int64) * 4
    x, y = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
    z, t = tl.load(at + 2, mask=inside, other=0.0), tl.load(at + 3, mask=inside, other=0.0)
    return x, y, z, t


@triton.jit
def _interval(mine, other, knots: tl.constexpr, per_unit):
    """(M, N) place on the axis of knots of the signed space-time interval between tokens: time-like to the right."""
    x, y = mine[0][:, None] - other[0][None, :], mine[1][:, None] - other[1][None, :]
    z, t = mine[2][:, None] - other[2][None, :], mine[3][:, None] - other[3][None, :]
    square = t * t - x * x - y * y - z * z
    root = tl.where(square < 0, -1.0, 1.0) * tl.sqrt(tl.abs(square))
    middle = (knots - 1) / 2
    return tl.minimum(tl.maximum(root * per_unit + middle, 0.0), knots - 1.0)


@triton.jit
def _bias(place, table, knots: tl.constexpr):
    """Piecewise linear between the knots: two of them are looked up, in a table that lies in the nearest cache."""
    low = tl.minimum(place.to(tl.int32), knots - 2)
    share = place - low.to(tl.float32)
    return tl.load(table + low).to(tl.float32) * (1.0 - share) + tl.load(table + low + 1).to(tl.float32) * share


@triton.jit(do_not_specialize=COUNTS)
def _attend_kernel(
    qkv, out, lse, bounds, spacetime, table, num_tokens, scale, per_unit, eps,
    H: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KNOTS: tl.constexpr, UNIT: tl.constexpr,
    INSIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row, inside, begin, stop, low, high, alone = _block(bounds, num_tokens, M, INSIDE)
    channel = tl.arange(0, C)
    at = row.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
    to = row.to(tl.int64)[:, None] * (H * C) + head * C + channel[None, :]
    if alone:
        # Tokens alone in their segments see themselves: their values, without arithmetic.
        tl.store(out + to, tl.load(qkv + at + 2 * H * C, mask=inside[:, None]), mask=inside[:, None])
    else:
        query = tl.load(qkv + at, mask=inside[:, None], other=0.0)
        if UNIT:
            query = norm_rows(query, eps, C, False)[0]
        if KNOTS > 0:
            mine = _events(spacetime, row, inside)
        most = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        mixed = tl.zeros([M, C], tl.float32)
        for first in range(low, high, N):
            col = first + tl.arange(0, N)
            there = col < high
            near = col.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
            key = tl.load(qkv + near + H * C, mask=there[:, None], other=0.0)
            value = tl.load(qkv + near + 2 * H * C, mask=there[:, None], other=0.0)
            if UNIT:
                key = norm_rows(key, eps, C, False)[0]
            score = tl.dot(query, tl.trans(key), input_precision=EXACT) * scale
            if KNOTS > 0:
                place = _interval(mine, _events(spacetime, col, there), KNOTS, per_unit)
                score += _bias(place, table + head * KNOTS, KNOTS) * 1.4426950408889634
            visible = _visible(col, begin, stop, inside, high, INSIDE)
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


@triton.jit(do_not_specialize=COUNTS)
def _attend_backward_kernel(
    qkv, out, d_out, lse, d_qkv, d_table, bounds, spacetime, table, num_tokens, scale, per_unit, eps,
    H: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KNOTS: tl.constexpr, R: tl.constexpr,
    UNIT: tl.constexpr, INSIDE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row, inside, begin, stop, low, high, alone = _block(bounds, num_tokens, M, INSIDE)
    channel = tl.arange(0, C)
    at = row.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
    to = row.to(tl.int64)[:, None] * (H * C) + head * C + channel[None, :]
    far = inside[:, None]
    d_mixed = tl.load(d_out + to, mask=far, other=0.0)
    d_knots = tl.zeros([M, R], tl.float32)
    if alone:
        tl.store(d_qkv + at + 2 * H * C, d_mixed, mask=far)
        tl.store(d_qkv + at, tl.zeros([M, C], d_qkv.dtype.element_ty), mask=far)
        tl.store(d_qkv + at + H * C, tl.zeros([M, C], d_qkv.dtype.element_ty), mask=far)
    else:
        query = tl.load(qkv + at, mask=far, other=0.0)
        key = tl.load(qkv + at + H * C, mask=far, other=0.0)
        value = tl.load(qkv + at + 2 * H * C, mask=far, other=0.0)
        query_scale, key_scale = tl.full([M], 1.0, tl.float32), tl.full([M], 1.0, tl.float32)
        if UNIT:
            query, query_scale = norm_rows(query, eps, C, False)
            key, key_scale = norm_rows(key, eps, C, False)
        by_head = head.to(tl.int64) * num_tokens
        my_lse = tl.load(lse + by_head + row, mask=inside, other=0.0)
        my_out = tl.load(out + to, mask=far, other=0.0).to(tl.float32)
        my_delta = tl.sum(my_out * d_mixed.to(tl.float32), 1)
        if KNOTS > 0:
            mine = _events(spacetime, row, inside)
        d_query = tl.zeros([M, C], tl.float32)
        d_key = tl.zeros([M, C], tl.float32)
        d_value = tl.zeros([M, C], tl.float32)
        for first in range(low, high, N):
            col = first + tl.arange(0, N)
            there = col < high
            near = col.to(tl.int64)[:, None] * (3 * H * C) + head * C + channel[None, :]
            near_out = col.to(tl.int64)[:, None] * (H * C) + head * C + channel[None, :]
            other_query = tl.load(qkv + near, mask=there[:, None], other=0.0)
            other_key = tl.load(qkv + near + H * C, mask=there[:, None], other=0.0)
            other_value = tl.load(qkv + near + 2 * H * C, mask=there[:, None], other=0.0)
            other_d = tl.load(d_out + near_out, mask=there[:, None], other=0.0)
            other_out = tl.load(out + near_out, mask=there[:, None], other=0.0).to(tl.float32)
            other_lse = tl.load(lse + by_head + col, mask=there, other=0.0)
            other_delta = tl.sum(other_out * other_d.to(tl.float32), 1)
            if UNIT:
                other_query = norm_rows(other_query, eps, C, False)[0]
                other_key = norm_rows(other_key, eps, C, False)[0]
            visible = _visible(col, begin, stop, inside, high, INSIDE)
            # As queries: what they gave to the keys of the tile.
            score = tl.dot(query, tl.trans(other_key), input_precision=EXACT) * scale
            # As keys: what the queries of the tile gave to them.
            given = tl.dot(key, tl.trans(other_query), input_precision=EXACT) * scale
            place = tl.zeros([M, N], tl.float32)
            if KNOTS > 0:
                place = _interval(mine, _events(spacetime, col, there), KNOTS, per_unit)
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
            if KNOTS > 0:  # noqa: SIM102  (this is decided when it is compiled, and the next when it runs)
                # A pair stands in two tiles, once from each end: the one that has it above the diagonal counts both.
                if first + N > tl.min(row, 0):
                    both = tl.where(col[None, :] > row[:, None], d_score + d_given, 0.0)
                    both = tl.where(col[None, :] == row[:, None], d_score, both)
                    for knot in range(KNOTS):
                        hat = tl.sum(both * tl.maximum(1.0 - tl.abs(place - knot), 0.0), 1)
                        d_knots += tl.where(tl.arange(0, R)[None, :] == knot, hat[:, None], 0.0)
        # Scores were scaled for exp2; their gradient is that of natural scores.
        natural = scale * 0.6931471805599453
        d_query, d_key = d_query * natural, d_key * natural
        if UNIT:
            d_query = through_norm(d_query, query.to(tl.float32), query_scale, C, False)
            d_key = through_norm(d_key, key.to(tl.float32), key_scale, C, False)
        tl.store(d_qkv + at, d_query.to(d_qkv.dtype.element_ty), mask=far)
        tl.store(d_qkv + at + H * C, d_key.to(d_qkv.dtype.element_ty), mask=far)
        tl.store(d_qkv + at + 2 * H * C, d_value.to(d_qkv.dtype.element_ty), mask=far)
    if KNOTS > 0:
        # A row of its own for every program: they are added up in one order, and not in that of arrival.
        knot = tl.arange(0, R)
        place_of = (tl.program_id(0).to(tl.int64) * H + head) * KNOTS + knot
        tl.store(d_table + place_of, tl.sum(d_knots, 0), mask=knot < KNOTS)


def attend_forward(
    qkv: Tensor, bounds: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
    unit_eps: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(T, H, C) what each token hears, and (H, T) the logarithm of its sum of weights.

    `unit_eps`: queries and keys are brought to a root mean square of 1 first, with this inside the root.
    """
    tokens, _, heads, channels = qkv.shape
    out = qkv.new_empty(tokens, heads, channels)
    lse = qkv.new_empty(heads, tokens, dtype=torch.float32)
    if tokens:
        _attend_kernel[(_programs(bounds, block), heads)](
            qkv, out, lse, bounds, spacetime, table, tokens, LOG2_E / math.sqrt(channels), per_unit, unit_eps or 0.0,
            H=heads, C=channels, M=block, N=_tile(block), KNOTS=_knots(table), UNIT=unit_eps is not None,
            INSIDE=_is_inside(bounds), EXACT=_precision(qkv), **_forward_options(block, table),
        )  # fmt: skip
    return out, lse


def attend_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, bounds: Tensor,
    spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int, unit_eps: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tokens, _, heads, channels = qkv.shape
    d_qkv, knots, programs = torch.empty_like(qkv), _knots(table), _programs(bounds, block)
    d_table = qkv.new_empty(programs if knots and tokens else 0, heads, knots, dtype=torch.float32)
    if tokens:
        _attend_backward_kernel[(programs, heads)](
            qkv, out, d_out.contiguous(), lse, d_qkv, d_table, bounds, spacetime, table, tokens,
            LOG2_E / math.sqrt(channels), per_unit, unit_eps or 0.0,
            H=heads, C=channels, M=block, N=_tile(block), KNOTS=knots, R=triton.next_power_of_2(max(2, knots)),
            UNIT=unit_eps is not None, INSIDE=_is_inside(bounds), EXACT=_precision(qkv),
            **_backward_options(block, table, unit_eps),
        )  # fmt: skip
    return d_qkv, d_table.sum(0) if knots else qkv.new_zeros(0, 0, dtype=torch.float32)


@torch.library.custom_op("stoker::attend", mutates_args=())
def _attend(
    qkv: Tensor, bounds: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int
) -> tuple[Tensor, Tensor]:
    return attend_forward(qkv, bounds, spacetime, table, per_unit, block)


@_attend.register_fake
def _(
    qkv: Tensor, bounds: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int
) -> tuple[Tensor, Tensor]:
    tokens, _, heads, channels = qkv.shape
    return qkv.new_empty(tokens, heads, channels), qkv.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("stoker::attend_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, bounds: Tensor,
    spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return attend_backward(d_out, qkv, out, lse, bounds, spacetime, table, per_unit, block)


@_attend_backward.register_fake
def _(
    d_out: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, bounds: Tensor,
    spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(qkv), fake_table(qkv, table)


def fake_table(like: Tensor, table: Tensor | None) -> Tensor:
    """The shape of a table's gradient, which is empty where there is none."""
    return like.new_empty((0, 0) if table is None else table.shape, dtype=torch.float32)


def _save_attend(ctx, inputs, output):
    qkv, bounds, spacetime, table, ctx.per_unit, ctx.block = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(qkv, *output, bounds, spacetime, table)


def _attend_gradient(ctx, d_out, _):
    qkv, out, lse, bounds, spacetime, table = ctx.saved_tensors
    d_qkv, d_table = _attend_backward(d_out, qkv, out, lse, bounds, spacetime, table, ctx.per_unit, ctx.block)
    return d_qkv, None, None, None if table is None else d_table.to(table.dtype), None, None


_attend.register_autograd(_attend_gradient, setup_context=_save_attend)


def attend(
    qkv: Tensor, bounds: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int
) -> Tensor:
    """(T, 3, H, C) -> (T, H, C); `bounds` are those of Segments."""
    out: Tensor = _attend(qkv.contiguous(), bounds, spacetime, table, per_unit, block)[0]
    return out


def _is_inside(bounds: Tensor) -> bool:
    return len(bounds) == 3


def _programs(bounds: Tensor, block: int) -> int:
    return bounds.shape[1] if _is_inside(bounds) else triton.cdiv(bounds.shape[1], block)


def _knots(table: Tensor | None) -> int:
    return 0 if table is None else table.shape[1]


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"  # tf32 is ignored where numbers have 16 bits


# Of blocks of 16 to 128 tokens and tiles of 16 to 64, with 1 to 8 warps, these were the fastest on an H200, with the pulses
# of 4,096 events by DOM (blocks of 32), and their DOMs and their pulses by event (blocks of 64).
def _tile(block: int) -> int:
    return block // 2


def _forward_options(block: int, table: Tensor | None) -> dict[str, int]:
    # Loads that run ahead of the walk. Triton would fetch looked-up knots ahead one by one: seven times the time.
    return {"num_warps": 4 if block >= 64 else 2, "num_stages": 3 if table is None else 1}


def _backward_options(block: int, table: Tensor | None, unit_eps: float | None) -> dict[str, int]:
    if block < 64:
        return {"num_warps": 1, "num_stages": 3}
    if table is not None:
        return {"num_warps": 4, "num_stages": 1}
    # With fewer registers a fourth program fits beside three others.
    return {"num_warps": 4, "num_stages": 2 if unit_eps is None else 1, "maxnreg": 128}
