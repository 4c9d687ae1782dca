"""How near the tuner comes to the best of an exhaustive grid, with how many trials and in how long.

    python benchmarks/tune.py [--budget 240] [--cases NAME ...] [--compile]
    python benchmarks/tune.py --rates [--seeds 5] [--cases NAME ...]
    python benchmarks/tune.py --batch

Each case twice: as its preset has it, and set badly. The grid holds precision, threads and look-ahead (with --compile also
compilation, with a GPU also processes); every point is a trial like the tuner's. `--rates`: the rate that the tuner chooses,
and the one that Lightning's finder does, against a fine grid, by the loss at the end of short trainings, over several seeds;
and what both say of labels that belong to other samples. `--batch`: what both say of the batch, and how long they take.
"""

import argparse
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from measure import emit, line

from stoker import console
from stoker.doctor.probe import probe_of
from stoker.launch.targets import resolve_target
from stoker.tune.commands import tune
from stoker.tune.space import ladder
from stoker.tune.trial import Ask, find_tunable, tried

CORES = len(os.sched_getaffinity(0))
ON_GPU = torch.cuda.is_available()
EVENTS = ["--data.simulate_events", "20000", "--data.simulate_files", "4"]
IMAGES = ["--data.draw_per_class", "100", "--data.draw_held_out", "10", "--data.check_labels", "false"]
BAD = ["--train.precision", "fp32" if ON_GPU else "bf16", "--loader.threads", "1", "--loader.look_ahead", "2"]
CASES: dict[str, tuple[str, list[str]]] = {
    "icecube": ("icecube:seed" if ON_GPU else "icecube:demo", EVENTS),
    "icecube, set badly": ("icecube:seed" if ON_GPU else "icecube:demo", [*EVENTS, *BAD]),
    "imagenet": ("imagenet:baseline" if ON_GPU else "imagenet:demo", IMAGES),
    "imagenet, set badly": ("imagenet:baseline" if ON_GPU else "imagenet:demo", [*IMAGES, *BAD]),
}


@dataclasses.dataclass(frozen=True)
class Small:
    """The same two, so small that a hundred trainings take minutes."""

    target: str
    words: list[str]
    steps: int  # of a training: until its loss tells more than the frequency of labels
    tuner_s: float  # that the tuner is given for its rates
    rates: tuple[float, ...]  # the fine grid


def powers(first: float, last: float) -> tuple[float, ...]:
    """Of ten, in quarters."""
    return tuple(10.0 ** (first + step / 4) for step in range(round(4 * (last - first)) + 1))


SMALL = {
    "simulated events": Small(
        "icecube:demo",
        ["--model.width", "32", "--loader.batch_size", "64"],
        steps=500,
        tuner_s=400.0,
        rates=powers(-4, -2),
    ),
    "drawn images": Small(
        "imagenet:demo",
        [*IMAGES, "--loader.batch_size", "32", "--train.lr_batch", "null"],
        steps=60,
        tuner_s=40.0,
        rates=powers(-3.5, -0.75),
    ),
}


def grid(target: str, compiled: bool) -> list[dict[str, Any]]:
    axes: dict[str, tuple[Any, ...]] = {
        "train.precision": ("bf16", "fp32"),
        "loader.threads": ladder(CORES),
        "loader.look_ahead": (2, 8, 32),
    }
    if compiled:
        axes["train.compile"] = (False, True)
    if target.startswith("imagenet") and ON_GPU:
        axes["data.processes"] = (0, *ladder(CORES))
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def speed(name: str, options: argparse.Namespace) -> None:
    target, words = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        found = tune(
            target,
            words,
            Path(folder) / "tuned.yaml",
            budget_s=options.budget,
            seconds=options.seconds,
            only=["step", "loader"],
        )
    points = grid(target, options.compile)
    rates = [tried(Ask(target, words, knobs, "run", options.seconds)).rate for knobs in points]
    best = points[rates.index(max(rates))]
    # Once more beside each other: the best of many noisy numbers is better than it is.
    turns: dict[str, list[float]] = {"tuned": [], "grid": []}
    for _ in range(3):
        turns["tuned"].append(tried(Ask(target, words, found.chosen, "run", options.seconds)).rate)
        turns["grid"].append(tried(Ask(target, words, best, "run", options.seconds)).rate)
    ratio = statistics.median(turns["tuned"]) / statistics.median(turns["grid"])
    details = {
        "case": name,
        "chosen": {key: str(value) for key, value in found.chosen.items()},
        "best_of_grid": {key: str(value) for key, value in best.items()},
        "grid_points": len(rates),
        "trials": found.trials,
        "seconds": round(found.seconds, 1),
        "before": round(found.before.rate, 1),
        "after": round(statistics.median(turns["tuned"]), 1),
    }
    emit(line("tuned / best of the grid", [ratio], "ratio", bar=0.95, **details))


def rates(name: str, options: argparse.Namespace) -> None:
    """The mean loss of the last steps of a short training, by rate and seed; the tuner is asked for each seed."""
    case = SMALL[name]
    found: dict[str, list[float]] = {"tuner": [], "Lightning": []}
    chosen: dict[str, list[float | None]] = {"tuner": [], "Lightning": []}
    spent: dict[str, list[float]] = {"tuner": [], "Lightning": []}
    for seed in range(options.seeds):
        own = [*case.words, "--run.seed", str(seed), "--train.schedule", "cosine"]
        own += ["--train.steps", str(case.steps), "--train.epochs", "1000"]
        own += ["--train.warmup_steps", str(case.steps // 10)]  # as the tuner's own trainings have it
        answers: dict[str, float | None] = {}
        for who, ask in (("tuner", _tuner_rate), ("Lightning", _lightning_rate)):
            begin = time.perf_counter()
            answers[who] = ask(case.target, own, case.tuner_s)
            spent[who].append(time.perf_counter() - begin)
        ends = {rate: _end_of(case, own, rate) for rate in {*case.rates, *filter(None, answers.values())}}
        best = min(ends.values())
        for who, rate in answers.items():
            chosen[who].append(rate)
            if rate is not None:
                found[who].append(ends[rate] / best - 1)
    for who, excess in found.items():
        details = {
            "case": name,
            "rates": len(case.rates),
            "steps": case.steps,
            "seeds": options.seeds,
            "chosen": chosen[who],
        }
        details["seconds"] = round(statistics.median(spent[who]), 1)
        emit(line(f"{who}: decisions on a rate", [len(excess)], "of the seeds", **details))
        if excess:
            name_of = f"{who}: loss at the chosen rate over the best of a fine grid"
            emit(line(name_of, excess, "share", bar=0.02, worst=round(max(excess), 4), **details))


def shuffled_labels(options: argparse.Namespace) -> None:
    """Numbers to learn, and labels that have nothing to do with them: nobody can say which rate is best."""
    for who, ask in (("tuner", _tuner_rate), ("Lightning", _lightning_rate)):
        answers = []
        for seed in range(options.seeds):
            os.environ["SHUFFLED_SEED"] = str(seed)
            answers.append(ask("shuffled:loop", [], 20.0))
        decided = sum(answer is not None for answer in answers)
        emit(line(f"{who}: decisions on shuffled labels", [decided], "of the seeds", seeds=options.seeds, bar=0))


def _tuner_rate(target: str, words: list[str], seconds: float) -> float | None:
    answer = tried(Ask(target, words, {}, "rates", seconds))
    chosen = (answer.rates or {}).get("chosen")
    return None if chosen is None else float(chosen) / float(answer.facts.get("lr_scale", 1.0))


def _end_of(case: Small, words: list[str], rate: float) -> float:
    answer = tried(Ask(case.target, words, {"train.lr": rate}, "learn", 600.0, steps=case.steps))
    last = answer.losses[-max(1, len(answer.losses) // 5) :]
    return sum(last) / len(last) if answer.ok and len(answer.losses) == case.steps else float("inf")


def _lightning_rate(target: str, words: list[str], _: float) -> float | None:
    return _in_its_own_process("rate", target, words)


def batches(name: str, options: argparse.Namespace) -> None:
    target, words = SMALL[name].target, SMALL[name].words
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tuned.yaml"
        found = tune(target, words, out, budget_s=options.budget, seconds=options.seconds, only=["batch"])
    begin = time.perf_counter()
    answer = _in_its_own_process("batch", target, words)
    details = {"case": name, "tuner": [*found.told, *(line for one in found.decisions for line in one.lines())]}
    details |= {"tuner_seconds": round(found.seconds, 1), "lightning_batch": answer}
    emit(line("batch: Lightning's finder", [time.perf_counter() - begin], "s", **details))


def _in_its_own_process(what: str, target: str, words: list[str]) -> float | None:
    """What Lightning answers, in a process of its own as the tuner's trials are; None: nothing."""
    program = [sys.executable, __file__, "--lightning", what, target, *words]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"Lightning failed: {done.stderr[-1000:]}")
    answer = done.stdout.strip().splitlines()[-1]
    return None if answer == "None" else float(answer)


def lightning(what: str, target: str, words: list[str]) -> None:
    """Lightning's finder on the very model, optimizer and batches of a target; prints its answer."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.lr, self.batch_size = 1e-3, 2
            self.opened = ExitStack()
            self.probe = self.made()
            self.model = self.probe.model

        def made(self) -> Any:
            self.opened.close()
            if (own := find_tunable(target)) is not None:
                return own.probe({})
            size = ["--loader.batch_size", str(self.batch_size)] if what == "batch" else []
            return self.opened.enter_context(probe_of(resolve_target(target, [*words, *size])))

        def training_step(self, batch: Any, _: int) -> Any:
            return self.probe.loss(batch)

        def configure_optimizers(self) -> Any:
            return self.probe.new_optimizer(list(self.model.parameters()), self.lr)

        def train_dataloader(self) -> Any:
            if what == "batch":  # another size is another loader; the model stays
                self.probe = dataclasses.replace(self.made(), model=self.model)
            loader = self.probe.loader  # a list would be taken for several loaders
            return torch.utils.data.DataLoader(loader, batch_size=None) if isinstance(loader, list) else loader

        def transfer_batch_to_device(self, batch: Any, device: Any, _: int) -> Any:
            return batch

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=1, accelerator="auto" if ON_GPU else "cpu", **quiet)
    module = Module()
    tuner = Tuner(trainer)
    if what == "rate":
        found = tuner.lr_find(module, num_training=100)
        print(None if found is None else found.suggestion())
    else:
        print(tuner.scale_batch_size(module, mode="power", max_trials=8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *SMALL])
    parser.add_argument("--compile", action="store_true", help="also with and without torch.compile in the grid")
    parser.add_argument("--rates", action="store_true")
    parser.add_argument("--batch", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    console.be_quiet()
    if not (options.rates or options.batch):
        for name in options.cases or CASES:
            speed(name, options)
        return
    for name in options.cases or SMALL:
        (rates if options.rates else batches)(name, options)
    if options.rates:
        shuffled_labels(options)


if __name__ == "__main__":
    os.environ.setdefault("STOKER_CACHE", tempfile.mkdtemp())
    os.environ.setdefault("XDG_STATE_HOME", tempfile.mkdtemp())
    os.chdir(Path(__file__).parent)  # where the loop with shuffled labels is found
    if sys.argv[1:2] == ["--lightning"]:
        lightning(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
