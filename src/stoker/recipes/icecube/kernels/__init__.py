"""Triton kernels for tokens in segments, as PyTorch operators with gradients.

No program adds to what another one writes: sums are made in one order, and the same numbers come out every time.

Imported only where there is a GPU (or under TRITON_INTERPRET=1): see recipes/icecube/attention.py for the path of a CPU.
"""

from stoker.recipes.icecube.kernels.attention import attend
from stoker.recipes.icecube.kernels.layer import LayerWeights, layer
from stoker.recipes.icecube.kernels.segments import mean, spread

__all__ = ["LayerWeights", "attend", "layer", "mean", "spread"]
