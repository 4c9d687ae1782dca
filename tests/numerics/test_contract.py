"""What a stranger's recipe must offer, what it may leave to us, and when it hears of what is missing."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stoker.data.batch import leaves, map_tensors, num_bytes, num_samples, pin, tensors_in, to_device
from stoker.data.loader import LoaderConfig
from stoker.data.order import ExactOrder
from stoker.data.plan import MicroBatch
from stoker.data.samples import RangeSubset, new_table, open_table
from stoker.data.source import RunData
from stoker.data.stages import Stage
from stoker.errors import UserError
from stoker.launch import commands
from stoker.launch.build import rebuild
from stoker.launch.checks import check_facts, check_same_split
from stoker.launch.targets import Target
from stoker.recipe import Recipe, RunConfig, RunSettings
from stoker.runs.events import read_events
from stoker.runs.schema import Evaluation, LeftOut, LoaderTimes, Step
from stoker.settings import config
from stoker.train.config import TrainConfig
from stoker.train.parallel import Ranks

CPU = torch.device("cpu")


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Nested:
    rows: Tensor
    inner: dict[str, Any]
    pair: Pair
    label: str = "kept"


def test_every_tensor_is_found_however_it_is_nested() -> None:
    batch = Nested(torch.arange(2), {"a": [torch.ones(2), (torch.ones(3), 7)]}, Pair(torch.zeros(1), torch.zeros(2)))
    doubled = map_tensors(batch, lambda tensor: tensor * 2)
    assert [name for name, _ in leaves(batch)] == ["rows", "inner.a.0", "inner.a.1.0", "inner.a.1.1", "pair.0",
                                                   "pair.1", "label"]  # fmt: skip
    assert doubled.inner["a"][1][0].tolist() == [2, 2, 2]
    assert (doubled.inner["a"][1][1], doubled.label, type(doubled.pair)) == (7, "kept", Pair)
    assert len(list(tensors_in(batch))) == 5
    assert num_bytes(batch) == sum(tensor.nbytes for tensor in tensors_in(batch))
    assert num_samples({"rows": torch.arange(4)}) == 4
    assert to_device({"rows": torch.arange(4)}, CPU)["rows"].tolist() == [0, 1, 2, 3]
    strange = object()
    assert map_tensors({"x": strange}, torch.neg)["x"] is strange


def test_what_a_batch_offers_itself_is_used() -> None:
    class Own:
        rows, num_samples, num_bytes = torch.arange(3), 3, 99

        def pin(self) -> str:
            return "pinned"

        def to(self, device: torch.device) -> str:
            return f"on {device}"

    own = Own()
    assert (num_samples(own), num_bytes(own), pin(own), to_device(own, CPU)) == (3, 99, "pinned", "on cpu")


@config
class Nothing:
    pass


class Sums:
    """Learns whether a number is large."""

    metric, goal, know_nothing_loss = "error", "min", 0.7

    def __init__(self, offset: float) -> None:
        self.model, self.offset = nn.Linear(1, 1), offset

    def predict(self, batch: Any) -> Tensor:
        return self.model(batch["x"] - self.offset).squeeze(1)  # type: ignore[no-any-return]

    def losses(self, prediction: Tensor, batch: Any) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(prediction, batch["y"], reduction="none")

    def scores(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"wrong": ((prediction > 0) != (batch["y"] > 0)).float()}

    def summarise(self, scores: Mapping[str, Any]) -> dict[str, float]:
        return {"error": float(np.mean(scores["wrong"]))}


def own_recipe(folder: Path, make: Callable[[MicroBatch], Any], task: type = Sums, **data: Any) -> Recipe:
    """A hundred numbers; a batch is whatever `make` gives."""

    def open_data(run: RunConfig, device: torch.device) -> RunData:
        with new_table(folder, 100, {}, ["all"], "numbers") as writer:
            ones, count = np.ones(100, int), np.arange(100)
            writer.append({"shard": 0 * count, "first": count, "count": ones, "id": count})
        table = open_table(folder)
        assert table is not None
        sides = [RangeSubset(np.array([first]), np.array([0, size])) for first, size in ((0, 80), (80, 20))]
        return RunData(
            table=table,
            training=sides[0],
            validation=sides[1],
            order=lambda seed, epoch: ExactOrder(80, seed, epoch),
            stages=[Stage("make", make)],
            files_of=lambda rows: "memory",
            description={"fingerprint": "numbers"},
            bytes_per_cost=8.0,
            facts={"offset": 50.0},
            **data,
        )

    return Recipe(
        name="numbers",
        presets={
            "only": lambda: RunConfig(
                recipe="numbers:only",
                data=Nothing(),
                model=Nothing(),
                run=RunSettings(folder=folder.parent / "runs", device="cpu"),
                loader=LoaderConfig(batch_size=16, threads=1),
                train=TrainConfig(epochs=2, log_every=1, compile=False, norms_every=None),
            )
        },
        open_data=open_data,
        build_task=lambda run, facts: task(facts["offset"]),
        result_table=lambda models: [("model", "error")],
    )


def as_dict(micro: MicroBatch) -> dict[str, Tensor]:
    rows = torch.from_numpy(micro.rows)
    return {"x": rows.float()[:, None], "y": (rows > 50).float(), "rows": rows}


def start(recipe: Recipe) -> commands.Outcome:
    return commands.start(Target(recipe, recipe.presets["only"](), {}))


def test_a_batch_may_be_a_plain_dict(tmp_path: Path) -> None:
    outcome = start(own_recipe(tmp_path / "table", as_dict))
    assert outcome.metrics["samples"] == 20
    events = outcome.folder.events
    steps = list(read_events(events, Step))
    assert [step.step for step in steps] == list(range(1, 11))
    assert all(len(step.step_ms) == 1 and step.step_ms[0] > 0 for step in steps)
    (first, *_) = read_events(events, LoaderTimes)
    assert first.stages["make"]["bytes"] > 0
    assert [evaluation.metrics["samples"] for evaluation in read_events(events, Evaluation)] == [20, 20]
    assert json.loads(outcome.folder.facts.read_text()) == {"offset": 50.0}


class NoScores(Sums):
    scores = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "scores":
            raise AttributeError(name)
        return super().__getattribute__(name)


class OneScore(Sums):
    def scores(self, prediction: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"wrong": prediction.mean()}


class OtherMetric(Sums):
    metric = "accuracy"


class NoGoal(Sums):
    goal = "less"


@pytest.mark.parametrize(
    ("make", "task", "said"),
    [
        (lambda micro: {"x": torch.ones(len(micro.rows), 1)}, Sums, 'needs a key "rows"'),
        (lambda micro: as_dict(micro) | {"rows": torch.ones(2)}, Sums, "whole numbers"),
        (as_dict, NoScores, "lacks scores"),
        (as_dict, OneScore, "one a sample"),
        (as_dict, OtherMetric, "'accuracy'"),
        (as_dict, NoGoal, "min or max"),
    ],
)
def test_what_is_missing_is_said_before_the_first_step(
    tmp_path: Path, make: Callable[[MicroBatch], Any], task: type, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        start(own_recipe(tmp_path / "table", make, task))
    for run in (tmp_path / "runs").glob("*"):
        assert not list(read_events(run / "events.jsonl", Step))


def test_what_validation_batches_lack_is_said_before_the_first_step(tmp_path: Path) -> None:
    bad = [Stage("make", lambda micro: {"x": torch.ones(len(micro.rows), 1)})]
    with pytest.raises(UserError, match=r"validation samples\) needs a key"):
        start(own_recipe(tmp_path / "table", as_dict, validation_stages=bad))
    (run,) = (tmp_path / "runs").iterdir()
    assert not list(read_events(run / "events.jsonl", Step))


def test_a_rehearsal_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(Sums):
        def losses(self, prediction: Tensor, batch: Any) -> Tensor:
            return super().losses(prediction, batch) * torch.rand(len(prediction))

    def losses(name: str) -> list[float]:
        outcome = start(own_recipe(tmp_path / name / "table", as_dict, Drawing))
        return [step.loss for step in read_events(outcome.folder.events, Step)]

    with_one = losses("a")
    monkeypatch.setattr("stoker.train.engine.rehearse", lambda *_: None)
    assert losses("b") == with_one


def test_samples_that_are_left_out_are_in_the_events_and_in_the_log(tmp_path: Path) -> None:
    from stoker.recipes.imagenet.draw import draw_set
    from stoker.recipes.imagenet.recipe import RECIPE

    draw_set(tmp_path / "set", per_class=8, held_out=2, seed=0)
    bad = tmp_path / "set" / "train" / "ring" / "00003.jpg"
    bad.write_bytes(b"\xff\xd8\xff but nothing more")
    preset = RECIPE.presets["demo"]()
    run = replace(
        preset,
        run=RunSettings(folder=tmp_path / "runs", device="cpu"),
        data=replace(preset.data, path=tmp_path / "set", size=16, check_labels=False),
        model=replace(preset.model, width=4),
        train=replace(preset.train, epochs=1),
    )
    outcome = commands.start(Target(RECIPE, run, {}))
    (left_out,) = read_events(outcome.folder.events, LeftOut)
    assert (left_out.what, left_out.name, left_out.samples) == ("image", str(bad), 1)
    assert str(bad) in outcome.folder.log.read_text()


def test_a_task_is_rebuilt_from_its_run_alone(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path / "table", as_dict)
    folder = start(recipe).folder

    def gone(run: RunConfig, device: torch.device) -> RunData:
        raise AssertionError("the data were opened")

    target = Target(replace(recipe, open_data=gone), recipe.presets["only"](), {})
    assert rebuild(folder, target, "last", "auto", Ranks()).task.offset == 50.0
    folder.facts.unlink()  # as runs of the first versions
    with pytest.raises(AssertionError, match="the data were opened"):
        rebuild(folder, target, "last", "auto", Ranks())
    assert rebuild(folder, replace(target, recipe=recipe), "last", "auto", Ranks()).task.offset == 50.0
    folder.facts.write_text("{")
    with pytest.raises(UserError, match=r"facts\.json is damaged"):
        rebuild(folder, target, "last", "auto", Ranks())


def test_data_with_other_facts_do_not_fit_the_run(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path / "table", as_dict)
    folder = start(recipe).folder
    data = recipe.open_data(recipe.presets["only"](), CPU)
    check_facts(folder, data)
    with pytest.raises(UserError, match=r"offset in .*facts\.json is 50\.0, and the data say 51\.0"):
        check_facts(folder, replace(data, facts={"offset": 51.0}))
    with pytest.raises(UserError, match="classes"):
        check_facts(folder, replace(data, facts={"offset": 50.0, "classes": ["a"]}))


def test_facts_are_what_the_run_keeps_from_the_beginning(tmp_path: Path) -> None:
    built: list[Any] = []

    class Remembers(Sums):
        def __init__(self, offset: Any) -> None:
            super().__init__(50.0)
            built.append(offset)

    recipe = own_recipe(tmp_path / "table", as_dict, Remembers)
    open_data = recipe.open_data
    tuples = replace(
        recipe, open_data=lambda run, device: replace(open_data(run, device), facts={"offset": ("a", {1: 2})})
    )
    folder = start(tuples).folder
    check_facts(folder, tuples.open_data(recipe.presets["only"](), CPU))
    rebuild(folder, Target(tuples, recipe.presets["only"](), {}), "last", "auto", Ranks())
    assert built == [["a", {"1": 2}]] * 2
    with pytest.raises(UserError, match="must be JSON"):
        start(replace(recipe, open_data=lambda run, device: replace(open_data(run, device), facts={"offset": CPU})))


def test_keys_that_mean_nothing_to_the_data_are_refused(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path / "table", as_dict)
    for name, value in (("sample_cost", 3), ("bad_shards", "quarantine"), ("window", 7)):
        config = recipe.presets["only"]()
        changed = replace(config, loader=replace(config.loader, **{name: value}))
        with pytest.raises(UserError, match=f"loader.{name} means nothing"):
            commands.start(Target(recipe, changed, {}))


def test_samples_that_were_trained_on_are_not_judged(tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path / "table", as_dict)
    folder = start(recipe).folder
    data = recipe.open_data(recipe.presets["only"](), CPU)
    check_same_split(folder, data)
    with pytest.raises(UserError, match="held out differently"):
        check_same_split(folder, replace(data, description={"fingerprint": "numbers", "validation": 30}))
    check_same_split(folder, replace(data, description={"fingerprint": "others", "validation": 30}))
