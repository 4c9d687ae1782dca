"""Did loading or training get slower between two commits? Both read the same files in turns: noise hits both alike.

    git worktree add ../before COMMIT
    python benchmarks/turns.py ../before . --repeats 15
    python benchmarks/turns.py ../before . --repeats 8 --train seed flat-5m

Each tree runs its own `benchmarks/loader.py` in a process of its own and waits while the other one measures; with
`--train` its own `benchmarks/end_to_end.py`, anew in each turn.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import emit, line

from stoker import console
from stoker.recipes.icecube.simulate import simulate

METHODS = {"packed, exact shuffle, 2 threads": "packed", "direct Parquet, window shuffle, 2 threads": "direct"}

SERVER = """
import sys
from pathlib import Path
import loader
kept = {}
for text in sys.stdin:
    mode = text.strip()
    if mode == "direct" or mode not in kept:  # files are decoded anew in each epoch, a packed store stays open
        kept[mode] = loader.ours(Path(sys.argv[1]), mode, 2)
    print(kept[mode].rate(), flush=True)
"""


class Tree:
    """A checkout that measures one epoch when it is told to."""

    def __init__(self, root: Path, data: Path, cache: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,  # Python looks there first
            env=environment(root, cache),
        )

    def rate(self, mode: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(mode, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


class Training:
    """A checkout that trains for a while when it is told to."""

    def __init__(self, root: Path, cache: Path) -> None:
        self._root, self._cache = root, cache

    def rate(self, preset: str) -> float:
        command = [sys.executable, "benchmarks/end_to_end.py", "--presets", preset, "--seed-steps", "0"]
        if not torch.cuda.is_available():
            command += ["--steps", "40"]
        found = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=self._root,
            env=environment(self._root, self._cache),
        )
        lines = map(json.loads, found.stdout.splitlines())
        return next(float(one["value"]) for one in lines if one["name"] == "end to end, shuffled packed shards")


def environment(root: Path, cache: Path) -> dict[str, str]:
    places = f"{root / 'src'}{os.pathsep}{root / 'benchmarks'}"
    return {**os.environ, "PYTHONPATH": places, "STOKER_CACHE": str(cache)}


def commit_of(root: Path) -> str:
    found = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--events", type=int, default=200_000, help="that the loaders read")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--train", nargs="+", default=[], metavar="PRESET", help="of icecube; instead of the loaders")
    options = parser.parse_args()
    roots = {"before": options.before.resolve(), "after": options.after.resolve()}
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder) / name for name in roots}
        if options.train:
            trainings = [Training(root, caches[name]) for name, root in roots.items()]
            for preset in options.train:
                compare(f"end to end after / before, {preset}", preset, trainings, options)
            return
        data = Path(folder) / "set"
        simulate(data, num_events=options.events, num_files=10, seed=0)
        trees = [Tree(root, data, caches[name]) for name, root in roots.items()]
        for name, mode in METHODS.items():
            compare(f"loader after / before, {name}", mode, trees, options, events=options.events)
        for tree in trees:
            tree.close()


def compare(name: str, what: str, trees: Sequence[Tree | Training], options: Any, **details: Any) -> None:
    """Ratios of neighbours: what both saw of the machine is alike."""
    ratios = []
    for repeat in range(options.repeats + 1):
        order = trees if repeat % 2 else trees[::-1]
        rates = {id(tree): tree.rate(what) for tree in order}
        if repeat:  # the first round packs, and warms caches
            ratios.append(rates[id(trees[1])] / rates[id(trees[0])])
    emit(line(name, ratios, "ratio", **details, before=commit_of(options.before)))
    console.say(f"{name}: {median(ratios):.3f} of the rate before (n = {len(ratios)})")


if __name__ == "__main__":
    main()
