"""Which steps are recorded as a CUDA graph. That replaying one gives the same numbers is tested on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.data.plan import Position, Step
from stoker.errors import UserError
from stoker.recipes.imagenet.batch import ImageBatch
from stoker.recipes.imagenet.classes import ClassMap
from stoker.recipes.imagenet.model import ImageModelConfig
from stoker.recipes.imagenet.task import ClassificationTask
from stoker.train import graph
from stoker.train.config import TrainConfig
from stoker.train.graph import SEEN, GraphedBackward
from stoker.train.optim import build_optimizer
from stoker.train.step import Stepper


@dataclass(frozen=True)
class Batch:
    values: Tensor
    scale: int = 1


class Recorder:
    """Stands in for a recorded graph, and counts."""

    made: ClassVar[list[Any]] = []

    def __init__(self, backward: Any, batch: Batch, num_samples: int, parameters: list[nn.Parameter]) -> None:
        self.made.append(tuple(batch.values.shape))
        self.num_samples = num_samples

    def replay(self, batch: Batch) -> Tensor:
        return torch.tensor(1000.0 + self.num_samples)


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> GraphedBackward:
    monkeypatch.setattr(graph, "_Recorded", Recorder)
    monkeypatch.setattr(Recorder, "made", [])
    return GraphedBackward(lambda batch, num_samples: batch.values.sum(), [nn.Parameter(torch.ones(2))])


def test_a_shape_is_recorded_once_it_keeps_coming(graphed: GraphedBackward) -> None:
    usual, last = Batch(torch.ones(8)), Batch(torch.ones(3))
    losses = [graphed(usual, 8).item() for _ in range(SEEN + 3)]
    assert losses == [8.0] * SEEN + [1008.0] * 3
    for _ in range(2 * SEEN):  # epochs, each with a shorter last batch
        assert graphed(last, 3).item() == 3.0
        assert [graphed(usual, 8).item() for _ in range(5)] == [1008.0] * 5
    assert Recorder.made == [(8,)]


def test_a_new_usual_shape_replaces_the_old_one(graphed: GraphedBackward) -> None:
    for _ in range(2 * SEEN):
        graphed(Batch(torch.ones(8)), 8)
    for _ in range(2 * SEEN):
        grown = graphed(Batch(torch.ones(12)), 12).item()
    assert Recorder.made == [(8,), (12,)]
    assert grown == 1012.0


def test_other_numbers_of_a_batch_and_of_the_step_count_too(graphed: GraphedBackward) -> None:
    for _ in range(2 * SEEN):
        graphed(Batch(torch.ones(8)), 8)
    assert graphed(Batch(torch.ones(8), scale=2), 8).item() == 8.0
    assert graphed(Batch(torch.ones(8)), 16).item() == 8.0


def test_a_step_that_cannot_be_recorded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph, "_Recorded", fails)
    graphed = GraphedBackward(lambda batch, num_samples: batch.values.sum(), [])
    for _ in range(SEEN):
        graphed(Batch(torch.ones(2)), 2)
    with pytest.raises(UserError, match=r"stream is capturing\. --train\.cuda_graphs false"):
        graphed(Batch(torch.ones(2)), 2)


def test_a_graph_makes_room_for_a_batch_that_does_not_fit_beside_it(graphed: GraphedBackward) -> None:
    usual, last = Batch(torch.ones(8)), Batch(torch.ones(3))
    for _ in range(2 * SEEN):
        graphed(usual, 8)
    failed = []

    def tight(batch: Batch, num_samples: int) -> Tensor:
        if not failed:
            failed.append(num_samples)
            raise torch.OutOfMemoryError("no room")
        return batch.values.sum()

    graphed._backward = tight
    assert graphed(last, 3).item() == 3.0
    assert failed == [3]
    assert [graphed(usual, 8).item() for _ in range(SEEN + 1)] == [8.0] * SEEN + [1008.0]
    assert Recorder.made == [(8,), (8,)]


def test_batches_that_cannot_be_recorded_are_refused(graphed: GraphedBackward) -> None:
    with pytest.raises(UserError, match="holds a ndarray"):
        graphed(Batch(np.ones(2)), 2)  # type: ignore[arg-type]


def test_batches_of_any_structure_have_a_shape() -> None:
    graphed = GraphedBackward(lambda batch, samples: batch["inputs"][0].sum(), [nn.Parameter(torch.ones(2))])
    for _ in range(SEEN):
        assert graphed({"inputs": (torch.ones(2), 3), "rows": torch.arange(2)}, 2) == 2


class StandIn:
    """Does on a CPU what CUDA's graphs do: notes down at first, changing nothing, and later does it on the same memory."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.made = model, 0

    def make(self, backward: Any, batch: Any, num_samples: int, parameters: list[nn.Parameter]) -> Any:
        self.made += 1
        kept = [buffer.clone() for buffer in self._model.buffers()]

        @contextmanager
        def capture(graph: Any, capture_error_mode: str) -> Iterator[None]:
            yield
            for buffer, old in zip(self._model.buffers(), kept, strict=True):
                buffer.copy_(old)

        def replay() -> None:
            for parameter in parameters:
                parameter.grad = None
            recorded._loss.copy_(backward(recorded._batch, num_samples))
            for parameter, gradient in zip(parameters, recorded._gradients, strict=True):
                gradient.copy_(parameter.grad)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
            patch.setattr(torch.cuda, "graph", capture)
            recorded = REAL(backward, batch, num_samples, parameters)
        return recorded


REAL = graph._Recorded


def test_recorded_steps_train_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter batch in between, another usual size later, a step that is not finite."""

    def weights(graphed: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        task = ClassificationTask(ImageModelConfig(name="resnet9", width=4), ClassMap(("a", "b", "c")))
        config = TrainConfig(optimizer="sgd", lr=0.05, ema=0.9)
        device = torch.device("cpu")
        stepper = Stepper(task, build_optimizer(task.model, config), config, "fp32", device)
        stand_in = StandIn(task.model)
        if graphed:
            stepper._graphed = GraphedBackward(stepper._backward, stepper.parameters)
            monkeypatch.setattr(graph, "_Recorded", stand_in.make)
        for number, size in enumerate([8] * 8 + [5] + [8] * 4 + [6] * 6):
            images = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(number))
            if number == 10:
                images[0] = float("nan")
            labels = torch.arange(size) % 3
            batch = ImageBatch(images, labels, labels, torch.ones(size), torch.arange(size))
            result = stepper.compute(Step(np.arange(size), Position(0), Position(0), batches=(batch,)))
            stepper.update(result, 0.05)
        assert stand_in.made == (2 if graphed else 0)
        assert stepper.average is not None
        return task.model.state_dict() | {f"average of {name}": v for name, v in stepper.average.weights.items()}

    plain, recorded = weights(False), weights(True)
    for name, value in plain.items():
        torch.testing.assert_close(recorded[name], value, rtol=0, atol=1e-6, msg=name)
