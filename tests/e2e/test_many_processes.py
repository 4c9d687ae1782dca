"""Several processes and two machines: the same samples, the same losses, through restarts."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Stoker, slow  # type: ignore[import-not-found]


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    """Every step's event; of a step that was repeated after a restart, the later one."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event for event in events if event["event"] == "step"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def assert_same_course(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> None:
    assert ours.keys() == theirs.keys()
    for step, event in ours.items():
        assert event["samples_crc32"] == theirs[step]["samples_crc32"], step
        assert event["consumed"] == theirs[step]["consumed"]
        assert event["loss"] == pytest.approx(theirs[step]["loss"], abs=2e-4), step


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=slow)])
def test_ranks_give_the_samples_and_losses_of_one_process(
    another_stoker: Callable[[str], Stoker], events_dir: Path, count: int
) -> None:
    alone, together = another_stoker("alone"), another_stoker("together")
    words = ["train", "icecube", "--data.path", events_dir, *SMALL, "--train.epochs", "1", "--train.ema", "0.9"]
    alone_result = alone.json(*words)
    out = together(*words, "--gpus", count, "--json")
    metrics = json.loads(out[out.index("{") :])["metrics"]
    assert_same_course(steps_of(together.only_run()), steps_of(alone.only_run()))
    for name, value in alone_result["metrics"].items():
        assert metrics[name] == pytest.approx(value, abs=2e-3), name


def test_a_run_goes_on_with_another_number_of_ranks(another_stoker: Callable[[str], Stoker], events_dir: Path) -> None:
    alone, changed = another_stoker("alone"), another_stoker("changed")
    words = ["train", "icecube", "--data.path", events_dir, *SMALL]
    alone(*words)
    run = changed.kill_after(8, *words)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}"]
    command = [*torchrun, "-m", "stoker", "resume", str(run)]
    done = subprocess.run(
        command, cwd=changed.folder, env=changed.environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert_same_course(steps_of(run), steps_of(alone.only_run()))


@contextmanager
def two_machines(tag: str) -> Iterator[tuple[list[str], list[str]]]:
    """Two network namespaces joined by a cable; yields the words that run a command in each."""
    names = [f"stk{tag}a", f"stk{tag}b"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"v{tag}a", "netns", names[0], "type", "veth", "peer", "name", f"v{tag}b", "netns", names[1])
        for number, (name, end) in enumerate(zip(names, "ab", strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.99.7.{number}/24", "dev", f"v{tag}{end}")
            ip("-n", name, "link", "set", f"v{tag}{end}", "up")
        yield ["ip", "netns", "exec", names[0]], ["ip", "netns", "exec", names[1]]
    finally:
        for name in names:
            kill_machine([name])
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def kill_machine(machine: list[str]) -> None:
    """All of it at once: launcher and workers."""
    pids = subprocess.run(["ip", "netns", "pids", machine[-1]], capture_output=True, text=True, check=True).stdout
    for pid in pids.split():
        os.kill(int(pid), signal.SIGKILL)


def may_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"stk{os.getpid()}"  # of its own: workers of pytest ask at the same time
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return probe.returncode == 0


@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces need root and iproute2")
def test_two_machines_one_of_which_dies_and_comes_back(
    another_stoker: Callable[[str], Stoker], events_dir: Path
) -> None:
    alone, pair = another_stoker("alone"), another_stoker("pair")
    words = ["train", "icecube", "--data.path", str(events_dir), *SMALL, "--train.epochs", "4"]
    alone(*words)
    tag = str(os.getpid() % 10_000)
    with two_machines(tag) as machines:

        def start(number: int) -> subprocess.Popen[str]:
            interface = f"v{tag}{'ab'[number]}"
            # Without the second variable a launcher that stays never tells one that joins later where the master is.
            environment = pair.environment | {
                "GLOO_SOCKET_IFNAME": interface,
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            }
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            rendezvous = [
                "--rdzv-backend=c10d",
                "--rdzv-endpoint=10.99.7.1:29517",
                "--rdzv-id=pair",
                "--max-restarts=9",
            ]
            # In a namespace no name resolves to the address, so each side is told whether it is the host.
            address = [f"--local-addr=10.99.7.{number + 1}", f"--rdzv-conf=is_host={int(number == 0)}"]
            return subprocess.Popen(
                [*machines[number], *torchrun, *rendezvous, *address, "-m", "stoker", *words],
                cwd=pair.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                start_new_session=True,
            )  # fmt: skip

        first, second = start(0), start(1)
        run = pair.folder / "runs" / "icecube-demo-pair"
        deadline = time.monotonic() + 150
        while len(pair.losses(run)) < 12 and time.monotonic() < deadline and first.poll() is None:
            time.sleep(0.01)
        assert len(pair.losses(run)) >= 12
        kill_machine(machines[1])
        second.communicate()
        second = start(1)
        outcome = [process.communicate(timeout=240) for process in (first, second)]
    assert first.returncode == 0, outcome[0][1][-3000:]
    assert second.returncode == 0, outcome[1][1][-3000:]
    assert_same_course(steps_of(run), steps_of(alone.only_run()))
    starts = [
        event for event in map(json.loads, (run / "events.jsonl").read_text().splitlines()) if event["event"] == "start"
    ]
    assert len(starts) >= 2
    assert starts[-1]["ranks"] == 2
    assert starts[-1]["resumed_from"] is not None
