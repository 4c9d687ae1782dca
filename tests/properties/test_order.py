import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.order import ExactOrder

SIZES = st.integers(1, 5000)
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)


@given(SIZES, SEEDS, EPOCHS)
def test_every_sample_comes_exactly_once(size: int, seed: int, epoch: int) -> None:
    taken = ExactOrder(size, seed, epoch).take(0, size)
    assert np.array_equal(np.sort(taken), np.arange(size))


@given(SIZES, SEEDS, EPOCHS)
def test_the_inverse_finds_the_position_of_a_sample(size: int, seed: int, epoch: int) -> None:
    order = ExactOrder(size, seed, epoch)
    positions = np.arange(size)
    assert np.array_equal(order.inverse(order.forward(positions)), positions)


@given(st.integers(2, 10**9), SEEDS, st.data())
def test_any_stretch_can_be_taken_alone(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    stop = min(size, start + 50)
    order = ExactOrder(size, seed, 3)
    assert np.array_equal(order.take(start, stop), np.concatenate([order.take(p, p + 1) for p in range(start, stop)]))


def test_seed_and_epoch_are_not_interchangeable() -> None:
    assert not np.array_equal(ExactOrder(1000, 0, 1).take(0, 1000), ExactOrder(1000, 1, 0).take(0, 1000))
