"""`--gpus N`: one process a GPU on this machine, by PyTorch's elastic agent, which lives in a thread of ours.

What a process understood itself (a mistake, a full disk, a request to stop) is said once and ends the run, with the exit
code that a single process has. A process that dies without a word is replaced: all start again, from the last checkpoint.
Signals to stop are handed on to every process, and we stay until the last of them has saved.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from stoker import console
from stoker.errors import MachineError, UserError

OUTCOME = "STOKER_OUTCOME"  # environment: the file in which the first process that ends says with which exit code
RESTARTS = 3
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def check_gpus(count: int, device: str) -> None:
    import torch

    if count < 1:
        raise UserError(f"--gpus is {count}; it must be at least 1.")
    found = torch.cuda.device_count()
    if device != "cpu" and found < count:
        raise UserError(
            f"--gpus is {count}, and torch sees {found} GPU(s) here. --run.device cpu trains in {count} processes on the "
            f"CPU instead."
        )


def run_processes(words: list[str], count: int) -> int:
    """`stoker WORDS` in so many processes; returns the exit code that one process would have."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what went wrong, the processes say
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    job = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix="stoker-") as folder, _signals_handed_on() as stop:
        outcome = Path(folder) / "outcome.json"
        os.environ[OUTCOME] = str(outcome)
        for attempt in range(RESTARTS + 1):
            died = _run_once(words, count, job, folder, stop)
            if outcome.exists():
                return int(json.loads(outcome.read_text())["code"])
            if died is None:
                return 0
            if stop.asked:
                raise MachineError(f"Stopped by {stop.asked} before training began.")
            console.say(f"{died} {'Starting all again.' if attempt < RESTARTS else ''}")
    raise MachineError(f"Processes of this run died {RESTARTS + 1} times; it is given up.")


def say_outcome(code: int) -> bool:
    """In a process of ours: whether it is the first to say how the run ended, and so the one that speaks."""
    path = os.environ.get(OUTCOME)
    if path is None:
        return True
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except OSError:
        return False
    with os.fdopen(file, "w") as handle:
        json.dump({"code": code}, handle)
    return True


class _Stop:
    def __init__(self) -> None:
        self.asked: str | None = None
        self._told: set[int] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again = self.asked is not None
        self.asked = signal.Signals(number).name
        self._told = set() if again else self._told
        self.hand_on(number)

    def hand_on(self, number: int | None = None) -> None:
        """To every process that was not told yet, also those that started only now."""
        if self.asked is None:
            return
        for child in psutil.Process().children():
            if child.pid not in self._told:
                self._told.add(child.pid)
                child.send_signal(number or signal.Signals[self.asked])


@contextmanager
def _signals_handed_on() -> Iterator[_Stop]:
    stop = _Stop()
    before = {number: signal.signal(number, stop) for number in HANDED_ON}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_once(words: list[str], count: int, job: str, folder: str, stop: _Stop) -> str | None:
    """None when all processes ended well, else which of them died of what."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=job,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
    )
    died: list[str] = []

    def launch() -> None:
        try:
            elastic_launch(config, sys.executable)("-m", "stoker", *words)
        except ChildFailedError as error:
            _, failure = error.get_first_failure()
            died.append(f"Process {failure.local_rank} died ({_cause(failure.exitcode)}).")
        except Exception as error:
            died.append(f"The processes could not be run: {type(error).__name__}: {error}.")

    _in_a_thread(launch, stop)
    return died[0] if died else None


def _cause(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _in_a_thread(work: Callable[[], None], stop: _Stop) -> None:
    """The agent would take signals for itself in the main thread, and give the processes half a minute to save."""
    thread = threading.Thread(target=work, name="agent")
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        stop.hand_on()
