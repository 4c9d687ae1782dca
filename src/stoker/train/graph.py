"""Forward and backward pass as one CUDA graph, for batches that all have one shape.

A compiled ResNet-50 is about a thousand kernels a step. Launching them takes the host nearly as long as the GPU needs to
run them, and longer as soon as the cores also decode images; a recorded graph is launched with a single call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stoker import console

SEEN = 3  # steps of one shape before it is recorded: kernels are compiled, chosen and loaded by then

Backward = Callable[
    [Any, int], Tensor
]  # (batch, samples of the step) -> its share of the loss; leaves gradients behind


class GraphedBackward:
    """Takes batches of any shape: records the shape that keeps coming, and runs all others as they are."""

    def __init__(self, backward: Backward, parameters: list[nn.Parameter]) -> None:
        self._backward, self._parameters = backward, parameters
        self._recorded: tuple[Any, _Recorded] | None = None  # with its shape
        self._latest: Any = None
        self._in_a_row, self._works = 0, True

    def __call__(self, batch: Any, num_samples: int) -> Tensor:
        shape = _shape(batch), num_samples
        if self._recorded is not None and self._recorded[0] == shape:
            return self._recorded[1].replay(batch)
        self._in_a_row = self._in_a_row + 1 if shape == self._latest else 1
        self._latest = shape
        if self._works and self._in_a_row > SEEN:  # a shorter batch at the end of an epoch never comes so often
            self._record(batch, num_samples, shape)
        # Recording only takes down what is to be done: this batch still goes the usual way.
        return self._backward(batch, num_samples)

    def _record(self, batch: Any, num_samples: int, shape: Any) -> None:
        self._recorded = None  # gives its memory back first
        try:
            self._recorded = shape, _Recorded(self._backward, batch, num_samples, self._parameters)
        except RuntimeError as error:
            self._works = False
            reason = str(error).strip().splitlines()[0]
            console.say(f"The step cannot be recorded as a CUDA graph, each kernel is launched by itself: {reason}")
        for parameter in self._parameters:
            parameter.grad = None


class _Recorded:
    def __init__(self, backward: Backward, batch: Any, num_samples: int, parameters: list[nn.Parameter]) -> None:
        # Copies: a graph reads and writes the same memory every time.
        self._batch = dataclasses.replace(batch, **{name: value.clone() for name, value in _tensors(batch).items()})
        self._parameters, self._graph = parameters, torch.cuda.CUDAGraph()
        for parameter in parameters:
            parameter.grad = None
        # Loader threads allocate pinned memory meanwhile, which is nothing to this graph.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._loss = backward(self._batch, num_samples)
        self._gradients = [parameter.grad for parameter in parameters]

    def replay(self, batch: Any) -> Tensor:
        for name, value in _tensors(batch).items():
            getattr(self._batch, name).copy_(value)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss


def _tensors(batch: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def _shape(batch: Any) -> Any:
    """All that a graph is made for, besides values."""
    return tuple(
        (name, value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else (name, value)
        for name, value in vars(batch).items()
    )
