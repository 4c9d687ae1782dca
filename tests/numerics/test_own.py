"""Other people's data: every kind of samples, exact, resumable, with their own labels."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import stoker
from stoker.errors import UserError

DICE = np.random.default_rng(0)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, number: int) -> Any:
        return torch.full((3,), float(number)), number


class Named(Numbers):
    def __getitem__(self, number: int) -> Any:
        return {"x": np.ones(2) * number, "name": f"sample {number}"}


class Several(Numbers):
    """As Hugging Face's datasets: many at a time."""

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [{"x": number} for number in numbers]

    def __getitem__(self, number: int) -> Any:
        raise AssertionError("one at a time")


def rows(loader: Any) -> list[list[int]]:
    return [batch["rows"].tolist() for batch in loader]


def test_arrays_come_with_their_labels_ragged_ones_too() -> None:
    waves = [DICE.normal(size=size) for size in DICE.integers(0, 9, 100)]
    samples = stoker.from_arrays(x=DICE.normal(size=(100, 3)), y=np.arange(100), wave=waves)
    loader = samples.loader(16, threads=2)
    assert len(loader) == 7
    seen = []
    for batch in loader:
        assert torch.equal(batch["y"], batch["rows"])
        for place, row in enumerate(batch["rows"].tolist()):
            begin, end = batch["wave_offsets"][place : place + 2]
            assert np.array_equal(batch["wave"][begin:end].numpy(), waves[row])
        seen += batch["rows"].tolist()
    assert sorted(seen) == list(range(100))


def test_an_epoch_is_a_for_and_a_position_is_where_it_goes_on() -> None:
    samples = stoker.from_arrays(x=np.arange(100))
    loader = samples.loader(16, seed=3)
    first, second = rows(loader), rows(loader)
    assert first != second
    again = samples.loader(16, seed=3)
    steps = iter(again)
    head = [next(steps)["rows"].tolist() for _ in range(3)]
    state = again.state_dict()
    assert head == first[:3]
    other = samples.loader(16, seed=3, threads=1, look_ahead=2)
    other.load_state_dict(state)
    assert rows(other) == first[3:]
    assert rows(other) == second
    assert rows(again) == second  # an epoch that was left half-way is over
    assert rows(samples.loader(16, shuffle=False)) == rows(samples.loader(16, shuffle=False, seed=9))
    shares = [samples.loader(16, seed=3, rank=rank, num_ranks=3) for rank in range(3)]
    together = [sorted(row for share in step for row in share) for step in zip(*map(rows, shares), strict=True)]
    assert together == [sorted(step) for step in first]


def test_steps_by_cost_are_counted_as_they_come() -> None:
    samples = stoker.from_arrays(x=[np.ones(size) for size in DICE.integers(1, 30, 200)])
    loader = samples.loader(batch_cost=200, micro_cost=100)
    assert len(loader) == len(rows(loader)) > 10


@pytest.mark.parametrize("processes", [0, 2])
def test_a_dataset_gives_what_its_collate_gives(processes: int) -> None:
    seen = []
    for x, label in stoker.from_dataset(Numbers(), processes=processes).loader(8):
        assert torch.equal(x[:, 0].long(), label)
        seen += label.tolist()
    assert sorted(seen) == list(range(50))
    for batch in stoker.from_dataset(Named(), processes=processes).loader(8):
        assert batch["name"] == [f"sample {row}" for row in batch["rows"].tolist()]
        assert batch["x"][:, 0].tolist() == batch["rows"].tolist()
    for batch in stoker.from_dataset(Several(), processes=processes).loader(8):
        assert torch.equal(batch["x"], batch["rows"])


def test_an_answer_larger_than_the_shared_memory_comes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.data.own.ROOM_BYTES", 64)
    for x, label in stoker.from_dataset(Numbers(), processes=1).loader(10):
        assert torch.equal(x[:, 2].long(), label)


def test_an_error_of_a_dataset_names_the_samples() -> None:
    class Breaks(Numbers):
        def __getitem__(self, number: int) -> Any:
            raise ValueError("no such file")

    for processes in (0, 1):
        with pytest.raises(RuntimeError, match=r"ValueError while loading samples .*: no such file"):
            next(iter(stoker.from_dataset(Breaks(), processes=processes).loader(4)))


def test_files_are_samples(tmp_path: Path) -> None:
    for number in range(20):
        folder = tmp_path / ("a" if number < 10 else "b")
        folder.mkdir(exist_ok=True)
        (folder / f"{number:02d}.txt").write_text(str(number))
    (tmp_path / ".hidden").write_text("no")
    samples = stoker.from_files(tmp_path, lambda path: {"value": int(path.read_text())}, endings=(".txt",))
    for batch in samples.loader(6):
        assert torch.equal(batch["value"], batch["rows"])
    with pytest.raises(UserError, match="holds no files"):
        stoker.from_files(tmp_path, len, endings=(".png",))


def write_lists(path: Path, sizes: Any, **more: Any) -> None:
    lists = {name: [DICE.normal(size=size).astype(np.float32) for size in sizes] for name in ("time", "height")}
    pq.write_table(pa.table({**lists, "size": np.asarray(sizes, np.int16), **more}), path, row_group_size=7)


def test_lists_in_parquet_are_ragged_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        write_lists(tmp_path / f"{number}.parquet", DICE.integers(0, 12, 30), word=["a"] * 30)
    samples = stoker.from_parquet(tmp_path)
    assert "column word holds string" in capsys.readouterr().err
    assert "Packing" not in capsys.readouterr().err
    tables = [pq.read_table(tmp_path / f"{number}.parquet").to_pylist() for number in range(3)]
    listed = [row for table in tables for row in table]
    for batch in samples.loader(16):
        assert batch["offsets"].diff().tolist() == batch["size"].tolist()
        for place, row in enumerate(batch["rows"].tolist()):
            begin, end = batch["offsets"][place : place + 2]
            assert batch["height"][begin:end].tolist() == listed[row]["height"]
    stoker.from_parquet(tmp_path)
    assert "Packing" not in capsys.readouterr().err  # once


def test_rows_with_one_id_are_a_sample(tmp_path: Path) -> None:
    event = np.repeat(np.arange(40), DICE.integers(1, 6, 40))
    pq.write_table(pa.table({"event": event, "t": np.arange(len(event)).astype(float)}), tmp_path / "long.parquet")
    for batch in stoker.from_parquet(tmp_path / "long.parquet", sample="event").loader(7):
        for place, row in enumerate(batch["rows"].tolist()):
            begin, end = batch["offsets"][place : place + 2]
            assert batch["event"][place] == row
            assert batch["t"][begin:end].tolist() == np.flatnonzero(event == row).tolist()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: stoker.from_parquet(folder / "absent"), "no file and no folder"),
        (lambda folder: stoker.from_parquet(folder), "holds no .parquet"),
        (lambda folder: stoker.from_arrays(x=np.ones(3), y=np.ones(4)), "different numbers of samples"),
        (lambda folder: stoker.from_arrays(x=np.array(["a"])), "type for"),
        (lambda folder: stoker.from_arrays(x=np.ones(0)), "no samples"),
        (lambda folder: stoker.from_arrays(), "at least one column"),
        (lambda folder: stoker.from_arrays(x=np.ones(3)).loader(), "needs a size"),
        (lambda folder: stoker.from_arrays(x=np.ones(3)).run_data(validation=0.001), "both are needed"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises((UserError, ValueError), match=said):
        make(tmp_path)


def test_parquet_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), file)
    with pytest.raises(UserError, match="no column of lists"):
        stoker.from_parquet(file)
    pq.write_table(pa.table({"x": [[1], [2, 3]], "y": [[1], [2]]}), file)
    with pytest.raises(UserError, match="in row 1 the list y has 1 values and x has 2"):
        stoker.from_parquet(file)
    pq.write_table(pa.table({"x": [[1], None]}), file)
    with pytest.raises(UserError, match="empty values"):
        stoker.from_parquet(file)
    pq.write_table(pa.table({"x": [[1]], "rows": [1]}), file)
    with pytest.raises(UserError, match="rename it"):
        stoker.from_parquet(file)
    pq.write_table(pa.table({"e": [1, 2, 1], "x": [1, 2, 3]}), file)
    with pytest.raises(UserError, match="do not stand together"):
        stoker.from_parquet(file, sample="e")
    with pytest.raises(UserError, match="lacks the column"):
        stoker.from_parquet(file, ["nothing"])


def test_a_recipe_in_hand_is_trained_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    @stoker.config
    class Nothing:
        pass

    x = DICE.normal(size=(200, 4)).astype(np.float32)
    samples = stoker.from_arrays(x=x, y=x.sum(1))
    recipe = stoker.Recipe(
        name="sums",
        presets={"only": lambda: stoker.RunConfig(data=Nothing(), model=Nothing())},
        open_data=lambda run, device: samples.run_data(0.2),
        build_task=lambda run, facts: stoker.Supervised(
            torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0)),
            torch.nn.MSELoss(reduction="none"),
            inputs="x",
            target="y",
        ),
        result_table=stoker.metrics_table,
    )
    outcome = stoker.train(  # type: ignore[operator]
        recipe, train={"lr": 0.03, "epochs": 30, "warmup_steps": 0}, loader={"batch_size": 32}, run={"device": "cpu"}
    )
    assert outcome.metrics["loss"] < 0.1
    assert outcome.table()[0] == ("validation", "loss", "samples")
    used = stoker.load_run(outcome.folder, device="cpu", recipe=recipe)
    with pytest.raises(UserError, match=r"recipe=RECIPE"):
        stoker.load_run(outcome.folder, device="cpu")
    answer = used({"x": torch.ones(2, 4), "rows": torch.arange(2)})
    assert answer.shape == (2,)
    assert abs(float(answer[0]) - 4) < 1
    with pytest.raises(UserError, match="no preset"):
        stoker.train(recipe, "other")  # type: ignore[operator]


def test_a_table_of_samples_says_more_about_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = np.repeat(np.arange(40) * 3, DICE.integers(1, 5, 40))
    pq.write_table(pa.table({"event": event, "x": event * 2.0}), tmp_path / "pulses.parquet")
    shuffled = DICE.permutation(50) * 3  # ten more than there are pulses of
    listed = {"event": shuffled, "energy": shuffled + 0.5, "name": [str(one) for one in shuffled]}
    pq.write_table(pa.table(listed), tmp_path / "table.parquet")
    samples = stoker.from_parquet(tmp_path / "pulses.parquet", sample="event", labels=tmp_path / "table.parquet")
    assert "name are no plain numbers" in capsys.readouterr().err
    assert len(samples) == 40
    for batch in samples.loader(7):
        assert torch.equal(batch["energy"], batch["event"] + 0.5)
        assert torch.equal(torch.repeat_interleave(batch["event"], batch["offsets"].diff()) * 2.0, batch["x"])
    for change, words in (
        (listed["event"][:3].tolist() + [-1] * 47, "lists event -1 more than once"),
        (np.arange(50).tolist(), "does not list event"),
    ):
        pq.write_table(pa.table({**listed, "event": change}), tmp_path / "table.parquet")
        with pytest.raises(UserError, match=words):
            stoker.from_parquet(tmp_path / "pulses.parquet", sample="event", labels=tmp_path / "table.parquet")
    for name in ("rows", "offsets", "first", "count", "shard"):
        pq.write_table(pa.table({name: event, "x": event * 2.0}), tmp_path / "named.parquet")
        with pytest.raises(UserError, match=f"The column {name} of .* has a name that batches use themselves"):
            stoker.from_parquet(tmp_path / "named.parquet", sample=name)
    with pytest.raises(UserError, match="sample= must name the column"):
        stoker.from_parquet(tmp_path / "pulses.parquet", labels=tmp_path / "table.parquet")


@pytest.mark.parametrize("processes", [0, 2])
def test_a_dataset_of_hugging_face_is_shuffled_and_resumed(processes: int) -> None:
    datasets = pytest.importorskip("datasets")
    x = DICE.normal(size=(90, 4)).astype(np.float32)
    made = datasets.Dataset.from_dict({"x": x, "y": np.arange(90)}).with_format("torch")
    samples = stoker.from_dataset(made, processes=processes)
    loader = samples.loader(16, seed=1)
    seen = list(loader)
    assert sorted(torch.cat([batch["y"] for batch in seen]).tolist()) == list(range(90))
    for batch in seen:
        assert torch.equal(batch["x"], torch.from_numpy(x[batch["y"].numpy()]))
        assert batch["rows"].tolist() == batch["y"].tolist()
    other = samples.loader(16, seed=1)
    for number, _ in enumerate(other):
        if number == 2:
            state = other.state_dict()
            break
    again = samples.loader(16, seed=1)
    again.load_state_dict(state)
    assert [batch["y"].tolist() for batch in again] == [batch["y"].tolist() for batch in seen[3:]]


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_with_our_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    x = DICE.normal(size=(96, 4)).astype(np.float32)
    seen: list[list[int]] = []

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, number: int) -> Any:
            seen.append(batch["rows"].tolist())
            return (self.layer(batch["x"]).squeeze(1) - batch["y"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    loader = stoker.from_arrays(x=x, y=x.sum(1)).loader(16, seed=1)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Module(), train_dataloaders=loader)
    assert trainer.num_training_batches == len(loader) == 6
    again = stoker.from_arrays(x=x, y=x.sum(1)).loader(16, seed=1)
    assert seen == [*rows(again), *rows(again)]


@pytest.mark.parametrize("processes", [0, 1])
def test_a_rank_that_gets_nothing_of_the_last_step_takes_part_all_the_same(processes: int) -> None:
    samples = stoker.from_dataset(Numbers(), processes=processes)  # 50: the last step of 7 has one sample
    shares = [list(samples.loader(7, rank=rank, num_ranks=2)) for rank in range(2)]
    assert len(shares[0]) == len(shares[1]) == 8
    assert [len(share[-1][0]) for share in shares] in ([1, 0], [0, 1])
    assert all(share[-1][0].shape[1:] == (3,) for share in shares)


def test_columns_that_cannot_be_batches_are_named() -> None:
    for columns, said in (
        ({"x": list("abc")}, "type for"),
        ({"x": [[1], [[2]]]}, "different shapes"),
        ({"x": torch.ones(3).bfloat16()}, "no array of numbers"),
        ({"x": np.ma.array(np.ones(3), mask=[1, 0, 0])}, "masked"),
        ({"x": np.ones(3, np.longdouble)}, "type for"),
        ({"rows": np.ones(3)}, "rename it"),
        ({"x": [np.ones(2)] * 3, "x_offsets": np.ones(3)}, "rename it"),
    ):
        with pytest.raises(UserError, match=said):
            stoker.from_arrays(**columns)
    samples = stoker.from_arrays(
        x=np.arange(6, dtype=">f4"), y=[[] if row % 2 else np.ones(2, np.int32) for row in range(6)]
    )
    (batch,) = samples.loader(6, shuffle=False)
    assert batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch["y"].dtype == torch.int32


def test_settings_of_a_loader_are_checked() -> None:
    samples = stoker.from_arrays(x=np.arange(9))
    for words, said in (
        ({"batch_size": 0}, "greater than or equal to 1"),
        ({"batch_size": 4, "num_workers": 3}, "threads"),
        ({"batch_size": 4, "seed": -1}, "seed"),
        ({"batch_size": 4, "device": "nothing"}, "no device"),
        ({"batch_size": 4, "rank": 2, "num_ranks": 2}, "no rank 2"),
    ):
        with pytest.raises(UserError, match=said):
            samples.loader(**words)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no position"):
        samples.loader(4).load_state_dict({"seed": 0, "epoch": 0, "consumed": 10})
    with pytest.raises(UserError, match="no position"):
        samples.loader(4).load_state_dict({"place": 3})
    for share in (0, 1, -0.5, 3):
        with pytest.raises(UserError, match="between 0 and 1"):
            samples.run_data(share)
    with pytest.raises(UserError, match="must be JSON"):
        samples.run_data(0.5, {"mean": np.ones(3)})
    with pytest.raises(UserError, match="one a sample"):
        stoker.from_dataset(Numbers(), costs=[1, 2])
    with pytest.raises(UserError, match="map-style"):
        stoker.from_dataset(iter([1]))


def test_parquet_files_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([[1.0]], pa.list_(pa.float32()))}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([[0.1]], pa.list_(pa.float64()))}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="not what the first file has"):
        stoker.from_parquet(tmp_path)
    for name in ("a", "b"):
        pq.write_table(pa.table({"id": [1, 7], "x": [1, 2]}), tmp_path / f"{name}.parquet")
    with pytest.raises(UserError, match="id 1 are in several files"):
        stoker.from_parquet(tmp_path, sample="id")
    pq.write_table(pa.table({"../../away": [[1]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="cannot be the name of a column"):
        stoker.from_parquet(tmp_path / "a.parquet")


def test_files_of_the_same_names_sizes_and_times_elsewhere_are_other_files(tmp_path: Path) -> None:
    import os

    found = []
    for folder, value in (("one", 1.0), ("two", 5.0)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "a.parquet"
        pq.write_table(pa.table({"x": [[value]], "y": [1]}), file, compression="none", use_dictionary=False)
        os.utime(file, (0, 0))
        (batch,) = stoker.from_parquet(tmp_path / folder).loader(1)
        found.append((file.stat().st_size, batch["x"].item()))
    assert [size for size, _ in found] == [found[0][0]] * 2
    assert [value for _, value in found] == [1.0, 5.0]


def test_samples_without_a_single_value_are_samples(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([[], []], pa.list_(pa.int32())), "y": [1, 2]}), tmp_path / "a.parquet")
    (batch,) = stoker.from_parquet(tmp_path / "a.parquet").loader(2)
    assert batch["offsets"].tolist() == [0, 0, 0]
    assert sorted(batch["y"].tolist()) == [1, 2]


def test_a_step_in_pieces_is_done_with_its_last_piece() -> None:
    samples = stoker.from_arrays(x=[np.full(3, row) for row in range(20)])
    whole_epoch = rows(samples.loader(8, seed=1, micro_cost=6))
    for taken in range(len(whole_epoch)):
        loader, rest = (samples.loader(8, seed=1, micro_cost=6) for _ in range(2))
        steps = iter(loader)
        seen = {row for _ in range(taken) for row in next(steps)["rows"].tolist()}
        rest.load_state_dict(loader.state_dict())
        left = [row for batch in rows(rest) for row in batch]
        assert seen | set(left) == set(range(20))
        assert len(left) == len(set(left))


def test_links_back_up_are_not_followed(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("1")
    (tmp_path / "round").symlink_to(tmp_path)
    assert len(stoker.from_files(tmp_path, len, endings=[".TXT"])) == 4


def test_losses_that_are_not_one_a_sample_are_named() -> None:
    batch = {"x": torch.ones(4, 2), "y": torch.ones(4)}
    flat = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Flatten(0))
    for model, loss, said in (
        (flat, torch.nn.MSELoss(), 'reduction="none"'),
        (torch.nn.Linear(2, 1), torch.nn.MSELoss(reduction="none"), "squeeze"),
    ):
        task = stoker.Supervised(model, loss, inputs="x", target="y")
        with pytest.raises(UserError, match=said):
            task.losses(task.predict(batch), batch)
