"""What a run ran on: versions, hardware, and the commit of the code, for `environment.json` and benchmark lines."""

import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from stoker.errors import UserError
from stoker.settings import kept_words

PACKAGES = ("stoker", "torch", "torchvision", "triton", "numpy", "pyarrow", "safetensors")


def describe_environment() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "command": kept_words(sys.argv),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": package_versions(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_names(),
        "code": code_version(),
    }


def environment_number(name: str, default: int = 0) -> int:
    """A whole number that another program, such as torchrun or Slurm, put into our environment."""
    text = os.environ.get(name, str(default))
    if not text.lstrip("-").isdigit():
        raise UserError(f"The environment variable {name} is {text!r}, and should be a whole number.")
    return int(text)


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@cache
def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache
def gpu_names() -> list[str]:
    """Asked of the driver's own tool: this module must not import torch."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


@cache
def code_version() -> dict[str, Any]:
    """Commit of the checkout this code runs from, and whether it was changed since; empty for an installed copy."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    tracked = git("ls-files", "--error-unmatch", Path(__file__).name)
    commit = git("rev-parse", "HEAD") if tracked is not None else None
    return {"commit": commit, "dirty": bool(git("status", "--porcelain"))} if commit else {}
