"""Kinds of options that commands share."""

from tyro.conf import FlagCreatePairsOff

from stoker.errors import UserError

Flag = FlagCreatePairsOff[bool]  # --name, without a --no-name


def no_overrides(command: str, overrides: list[str]) -> None:
    if overrides:
        raise UserError(f"`stoker {command}` takes no configuration keys, and got {overrides[0]}.")
