import numpy as np

from stoker.data.order import ExactOrder, StorageOrder, WindowOrder
from stoker.data.quality import shuffle_quality


def test_the_exact_order_has_no_lag_1_correlation_for_twenty_seeds() -> None:
    size = 1_000_003
    shard = np.arange(size) // 2000
    for seed in range(20):
        quality = shuffle_quality(ExactOrder(size, seed, 0).take(0, size), shard, 256)
        assert abs(quality.lag1) < 3 * quality.lag1_error
        assert abs(quality.chi2_z) < 4
        assert abs(quality.shards_per_batch - quality.shards_expected) < 2


def test_quality_tells_a_window_and_no_shuffle_from_a_true_one() -> None:
    size = 100_000
    shard = np.arange(size) // 1000
    window = WindowOrder(np.arange(0, size, 500), size, 2000, 0, 0)
    mixed = shuffle_quality(window.take(0, size), shard, 256)
    plain = shuffle_quality(StorageOrder().take(0, size), shard, 256, StorageOrder().take(0, size))
    exact = shuffle_quality(ExactOrder(size, 0, 0).take(0, size), shard, 256, ExactOrder(size, 0, 1).take(0, size))
    assert abs(exact.lag1) < 0.01 < mixed.lag1 < 0.9 < plain.lag1
    assert plain.shards_per_batch < mixed.shards_per_batch < exact.shards_per_batch
    assert plain.displacement == 0
    assert exact.displacement is not None
    assert abs(exact.displacement - 1) < 0.02
    assert "lag-1" in exact.line()
