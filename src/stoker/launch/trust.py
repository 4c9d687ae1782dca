"""Whose code may run. A recipe of one's own is a module, and importing a module executes it.

A name typed on the command line is a wish to run it, and is remembered by place and content in the user's own state folder.
A name that stands in a file, such as the configuration of a run that somebody sent, is only followed to a module that is
remembered; anything else is named and needs `--trust`. Modules that a recipe imports in turn are not looked at.
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UserError
from stoker.files import write_json
from stoker.runs.folder import RunFolder


@dataclass(frozen=True)
class Module:
    """Where a module lies: `root` is the folder that its name is looked up in."""

    name: str
    root: Path
    file: Path
    sha256: str


def find_module(name: str, first: Path | None = None) -> Module | None:
    """The module's file, found without executing anything; None: it is nowhere, or no plain file."""
    for root in (*([first] if first else []), Path.cwd(), *(Path(entry) for entry in sys.path if entry)):
        base = root.joinpath(*name.split("."))
        for file in (base / "__init__.py", base.with_suffix(".py")):
            if file.is_file():
                content = file.read_bytes()
                return Module(name, root.resolve(), file.resolve(), hashlib.sha256(content).hexdigest())
    return None


def check_trusted(words: str, module: Module | None, origin: str) -> None:
    """Refuses code that a file names and that this user never ran by its name."""
    if module is not None and _entry(module) in _remembered():
        return
    place = f"the file {module.file}" if module else "a module that is not found here"
    raise UserError(
        f"{origin} names the recipe {words!r}: {place}, whose code would be executed. It is not built in, and not (or no "
        f"longer) the code that one of your own runs was started with. Read it, then add --trust to run it."
    )


def remember(module: Module | None) -> None:
    """The user ran this code by its name. Where nothing can be written, --trust will be asked for again."""
    if module is None or _entry(module) in _remembered():
        return
    path = _record()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(_entry(module)) + "\n")
    except OSError:
        return


def keep_place(run: RunFolder, module: Module | None) -> None:
    """A run knows where its recipe lies, so that it is found from any directory."""
    if module is not None:
        write_json(run.module, {"module": module.name, "root": str(module.root), "sha256": module.sha256})


def kept_root(config_file: Path, name: str) -> Path | None:
    """The folder that the run of this configuration found the module in."""
    try:
        kept = json.loads(RunFolder(config_file.parent).module.read_text())
        return Path(kept["root"]) if kept["module"] == name else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _entry(module: Module) -> list[str]:
    return [str(module.file), module.sha256]


def _remembered() -> list[list[str]]:
    try:
        lines = _record().read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # half a line of a process that was killed
    return found


def _record() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "stoker" / "recipes.jsonl"
