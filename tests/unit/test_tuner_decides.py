"""How the tuner decides, with trials whose answers are known; tests/e2e/test_tune.py measures."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.cli.tune import tuned_words
from stoker.doctor.learning.facts import Arm
from stoker.errors import UserError
from stoker.launch.targets import resolve_target
from stoker.tune.batch import offer_batch, tune_pieces
from stoker.tune.commands import Tuning, _is_fed, _learning_rate, _prove
from stoker.tune.rates import LongArm, _fill, candidates, compare_rates, pick
from stoker.tune.search import Line, OutOfTime, Search, agree
from stoker.tune.space import Knob, Tunable, ladder, plain, space_of
from stoker.tune.stored import Stored, keep, known
from stoker.tune.trial import Answer, Ask, on_gpu, words_of

GIB = 1 << 30


def searching(answers: Any, budget_s: float = 1e9) -> Search:
    return Search("target", [], 1.0, budget_s, run=answers)


def test_the_fastest_value_is_taken_and_every_value_is_told() -> None:
    rates = {1: 100.0, 2: 180.0, 4: 300.0, 8: 290.0}
    search = searching(lambda ask: Answer(rate=rates[ask.knobs.get("loader.threads", 1)]))
    search.choose(Knob("loader.threads", "loader", (1, 2, 4, 8)), 1, "run")
    assert search.best == {"loader.threads": 4}
    assert [value for value, _ in search.decisions[0].tried] == [1, 2, 4, 8]
    assert "3.00 times" in search.decisions[0].why


def test_what_is_hardly_faster_stays_as_it_is() -> None:
    search = searching(lambda ask: Answer(rate=102.0 if ask.knobs else 100.0))
    search.choose(Knob("loader.look_ahead", "loader", (2, 8)), 2, "run")
    assert search.best == {}


def test_a_faster_step_with_other_losses_is_not_taken() -> None:
    def answer(ask: Ask) -> Answer:
        fast = ask.knobs.get("train.precision") == "bf16"
        return Answer(rate=200.0 if fast else 100.0, losses=[2.0, 1.9, 1.8] if fast else [1.0, 0.9, 0.8])

    search = searching(answer)
    search.choose(Knob("train.precision", "step", ("bf16", "fp32")), "fp32", "resident")
    assert search.best == {}
    assert "other losses" in search.decisions[0].tried[1][1]


@pytest.mark.parametrize("answer", [Answer(error="CUDA out of memory", out_of_memory=True), Answer(error="broken")])
def test_a_trial_that_fails_is_told_and_passed_over(answer: Answer) -> None:
    search = searching(lambda ask: answer if ask.knobs else Answer(rate=100.0))
    search.choose(Knob("loader.threads", "loader", (1, 2)), 1, "run")
    assert search.best == {}
    assert ("out of memory" if answer.out_of_memory else "not possible") in search.decisions[0].tried[1][1]


def test_what_was_tried_is_not_tried_again() -> None:
    asked: list[Ask] = []

    def answer(ask: Ask) -> Answer:
        asked.append(ask)
        return Answer(rate=100.0)

    search = searching(answer)
    search.trial({}, "run")
    search.trial({}, "run")
    search.trial({}, "resident")
    search.trial({}, "run", anew=True)
    assert len(asked) == 3


def test_a_budget_that_ends_leaves_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("time.monotonic", lambda: float(next(clock)))
    rates = {1: 100.0, 2: 200.0, 4: 400.0, 8: 800.0}
    search = searching(lambda ask: Answer(rate=rates[ask.knobs.get("n", 1)]), budget_s=110)
    with pytest.raises(OutOfTime):
        search.choose(Knob("n", "loader", (1, 2, 4, 8)), 1, "run")
    assert search.best["n"] in (2, 4)
    assert "the budget ended" in search.decisions[0].why


def test_losses_agree_within_rounding_or_their_own_noise() -> None:
    assert agree([1.0, 0.9], [1.001, 0.901])
    assert agree([1.0, 0.5, 0.2, 0.1], [1.1, 0.4, 0.3, 0.0])  # away in both directions
    assert not agree([1.0, 0.9, 0.8], [1.2, 1.1, 1.0])
    assert not agree([1.0, 0.9], [1.0, math.nan])
    assert not agree([1.0, 0.9], [1.0])
    assert agree([], [])


def test_a_line_goes_through_its_points() -> None:
    line = Line.through([(1.0, 3.0), (2.0, 5.0), (4.0, 9.0)])
    assert line.at(10.0) == pytest.approx(21.0)
    assert Line.through([(5.0, 7.0)]).at(100.0) == 7.0


def memory(cost: int, total: float = 24 * GIB) -> dict[str, float]:
    return {"peak": GIB + 20_000.0 * cost, "total": total, "retries": 0}


@pytest.mark.parametrize("most", [400_000, 700_000])
def test_pieces_fit_the_largest_samples_too(most: int) -> None:
    """Out of memory above `most`, on the largest samples alone: usual ones would take twice as much."""

    def answer(ask: Ask) -> Answer:
        size = ask.knobs.get("loader.micro_cost", 200_000)
        if size > (most if ask.leg == "largest" else 2 * most):
            return Answer(error="out of memory", out_of_memory=True)
        return Answer(rate=size**0.5, memory=memory(size))

    search = searching(answer)
    tune_pieces(search, 200_000, 100_000)
    chosen = search.best["loader.micro_cost"]
    assert 200_000 < chosen <= most
    assert answer(Ask("", [], {"loader.micro_cost": chosen}, "largest", 1.0)).ok


def test_pieces_that_make_the_allocator_try_again_are_cut() -> None:
    def answer(ask: Ask) -> Answer:
        size = ask.knobs.get("loader.micro_cost", 200_000)
        return Answer(rate=float(size), memory={**memory(size, 16 * GIB), "retries": float(size > 500_000)})

    search = searching(answer)
    tune_pieces(search, 200_000, 100_000)
    assert search.best["loader.micro_cost"] <= 500_000


@pytest.mark.parametrize("trouble", [Answer(error="out of memory", out_of_memory=True), Answer(error="illegal access")])
def test_pieces_that_never_stood_the_largest_samples_are_not_taken(trouble: Answer) -> None:
    def answer(ask: Ask) -> Answer:
        size = ask.knobs.get("loader.micro_cost", 200_000)
        return trouble if ask.leg == "largest" else Answer(rate=size**0.5, memory=memory(size))

    search = searching(answer)
    tune_pieces(search, 200_000, 10)
    assert search.best == {}
    assert "no size" in search.decisions[0].why


def test_what_was_found_of_pieces_is_told_when_the_budget_ends() -> None:
    def answer(ask: Ask) -> Answer:
        if ask.leg == "largest":
            raise OutOfTime
        return Answer(rate=float(ask.knobs.get("loader.micro_cost", 200_000)), memory=memory(1000))

    search = searching(answer)
    with pytest.raises(OutOfTime):
        tune_pieces(search, 200_000, 10)
    assert search.best == {}
    assert len(search.decisions[0].tried) > 1


@pytest.mark.parametrize(("after", "lr"), [(50.0, {}), (None, {}), (50.0, {"train.lr": 0.01})])
def test_what_does_not_stand_the_proof_is_not_taken(after: float | None, lr: dict[str, float]) -> None:
    found = Tuning("target", before=Answer(rate=100.0, samples=1.0))

    def answer(ask: Ask) -> Answer:
        if ask.knobs and after is None and proving:
            return Answer(error="only once")
        return Answer(rate=(after if proving else 200.0) if ask.knobs else 100.0, samples=1.0)  # type: ignore[arg-type]

    proving = False
    search = searching(answer)
    search.best = {"loader.threads": 4, **lr}
    search.trial({}, "run")
    proving = True
    _prove(search, found)
    assert search.best == lr
    assert found.ratio is None
    assert "nothing of that is taken" in found.told[-1]


def test_what_is_kept_are_settings_that_were_found_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config = resolve_target("icecube", []).config
    keep(config, Stored({"train.compile": True, "loader.batch_size": 512, "train.lr": 2e-3}, "data", 200.0, 100.0))
    keep(config, Stored({"train.lr": 3e-4}, "data", 0.0, 0.0), {"train.lr"})
    assert known(config) == Stored({"train.compile": True, "train.lr": 3e-4}, "data", 200.0, 100.0)
    keep(config, Stored({}, "data", 0.0, 0.0), {"train.compile"})  # it is not faster any more
    assert known(config) == Stored({"train.lr": 3e-4}, "data", 0.0, 0.0)
    keep(config, Stored({"loader.threads": 1}, "others", 2.0, 1.0), {"loader.threads"})
    assert known(config) == Stored({"loader.threads": 1}, "others", 2.0, 1.0)
    for damaged in (
        '{"knobs": ["a"], "fingerprint": "", "rate": 1, "before": 1}',
        '{"knobs": {}, "fingerprint": "", "rate": "x", "before": 1}',
    ):
        next((tmp_path / "stoker" / "tuned").iterdir()).write_text(damaged)
        assert known(config) is None


def test_a_rate_is_not_taken_without_the_batch_it_belongs_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = Stored({"loader.batch_size": 512, "train.lr": 2e-3, "train.compile": True}, "", 2.0, 1.0)
    keep(resolve_target("icecube", []).config, found)
    target = resolve_target("icecube", ["--loader.batch_size", "512"])
    keep(target.config, found)
    assert tuned_words(target, asked=True)[0] == ["--train.compile=true"]
    with pytest.raises(UserError, match="one process"):
        tuned_words(target, asked=True, several=True)


@pytest.mark.parametrize(("where", "trials"), [(memory(1000), 2), ({}, 1)])
def test_a_step_that_is_whole_already_is_not_cut(where: dict[str, float], trials: int) -> None:
    """And proven on the largest samples where memory is short, which it is not on a CPU."""
    search = searching(lambda ask: Answer(rate=100.0, memory=where))
    tune_pieces(search, None, 10)
    assert search.best == {}
    assert search.num_trials == trials


def with_fixed_cost(ask: Ask, *, learns: bool = True) -> Answer:
    """Ten milliseconds a step, and ten microseconds a sample."""
    size = ask.knobs.get("loader.batch_size", 64)
    if ask.leg == "learn":
        worse = 0.0 if learns or size == 64 else 5.0
        return Answer(losses=[1.0 / (1 + number * size / 6400) + worse for number in range(6400 // size)])
    step_s = 10e-3 + 10e-6 * size
    return Answer(rate=size / step_s, step_s=step_s, samples=size)


@pytest.mark.parametrize(("optimizer", "lr"), [("sgd", 0.1 * 8), ("adamw", 0.1 * math.sqrt(8))])
def test_another_batch_is_offered_with_its_rate_and_not_taken(optimizer: str, lr: float) -> None:
    search = searching(with_fixed_cost)
    told = offer_batch(search, 64, 0.1, optimizer, allowed=False)
    assert told is not None
    assert "loader.batch_size 512" in told
    assert f"--train.lr {lr:.3g}" in told
    assert search.best == {}


def test_another_batch_is_taken_on_request_if_it_learns_as_much() -> None:
    search = searching(with_fixed_cost)
    told = offer_batch(search, 64, 0.1, "sgd", allowed=True)
    assert told is not None
    assert "Taken" in told
    assert search.best == {"loader.batch_size": 512, "train.lr": pytest.approx(0.8)}
    search = searching(lambda ask: with_fixed_cost(ask, learns=False))
    told = offer_batch(search, 64, 0.1, "sgd", allowed=True)
    assert told is not None
    assert "not taken" in told
    assert search.best == {}


def test_another_batch_that_explodes_is_not_taken() -> None:
    def answer(ask: Ask) -> Answer:
        found = with_fixed_cost(ask)
        exploded = ask.leg == "learn" and ask.knobs
        return replace(found, losses=[*found.losses[:4], *[math.nan] * 30]) if exploded else found

    search = searching(answer)
    assert "not taken" in str(offer_batch(search, 64, 0.1, "sgd", allowed=True))
    assert search.best == {}


def test_a_batch_that_is_large_enough_is_left_alone() -> None:
    assert offer_batch(searching(with_fixed_cost), 65_536, 0.1, "sgd", allowed=False) is None


def test_a_rate_that_grows_with_the_batch_by_itself_is_not_scaled_again() -> None:
    told = offer_batch(searching(with_fixed_cost), 64, 0.1, "sgd", allowed=False, scaled=True)
    assert told is not None
    assert "--train.lr 0.1 (train.lr_batch scales it)" in told


def test_no_batch_is_offered_that_there_are_no_samples_for() -> None:
    assert offer_batch(searching(with_fixed_cost), 64, 0.1, "sgd", allowed=False, samples=640) is None


def test_a_rate_is_written_as_its_key_is_stated() -> None:
    """Compared as the optimizer has it: four times the key, where that is for a quarter of the samples."""
    rates = {"chosen": 0.04, "own": {"rate": 0.4}, "arms": [], "best": 0.04, "at the end": False, "steps": 100}
    search, found = searching(lambda ask: Answer(rates=rates, facts={"lr_scale": 4.0})), Tuning("target")
    _learning_rate(search, found, 0.1)
    assert search.best == {"train.lr": 0.01}
    assert search.decisions[0].before == 0.1


def test_what_does_not_fit_as_it_is_is_cut_into_pieces_that_do() -> None:
    def answer(ask: Ask) -> Answer:
        size = ask.knobs.get("loader.micro_cost", 800_000)
        if size > 250_000:
            return Answer(error="out of memory", out_of_memory=True)
        return Answer(rate=100.0, memory=memory(size))

    search = searching(answer)
    tune_pieces(search, 800_000, 100_000)
    assert search.best == {"loader.micro_cost": 200_000}


@pytest.mark.parametrize(("fed", "is_fed"), [(99.0, True), (120.0, True), (90.0, False)])
def test_a_run_that_is_as_fast_as_its_step_needs_no_other_loader(fed: float, is_fed: bool) -> None:
    search = searching(lambda ask: Answer(rate=fed if ask.leg == "run" else 100.0))
    said = _is_fed(search)
    assert (said is not None) == is_fed
    assert search.num_trials == 2


def test_the_memory_budget_is_a_knob_where_it_holds_the_look_ahead_back() -> None:
    config = resolve_target("icecube", ["--loader.look_ahead", "8", "--loader.ram_bytes", "100000000"]).config
    for fits, tuned in ((100, False), (3, True)):
        knobs = {knob.name: knob for knob in space_of(config, on_gpu=False, fixed_shapes=False, batches_that_fit=fits)}
        assert ("loader.ram_bytes" in knobs) == tuned
    values = knobs["loader.ram_bytes"].values
    assert values[0] == 100_000_000
    assert values == tuple(sorted(values))


def arm(rate: float, gain: float, bad: str | None = None) -> Arm:
    return Arm(rate, gain, 0.01, (1.0, 1.0, 1.0), bad)


def test_rates_that_may_be_as_good_as_the_best_are_looked_at_for_longer_and_the_next_below() -> None:
    arms = [
        arm(1e-5, 0.0),
        arm(1e-4, 0.1),
        arm(1e-3, 0.49),
        arm(1e-2, 0.5),
        arm(1e-1, 0.495),
        arm(1.0, -math.inf, "head"),
    ]
    assert candidates(arms) == [1e-4, 1e-3, 1e-2, 1e-1]
    plateau = candidates([arm(10.0**-power, 0.5) for power in range(12, 0, -1)])
    assert len(plateau) == 6
    assert (plateau[0], plateau[-1]) == (1e-12, 1e-1)
    assert candidates([arm(1.0, -math.inf, "head")]) == []


def falling(to: float, noise: float = 0.0) -> list[float]:
    dice = np.random.default_rng(int(1e6 * to))
    return (to + np.linspace(1, 0, 40).clip(0.1) + noise * dice.normal(size=40)).tolist()


def test_the_lowest_end_wins_and_of_equals_the_smallest_rate() -> None:
    arms = [LongArm(1e-4, falling(0.9)), LongArm(1e-3, falling(0.5)), LongArm(1e-2, falling(0.3))]
    assert [one.rate for one in pick(arms, 40) if one] == [1e-2, 1e-2]
    arms.append(LongArm(3e-3, falling(0.3003)))
    best, chosen = pick(arms, 40)
    assert best is not None
    assert chosen is not None
    assert (best.rate, chosen.rate) == (1e-2, 3e-3)
    exploded = LongArm(1e-1, falling(0.0)[:12])
    assert pick([*arms, exploded], 40)[0] == best
    assert pick([], 40) == (None, None)
    assert pick([exploded], 40) == (None, None)


def probe_of(labels: torch.Tensor, inputs: torch.Tensor) -> stoker.Probe:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = list(zip(inputs.split(32), labels.split(32), strict=True))

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return stoker.Probe(batches, lambda batch: None, model, loss=loss, optimizer=optimizer)


def test_a_rate_is_found_by_training_and_not_where_labels_belong_to_others() -> None:
    x = torch.randn(2048, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    found = compare_rates(probe_of(y, x), 1.0)
    assert 1e-3 <= found["chosen"] <= 0.3
    ends = {arm["rate"]: arm["end"] for arm in found["arms"] if arm["end"] is not None}
    assert ends[found["chosen"]] <= 1.02 * min(ends.values())
    shuffled = compare_rates(probe_of(y[torch.randperm(2048, generator=torch.Generator().manual_seed(1))], x), 1.0)
    assert shuffled["chosen"] is None


def test_ladders_and_words() -> None:
    assert ladder(1) == (1,)
    assert ladder(2) == (1, 2)
    assert ladder(12) == (1, 2, 4, 8, 12)
    assert words_of({"a.b": None, "c.d": True, "e.f": 3}) == ["--a.b=null", "--c.d=true", "--e.f=3"]


def test_values_of_a_knob_may_be_anything() -> None:
    values = (torch.ones(2), torch.zeros(2), 1, True)
    own = Tunable(make=lambda kind: kind, knobs={"kind": values})
    rates = {0: 100.0, 1: 90.0, 2: 120.0, 3: 200.0}
    search = searching(lambda ask: Answer(rate=rates[ask.knobs.get("kind", 0)]))
    (knob,) = own.space()
    search.choose(knob, own.now()["kind"], "run")
    assert plain(search.best["kind"]) is True
    assert [said for _, said in search.decisions[0].tried] == ["100/s", "90/s", "120/s", "200/s"]
    assert search.decisions[0].as_json()["chosen"] == "True"


def test_a_loop_without_values_to_try_is_refused() -> None:
    for wrong in ({1, 2}, np.array([1, 2]), "12"):
        with pytest.raises(UserError, match="tuple or list"):
            Tunable(make=print, knobs={"num_workers": wrong})  # type: ignore[dict-item]
    with pytest.raises(UserError, match="values to try"):
        Tunable(make=print, knobs={})
    with pytest.raises(UserError, match="num_workers"):
        Tunable(make=print, knobs={"num_workers": ()})


def test_what_fills_a_gpu_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded graphs have pools of their own; what libraries take is in no pool."""
    segments = [{"total_size": 5 * GIB, "segment_pool_id": (0, 0)}, {"total_size": 2 * GIB, "segment_pool_id": (0, 1)}]
    known = {
        "max_memory_allocated": 6 * GIB,
        "max_memory_reserved": 7 * GIB,
        "memory_reserved": 7 * GIB,
        "mem_get_info": (12 * GIB, 20 * GIB),
        "memory_snapshot": segments,
        "memory_stats": {"num_alloc_retries": 3},
    }
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    found = on_gpu(kept=2 * GIB, samples=4.0)
    assert found["activations"] == 4 * found["activations a sample"] == 4 * GIB
    assert found["of them in recorded graphs"] == 2 * GIB
    assert found["held beyond the peak"] == found["workspaces and context"] == GIB
    assert found["headroom"] == 12 * GIB
    assert found["retries"] == 3


def test_pieces_that_change_the_losses_are_not_taken() -> None:
    def answer(ask: Ask) -> Answer:
        size = ask.knobs.get("loader.micro_cost", 200_000)
        losses = [1.0, 0.9, 0.8] if size == 200_000 else [2.0, 1.9, 1.8]
        return Answer(rate=float(size), memory=memory(size), losses=losses)

    search = searching(answer)
    tune_pieces(search, 200_000, 100_000, batch_norm=True)
    assert search.best == {}
    assert "other losses" in search.decisions[0].tried[1][1]


def test_pieces_that_a_batch_norm_sees_are_told() -> None:
    def answer(ask: Ask) -> Answer:
        size = ask.knobs.get("loader.micro_cost", 800_000)
        fits = size <= 250_000
        return Answer(rate=100.0, memory=memory(size)) if fits else Answer(error="memory", out_of_memory=True)

    search = searching(answer)
    tune_pieces(search, 800_000, 100_000, batch_norm=True)
    assert "BatchNorm" in search.decisions[0].why


def test_a_budget_that_ends_early_decides_nothing_that_is_stored() -> None:
    """Only what was tried as a whole may take the place of what an earlier tuning has found."""
    search = searching(lambda ask: Answer(rate=100.0), budget_s=1e9)
    knob = Knob("loader.threads", "loader", (1, 2, 4))
    search.choose(knob, 1, "run")
    assert search.decisions[0].whole

    def out_of_time(ask: Ask) -> Answer:
        if ask.knobs:
            raise OutOfTime
        return Answer(rate=100.0)

    search = searching(out_of_time)
    with pytest.raises(OutOfTime):
        search.choose(knob, 1, "run")
    assert not search.decisions[0].whole


def test_a_rate_that_is_right_already_is_a_decision() -> None:
    rates = {"chosen": 0.1, "own": None, "arms": [], "best": 0.1, "at the end": False, "steps": 100}
    search = searching(lambda ask: Answer(rates=rates))
    _learning_rate(search, Tuning("target"), 0.1)
    assert search.best == {}
    assert [one.knob for one in search.decisions] == ["train.lr"]


class Epochs:
    """A short epoch, over and over, as a recipe's loader gives it."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return itertools.cycle(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_labels_that_are_known_by_heart_are_no_knowledge() -> None:
    """Few samples, and noise for labels, seen in epoch after epoch."""
    torch.manual_seed(2)
    inputs, labels = torch.randn(320, 64), torch.randint(2, (320,))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 2))

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    loader = Epochs(list(zip(inputs.split(32), labels.split(32), strict=True)))
    found = compare_rates(stoker.Probe(loader, lambda batch: None, model, loss=loss), 2.0)
    assert found["steps"] > 40
    assert min(arm["end"] for arm in found["arms"] if arm["end"] is not None) < 0.3  # they were learnt
    assert found["chosen"] is None


def test_batches_of_workers_are_not_kept_in_their_shared_memory() -> None:
    shared = [(torch.randn(4, 8).share_memory_(), torch.zeros(4, dtype=torch.long)) for _ in range(9)]
    kept: list[Any] = []
    model = torch.nn.Linear(8, 2)
    _fill(kept, 9, stoker.Probe(shared, lambda batch: None, model), iter(shared))
    assert len(kept) == 9
    assert not any(batch[0].is_shared() for batch in kept)
    assert torch.equal(kept[3][0], shared[3][0])
