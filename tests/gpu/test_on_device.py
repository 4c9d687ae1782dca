"""What only a GPU can show: the same batches, nobody waiting, the same events for the same seed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.data.batch import pin, pin_tensor
from stoker.data.device import feed
from stoker.data.loader import Loader, LoaderConfig
from stoker.data.plan import MicroBatch, Plan, Position
from stoker.data.stages import Stage
from stoker.recipe import RunConfig, RunData
from stoker.recipes.icecube.batch import EventBatch
from stoker.recipes.icecube.data import IceCubeData, open_data
from stoker.recipes.icecube.geometry import standard_geometry
from stoker.recipes.icecube.light import Detector
from stoker.recipes.icecube.model import TwoStageConfig
from stoker.recipes.icecube.simulate import simulate_events
from stoker.tune.trial import Ask, tried


def data_of(folder: Path, mode: str, device: str) -> RunData:
    data = IceCubeData(path=folder, mode=mode, validation=(4,))  # type: ignore[arg-type]
    return open_data(RunConfig(recipe="icecube", data=data, model=TwoStageConfig()), torch.device(device))


def batch_of(data: RunData, rows: np.ndarray, device: str) -> EventBatch:
    value = MicroBatch(rows, seed=0, epoch=0)
    for stage in data.stages:
        value = stage.run(value)
    return value.to(torch.device(device))  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("mode", ["direct", "packed", "resident"])
def test_a_batch_on_the_gpu_equals_the_one_on_the_cpu(events_dir: Path, mode: str) -> None:
    rows = np.sort(np.random.default_rng(0).permutation(450)[:100])
    ours = batch_of(data_of(events_dir, mode, "cuda"), rows, "cuda")
    theirs = batch_of(data_of(events_dir, "packed", "cpu"), rows, "cpu")
    for name, value in vars(theirs).items():
        if value is not None:
            assert torch.equal(getattr(ours, name).cpu(), value), name


def test_auto_keeps_events_on_the_gpu_when_they_fit(events_dir: Path) -> None:
    assert data_of(events_dir, "auto", "cuda").description["mode"] == "resident"


@pytest.mark.parametrize("mode", ["packed", "resident"])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_batches_reach_the_gpu_without_anybody_waiting(events_dir: Path, mode: str) -> None:
    data = data_of(events_dir, mode, "cuda")
    rows = np.arange(64)
    value = MicroBatch(rows, seed=0, epoch=0)
    for stage in data.stages:
        value = stage.run(value)
    pinned = pin(value)
    try:
        torch.cuda.set_sync_debug_mode("error")
        pinned.to(torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_feed_keeps_the_order_and_the_content(events_dir: Path) -> None:
    data = data_of(events_dir, "packed", "cuda")
    plan = Plan(data.table, data.training, data.order, 50)
    stages = [*data.stages, Stage("pin", pin)]
    loader: Loader = Loader(plan, stages, LoaderConfig(batch_size=50))
    seen = []
    for step in feed(loader.steps(Position(3), 1), torch.device("cuda")):
        torch.cuda._sleep(2_000_000)  # the consumer is slow: memory handed over must not be reused meanwhile
        seen.append((step.batches[0].rows.cpu(), step.batches[0].time.sum().cpu()))
    for (rows, total), planned in zip(seen, plan.steps(Position(3), 1), strict=True):
        assert torch.equal(rows, torch.from_numpy(np.sort(planned.rows)))
        expected = batch_of(data_of(events_dir, "packed", "cpu"), np.sort(planned.rows), "cpu").time.sum()
        torch.testing.assert_close(total, expected)


def test_the_same_seed_gives_the_same_events_on_the_gpu() -> None:
    detector = Detector(standard_geometry(), torch.device("cuda"))
    first, second = (simulate_events(detector, 2000, (1,)) for _ in range(2))
    for name, value in vars(first).items():
        assert np.array_equal(value, getattr(second, name)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_pinning_in_threads_of_the_loader_wakes_no_other_threads(dtype: torch.dtype) -> None:
    batches = [(torch.arange(1 << 20) % 7).to(dtype).view(2, -1) for _ in range(4)]
    torch.ones(1, device="cuda")
    before = num_threads()
    with ThreadPoolExecutor(4) as threads:
        pinned = list(threads.map(pin_tensor, batches))
        assert num_threads() <= before + 4
    for batch, copy in zip(batches, pinned, strict=True):
        assert copy.is_pinned()
        assert torch.equal(batch, copy)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_trial_says_what_fills_the_gpu() -> None:
    words = ["--data.draw_per_class", "20", "--data.draw_held_out", "5", "--data.check_labels", "false"]
    answer = tried(Ask("imagenet:demo", words, {"train.compile": False}, "resident", 1.0))
    assert answer.ok, answer.error
    memory = answer.memory
    assert memory["weights"] > 0
    assert memory["peak"] <= memory["total"]
    assert 0 < memory["workspaces and context"] < memory["total"]
    assert 0 < memory["headroom"] < memory["total"]
    assert memory["of them in recorded graphs"] <= memory["total"]
