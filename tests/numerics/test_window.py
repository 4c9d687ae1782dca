"""Row groups read in a window order: every sample once an epoch, every block decoded once, the order itself pure."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from stoker.data.loader import LoaderConfig, loader_of
from stoker.data.parquet import ParquetSource
from stoker.data.plan import MicroBatch, Position
from stoker.data.ragged import Ragged
from stoker.data.source import RunData
from stoker.data.window import WindowSource, take_samples
from stoker.recipe import RunConfig
from stoker.recipes.icecube import events, table
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.table import open_events

CPU = torch.device("cpu")


@pytest.fixture
def small_groups(own_events: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Several row groups a file, and a block each."""
    monkeypatch.setattr(table, "BLOCK_ROWS", 1000)
    for path in (own_events / "train").glob("*.parquet"):
        pq.write_table(pq.read_table(path), path, row_group_size=1500)
    return own_events


def opened(folder: Path, loader: LoaderConfig, **data: Any) -> RunData:
    settings = IceCubeData(path=folder, mode="direct", **({"validation": (4,)} | data))
    return open_data(RunConfig(recipe="icecube", data=settings, model=TwoStageConfig(), loader=loader), CPU)


@pytest.mark.parametrize("split", [{}, {"split": "hash", "validation": 0.2}])
def test_every_sample_comes_once_with_its_own_pulses(small_groups: Path, split: dict[str, Any]) -> None:
    config = LoaderConfig(batch_size=50, window=80, threads=2)
    data = opened(small_groups, config, **split)
    anywhere = events.open_pulses(small_groups, open_events(small_groups))
    seen: list[int] = []
    for step in loader_of(data, config, CPU, training=True).steps(Position(0), 1):
        for batch in step.batches:
            rows = batch.rows.numpy()
            assert np.array_equal(batch.time.numpy(), anywhere.gather(MicroBatch(rows)).columns["time"])
            seen += rows.tolist()
    assert sorted(seen) == data.training.rows(np.arange(len(data.training))).tolist()


def test_every_block_is_decoded_once_an_epoch_also_where_one_goes_over_into_the_next(
    small_groups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LoaderConfig(batch_size=25, window=60, threads=2, look_ahead=16)
    data = opened(small_groups, config)
    decoded: list[tuple[int, int]] = []
    decode = WindowSource._decode

    def counted(self: WindowSource, number: int, order: Any) -> Any:
        decoded.append((id(order), number))
        return decode(self, number, order)

    monkeypatch.setattr(WindowSource, "_decode", counted)
    epochs = 4
    count = sum(1 for _ in loader_of(data, config, CPU, training=True).steps(Position(0), epochs))
    assert count == epochs * -(-450 // 25)
    blocks = data.table.blocks
    assert blocks is not None
    used = int((blocks < 450).sum())
    assert used > 8
    assert len(set(decoded)) == len(decoded) == epochs * used


@pytest.mark.parametrize(("num_ranks", "micro_cost"), [(1, 13_000), (2, None), (3, 13_000)])
def test_ranks_and_pieces_of_a_step_take_their_samples_from_blocks_that_are_decoded_once(
    small_groups: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int, micro_cost: int | None
) -> None:
    config = LoaderConfig(batch_size=225, window=80, threads=2, micro_cost=micro_cost, sample_cost=micro_cost)
    anywhere = events.open_pulses(small_groups, open_events(small_groups))
    decoded: list[tuple[int, int]] = []
    decode = WindowSource._decode

    def counted(self: WindowSource, number: int, order: Any) -> Any:
        decoded.append((id(self), number))
        return decode(self, number, order)

    def slow(self: ParquetSource, micro: MicroBatch) -> Ragged:
        assert self is anywhere
        return gather(self, micro)

    gather = ParquetSource.gather
    monkeypatch.setattr(ParquetSource, "gather", slow)
    monkeypatch.setattr(WindowSource, "_decode", counted)
    seen: list[int] = []
    kept: list[RunData] = []
    for rank in range(num_ranks):
        data = opened(small_groups, config)
        kept.append(data)  # so that no other gets its id
        for step in loader_of(data, config, CPU, training=True, rank=rank, num_ranks=num_ranks).steps(Position(0), 1):
            for batch in step.batches:
                rows = batch.rows.numpy()
                found = anywhere.gather(MicroBatch(rows)).columns
                assert np.array_equal(batch.time.numpy(), found["time"])
                assert np.array_equal(batch.sensor.numpy(), found["sensor_id"])
                assert np.array_equal(batch.charge.numpy(), found["charge"])
                assert np.array_equal(batch.flags.numpy().astype(bool), found["auxiliary"])
                seen += rows.tolist()
    assert sorted(seen) == list(range(450))
    assert len(set(decoded)) == len(decoded)


def test_a_sample_that_is_asked_for_twice_comes_twice(small_groups: Path) -> None:
    data = opened(small_groups, LoaderConfig(batch_size=50, window=80, threads=1))
    order = data.order(0, 0).take(0, 3)
    rows = np.sort(data.training.rows(order))[[0, 0, 2]]
    pulses = data.stages[0].run(MicroBatch(rows, 0, 0))
    assert pulses.ragged.rows.tolist() == rows.tolist()


def test_samples_are_taken_as_wholes_wherever_they_lie() -> None:
    columns = {
        "a": np.arange(20, dtype=np.int32),
        "b": np.arange(20, dtype=np.float64) / 2,
        "c": np.arange(20) % 3 == 0,
    }
    for first, counts in (([0, 4, 4, 10], [4, 0, 3, 10]), ([10, 0, 5], [5, 6, 2]), ([], [])):  # gaps; any order; none
        starts, sizes = np.array(first, np.int64), np.array(counts, np.int64)
        order = np.random.default_rng(0).permutation(len(starts))
        rows = [row for one in order for row in range(starts[one], starts[one] + sizes[one])]
        for name, column in take_samples(columns, starts, sizes, order).items():
            assert np.array_equal(column, columns[name][np.array(rows, np.int64)])
            assert column.dtype == columns[name].dtype


def test_asking_for_an_order_changes_nothing(small_groups: Path) -> None:
    config = LoaderConfig(batch_size=50, window=80, threads=1)
    data = opened(small_groups, config)
    loader = loader_of(data, config, CPU, training=True)
    steps = loader.steps(Position(0), 1)
    first = [next(steps).rows.tolist()]
    for epoch in (3, 1, 7):
        data.order(0, epoch).take(0, 10)
    rest = [step.rows.tolist() for step in steps]
    again = [step.rows.tolist() for step in loader.steps(Position(0), 1)]
    assert first + rest == again
