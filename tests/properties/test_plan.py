"""What must hold for every plan: each sample once, the same steps for any ranks and from any position."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.data.order import ExactOrder, Order, StorageOrder, WindowOrder, rising
from stoker.data.plan import Plan, Position
from stoker.data.ragged import offsets_of
from stoker.data.samples import RangeSubset, SampleTable, whole


def make_table(counts: list[int], shard_size: int = 7) -> SampleTable:
    size = len(counts)
    columns = {
        "shard": (np.arange(size) // shard_size).astype(np.int32),
        "first": offsets_of(np.array(counts))[:-1],
        "count": np.array(counts, np.int32),
        "id": np.arange(size) * 3 + 5,
    }
    shards = tuple(f"shard {number}" for number in range(-(-size // shard_size)))
    starts = np.append(np.arange(0, size, shard_size), size)
    return SampleTable(shards, columns, "print", starts, blocks=np.arange(0, size, 5))


COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=120)
KINDS = st.sampled_from(["exact", "window", "storage"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    table = make_table(draw(COUNTS))
    size, kind, window = len(table), draw(KINDS), draw(st.integers(1, 40))

    def order(seed: int, epoch: int) -> Order:
        if kind == "window":
            return WindowOrder(np.arange(0, size, 5), size, window, seed, epoch)
        return ExactOrder(size, seed, epoch) if kind == "exact" else StorageOrder()

    by_cost = draw(st.booleans())
    cap = draw(st.one_of(st.none(), st.integers(1, 60)))
    return Plan(
        table=table,
        subset=whole(table),
        order=order,
        batch_size=None if by_cost else draw(st.integers(1, 50)),
        batch_cost=draw(st.integers(1, 400)) if by_cost else None,
        micro_cost=None if cap is None else cap * draw(st.integers(1, 5)),
        sample_cost=cap,
    )


def rows_of(plan: Plan, position: Position, num_epochs: int) -> list[list[int]]:
    return [step.rows.tolist() for step in plan.steps(position, num_epochs)]


@given(plans(), st.integers(0, 2**32))
def test_every_sample_comes_exactly_once_an_epoch(plan: Plan, seed: int) -> None:
    for epoch in (0, 1):
        seen = sorted(row for rows in rows_of(plan, Position(seed, epoch), epoch + 1) for row in rows)
        assert seen == list(range(len(plan)))


@settings(deadline=None)
@given(plans(), st.integers(0, 2**32))
def test_resuming_after_any_step_gives_the_same_tail(plan: Plan, seed: int) -> None:
    steps = list(plan.steps(Position(seed), 2))
    rows = [step.rows.tolist() for step in steps]
    for number, step in enumerate(steps):
        assert rows_of(plan, step.after, 2) == rows[number + 1 :]
    middle = steps[len(steps) // 2]
    again = list(plan.steps(middle.after, 2))
    for number, step in enumerate(again):  # resumed twice in a row
        assert rows_of(plan, step.after, 2) == [other.rows.tolist() for other in again[number + 1 :]]


@given(plans(), st.integers(1, 6))
def test_ranks_share_a_step_without_overlap_and_with_equal_numbers_of_micro_batches(plan: Plan, ranks: int) -> None:
    for step in plan.steps(Position(3), 1):
        dealt = plan.deal(step, ranks)
        assert len(dealt) == ranks
        assert len({len(mine) for mine in dealt}) == 1
        together = [row for mine in dealt for micro in mine for row in micro.rows.tolist()]
        assert sorted(together) == sorted(step.rows.tolist())
        if plan.micro_cost is not None:
            assert all(plan.costs(micro.rows).sum() <= plan.micro_cost for mine in dealt for micro in mine)


@given(plans(), st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_changed_number_of_ranks_in_mid_epoch_keeps_the_sequence(
    plan: Plan, before: int, after: int, data: st.DataObject
) -> None:
    steps = list(plan.steps(Position(1), 1))
    cut = data.draw(st.integers(0, len(steps) - 1))
    seen = [
        sorted(row for mine in plan.deal(step, before) for m in mine for row in m.rows) for step in steps[: cut + 1]
    ]
    for step in plan.steps(steps[cut].after, 1):
        seen.append(sorted(row for mine in plan.deal(step, after) for m in mine for row in m.rows))
    assert seen == [sorted(step.rows) for step in steps]


@given(plans())
def test_steps_by_cost_stay_within_the_budget_unless_one_sample_exceeds_it(plan: Plan) -> None:
    if plan.batch_cost is None:
        return
    for step in plan.steps(Position(0), 1):
        assert plan.costs(step.rows).sum() <= plan.batch_cost or len(step.rows) == 1


@given(st.integers(1, 400), st.integers(1, 90), st.integers(1, 50), st.integers(0, 2**32), st.data())
def test_a_window_order_is_a_permutation_that_can_be_taken_from_anywhere(
    size: int, window: int, block: int, seed: int, data: st.DataObject
) -> None:
    blocks = np.arange(0, size, block)
    whole_epoch = WindowOrder(blocks, size, window, seed, 0).take(0, size)
    assert sorted(whole_epoch.tolist()) == list(range(size))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    fresh = WindowOrder(blocks, size, window, seed, 0)
    assert np.array_equal(fresh.take(start, stop), whole_epoch[start:stop])
    keys = fresh.sort_keys(whole_epoch)
    assert (np.diff(keys) > 0).all()


@given(st.lists(st.integers(-3, 2**63 - 1) | st.integers(0, 9)))
def test_numbers_rise_in_the_order_of_a_stable_sort(numbers: list[int]) -> None:
    keys = np.array(numbers, np.int64)
    assert rising(keys).tolist() == np.argsort(keys, kind="stable").tolist()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), min_size=1, max_size=10))
def test_positions_in_a_subset_of_ranges_find_their_rows(gaps: list[tuple[int, int]]) -> None:
    starts, stops, at = [], [], 0
    for gap, length in gaps:
        starts.append(at + gap)
        stops.append(at + gap + length)
        at += gap + length
    subset = RangeSubset(np.array(starts), offsets_of(np.array(stops) - np.array(starts)))
    listed = [row for start, stop in zip(starts, stops, strict=True) for row in range(start, stop)]
    assert subset.rows(np.arange(len(subset))).tolist() == listed
    everything = np.arange(at + 5)
    expected = np.searchsorted(listed, everything)
    assert subset.positions(everything).tolist() == expected.tolist()


@given(plans(), st.integers(1, 6))
def test_partners_are_the_same_for_any_number_of_ranks(plan: Plan, ranks: int) -> None:
    paired = replace(plan, paired=True, micro_cost=None)
    for step in paired.steps(Position(3), 1):
        found = []
        for dealt in (paired.deal(step, 1), paired.deal(step, ranks)):
            partner = {}
            for micro in (micro for mine in dealt for micro in mine):
                assert micro.partners is not None
                assert (micro.partners[micro.partners] == np.arange(len(micro.rows))).all()
                partner |= dict(zip(micro.rows.tolist(), micro.rows[micro.partners].tolist(), strict=True))
            found.append(partner)
        assert found[0] == found[1]
        assert sorted(found[0]) == sorted(step.rows.tolist())
        assert sum(row == other for row, other in found[0].items()) == len(step.rows) % 2  # one may be left alone


@given(st.integers(1, 40), st.integers(1, 6))
def test_ranks_have_as_many_samples_in_every_full_step(batch_size: int, ranks: int) -> None:
    """So that what was compiled and recorded for a shape serves all of them, with partners too."""
    costs = np.random.default_rng(batch_size).integers(1, 100, 400).tolist()
    table = make_table(costs)
    plan = Plan(table, whole(table), lambda seed, epoch: ExactOrder(400, seed, epoch), batch_size, paired=True)
    steps = [step for step in plan.steps(Position(0), 1) if len(step.rows) == batch_size]
    numbers = {tuple(len(mine[0].rows) for mine in plan.deal(step, ranks)) for step in steps}
    assert len(numbers) == 1
