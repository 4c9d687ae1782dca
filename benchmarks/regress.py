"""Lines of a benchmark beside the stored ones of the same hardware: what got slower, and by how much.

    python benchmarks/loader.py | python benchmarks/regress.py [--slower 0.1]

Passes its input on, says what it found on standard error, and ends with 1 where a line is worse than every stored one by
more than that share. Lines are the same where name, unit, hardware and all details but the figures are.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
MORE_IS_BETTER = ("/s", "ratio", "share")
FIGURES = {"value", "n", "spread", "versions", "commit", "dirty", "command"}


def key(line: dict[str, Any]) -> str:
    kept = {name: value for name, value in line.items() if name not in FIGURES and not isinstance(value, float)}
    return json.dumps(kept, sort_keys=True)


def stored() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            found.setdefault(key(line), []).append(line)
    return found


def worse(line: dict[str, Any], other: dict[str, Any]) -> float:
    """Share by which a line is worse than another; below 0: better."""
    ratio = line["value"] / other["value"] if other["value"] else 1.0
    return 1 - ratio if str(line.get("unit", "")).endswith(MORE_IS_BETTER) else ratio - 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slower", type=float, default=0.1)
    options = parser.parse_args()
    known, bad, compared = stored(), 0, 0
    for text in sys.stdin:
        print(text, end="", flush=True)
        try:
            line = json.loads(text)
            others = known.get(key(line), [])
        except (ValueError, AttributeError):
            continue
        if not others or not isinstance(line.get("value"), int | float):
            continue
        compared += 1
        least = min(worse(line, other) for other in others)
        if least > options.slower:
            bad += 1
            values = ", ".join(f"{other['value']:,.4g}" for other in others)
            print(
                f"WORSE by {least:.0%}: {line['name']}: {line['value']:,.4g} {line['unit']}, stored {values}",
                file=sys.stderr,
            )
    print(f"{compared} lines compared with stored ones, {bad} worse by more than {options.slower:.0%}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
