"""The doctor on planted faults: the cause is named first, with a number; a healthy loop is called healthy."""

import collections
import copy
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.cli import run as cli
from stoker.doctor import commands, history, ledger, legs, trials
from stoker.doctor.calls import Call, Calls, calls_of
from stoker.doctor.ceilings import ceilings
from stoker.doctor.finding import Finding, ranked
from stoker.doctor.history import from_events
from stoker.doctor.lines import timed_lines, watched_lines
from stoker.doctor.loaders import LoaderFacts, Split, describe
from stoker.doctor.looks import DeviceFacts
from stoker.doctor.measure import measure
from stoker.doctor.measured import Leg, Measured
from stoker.doctor.operations import Operations, count_flops
from stoker.doctor.probe import trainer_probe
from stoker.doctor.rules import RULES, diagnose, verdict
from stoker.doctor.rules.loader import with_workers
from stoker.doctor.trials import numbers_of_before, storage_beside
from stoker.doctor.waterfall import draw, waterfall
from stoker.errors import UserError
from stoker.runs.events import EventLog, read_events
from stoker.runs.folder import RunFolder
from stoker.runs.schema import Evaluation, Found, LoaderTimes, Step

sys.path.insert(0, str(Path(__file__).parent))
from planted import loops
from planted.table import CASES

ROOT = Path(__file__).parents[2]
QUICK = [case for case in CASES if case.quick]


@pytest.mark.parametrize("case", QUICK, ids=[case.name for case in QUICK])
def test_a_planted_fault_is_named(case: Any) -> None:
    """In a process of its own, as the benchmark does it; a machine that is busy with something else gets further tries."""
    words = [sys.executable, str(ROOT / "benchmarks" / "doctor.py"), "--one", case.name, "--seconds", "1", "--no-cure"]
    for _ in range(3):
        done = subprocess.run(
            words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT / "benchmarks"
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        assert not result["troubles"]
        above = [rule for rule, share in result["found"] if share >= 0.1]
        right = not above if case.rule is None else above[:1] == [case.rule]
        if right:
            return
    assert right, result


def test_every_rule_is_planted_or_tried_here_and_on_its_page() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert [name for name in RULES if f"`{name}`" not in page] == []
    on_cpu = [case for case in CASES if not case.gpu]
    assert len([case for case in on_cpu if case.rule]) >= 24
    assert len([case for case in on_cpu if case.rule is None]) >= 8
    later = [case for case in CASES if not case.tuned]
    assert 3 * len(later) >= len(CASES)


def step_of(seconds: float, **more: Any) -> Measured:
    return Measured(run=Leg((seconds,) * 20), samples=10.0, cores=2, **more)


def test_bars_add_up_to_the_step() -> None:
    found = step_of(
        0.010, resident=Leg((0.004,) * 20), wait_s=0.005, gap_s=0.001, split=Split(0.006, 0.004, 0.003, 0.001)
    )
    bars = waterfall(found)
    assert sum(bar.seconds for bar in bars) == pytest.approx(0.010)
    assert [bar.name for bar in bars] == ["step", "preparation", "fetch", "between epochs"]
    assert "10.000 ms" in draw(bars)


@pytest.mark.parametrize(
    ("workers", "expected"),
    [(0, 0.004 + 0.010), (1, 0.010), (2, 0.007)],  # between the steps; one worker's pace; both cores for everything
)
def test_workers_are_predicted_from_one_thread_alone(workers: int, expected: float) -> None:
    found = step_of(0.014, resident=Leg((0.004,) * 20), resident_cpu_s=0.004, split=Split(0.010, 0.010, 0.010, 0.0))
    assert with_workers(found, workers) == pytest.approx(expected)


def test_the_floor_is_what_the_machine_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))
    best = ceilings(torch.device("cpu"))
    assert best == ceilings(torch.device("cpu"))  # measured once
    assert set(best.products) == {"fp32", "bf16", "fp64"}
    assert min(*best.products.values(), best.copy, best.call_s) > 0
    model = torch.nn.Linear(64, 32, bias=False)
    flops = count_flops(lambda batch: model(batch).sum().backward(), torch.randn(16, 64), model)
    assert flops == 2 * (2 * 16 * 64 * 32)  # forwards, and backwards to the weights alone
    grouped = torch.nn.Conv2d(4, 4, 3, groups=4)
    assert count_flops(lambda batch: grouped(batch), torch.randn(1, 4, 8, 8), grouped) is None
    found = step_of(0.010, resident=Leg((0.010,) * 20), floor_s=0.004)
    found.operations = Operations(0.9, 10, 0.0, 0.9, 0, 0.0, False, True)
    bars = waterfall(found)
    assert [bar.name for bar in bars][:3] == ["floor", "operations, above it", "host"]
    assert [round(1e3 * bar.seconds, 3) for bar in bars][:3] == [4.0, 5.0, 1.0]
    assert "40% of this machine's best" in verdict(found, [])


def test_findings_are_ranked_and_told() -> None:
    small, large = Finding("a", 0.06, "Small.", "x"), Finding("b", 0.5, "Large.", "y", (), 2.0, 1.8, 2.2)
    assert ranked([small, Finding("c", 0.01, "Nothing.", ""), large]) == [large, small]
    assert (small.severity, large.severity) == ("notice", "critical")
    assert "predicted: 2.00 x (1.80 to 2.20), from 100 to 200 samples/s" in "\n".join(large.lines(100.0))


def test_rules_of_a_whole_run() -> None:
    found = step_of(0.01, evaluation_share=0.5, checkpoint_share=0.2, drift=-0.3, slow_rank=(1, 0.4), grown_bytes=1e6)
    found.free_bytes = 10**9
    rules = {one.rule for one in diagnose(found)}
    assert rules == {"evaluation", "saving", "drift", "straggler", "memory-creep"}
    assert "Rank 1 takes 40% longer" in next(one.sentence for one in diagnose(found) if one.rule == "straggler")
    assert verdict(step_of(0.01), []).startswith("Healthy")


def test_a_run_that_waits_for_an_object_store(tmp_path: Path) -> None:
    run = write_run(tmp_path / "far", [1000.0] * 8)
    storage = {"bytes": 1e9, "requests": 300.0, "retries": 3.0, "latency_p50_ms": 40.0, "latency_p99_ms": 300.0,
               "throttled": 2.0, "at_a_time": 12.0, "hits": 10.0, "misses": 250.0, "damaged": 0.0, "cache_bytes": 9e9,
               "budget_bytes": 1e10}  # fmt: skip
    stages = {"fetch": {"busy_s": 8.0}, "read": {"busy_s": 1.0}}
    with EventLog(run.events) as log:
        for step in (10, 20):
            log.write(LoaderTimes(step=step, seconds=10.0, wait_s=1.0, wait_p50_ms=1.0, wait_p99_ms=1.0, ready=1.0,
                                  stages=stages, storage=storage))  # fmt: skip
    (one,) = [one for one in diagnose(from_events(run)) if one.rule == "fetch"]
    assert one.share == pytest.approx(0.1)
    assert "100 MB/s" in one.sentence
    assert "STOKER_CACHE_BYTES" in one.change
    assert any("500 were not" in line for line in one.evidence)
    found = from_events(run)
    found.storage["cache_bytes"] = 0.0
    assert "stoker fetch" in next(one for one in diagnose(found) if one.rule == "fetch").change
    found.fetch_share = 0.2  # it waits, but for something else
    assert "fetch" not in [one.rule for one in diagnose(found)]


def write_run(folder: Path, rates: list[float], judged_s: float = 0.0, ranks: list[float] | None = None) -> RunFolder:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("recipe: icecube:demo\n")
    with EventLog(folder / "events.jsonl") as log:
        for number, rate in enumerate(rates, start=1):
            ms = 1e3 * 32 / rate
            log.write(
                Step(step=10 * number, epoch=0, consumed=0, samples_crc32=0, lr=0.1, loss=1.0, grad_norm=1.0, bad=0,
                     samples_per_s=rate, wait_share=0.1, step_ms=[ms] * 10, rank_ms=ranks or [])
            )  # fmt: skip
            if judged_s:
                log.write(Evaluation(step=10 * number, metric="m", goal="min", score=1.0, seconds=judged_s))
    return RunFolder(folder)


def test_the_events_of_a_run_tell_what_they_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LEAST_S", 1.0)
    slowing = write_run(tmp_path / "slowing", [1000.0] * 6 + [500.0] * 6, judged_s=0.5, ranks=[10.0, 10.0, 15.0])
    found = from_events(slowing)
    assert found.drift == pytest.approx(-0.5)
    assert found.slow_rank is not None
    assert found.slow_rank == (2, pytest.approx(0.5))
    assert found.evaluation_share == pytest.approx(0.5 / (0.5 + 0.48))
    assert commands.at_end(slowing) is None  # six seconds
    monkeypatch.setattr(commands, "WORTH_S", 1.0)
    assert "evaluating" in (commands.at_end(slowing) or "")
    assert "evaluation" in [event.rule for event in read_events(slowing.events, Found)]
    assert cli(["doctor", str(slowing.path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert {one["rule"] for one in told["findings"]} >= {"evaluation", "drift", "straggler"}
    assert "trial" in told["notes"][0]
    assert commands.at_end(write_run(tmp_path / "well", [1000.0] * 8)) is None
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.yaml").write_text("recipe: icecube:demo\n")
    assert cli(["doctor", str(tmp_path / "empty")]) == 2
    assert "holds no steps yet" in capsys.readouterr().err


def test_damaged_records_and_runs_are_passed_over_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger.record("host", "here", 2.0, 1.9)
    with ledger.ledger_path().open("ab") as file:
        file.write(b'{"rule": "x", "name": "y", "predicted": "z", "measured": 1, "when": 1}\n\xff\xfe\n[1]\n')
    assert cli(["doctor", "--record"]) == 0
    assert "host" in capsys.readouterr().out
    assert len(list(ledger.entries())) == 1
    assert cli(["doctor", str(write_run(tmp_path / "zero", [float("inf")] * 3).path)]) == 2
    assert "do not say how long they took" in capsys.readouterr().err
    every = write_run(tmp_path / "every", [1000.0] * 8)
    lines = [json.loads(line) for line in every.events.read_text().splitlines()]
    every.events.write_text("".join(json.dumps({**line, "step_ms": line["step_ms"][:1]}) + "\n" for line in lines))
    found = from_events(every)  # a step an interval
    assert found.run is not None
    assert found.run.mean == pytest.approx(0.032)


def test_two_runs_are_compared_leg_by_leg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = write_run(tmp_path / "old", [1000.0] * 8), write_run(tmp_path / "new", [800.0] * 8)
    assert cli(["doctor", str(new.path), "--against", str(old.path)]) == 1
    assert "slower: 0.80" in capsys.readouterr().out
    assert cli(["doctor", str(old.path), "--against", str(new.path)]) == 0
    assert cli(["doctor", str(new.path), "--against", str(old.path), "--slower", "0.3"]) == 0
    for words in (["--verify", "--against", str(old.path)], ["--slower", "0.3"], ["--record"]):
        assert cli(["doctor", str(new.path), *words]) == 2


def test_what_cannot_be_measured_is_said_and_the_rest_is() -> None:
    batches = [(torch.randn(8, 4), torch.randn(8)) for _ in range(4)]
    raising = measure(stoker.Probe(batches, lambda batch: 1 / 0), 0.1)
    assert any("ZeroDivisionError" in trouble for trouble in raising.troubles)
    assert raising.drained_s is not None
    empty = measure(stoker.Probe([], print), 0.1)
    assert "not a single batch" in empty.troubles[0]
    none = measure(stoker.Probe([None] * 5, lambda batch: None, num_samples=lambda batch: 1), 0.1)
    assert none.run is not None
    leaving = measure(stoker.Probe(batches, lambda batch: sys.exit(3)), 0.1)
    assert any("SystemExit" in trouble for trouble in leaving.troubles)
    assert verdict(empty, diagnose(empty)) == "Nothing could be measured."
    bare = measure(stoker.Probe(batches, lambda batch: batch[0].sum()), 0.1)
    assert bare.run is not None
    assert not bare.troubles

    def full(batch: Any) -> None:
        raise torch.OutOfMemoryError

    assert "the run: out of memory" in measure(stoker.Probe(batches, full), 0.1).troubles


def test_a_trial_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.doctor import measure as module

    monkeypatch.setattr(module, "STUCK_S", 0.5)
    found = module.measure(stoker.Probe([torch.randn(4)], lambda batch: time.sleep(30)), 0.1)
    assert any("nothing moved" in trouble for trouble in found.troubles)


def test_a_probe_of_ones_own_is_found_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_loop.py").write_text(
        "import io, time, torch, stoker\n"
        "sink = io.StringIO()\n"
        "def step(batch):\n"
        "    time.sleep(0.001)\n"
        "    print('loss', file=sink); time.sleep(0.004)\n"
        "def probe():\n"
        "    return stoker.Probe([torch.randn(8, 2)] * 5, step)\n"
    )
    assert cli(["doctor", "my_loop:probe", "--seconds", "0.3"]) == 1
    told = capsys.readouterr().out
    assert "CRITICAL logging" in told
    assert "my_loop.py:5" in told
    assert cli(["doctor", "my_loop:probe", "--loader.threads", "2"]) == 2
    assert cli(["doctor", "absent:probe"]) == 2
    (tmp_path / "odd.py").write_text("def raising(): return 1 / 0\ndef number(): return 3\n")
    assert cli(["doctor", "odd:raising"]) == 2
    assert "cannot be made: ZeroDivisionError" in capsys.readouterr().err
    assert cli(["doctor", "odd:number"]) == 2
    (tmp_path / "broken.py").write_text("def (:\n")
    assert cli(["doctor", "broken:probe"]) == 2
    assert "SyntaxError" in capsys.readouterr().err
    (tmp_path / "loud.py").write_text(
        "import torch, stoker\nprobe = stoker.Probe([torch.ones(4)] * 5, lambda batch: print('so loud'))\n"
    )
    cli(["doctor", "loud:probe", "--seconds", "0.1", "--json"])
    assert json.loads(capsys.readouterr().out)["name"] == "probe"
    for seconds in ("0", "-1", "inf", "nan"):
        assert cli(["doctor", "loud:probe", "--seconds", seconds]) == 2
    assert cli(["doctor"]) == 2


def test_a_change_is_applied_tried_and_written_down(
    events_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    words = ["--data.path", str(events_dir), "--run.device", "cpu", "--model.width", "16", "--model.heads", "2",
             "--loader.threads", "2"]  # fmt: skip
    before = sorted(events_dir.rglob("*"))
    finding = Finding("workers-few", 0.3, "Few.", "--loader.threads 1", (), 1.0, 0.9, 1.1, keys={"loader.threads": 1})
    diagnosis = commands.Diagnosis(Measured(name="icecube:demo"), [finding], [])
    told = commands.apply("icecube", words, diagnosis, tmp_path / "tuned.yaml")
    assert "loader.threads: 2 -> 1" in told
    assert "threads: 1" in (tmp_path / "tuned.yaml").read_text()
    with pytest.raises(UserError, match="nothing is overwritten"):
        commands.apply("icecube", words, diagnosis, tmp_path / "tuned.yaml")
    assert "workers-few: predicted 1.00 x, measured" in commands.verify("icecube", words, diagnosis, 0.5)
    assert cli(["doctor", "--record"]) == 0
    assert "workers-few" in capsys.readouterr().out
    assert len(list(ledger.entries())) == 1
    with pytest.raises(UserError, match="nothing to apply"):
        commands.apply("icecube", words, commands.Diagnosis(Measured(), [], []), tmp_path / "other.yaml")
    assert sorted(events_dir.rglob("*")) == before
    assert not (tmp_path / "runs").exists()


def test_a_watched_loop_gets_the_same_batches_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    batches = [torch.full((4,), float(number)) for number in range(30)]

    def slow() -> Any:
        for batch in batches:
            time.sleep(0.003)
            yield batch

    class Loader:
        def __iter__(self) -> Any:
            return slow()

        def __len__(self) -> int:
            return 30

    watched = stoker.watch(Loader())
    assert len(watched) == 30
    seen = []
    for number, batch in enumerate(watched):
        seen.append(batch)
        time.sleep(0.001)
        if number == 20:
            os.kill(os.getpid(), signal.SIGUSR2)
    assert all(torch.equal(one, two) for one, two in zip(seen, batches, strict=True))
    told = capsys.readouterr().err
    assert told.count("stoker.watch:") == 2
    assert "CRITICAL loader" in told
    found = watched.measured()
    assert found.run is not None
    assert 0.5 < found.wait_s / found.run.mean < 0.95
    assert watched.findings()[0].rule == "loader"


@pytest.mark.parametrize(
    ("fault", "rule"),
    [("", ""), ("nan", "answers-not-finite"), ("constant", "collapsed"), ("labels", "at-baseline"),
     ("numbers", "at-baseline"), ("explodes", "gradients-grow"), ("detached", "gradient-none")],
)  # fmt: skip
def test_a_watched_model_is_looked_at(fault: str, rule: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if fault in ("labels", "numbers") else 0.1)
    inputs = torch.randn(600, 128, 8)
    labels = (inputs @ torch.randn(8, 3)).argmax(2)
    if fault == "labels":
        labels = labels[torch.randperm(600)]
    if fault == "numbers":
        labels = torch.randn(600, 128, 3)
    watched = stoker.watch(list(zip(inputs, labels, strict=True)), model, say=False)
    for number, (batch, wanted) in enumerate(watched):
        optimizer.zero_grad()
        answers = model(batch)
        numbers = torch.nn.functional.mse_loss(answers, wanted) if fault == "numbers" else None
        loss = torch.nn.functional.cross_entropy(answers, wanted) if numbers is None else numbers
        if fault == "detached":
            loss = 0.0 * loss
        (loss * (1e5 if fault == "explodes" and number > 400 else 1)).backward()
        if fault != "explodes" or number < 400:
            optimizer.step()
        with torch.no_grad():
            if fault == "nan" and number == 300:
                model.weight.fill_(float("nan"))
            if fault == "constant":
                model.weight.zero_()
    told = [one for one in watched.findings() if one.of == "learning"]
    assert [one.rule for one in told[:1]] == ([rule] if rule else [])
    assert watched.measured().answers is not None


def _unused_class(model: Any, x: Any, y: Any) -> Any:
    return ((model(x)[:, :8] - x) ** 2).mean()


def _mostly_ignored(model: Any, x: Any, y: Any) -> Any:
    kept = torch.where(torch.arange(len(y)) % 30 == 0, y, -100)
    return torch.nn.functional.cross_entropy(model(x), kept)


def _weighted(model: Any, x: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(x)[:, :2], (y == 0).long(), torch.tensor([1.0, 40.0]))


def _overflow_at_first(model: Any, x: Any, y: Any) -> Any:
    loss = torch.nn.functional.cross_entropy(model(x), y)
    return loss * (float("inf") if _overflow_at_first.calls < 70 else 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("loss", [_unused_class, _mostly_ignored, _weighted, _overflow_at_first])
def test_a_watched_model_that_learns_something_else_is_left_alone(loss: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(700, 32, 8)
    labels = (inputs @ torch.randn(8, 10)).argmax(2)
    watched = stoker.watch(list(zip(inputs, labels, strict=True)), model, say=False)
    for number, (x, y) in enumerate(watched):
        loss.calls = number
        value = loss(model, x, y)
        value.backward()
        if bool(torch.isfinite(value)):
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # at the end: whoever asks later sees zeros
        if number == 62:
            copy.deepcopy(model)
    assert [one for one in watched.findings() if one.of == "learning"] == []
    assert not model._forward_hooks
    answers = watched.measured().answers
    assert answers is not None
    assert len(answers.looks) == 10


def test_a_model_that_is_watched_anew_every_epoch_keeps_its_looks() -> None:
    model = torch.nn.Linear(4, 1)
    for _ in range(4):
        for number, batch in enumerate(stoker.watch([torch.ones(2, 4)] * 100, model, say=False)):
            model(batch).sum().backward()
            if number == 70:
                break
    again = stoker.watch([], model, say=False)
    assert again._model is not None
    found = again._model.answers()
    assert found is not None
    assert [one.step for one in found.looks] == [64, 128, 192, 256]
    assert not model._forward_hooks
    with pytest.raises(TypeError, match=r"no torch\.nn\.Module"):
        stoker.watch([], print)  # type: ignore[arg-type]


def test_numbers_are_read_once_while_a_trial_asks_for_it() -> None:
    def read(value: torch.Tensor) -> tuple[float, int, bool, list[float]]:
        return float(value), int(value.item()), bool(value), value.tolist()

    with numbers_of_before() as remember:
        assert read(torch.tensor(1.0)) == (1.0, 1, True, 1.0)
        assert read(torch.tensor(3.0)) == (3.0, 3, True, 3.0)
        remember()
        assert read(torch.tensor(0.0)) == (3.0, 3, True, 3.0)
        assert torch.tensor(7.0).item() == 7.0  # another line
    assert read(torch.tensor(0.0)) == (0.0, 0, False, 0.0)
    assert not {"item", "__float__"} & set(vars(torch.Tensor))


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_with_a_watched_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from planted.later import Module

    lightning = pytest.importorskip("lightning")
    monkeypatch.chdir(tmp_path)
    loader = torch.utils.data.DataLoader(loops.Samples(256), 64)
    watched = stoker.watch(loader, say=False)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Module(32), train_dataloaders=watched)
    assert len(watched._steps) == 8


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.95, 0), (0.5, 1), (2.0, 0)])
def test_a_benchmark_that_got_slower_is_named(factor: float, code: int) -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "loader-2cores.jsonl").read_text().splitlines()[0])
    line = {**stored, "value": factor * stored["value"], "commit": "other"}
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "regress.py")], input=json.dumps(line) + "\n",
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout) == line
    assert ("WORSE by 50%" in done.stderr) == (code == 1)


def test_intervals_hold_the_mean_of_bursts() -> None:
    dice = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        leg = Leg(tuple(dice.exponential(0.01, 80)))
        low, high = leg.interval()
        held += low <= 0.01 <= high
    assert held >= 75


def on_gpu(run_s: float, resident_s: float, busy_s: float, **more: Any) -> Measured:
    found = step_of(run_s, resident=Leg((resident_s,) * 20), device="cuda", **more)
    found.operations = Operations(0.9, 500, 0.0, 0.5, 0, 0.0, False, True, busy_s=busy_s, wait_s=found.wait_s)
    return found


def first_rule(found: Measured) -> Finding:
    return diagnose(found)[0]


def test_a_gpu_that_waits_for_its_host() -> None:
    found = on_gpu(0.010, 0.010, 0.004, launch_s=0.010, call_s=1e-5)
    one = first_rule(found)
    # Of 6 ms that the GPU does nothing in, half is hoped for: no loop is to blame that could be written anew.
    assert (one.rule, one.factor) == ("host", pytest.approx(10 / 7))
    assert "the GPU computes for 4 ms of a step of 10 ms; launching alone takes 5 ms" in one.evidence[-1]
    # The same idle GPU, because the host reads numbers: without that it would be ahead.
    found.calls = Calls((), {("loop.py", 7): 12})
    found.operations = Operations(0.9, 500, 0.0, 0.5, 0, 0.0, False, True, busy_s=0.004, wait_s=0.007)
    one = first_rule(found)
    assert one.rule == "sync"
    assert "waits for the GPU 12 times" in one.sentence
    assert "loop.py:7" in one.evidence[0]
    assert one.factor == pytest.approx(2.5)
    # It need not wait long: what those lines launch for the numbers they read goes as well.
    found.operations, found.sync_s = replace(found.operations, wait_s=0.0005), 0.003
    assert (first_rule(found).rule, first_rule(found).factor) == ("sync", pytest.approx(10 / 7))


def test_attention_that_nobody_compiled_is_what_its_lines_take(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("mixed = flex_attention(query, key, value)\nloss.backward()\n")
    found = on_gpu(0.010, 0.010, 0.001)
    found.calls = Calls((Call("flex_attention", (str(file), 1), 0.2, (), None), Call("mm", None, 0.8, (), None)))
    found.lines.seconds |= {(str(file), 1, "step"): 0.6, (str(file), 2, "step"): 0.25, (str(file), 9, "step"): 0.15}
    found.lines.total = 1.0
    one = first_rule(found)
    assert (one.rule, one.share) == ("attention", pytest.approx(0.85 * 0.6 / 0.75))  # as much of the backward pass
    assert "model.py:1" in one.evidence[0]


def test_a_step_of_ours_that_is_cut_into_pieces() -> None:
    found = on_gpu(0.060, 0.045, 0.035, launch_s=0.046, pieces=2, settings={"loader.micro_cost": 400_000})
    found.loader = LoaderFacts("stoker", 8, 8, key="loader.threads")
    found.wait_s, found.drained_s, found.split = 0.005, 0.008, Split(0.012, 0.011, 0.011, 0.0)
    found.gpu, found.cores = DeviceFacts(20 << 30, 140 << 30), 16
    pieces, interpreter = diagnose(found)
    assert (pieces.rule, interpreter.rule) == ("pieces", "interpreter")
    assert pieces.keys == {"loader.micro_cost": 800_000}
    assert pieces.factor == pytest.approx(0.060 / 0.035)
    assert interpreter.keys == {"loader.threads": 1}
    found.gpu = DeviceFacts(100 << 30, 140 << 30)  # no room for it as a whole
    assert [one.rule for one in diagnose(found)] == ["interpreter", "host"]


def test_copies_clocks_and_memory_of_a_gpu() -> None:
    found = on_gpu(0.010, 0.006, 0.006, given=Leg((0.010,) * 20), pinned_copy_s=0.001, batch_bytes=8_000_000)
    one = first_rule(found)
    assert one.rule == "copy"
    assert "pin_memory=True" in one.change
    assert one.factor == pytest.approx(10 / 7)
    found.pinned_copy_s = 0.004  # pinned already
    assert "while this step computes" in first_rule(found).change
    full = on_gpu(0.010, 0.010, 0.010, gpu=DeviceFacts(96 << 30, 100 << 30, 3))
    assert first_rule(full).rule == "memory-limit"
    hot = on_gpu(0.010, 0.010, 0.010, gpu=DeviceFacts(1, 100, 0, 0.6, slowed=True))
    assert (first_rule(hot).rule, first_rule(hot).factor) == ("throttled", pytest.approx(1 / 0.6))
    assert diagnose(on_gpu(0.010, 0.010, 0.010, gpu=DeviceFacts(1, 100, 0, 0.6))) == []  # by its limit of power


def test_what_was_tried_is_what_is_predicted() -> None:
    products = Call("mm", None, 0.9, (), torch.float32), Call("add", None, 0.1, (), torch.float32)
    found = on_gpu(0.010, 0.010, 0.010, calls=Calls(products), plain_layout=True)
    assert first_rule(found).rule == "precision"
    found.tried = {"precision": 0.0025, "layout": 0.0099}
    assert [(one.rule, one.factor) for one in diagnose(found)] == [("precision", pytest.approx(4.0))]
    found.tried = {"precision": 0.011, "layout": 0.005}  # the one made it slower, the other twice as fast
    assert [(one.rule, one.factor) for one in diagnose(found)] == [("layout", pytest.approx(2.0))]


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(tokens)
        mixed = torch.softmax(hidden @ hidden.transpose(1, 2), -1) @ hidden  # all pairs
        return torch.stack([one.mean(0) for one in mixed]).sum()  # one by one


def test_operations_are_traced_to_their_lines() -> None:
    model, batch = Scores(), torch.randn(40, 128, 8)
    calls = calls_of(lambda tokens: model(tokens).backward(), batch, torch.device("cpu"))
    assert "one by one" in calls.busiest_lines()[0]
    assert calls.attention_share > 0.2
    assert "all pairs" in calls.attention_lines()[0]
    assert 0 < calls.product_share(torch.float32) < 1
    assert calls.product_share(torch.float64) == 0
    compiled = torch.compile(model, backend="eager")
    assert (
        "all pairs" in calls_of(lambda one: compiled(one).backward(), batch, torch.device("cpu")).attention_lines()[0]
    )


def test_a_change_is_tried_and_taken_back() -> None:
    probe = loops.doubles(True)
    found = measure(probe, 0.3)
    assert (
        found.tried["precision"] > 0
    )  # that it is quicker is benchmarks/doctor.py's to show: this machine may be busy
    assert {parameter.dtype for parameter in probe.model.parameters()} == {torch.float64}  # type: ignore[union-attr]
    probe.step(probe.loader[0])  # type: ignore[index]  # its optimizer has what it had, too
    padded = measure(loops.padded(True), 0.1)
    assert padded.tried["padding"] > 0
    workers = trials.anew(torch.utils.data.DataLoader(loops.Samples(64), 16), 2)
    assert workers is not None
    assert (workers.num_workers, sum(len(batch[0]) for batch in workers)) == (2, 64)
    assert trials.anew([1, 2], 2) is None
    shuffled = measure(loops.shuffled_files(True), 0.1)
    assert shuffled.tried["shuffle"] > 0


def trainer_of(folder: Path) -> Any:
    """A small model of Hugging Face's library with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**shape, intermediate_size=32, hidden_dropout_prob=0.0,
                                     attention_probs_dropout_prob=0.0)  # fmt: skip
    rows = [{"input_ids": torch.arange(8) + row % 40, "labels": torch.tensor(row % 2)} for row in range(16)]
    arguments = transformers.TrainingArguments(
        str(folder), report_to=[], use_cpu=True, max_steps=1, per_device_train_batch_size=16, save_strategy="no",
        lr_scheduler_type="constant", learning_rate=1e-2, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    return transformers.Trainer(transformers.BertForSequenceClassification(config), arguments, train_dataset=rows)


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_trainer_is_stepped_as_it_steps_itself(tmp_path: Path) -> None:
    theirs = trainer_of(tmp_path / "theirs")
    theirs.train()
    ours = trainer_of(tmp_path / "ours")
    probe = trainer_probe(ours)
    probe.step(next(iter(probe.loader)))
    for one, two in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    found = measure(probe, 0.2)
    assert found.run is not None
    assert not found.troubles
    assert (found.loader.kind, found.samples) == ("DataLoader", 16)


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def test_batches_of_all_kinds_are_walked_through() -> None:
    batch = Attributes(x=torch.ones(4, 3), y=torch.ones(4))
    found = measure(stoker.Probe([batch] * 4, lambda batch: batch.x.sum() + batch.y.sum()), 0.1)
    assert not found.troubles
    assert found.samples == 4
    users = collections.UserDict(x=torch.ones(4, 3))
    assert measure(stoker.Probe([users] * 4, lambda batch: batch["x"].sum()), 0.1).samples == 4
    sparse = torch.eye(4).to_sparse()
    assert not measure(stoker.Probe([sparse] * 4, lambda batch: batch.sum()), 0.1).troubles
    words = measure(stoker.Probe(["a", "b"], lambda batch: None), 0.1)
    assert "batch" not in [one.rule for one in diagnose(words)]  # nothing of it could be made larger


def test_a_loader_that_can_be_read_only_once_is_told() -> None:
    found = measure(stoker.Probe((torch.ones(4, 2) for _ in range(1)), lambda batch: batch.sum()), 0.1)
    assert "only once" in found.troubles[0]
    assert verdict(found, diagnose(found)) == "Nothing could be measured."


def test_batches_of_different_sizes_are_counted() -> None:
    batches = [torch.ones(16, 2), torch.ones(2, 2)] * 8
    found = measure(stoker.Probe(batches, lambda batch: time.sleep(0.001)), 0.2)
    assert found.samples == pytest.approx(9, abs=1.5)


def test_a_change_that_was_tried_in_vain_is_no_advice() -> None:
    found = step_of(0.010, resident=Leg((0.006,) * 20), wait_s=0.004, split=Split(0.004, 0.004, 0.004, 0.0))
    found.loader = LoaderFacts("DataLoader", 0, 0)
    one = first_rule(found)
    assert (one.rule, one.severity) == ("workers-zero", "critical")
    found.tried["workers-zero"] = 0.012
    one = first_rule(found)
    assert one.severity == "notice"
    assert "tried, and gains nothing" in one.sentence


def test_an_epoch_of_one_batch_has_no_gap() -> None:
    assert legs._waits_and_gaps([], [0.2, 0.2], 2, in_between=True) == pytest.approx((0.2, 0.0))
    assert legs._waits_and_gaps([0.01, 0.01], [0.21], 3, in_between=False) == pytest.approx((0.01, 0.2 / 3))


def test_columns_and_targets_are_no_padding() -> None:
    batches = [(torch.randn(64, 32), torch.nn.functional.one_hot(torch.randint(0, 500, (64,)), 1000)) for _ in range(3)]
    model = torch.nn.Linear(32, 1000)
    probe = stoker.Probe(batches, lambda batch: (model(batch[0]) * batch[1]).sum().backward(), model)
    assert measure(probe, 0.1).padding == 0


def test_what_others_set_is_put_back() -> None:
    """Loggers of torch, handlers of signals, a generator that is somebody's own."""
    torch._logging.set_logs(graph_breaks=True)
    faulthandler.register(signal.SIGUSR1)
    try:
        state = torch._logging._internal.log_state
        before = set(state.artifact_names)
        measure(stoker.Probe([torch.ones(4, 2)] * 4, lambda batch: batch.sum()), 0.1)
        assert set(state.artifact_names) == before
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        torch._logging.set_logs()


def test_a_slow_step_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker.doctor import measure as module

    monkeypatch.setattr(module, "STUCK_S", 0.5)
    found = module.measure(stoker.Probe([torch.ones(4)] * 4, lambda batch: time.sleep(0.2)), 0.1)
    assert not found.troubles  # a leg took longer than that, and moved all the time


def test_a_diagnosis_is_told_even_where_nothing_can_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiet.py").write_text("import torch, stoker\nprobe = stoker.Probe([torch.ones(4)] * 5, torch.sum)\n")
    assert cli(["doctor", "quiet:probe", "--seconds", "0.1", "--apply", "new.yaml"]) == 2
    told = capsys.readouterr()
    assert "samples/s" in told.out
    assert "nothing to apply" in told.err


def test_lines_of_a_kind_are_timed_with_all_that_they_call() -> None:
    class Service:
        def log(self, seconds: float) -> None:
            time.sleep(seconds)

    service = Service()
    begin = time.perf_counter()
    with watched_lines() as seen:
        while time.perf_counter() - begin < 0.2:
            service.log(0.004)
            sum(range(20_000))
    assert set(seen.places.values()) == {"logging"}
    with timed_lines(seen.places) as spent:
        for _ in range(10):
            service.log(0.004)
    with timed_lines(seen.places) as outside:
        time.sleep(0.01)
    assert spent == {}  # other lines than those that were seen
    assert outside == {}
    (place,) = seen.places

    def step() -> None:
        service.log(0.01)
        time.sleep(0.01)

    begin = time.perf_counter()
    with timed_lines({(place[0], step.__code__.co_firstlineno + 1): "logging"}) as spent:
        for _ in range(5):
            step()
    assert 0.05 <= spent["logging"] < time.perf_counter() - begin - 0.05  # and not what comes after
    assert sys.gettrace() is None


@pytest.mark.filterwarnings("ignore")
def test_lines_are_looked_at_while_compiled_code_runs() -> None:
    """The signal came while torch ran what it had compiled, which then tried to compile the one who looked."""
    from torch.nn.attention.flex_attention import flex_attention

    query = torch.randn(1, 2, 128, 16)
    begin = time.perf_counter()
    with torch.no_grad(), watched_lines() as lines:
        while time.perf_counter() - begin < 2.0:
            flex_attention(query, query, query, score_mod=lambda score, b, h, i, j: score * 2)
    assert any("flex_attention(query" in line for line in lines.top())


class Records(torch.utils.data.Dataset[Any]):
    """Samples that come late, and that whoever collates them takes apart."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.001)
        return {"inputs": torch.full((4,), float(index)), "label": torch.tensor(index)}


def taken_apart(samples: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.stack([sample.pop("label") for sample in samples])
    return torch.stack([sample["inputs"] for sample in samples]), labels


def test_samples_that_are_remembered_stay_whole() -> None:
    loader = torch.utils.data.DataLoader(Records(), 128, collate_fn=taken_apart)
    found = Measured(samples=128, split=Split(cold_s=0.2, warm_s=0.13, cpu_s=0.01, collate_s=0.001))
    found.loader = describe(loader, {})
    probe = stoker.Probe(loader, lambda batch: None, None)
    storage_beside("fetch-bandwidth")(probe, found, legs.Kept(), 0.05)
    assert 0.01 <= found.tried["fetch-bandwidth"] < 0.13  # what reading computes stays, waiting does not


def test_streams_are_not_made_anew() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.zeros(8, 2))

    assert trials.anew(torch.utils.data.DataLoader(Stream(), 4), 1) is None


def test_a_loader_that_is_used_up_is_said_to_be() -> None:
    probe = stoker.Probe(iter([]), lambda batch: None, None)
    with pytest.raises(ValueError, match="read only once"):
        legs.rate_of(probe, 0.1)
