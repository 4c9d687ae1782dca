"""The loader changes how fast batches come, and never which."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
from test_plan import make_table

from stoker.data.loader import Loader, LoaderConfig
from stoker.data.order import ExactOrder
from stoker.data.plan import MicroBatch, Plan, Position
from stoker.data.samples import whole
from stoker.data.stages import Stage
from stoker.errors import MachineError, UserError


class Rows:
    """A batch that remembers its rows and fills some memory."""

    def __init__(self, micro: MicroBatch, num_bytes: int = 0) -> None:
        self.rows = micro.rows.tolist()
        self.content = np.ones(num_bytes, np.uint8)

    @property
    def num_bytes(self) -> int:
        return self.content.nbytes


def make_loader(
    size: int = 60, make: Callable[[MicroBatch], Any] = Rows, rank: int = 0, num_ranks: int = 1, **options: Any
) -> Loader:
    table = make_table([5 + number % 9 for number in range(size)])
    config = LoaderConfig(**({"batch_size": 7, "threads": 2} | options))
    plan = Plan(table, whole(table), lambda seed, epoch: ExactOrder(size, seed, epoch), config.batch_size)
    stages = [Stage("make", make)]
    return Loader(plan, stages, config, num_epochs=2, rank=rank, num_ranks=num_ranks, files_of=lambda rows: "some.file")


def sequence(loader: Loader, position: Position = Position(0)) -> list[list[int]]:  # noqa: B008
    return [batch.rows for loaded in loader.steps(position, 2) for batch in loaded.batches]


def slowly(micro: MicroBatch) -> Rows:
    time.sleep(0.001 * (sum(micro.rows) % 5))  # batches finish out of order
    return Rows(micro)


@pytest.mark.parametrize(("threads", "look_ahead"), [(1, 1), (2, 3), (8, 30)])
def test_threads_and_look_ahead_do_not_change_the_batches(threads: int, look_ahead: int) -> None:
    assert sequence(make_loader(make=slowly, threads=threads, look_ahead=look_ahead)) == sequence(
        make_loader(threads=1)
    )


def test_resuming_after_every_single_step_gives_the_same_tail() -> None:
    loader = make_loader()
    steps = list(loader.steps(Position(0), 2))
    rows = [step.batches[0].rows for step in steps]
    for number, step in enumerate(steps):
        assert sequence(make_loader(make=slowly, look_ahead=5), step.after) == rows[number + 1 :]


def test_state_counts_what_was_consumed_and_not_what_was_made_ahead() -> None:
    first, second = make_loader(look_ahead=20), make_loader()
    batches = iter(first)
    head = [next(batches).batches[0].rows for _ in range(12)]
    second.load_state_dict(first.state_dict())
    batches.close()  # type: ignore[attr-defined]
    tail = [loaded.batches[0].rows for loaded in second]
    assert head + tail == sequence(make_loader())


def test_ranks_together_see_every_sample_once() -> None:
    seen = [row for rank in range(3) for rows in sequence(make_loader(rank=rank, num_ranks=3)) for row in rows]
    assert sorted(seen) == sorted(list(range(60)) * 2)


def test_an_error_in_a_thread_reaches_the_caller_with_files_and_sample_ids() -> None:
    def fail(micro: MicroBatch) -> Rows:
        raise ValueError("broken bytes")

    with pytest.raises(RuntimeError, match=r"ValueError while loading samples \d+.*some\.file.*broken bytes"):
        sequence(make_loader(make=fail))


def test_a_user_error_in_a_thread_stays_one() -> None:
    def fail(micro: MicroBatch) -> Rows:
        raise UserError("the file is cut short")

    with pytest.raises(UserError, match=r"the file is cut short.*some\.file"):
        sequence(make_loader(make=fail))


def test_a_stuck_read_is_reported_with_its_file_and_does_not_hang() -> None:
    release = threading.Event()

    def hang(micro: MicroBatch) -> Rows:
        release.wait(60)
        return Rows(micro)

    begin = time.monotonic()
    with pytest.raises(MachineError, match=r"stuck.*some\.file"):
        next(make_loader(make=hang, stuck_after_s=0.2).steps(Position(0), 1))
    release.set()
    assert time.monotonic() - begin < 30


def test_closing_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    batches = make_loader(make=slowly, threads=4).steps(Position(0), 2)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) <= before


def test_the_memory_budget_holds_under_a_slow_consumer() -> None:
    size = 1 << 20  # bytes of a batch; each step reserves about as much
    alive = []
    lock = threading.Lock()

    class Counted(Rows):
        def __init__(self, micro: MicroBatch) -> None:
            super().__init__(micro, size)
            with lock:
                counts[0] += 1
                alive.append(counts[0])

        def __del__(self) -> None:
            with lock:
                counts[0] -= 1

    counts = [0]
    table = make_table([10] * 400)
    config = LoaderConfig(batch_size=10, threads=4, look_ahead=1000, ram_bytes=6 * size)
    plan = Plan(table, whole(table), lambda seed, epoch: ExactOrder(400, seed, epoch), 10)
    loader: Loader = Loader(plan, [Stage("make", Counted)], config, bytes_per_cost=size / 100)
    for loaded in loader.steps(Position(0), 1):
        time.sleep(0.005)
        del loaded
    assert max(alive) <= 6
    assert max(alive) >= 3  # the budget is used, not only kept


def test_a_step_that_cannot_fit_the_budget_is_refused() -> None:
    table = make_table([10] * 40)
    config = LoaderConfig(batch_size=40, ram_bytes=1 << 20)
    plan = Plan(table, whole(table), lambda seed, epoch: ExactOrder(40, seed, epoch), 40)
    loader: Loader = Loader(plan, [Stage("make", Rows)], config, bytes_per_cost=1e5)
    with pytest.raises(UserError, match=r"loader\.ram_bytes"):
        next(loader.steps(Position(0), 1))


def test_memory_stays_flat_over_many_epochs() -> None:
    loader = make_loader(size=2000, make=lambda micro: Rows(micro, 1 << 18), batch_size=50)
    process = psutil.Process()

    def epoch(number: int) -> int:
        for _ in loader.steps(Position(0, number), number + 1):
            pass
        return process.memory_info().rss

    for number in range(2):
        epoch(number)  # allocators and caches settle
    sizes = [epoch(number) for number in range(2, 7)]
    assert max(sizes) < 1.01 * sizes[0]


def test_stages_count_their_time_bytes_and_the_wait() -> None:
    loader = make_loader(make=lambda micro: Rows(micro, 100))
    steps = len(sequence(loader))
    seen = loader.times.read()
    assert seen["stages"]["make"]["count"] == steps
    assert seen["stages"]["make"]["bytes"] == 100 * steps
    assert seen["stages"]["make"]["p99_ms"] >= seen["stages"]["make"]["p50_ms"] >= 0
    assert seen["wait_s"] >= 0
    assert loader.times.read()["stages"]["make"]["count"] == 0


@pytest.mark.parametrize("options", [{"batch_cost": 5}, {"batch_size": None}, {"micro_cost": 10, "sample_cost": 20}])
def test_impossible_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cost"):
        LoaderConfig(**options)
