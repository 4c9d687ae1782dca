"""A bounded share of fuzz.py: nothing that is accepted differs, nothing ends in a traceback, hangs or crashes."""

import os

import pytest
from fuzz import BAD, FORMATS, fuzz  # type: ignore[import-not-found]

CASES = int(os.environ.get("STOKER_FUZZ", "120"))  # of each format; `make fuzz` tries thousands
ENOUGH = {"packing": 0.25, "pulses": 0.5, "meta": 0.5}  # of the cases, for those that take longest


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_are_named_or_give_what_they_gave(name: str) -> None:
    bad: list[str] = []

    def tell(number: int, outcome: str, text: str) -> None:
        if outcome in BAD:
            bad.append(f"{name} {number}: {outcome}: {text}")

    counts = fuzz(name, 0, int(CASES * ENOUGH.get(name, 1)), tell)
    assert not bad, "\n".join(bad)
    # Some of the mutations change nothing that is read, or nothing that counts; of a long file of settings hardly one.
    assert len(counts) > 1 or name in ("store", "settings")
