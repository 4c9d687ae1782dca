"""Where Stoker keeps what it can make again: sample tables, simulated events, packed copies."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$STOKER_CACHE, or .cache/stoker in the home directory."""
    named = os.environ.get("STOKER_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "stoker"
