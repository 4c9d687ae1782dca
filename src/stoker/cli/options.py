"""Kinds of options that commands share."""

from tyro.conf import FlagCreatePairsOff

Flag = FlagCreatePairsOff[bool]  # --name, without a --no-name
