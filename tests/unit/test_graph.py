"""Which steps are recorded as a CUDA graph. That replaying one gives the same numbers is tested on a GPU."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from stoker.errors import UserError
from stoker.train import graph
from stoker.train.graph import SEEN, GraphedBackward


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
    for batch in ({"values": torch.ones(2)}, Batch((torch.ones(2), torch.ones(2)))):  # type: ignore[arg-type]
        with pytest.raises(UserError, match="dataclasses of tensors"):
            graphed(batch, 2)
