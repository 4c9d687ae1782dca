"""What every benchmark shares: the JSON line it prints. Run the programs beside this file, not this one."""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from stoker.runs.environment import code_version, cpu_name, gpu_names, package_versions


def line(name: str, values: list[float], unit: str, **details: Any) -> dict[str, Any]:
    """Median and spread of repeated measurements, with what they were made on."""
    return {
        "name": name,
        "value": round(statistics.median(values), 4),
        "unit": unit,
        "n": len(values),
        "spread": [round(min(values), 4), round(max(values), 4)],
        **details,
        "hardware": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "gpus": gpu_names()},
        "versions": package_versions(),
        **code_version(),
        "command": " ".join(["python", *map(_short, sys.argv)]),
    }


def emit(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def _short(word: str) -> str:
    """Paths without the directory they happen to lie in."""
    if word.endswith(".py"):
        return f"{Path(word).parent.name}/{Path(word).name}"
    return Path(word).name if "/" in word and Path(word).exists() else word
