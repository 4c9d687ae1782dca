"""What the doctor says of our own recipes on a GPU, with settings whose verdict is known from other measurements.

    python benchmarks/doctor_recipes.py --sample imagenet-sample.tar

ResNet-50 fed by 4 processes, by one a core, and from batches that lie on the GPU; IceCube with pieces of 400,000 pulses and
with as many as fit. One JSON line each, with the waterfall; what a person reads goes to standard error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from images import make_folders, make_packed
from measure import emit, line

CORES = len(os.sched_getaffinity(0))


@contextmanager
def resident(probe: Any, count: int = 12) -> Iterator[Any]:
    batches = []
    for batch in probe.loader:
        batches.append(batch)
        if len(batches) == count:
            break
    yield replace(probe, loader=batches)


def diagnose_one(target: str, words: list[str], seconds: float, *, there: bool) -> None:
    """In this process: prints the diagnosis as JSON."""
    from stoker.doctor.commands import Diagnosis
    from stoker.doctor.measure import measure
    from stoker.doctor.probe import probe_of
    from stoker.doctor.rules import diagnose
    from stoker.doctor.waterfall import waterfall
    from stoker.launch.targets import resolve_target

    with probe_of(resolve_target(target, words)) as probe:
        if there:
            with resident(probe) as other:
                found = measure(other, seconds, "speed")
        else:
            found = measure(probe, seconds, "speed")
    diagnosis = Diagnosis(found, diagnose(found), waterfall(found))
    print(diagnosis.text(), file=sys.stderr)
    details = {
        "split": vars(found.split) if found.split else None,
        "loader": vars(found.loader),
        "drained_ms": 1e3 * (found.drained_s or 0),
        "launch_ms": 1e3 * (found.launch_s or 0),
        "operations": vars(found.operations) if found.operations else None,
    }
    print(json.dumps({**diagnosis.as_json(), **details}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--one", help="of a diagnosis in this process: the target")
    parser.add_argument("--there", action="store_true", help="of --one: on batches that are there")
    options, words = parser.parse_known_args()
    if options.one:
        diagnose_one(options.one, words, options.seconds, there=options.there)
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name, target, more, there in cases(Path(scratch), options):
            command = [sys.executable, __file__, "--one", target, "--seconds", str(options.seconds), *more]
            done = subprocess.run([*command, *(["--there"] if there else [])], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{name}: failed", file=sys.stderr)
                continue
            told = json.loads(done.stdout.splitlines()[-1])
            rate = told.pop("samples_per_s") or 0.0
            emit(line(f"doctor, {name}", [rate], "samples/s", diagnosis=told))


def cases(scratch: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, list[str], bool]]:
    wanted = options.only or ["images", "events"]
    if "images" in wanted:
        folders, packed = scratch / "folders", scratch / "packed"
        make_folders(options.sample, folders, 200)
        make_packed(folders, packed, None, 200)
        words = ["--data.path", str(packed), "--data.check_labels", "false", "--train.epochs", "1000"]
        yield "ResNet-50, 4 processes", "imagenet:baseline", [*words, "--data.processes", "4"], False
        yield f"ResNet-50, {CORES} processes", "imagenet:baseline", [*words, "--data.processes", str(CORES)], False
        yield "ResNet-50, resident", "imagenet:baseline", [*words, "--data.processes", str(CORES)], True
    if "events" in wanted:
        from stoker.recipes.icecube.simulate import simulate

        root = Path(os.environ["STOKER_CACHE"]) / f"end-to-end-{options.events}"
        if not root.exists():
            simulate(root, num_events=options.events, num_files=20, seed=0, device="cuda")
        words = ["--data.path", str(root), "--data.mode", "packed", "--train.epochs", "1000"]
        yield "IceCube, pieces of 400,000 pulses", "icecube:seed", [*words, "--loader.micro_cost", "400000"], False
        yield "IceCube, as many as fit", "icecube:seed", words, False


if __name__ == "__main__":
    os.environ.setdefault("STOKER_CACHE", tempfile.mkdtemp())
    main()
