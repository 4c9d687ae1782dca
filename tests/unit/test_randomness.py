"""States of generators that are taken at every step: quick where nothing was drawn, and never an old one."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.train.randomness import random_states, restore_random_states, seed_all

DRAWS = {
    "nothing": lambda: None,
    "numbers": lambda: np.random.rand(3),  # noqa: NPY002
    "a normal number": lambda: np.random.normal(),  # noqa: NPY002  the second of a pair is kept for later
    "another seed": lambda: np.random.seed(4),  # noqa: NPY002
    "the same seed": lambda: seed_all(7),
    "python": random.random,
    "torch": lambda: torch.rand(2),
}


@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=30))
def test_states_are_those_of_now(draws: list[str]) -> None:
    seed_all(7)
    for name in draws:
        DRAWS[name]()
        state, told = random_states().numpy, np.random.get_state()  # noqa: NPY002
        assert (state[1] == told[1]).all()
        assert state[2:] == told[2:]


def test_restored_states_draw_the_same() -> None:
    np.random.normal()  # noqa: NPY002
    before = random_states().tensors()
    drawn = np.random.normal(size=3), random.random(), torch.rand(2)  # noqa: NPY002
    restore_random_states(before)
    again = np.random.normal(size=3), random.random(), torch.rand(2)  # noqa: NPY002
    assert (drawn[0] == again[0]).all()
    assert drawn[1] == again[1]
    assert torch.equal(drawn[2], again[2])
