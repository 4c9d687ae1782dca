"""Attention inside segments of a flat array: every token sees the tokens of its own segment and no others.

The plain path: segments of similar length are padded to the same power of two and attend together, so the waste is
bounded and no operation looks at pairs of different segments.
"""

# T tokens, H heads, C channels a head, S segments
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Not cuDNN's: steps of ragged batches took 1 s with it and 0.06 s without (one H200, one run of each); presumably it
# plans anew for every shape.
BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def segment_attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor) -> Tensor:
    """Softmax attention, (T, H, C) each; segment i holds the tokens offsets[i] .. offsets[i + 1]."""
    lengths = offsets.diff()
    # A token alone in its segment attends to itself: its value, without any arithmetic.
    out = value.clone()
    width = 2
    longest = int(lengths.max()) if len(lengths) else 0
    while width < 2 * longest:
        chosen = torch.nonzero((lengths > width // 2) & (lengths <= width)).squeeze(1)
        if len(chosen):
            index, inside = _padded_index(offsets[chosen], lengths[chosen], width)
            mixed = _padded_attention(query[index], key[index], value[index], inside)
            out = out.index_put((index[inside],), mixed[inside])
        width *= 2
    return out


def _padded_index(first: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Token numbers (S, width), the last one repeated past the end, and where they lie inside the segment."""
    step = torch.arange(width, device=first.device)
    inside = step < lengths[:, None]
    return first[:, None] + torch.minimum(step, lengths[:, None] - 1), inside


def _padded_attention(query: Tensor, key: Tensor, value: Tensor, inside: Tensor) -> Tensor:
    """(S, width, H, C) in and out; padded keys are masked."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    with sdpa_kernel(BACKENDS):
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=inside[:, None, None, :])
    return mixed.transpose(1, 2)
