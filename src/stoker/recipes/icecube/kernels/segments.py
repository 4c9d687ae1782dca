"""Means over the rows of a segment, and rows of a segment that are alike."""

# T tokens, S segments, C channels
import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker.recipes.icecube.kernels.norm import COUNTS

FEW = 8  # channels, and tokens of a segment on average


@triton.jit(do_not_specialize=COUNTS)
def _spread_kernel(values, number, out, num_tokens, num_channels, C: tl.constexpr, M: tl.constexpr):
    row = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.arange(0, C)
    inside = (row < num_tokens)[:, None] & (channel < num_channels)[None, :]
    segment = tl.load(number + row, mask=row < num_tokens, other=0)
    found = tl.load(values + segment[:, None] * num_channels + channel[None, :], mask=inside, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * num_channels + channel[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["num_segments"])
def _few_sums_kernel(
    values, offsets, out, num_segments, num_channels, M: tl.constexpr, C: tl.constexpr, MEAN: tl.constexpr
):  # fmt: skip
    """A segment a lane, for rows so short that a program of its own would do next to nothing."""
    segment = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    inside = segment < num_segments
    begin = tl.load(offsets + segment, mask=inside, other=0)
    length = tl.load(offsets + segment + 1, mask=inside, other=0) - begin
    channel = tl.arange(0, C)
    real = channel < num_channels
    total = tl.zeros([M, C], tl.float32)
    for step in range(tl.max(length, 0)):
        at = (begin + step)[:, None] * num_channels + channel[None, :]
        total += tl.load(values + at, mask=(step < length)[:, None] & real[None, :], other=0.0).to(tl.float32)
    if MEAN:
        total /= tl.maximum(length, 1).to(tl.float32)[:, None]
    to = segment[:, None] * num_channels + channel[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty), mask=inside[:, None] & real[None, :])


@triton.jit
def _sum_kernel(values, offsets, out, num_channels, R: tl.constexpr, C: tl.constexpr, MEAN: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    begin, stop = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    channel = tl.arange(0, C)
    real = channel < num_channels
    total = tl.zeros([C], tl.float32)
    for first in range(begin, stop, R):
        row = first + tl.arange(0, R)
        at = row.to(tl.int64)[:, None] * num_channels + channel[None, :]
        total += tl.sum(tl.load(values + at, mask=(row < stop)[:, None] & real[None, :], other=0.0).to(tl.float32), 0)
    if MEAN:
        total /= tl.maximum(stop - begin, 1).to(tl.float32)
    tl.store(out + segment * num_channels + channel, total.to(out.dtype.element_ty), mask=real)


def _sums(values: Tensor, offsets: Tensor, is_mean: bool) -> Tensor:
    channels, count = values.shape[1], len(offsets) - 1
    out = values.new_empty(count, channels)
    if channels <= FEW and len(values) < FEW * count:
        _few_sums_kernel[(triton.cdiv(count, 64),)](
            values.contiguous(), offsets, out, count, channels, M=64, C=triton.next_power_of_2(channels), MEAN=is_mean,
            num_warps=2,
        )  # fmt: skip
    elif count:
        _sum_kernel[(count,)](
            values.contiguous(), offsets, out, channels, R=8, C=triton.next_power_of_2(channels), MEAN=is_mean, num_warps=1
        )  # fmt: skip
    return out


def _fake_sums(values: Tensor, offsets: Tensor) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1, values.shape[1])


@torch.library.custom_op("stoker::segment_mean", mutates_args=())
def _mean(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    return _sums(values, offsets, is_mean=True)


@_mean.register_fake
def _(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    return _fake_sums(values, offsets)


def _save_segments(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:])


def _mean_gradient(ctx, d_out):
    offsets, number = ctx.saved_tensors
    return (d_out / offsets.diff().clamp_min(1)[:, None])[number].to(d_out.dtype), None, None


_mean.register_autograd(_mean_gradient, setup_context=_save_segments)


@torch.library.custom_op("stoker::segment_sum", mutates_args=())
def _sum(values: Tensor, offsets: Tensor) -> Tensor:
    return _sums(values, offsets, is_mean=False)


@_sum.register_fake
def _(values: Tensor, offsets: Tensor) -> Tensor:
    return _fake_sums(values, offsets)


@torch.library.custom_op("stoker::spread", mutates_args=())
def _spread(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    count, channels = len(number), values.shape[1]
    out = values.new_empty(count, channels)
    if count:
        _spread_kernel[(triton.cdiv(count, 16),)](
            values.contiguous(), number, out, count, channels, C=triton.next_power_of_2(channels), M=16, num_warps=1
        )
    return out


@_spread.register_fake
def _(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    return values.new_empty(number.shape[0], values.shape[1])


def _spread_gradient(ctx, d_out):
    # What `values[number]` would do by itself is add to rows as programs come along, in another order every time.
    return _sum(d_out, ctx.saved_tensors[0]), None, None


_spread.register_autograd(_spread_gradient, setup_context=_save_segments)


def mean(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    """(T, C) -> (S, C); `number` (T,) is each token's segment."""
    out: Tensor = _mean(values, offsets, number)
    return out


def spread(values: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    """(S, C) -> (T, C): each segment's row for each of its tokens."""
    out: Tensor = _spread(values, offsets, number)
    return out
