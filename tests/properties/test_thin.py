import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.ragged import Ragged, offsets_of
from stoker.data.thin import thin


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(1, 30), st.integers(0, 99), st.randoms())
def test_thinning_keeps_at_most_the_cap_first_priority_first_in_order(
    counts: list[int], cap: int, seed: int, random: "np.random.Generator"
) -> None:
    offsets = offsets_of(np.array(counts))
    last = np.array([random.random() < 0.5 for _ in range(offsets[-1])], bool)
    ragged = Ragged({"row": np.arange(offsets[-1]), "last": last}, offsets, np.arange(len(counts)))
    ids = np.arange(len(counts)) * 7
    thinned = thin(ragged, cap, ids, seed, 0, last=last)
    for sample, count in enumerate(counts):
        kept = thinned.columns["row"][thinned.offsets[sample] : thinned.offsets[sample + 1]]
        assert len(kept) == min(count, cap)
        assert (np.diff(kept) > 0).all()
        mine = range(offsets[sample], offsets[sample + 1])
        assert set(kept.tolist()) <= set(mine)
        first = sum(not last[row] for row in mine)
        assert sum(not last[row] for row in kept) == min(first, cap)


def test_the_draw_depends_on_sample_and_epoch_and_not_on_company() -> None:
    ragged = Ragged({"row": np.arange(200)}, np.array([0, 100, 200]), np.arange(2))
    both = thin(ragged, 10, np.array([5, 6]), 1, 0)
    alone = thin(Ragged({"row": np.arange(100, 200)}, np.array([0, 100]), np.arange(1)), 10, np.array([6]), 1, 0)
    assert both.columns["row"][10:].tolist() == alone.columns["row"].tolist()
    other_epoch = thin(ragged, 10, np.array([5, 6]), 1, 1)
    assert both.columns["row"].tolist() != other_epoch.columns["row"].tolist()
    assert (both.columns["row"][:10] + 100).tolist() != both.columns["row"][10:].tolist()
