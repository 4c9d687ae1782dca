"""The states of all generators of random numbers that a task might draw from: taken at every step, saved, brought back."""

import ctypes
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

STATE_BYTES = 624 * 4 + 4  # of MT19937: its words, and how many of them are used up


@dataclass(frozen=True)
class RandomStates:
    """Every kind of random number a task might draw. Cheap to take at every step; tensors are made when they are saved."""

    python: Any
    numpy: Any
    torch: Tensor
    cuda: Tensor | None

    def tensors(self) -> dict[str, Tensor]:
        version, words, gauss = self.python
        kind, keys, position, has_gauss, cached = self.numpy
        assert version == 3, "the layout of Python's random state"
        assert kind == "MT19937", "numpy's legacy generator"
        states = {
            "python": torch.tensor([*words, -1 if gauss is None else 1], dtype=torch.int64),
            "python_gauss": torch.tensor(gauss or 0.0, dtype=torch.float64),
            "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
            "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
            "torch": self.torch,
        }
        return states if self.cuda is None else {**states, "cuda": self.cuda}


class _Seeded:
    """numpy's generator as `seed_all` left it: a state takes longer to make than most else that is done for a step."""

    words = b""  # as they lie in memory
    state: Any = None


def seed_all(seed: int) -> None:
    """Every generator that a task might draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    _Seeded.words, _Seeded.state = _numpy_words(), np.random.get_state()  # noqa: NPY002


def random_states() -> RandomStates:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    words = _numpy_words()
    return RandomStates(
        python=random.getstate(),
        # Words alone do not tell whether the second of two normal numbers is kept for later. After seeding none is.
        numpy=_Seeded.state if words and words == _Seeded.words else np.random.get_state(),  # noqa: NPY002
        torch=torch.get_rng_state(),
        cuda=torch.cuda.get_rng_state() if on_gpu else None,
    )


def _numpy_words() -> bytes:
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    usual = type(generator) is np.random.MT19937
    return ctypes.string_at(generator.ctypes.state_address, STATE_BYTES) if usual else b""


def restore_random_states(states: Mapping[str, Tensor]) -> None:
    """Raises what a state of the wrong kind makes each generator raise."""
    *words, has = states["python"].tolist()
    random.setstate((3, tuple(words), None if has < 0 else states["python_gauss"].item()))
    *keys, position, has_gauss = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, states["numpy_gauss"].item()))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def by_rank(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Of all ranks, in one table, as a checkpoint keeps them."""
    return {f"{rank}/{key}": value for rank, mine in enumerate(states) for key, value in mine.items()}


def of_rank(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """A rank that the saved run did not have takes the state of another."""
    count = len({key.split("/")[0] for key in states})
    prefix = f"{rank % count}/"
    return {key.removeprefix(prefix): value for key, value in states.items() if key.startswith(prefix)}
