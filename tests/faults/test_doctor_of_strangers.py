"""Loops as strangers write them: none of their habits misleads the doctor, and nothing of it ends their training."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import stoker
from stoker.cli import run as cli
from stoker.doctor import watch as watching
from stoker.doctor.lines import WRITES
from stoker.doctor.loaders import split_of
from stoker.doctor.measure import measure
from stoker.doctor.measured import Leg, Measured
from stoker.doctor.rules import diagnose
from stoker.doctor.waterfall import waterfall


@pytest.mark.parametrize(
    ("line", "writes"),
    [("loss = -p.log().mean()", False), ("y = torch.log(x)", False), ("a = math.log(3)", False), ("blueprint(x)", False),
     ("service.log(loss)", True), ("np.log( x )", False),
     ("print(loss)", True), ("self.log('loss', loss)", True), ("wandb.log({})", True), ("logger.info(x)", True),
     ("writer.add_scalar('a', 1)", True), ("log.debug('x')", True), ("file.write(text)", True)],
)  # fmt: skip
def test_a_logarithm_is_no_log(line: str, writes: bool) -> None:
    assert bool(WRITES.search(line)) is writes


def test_a_run_that_waits_is_told() -> None:
    """Of its events alone: nobody has measured its step."""
    found = Measured(name="run", run=Leg((0.01,) * 9), wait_s=0.0095)
    first = diagnose(found)[0]
    assert first.rule == "waiting"
    assert first.severity == "critical"
    assert next(bar for bar in waterfall(found) if bar.name == "waiting for batches").low > 0
    assert not diagnose(Measured(name="run", run=Leg((0.01,) * 9), wait_s=0.0001))


def test_nobody_listens_to_a_watched_loop() -> None:
    """As after `2>&1 | head`: what the doctor has to say is lost, and the training is not."""
    code = (
        "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 2)\n"
        "import stoker\n"
        "for _ in range(2):\n"
        "    for batch in stoker.watch(list(range(30))): pass\n"
        "print('trained')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "trained\n"


def test_an_iterator_that_is_never_finished() -> None:
    code = "import stoker; g = iter(stoker.watch([1] * 40)); [next(g) for _ in range(25)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_signal_while_the_last_one_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    before, told = signal.getsignal(signal.SIGUSR2), []
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)

    def answer(self: Any) -> None:
        told.append(1)
        os.kill(os.getpid(), signal.SIGUSR2)
        raise RuntimeError("what it has to say cannot be said")

    monkeypatch.setattr(watching.Watch, "_print", answer)
    try:
        for _ in stoker.watch([1] * 3, say=False):
            os.kill(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert told


def test_epochs_beyond_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "KEPT", 50)
    watched = stoker.watch([1] * 10, say=False)
    for _ in range(40):
        for _ in watched:
            pass
    found = watched.measured()
    assert found.epoch_steps == 10
    assert len(watched._gaps) == 5


class OneFile(Dataset[Tensor]):
    """Opens its file at the first sample, as many do, so that every worker has its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, None

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()  # type: ignore[unreachable]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, row: int) -> Tensor:
        if self.file is None:
            self.file = self.path.open("rb")  # type: ignore[assignment]
        self.file.seek(row)  # type: ignore[attr-defined]
        return torch.tensor(self.file.read(1)[0])  # type: ignore[attr-defined]


def test_the_file_of_a_data_set_stays_closed(tmp_path: Path) -> None:
    """What the doctor opens would be shared by all workers that are forked later, with one place to read at."""
    (tmp_path / "data").write_bytes(bytes(range(64)))
    loader = DataLoader(OneFile(tmp_path / "data"), batch_size=8)
    assert split_of(stoker.Probe(loader=loader, step=lambda batch: None), []) is not None
    assert loader.dataset.file is None  # type: ignore[attr-defined]


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_steps_that_take_their_batch_apart_or_end_strangely() -> None:
    model = nn.Linear(4, 1)

    def pops(batch: dict[str, Tensor]) -> None:
        (model(batch.pop("x")) - batch.pop("y")).square().mean().backward()

    batches = [{"x": torch.randn(8, 4), "y": torch.randn(8, 1)} for _ in range(8)]
    found = measure(stoker.Probe(loader=batches, step=pops, model=model), 0.1, "speed")
    assert found.run is not None
    assert not [trouble for trouble in found.troubles if "KeyError" in trouble]

    for error in (Wordless(), GeneratorExit()):

        def fails(batch: Any, error: BaseException = error) -> None:
            raise error

        found = measure(stoker.Probe(loader=batches, step=fails, model=model), 0.1, "speed")
        assert any(type(error).__name__ in trouble for trouble in found.troubles)


def test_ctrl_c_that_a_library_answered_with_an_error() -> None:
    def interrupted(batch: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("DataLoader worker exited unexpectedly")  # noqa: B904

    with pytest.raises(KeyboardInterrupt):
        measure(stoker.Probe(loader=[torch.zeros(2)] * 4, step=interrupted), 0.1, "speed")


class Unsized:
    def __len__(self) -> int:
        raise RuntimeError("length unknown")

    def __iter__(self) -> Iterator[Tensor]:
        yield from (torch.randn(8, 4) for _ in range(50))


def test_a_loader_that_does_not_know_its_length() -> None:
    model = nn.Linear(4, 1)
    probe = stoker.Probe(loader=Unsized(), step=lambda batch: model(batch).sum().backward(), model=model)
    found = measure(probe, 0.1, "speed")
    assert not any("length unknown" in trouble for trouble in found.troubles)


def test_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nosuchlibrary_probe.py").write_text("import nosuchlibrary\nprobe = None\n")
    assert cli(["doctor", "nosuchlibrary_probe:probe"]) == 2
    assert "No module named 'nosuchlibrary'" in capsys.readouterr().err
    assert cli(["doctor", "no_such_file_at_all:probe"]) == 2
    assert "There is no module no_such_file_at_all" in capsys.readouterr().err
    for share in ("nan", "5", "-1"):
        assert cli(["doctor", "a", "--against", "b", "--slower", share]) == 2
        assert "a share of the rate" in capsys.readouterr().err
