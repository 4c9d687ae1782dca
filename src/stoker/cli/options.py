"""Kinds of options that commands share."""

import re
from pathlib import Path

from tyro.conf import FlagCreatePairsOff

from stoker.errors import UserError

Flag = FlagCreatePairsOff[bool]  # --name, without a --no-name


def local(path: Path | str) -> Path:
    """A place that must be on a disk of this machine."""
    if re.match(r"(s3|gs|az|https?):/", str(path)):
        raise UserError(f"{path} is a URL, and this command writes to local folders only.")
    return Path(path)


def no_overrides(command: str, overrides: list[str]) -> None:
    if overrides:
        raise UserError(f"`stoker {command}` takes no configuration keys, and got {overrides[0]}.")
