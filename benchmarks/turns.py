"""Did the loader get slower between two commits? Both read the same files in turns, so that a noisy machine hits both.

    git worktree add ../before COMMIT
    python benchmarks/turns.py ../before . --repeats 15

Each tree runs its own `benchmarks/loader.py` in a process of its own and waits while the other one measures.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

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
        places = f"{root / 'src'}{os.pathsep}{root / 'benchmarks'}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,  # Python looks there first
            env={**os.environ, "PYTHONPATH": places, "STOKER_CACHE": str(cache)},
        )

    def rate(self, mode: str) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(mode, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def commit_of(root: Path) -> str:
    found = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "set"
        simulate(data, num_events=options.events, num_files=10, seed=0)
        roots = {"before": options.before, "after": options.after}
        trees = [Tree(root.resolve(), data, Path(folder) / name) for name, root in roots.items()]
        for name, mode in METHODS.items():
            compare(name, mode, trees, options)
        for tree in trees:
            tree.close()


def compare(name: str, mode: str, trees: list[Tree], options: Any) -> None:
    """Ratios of neighbours: what both saw of the machine is alike."""
    ratios = []
    for repeat in range(options.repeats + 1):
        order = trees if repeat % 2 else trees[::-1]
        rates = {id(tree): tree.rate(mode) for tree in order}
        if repeat:  # the first round packs, and warms caches
            ratios.append(rates[id(trees[1])] / rates[id(trees[0])])
    emit(
        line(f"loader after / before, {name}", ratios, "ratio", events=options.events, before=commit_of(options.before))
    )
    console.say(f"{name}: {median(ratios):.3f} of the rate before (n = {len(ratios)})")


if __name__ == "__main__":
    main()
