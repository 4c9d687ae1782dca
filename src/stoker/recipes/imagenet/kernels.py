"""The Triton kernel behind resize.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _resize_kernel(
    pixels, offsets, shapes, flips, out, size, mean_0, mean_1, mean_2, std_0, std_1, std_2, BLOCK: tl.constexpr
):
    image = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size * size
    row, col = place // size, place % size
    start = tl.load(offsets + image)
    height, width = tl.load(shapes + 2 * image), tl.load(shapes + 2 * image + 1)
    # Flipping the image is asking for the mirrored column.
    col = tl.where(tl.load(flips + image) != 0, size - 1 - col, col)
    step_y, step_x = height.to(tl.float32) / size, width.to(tl.float32) / size
    reach_y, reach_x = tl.maximum(step_y, 1.0), tl.maximum(step_x, 1.0)
    centre_y, centre_x = (row + 0.5) * step_y, (col + 0.5) * step_x
    first_y = tl.maximum((centre_y - reach_y + 0.5).to(tl.int32), 0)
    first_x = tl.maximum((centre_x - reach_x + 0.5).to(tl.int32), 0)
    taps_y, taps_x = tl.ceil(reach_y * 2).to(tl.int32) + 1, tl.ceil(reach_x * 2).to(tl.int32) + 1
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for tap_y in range(0, taps_y):
        y = first_y + tap_y
        weight_y = tl.maximum(1.0 - tl.abs((y + 0.5 - centre_y) / reach_y), 0.0)
        weight_y = tl.where(y < height, weight_y, 0.0)
        for tap_x in range(0, taps_x):
            x = first_x + tap_x
            weight = weight_y * tl.maximum(1.0 - tl.abs((x + 0.5 - centre_x) / reach_x), 0.0)
            weight = tl.where(x < width, weight, 0.0)
            at = pixels + start + (y.to(tl.int64) * width + x) * 3
            read = inside & (weight > 0)
            red += weight * tl.load(at, mask=read, other=0).to(tl.float32)
            green += weight * tl.load(at + 1, mask=read, other=0).to(tl.float32)
            blue += weight * tl.load(at + 2, mask=read, other=0).to(tl.float32)
            total += weight
    to = out + (image * size * size + place) * 3
    kind = out.dtype.element_ty
    tl.store(to, ((red / total / 255 - mean_0) / std_0).to(kind), mask=inside)
    tl.store(to + 1, ((green / total / 255 - mean_1) / std_1).to(kind), mask=inside)
    tl.store(to + 2, ((blue / total / 255 - mean_2) / std_2).to(kind), mask=inside)


def resize_kernel(
    pixels: Tensor,
    offsets: Tensor,
    shapes: Tensor,
    flips: Tensor,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    kind: torch.dtype = torch.float32,
) -> Tensor:
    out = torch.empty(len(offsets), size, size, 3, dtype=kind, device=pixels.device)
    if len(offsets):
        block = 256
        _resize_kernel[(len(offsets), triton.cdiv(size * size, block))](
            pixels, offsets, shapes, flips, out, size, *mean, *std, BLOCK=block
        )
    return out.permute(0, 3, 1, 2)
