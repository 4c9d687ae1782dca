"""A layer of a transformer over segments as one operator: few large calls, because the host has to keep ahead of the GPU.

tokens + mix(attention(qkv(norm(tokens)))), then tokens + narrow(activation(widen(norm(tokens)))), in 16 bits, with weights
in 32. Norms have no weights and products no biases.
"""

# T tokens, W channels, I inner channels, H heads
from dataclasses import dataclass

import torch
from torch import Tensor

from stoker.recipes.icecube.attention import Bias, Segments
from stoker.recipes.icecube.kernels import products
from stoker.recipes.icecube.kernels.attention import attend_backward, attend_forward, fake_table
from stoker.recipes.icecube.kernels.norm import norm


@dataclass(frozen=True)
class LayerWeights:
    qkv: Tensor  # (3 W, W)
    mix: Tensor  # (W, W)
    widen: Tensor  # (I, W)
    narrow: Tensor  # (W, I)


@torch.library.custom_op("stoker::layer", mutates_args=())
def _layer(
    tokens: Tensor, qkv: Tensor, mix: Tensor, widen: Tensor, narrow: Tensor,
    bounds: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
    heads: int, eps: float, centred: bool, unit_eps: float | None, gelu: bool,
) -> list[Tensor]:  # fmt: skip
    """The tokens behind the layer, and all that its gradient needs."""
    count, width = tokens.shape
    weights = products.narrowed((qkv, mix, widen, narrow), tokens.dtype)
    normed, scales = norm(tokens, eps, centred=centred)
    product = (normed @ weights[0].t()).view(count, 3, heads, width // heads)
    mixed, lse = attend_forward(product, bounds, spacetime, table, per_unit, block, unit_eps)
    middle = products.add_product(tokens, mixed, weights[1])
    normed_2, scales_2, active, before = products.norm_activate(middle, weights[2], eps, centred=centred, gelu=gelu)
    out = products.add_product(middle, active, weights[3])
    return [out, *weights, normed, scales, product, mixed, lse, normed_2, scales_2, active, before]


@_layer.register_fake
def _(
    tokens: Tensor, qkv: Tensor, mix: Tensor, widen: Tensor, narrow: Tensor,
    bounds: Tensor, spacetime: Tensor | None, table: Tensor | None, per_unit: float, block: int,
    heads: int, eps: float, centred: bool, unit_eps: float | None, gelu: bool,
) -> list[Tensor]:  # fmt: skip
    count, width = tokens.shape
    weights = [torch.empty_like(weight, dtype=tokens.dtype) for weight in (qkv, mix, widen, narrow)]
    scales = [tokens.new_empty(count, dtype=torch.float32) for _ in range(2)]
    product, mixed = (tokens.new_empty(count, *shape, heads, width // heads) for shape in ((3,), ()))
    lse, active = tokens.new_empty(heads, count, dtype=torch.float32), tokens.new_empty(count, widen.shape[0])
    before = torch.empty_like(active) if gelu else tokens.new_empty(0)
    out, normed, normed_2 = (torch.empty_like(tokens) for _ in range(3))
    return [out, *weights, normed, scales[0], product, mixed, lse, normed_2, scales[1], active, before]


@torch.library.custom_op("stoker::layer_backward", mutates_args=())
def _layer_backward(
    d_out: Tensor, kept: list[Tensor], bounds: Tensor, spacetime: Tensor | None, table: Tensor | None,
    per_unit: float, block: int, centred: bool, unit_eps: float | None, gelu: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of tokens, weights and table."""
    qkv, mix, widen, narrow, normed, scales, product, mixed, lse, normed_2, scales_2, active, before = kept
    (count, width), d_out = normed.shape, d_out.contiguous()
    d_middle, d_before = products.through_feed_forward(
        d_out, widen, narrow, normed_2, scales_2, before if gelu else active, centred=centred, gelu=gelu
    )
    d_widen, d_narrow = products.weight_gradient(d_before, normed_2), products.weight_gradient(d_out, active)
    d_mixed = (d_middle @ mix).view_as(mixed)
    d_product, d_table = attend_backward(
        d_mixed, product, mixed, lse, bounds, spacetime, table, per_unit, block, unit_eps
    )
    d_product = d_product.view(count, 3 * width)
    d_tokens = products.through_norm_product(d_product, qkv, normed, scales, d_middle, centred=centred)
    d_qkv = products.weight_gradient(d_product, normed)
    d_mix = products.weight_gradient(d_middle, mixed.view(count, width))
    return [d_tokens, d_qkv, d_mix, d_widen, d_narrow, d_table]


@_layer_backward.register_fake
def _(
    d_out: Tensor, kept: list[Tensor], bounds: Tensor, spacetime: Tensor | None, table: Tensor | None,
    per_unit: float, block: int, centred: bool, unit_eps: float | None, gelu: bool,
) -> list[Tensor]:  # fmt: skip
    weights = [torch.empty_like(weight, dtype=torch.float32) for weight in kept[:4]]
    return [torch.empty_like(kept[4]), *weights, fake_table(d_out, table)]


def _save(ctx, inputs, output):
    *_, bounds, spacetime, table, ctx.per_unit, ctx.block, _, _, ctx.centred, ctx.unit_eps, ctx.gelu = inputs
    ctx.set_materialize_grads(False)  # nobody wants zeros for all that is only kept
    ctx.save_for_backward(*output[1:], bounds, spacetime, table)


def _gradient(ctx, gradients):
    *kept, bounds, spacetime, table = ctx.saved_tensors
    d_tokens, *d_weights, d_table = _layer_backward(
        gradients[0], kept, bounds, spacetime, table, ctx.per_unit, ctx.block, ctx.centred, ctx.unit_eps, ctx.gelu
    )
    d_table = None if table is None else d_table.to(table.dtype)
    return d_tokens, *d_weights, None, None, d_table, *[None] * 7


_layer.register_autograd(_gradient, setup_context=_save)


def layer(
    tokens: Tensor, weights: LayerWeights, segments: Segments, bias: Bias | None, *,
    heads: int, eps: float, centred: bool, unit_eps: float | None = None, gelu: bool = False,
) -> Tensor:  # fmt: skip
    """(T, W) -> (T, W).

    `centred`: norms subtract the mean (layer norm). `unit_eps`: queries and keys are normed too. The activation is a squared
    ReLU, or GELU.
    """
    spacetime, table, per_unit = (None, None, 1.0) if bias is None else (bias.spacetime, bias.table, bias.per_unit)
    out: Tensor = _layer(
        tokens.contiguous(), weights.qkv, weights.mix, weights.widen, weights.narrow,
        segments.bounds, spacetime, table, per_unit, segments.block, heads, eps, centred, unit_eps, gelu,
    )[0]  # fmt: skip
    return out
