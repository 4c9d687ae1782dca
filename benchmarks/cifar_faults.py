"""Three faults in CIFAR-10, and whether `stoker doctor` names them with their images.

    python benchmarks/cifar_faults.py --cifar DIR     # JPEG files in class folders, train/ and test/

Test labels in another order; 5 % of the test images copied into training; 1 % of the training files cut off. The set itself
is only linked, never changed. One JSON line a fault: which share of the images in question was named, and how many others.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import emit, line

TARGET = ["imagenet:cifar10", "--run.device", "cpu", "--only", "learning", "--seconds", "2", "--json"]


def link(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=os.link)


def permuted(cifar: Path, out: Path) -> set[str]:
    link(cifar / "train", out / "train")
    classes = sorted(path.name for path in (cifar / "test").iterdir())
    for one, other in zip(classes, [*classes[3:], *classes[:3]], strict=True):
        link(cifar / "test" / one, out / "test" / other)
    return set()


def copied(cifar: Path, out: Path) -> set[str]:
    for side in ("train", "test"):
        link(cifar / side, out / side)
    tests = sorted((out / "test").rglob("*.jpg"))
    chosen = random.Random(0).sample(tests, len(tests) // 20)
    for number, path in enumerate(chosen):
        os.link(path, out / "train" / path.parent.name / f"copy{number}.jpg")
    return {str(path.relative_to(out)) for path in chosen}


def cut(cifar: Path, out: Path) -> set[str]:
    for side in ("train", "test"):
        link(cifar / side, out / side)
    files = sorted((out / "train").rglob("*.jpg"))
    dice = random.Random(0)
    chosen = dice.sample(files, len(files) // 100)
    for path in chosen:
        content = path.read_bytes()
        path.unlink()  # it is a link to somebody's file
        path.write_bytes(content[: int(len(content) * dice.uniform(0.3, 0.9))])
    return {str(path.relative_to(out)) for path in chosen}


def named(told: dict[str, Any], rule: str, out: Path) -> set[str]:
    contents = told["learning"]["contents"]
    pairs = contents["in_validation"] if rule == "validation-seen" else contents["broken"]
    return {str(pair[0]).split(f"{out.name}/")[-1] for pair in pairs}


def refused(words: str) -> dict[str, Any]:
    """Labels that mean something else are named before anything is opened for training; classes instead of images."""
    reason = words[words.rindex("stoker: ") :] if "stoker: " in words else words
    is_so = "do not seem to mean" in reason
    return {"share": float(is_so), "found": ["refused"], "evidence": [reason.strip()], "others": 0, "looked_at": 0}


def judged(told: dict[str, Any], rule: str, out: Path, expected: set[str]) -> dict[str, Any]:
    found = named(told, rule, out)
    first = told["findings"][0] if told["findings"] else {"rule": "", "evidence": []}
    return {
        "share": len(found & expected) / len(expected) if first["rule"] == rule else 0.0,
        "found": [one["rule"] for one in told["findings"]],
        "evidence": first["evidence"][:6],
        "others": len(found - expected),
        "looked_at": told["learning"]["contents"]["seen"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", type=Path, required=True)
    options = parser.parse_args()
    for make, rule in ((permuted, "labels-differ"), (copied, "validation-seen"), (cut, "broken")):
        # Beside the set: links do not reach other disks.
        with tempfile.TemporaryDirectory(dir=options.cifar.resolve().parent) as folder:
            out = Path(folder) / make.__name__
            expected, begin = make(options.cifar, out), time.perf_counter()
            words = [sys.executable, "-m", "stoker", "doctor", *TARGET, "--data.path", str(out)]
            done = subprocess.run(words, capture_output=True, text=True)
            is_told = done.returncode in (0, 1)
            seen = judged(json.loads(done.stdout), rule, out, expected) if is_told else refused(done.stderr)
            evidence = [one.replace(folder, "...") for one in seen.pop("evidence")]
            seconds = round(time.perf_counter() - begin, 1)
            share = seen.pop("share")
            details = {**seen, "evidence": evidence, "images": len(expected), "seconds": seconds}
            emit(line(f"CIFAR-10, {make.__name__}: named", [share], "share", expected=rule, **details))


if __name__ == "__main__":
    main()
