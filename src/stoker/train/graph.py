"""Forward and backward pass as one CUDA graph, for batches that all have one shape.

A compiled ResNet-50 is about a thousand kernels a step. Launching them takes the host nearly as long as the GPU needs to
run them, and longer as soon as the cores also decode images; a recorded graph is launched with a single call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stoker import console
from stoker.data.batch import leaves, map_tensors, tensors_in
from stoker.errors import UserError

SEEN = 3  # steps of one shape before it is recorded: kernels are compiled, chosen and loaded by then
PLAIN = (bool, int, float, str, type(None))

# (batch, samples of the whole step) -> its share of the loss; gradients are left in the parameters.
Backward = Callable[[Any, int], Tensor]


class GraphedBackward:
    """Takes batches of any shape: records the shape that keeps coming, and runs all others as they are."""

    def __init__(self, backward: Backward, parameters: list[nn.Parameter]) -> None:
        self._backward, self._parameters = backward, parameters
        self._recorded: tuple[Any, _Recorded] | None = None  # with its shape
        self._latest: Any = None
        self._in_a_row = 0

    def __call__(self, batch: Any, num_samples: int) -> Tensor:
        shape = _shape(batch), num_samples
        self._in_a_row = self._in_a_row + 1 if shape == self._latest else 1
        self._latest = shape
        if self._recorded is not None and self._recorded[0] == shape:
            return self._recorded[1].replay(batch)
        if self._in_a_row == 2:  # not the shorter batch at the end of an epoch: the old graph is done for
            self._recorded = None
        if self._in_a_row > SEEN:
            return self._record(batch, num_samples, shape).replay(batch)
        return self._as_it_is(batch, num_samples)

    def _record(self, batch: Any, num_samples: int, shape: Any) -> "_Recorded":
        try:
            recorded = _Recorded(self._backward, batch, num_samples, self._parameters)
        except Exception as error:
            # No going on: CUDA and its random numbers are not what they were after a recording that broke off.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(
                f"The step cannot be recorded as a CUDA graph: {reason}. --train.cuda_graphs false trains without one."
            ) from error
        self._recorded = shape, recorded
        return recorded

    def _as_it_is(self, batch: Any, num_samples: int) -> Tensor:
        try:
            return self._backward(batch, num_samples)
        except torch.OutOfMemoryError:
            if self._recorded is None:
                raise
            # The graph keeps memory for all that it computes; a shorter batch beside it may be too much. Layers that were
            # through with it have counted it in their running statistics, and do so once more.
            self._recorded = None
            console.say("Out of GPU memory beside the recorded step: it is dropped, and recorded again later.")
        for parameter in self._parameters:
            parameter.grad = None
        torch.cuda.empty_cache()
        return self._backward(batch, num_samples)


class _Recorded:
    def __init__(self, backward: Backward, batch: Any, num_samples: int, parameters: list[nn.Parameter]) -> None:
        # Copies: a graph reads and writes the same memory every time.
        self._batch = map_tensors(batch, Tensor.clone)
        self._parameters, self._graph = parameters, torch.cuda.CUDAGraph()
        for parameter in parameters:
            parameter.grad = None
        # Loader threads allocate pinned memory meanwhile, which is nothing to this graph.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = backward(self._batch, num_samples)
        self._gradients = [parameter.grad for parameter in parameters]

    def replay(self, batch: Any) -> Tensor:
        for ours, theirs in zip(tensors_in(self._batch), tensors_in(batch), strict=True):
            ours.copy_(theirs)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss.clone()  # the next replay writes to it


def _shape(batch: Any) -> Any:
    """All that a graph is made for, besides the numbers in tensors."""
    found = list(leaves(batch))
    strange = [value for _, value in found if not isinstance(value, (Tensor, *PLAIN))]
    if strange:
        raise UserError(
            f"A task with fixed_shapes needs batches of tensors and plain numbers, and {type(batch).__name__} holds a "
            f"{type(strange[0]).__name__}. Leave fixed_shapes out, or train with --train.cuda_graphs false."
        )
    return tuple(
        (name, value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (name, value)
        for name, value in found
    )
