"""Which steps are recorded as a CUDA graph. That replaying one gives the same numbers is tested on a GPU."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

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
    assert losses == [8.0] * (SEEN + 1) + [1008.0] * 2
    assert graphed(last, 3).item() == 3.0  # the shorter last batch of an epoch, epoch after epoch
    assert graphed(usual, 8).item() == 1008.0
    assert graphed(last, 3).item() == 3.0
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


def test_a_step_that_cannot_be_recorded_goes_on_as_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph, "_Recorded", fails)
    graphed = GraphedBackward(lambda batch, num_samples: batch.values.sum(), [])
    assert [graphed(Batch(torch.ones(2)), 2).item() for _ in range(3 * SEEN)] == [2.0] * 3 * SEEN
    said = capsys.readouterr()
    assert (said.out + said.err).count("operation not permitted when stream is capturing") == 1
