"""Code in the docs runs."""

import re
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]


def test_your_own_data_set_in_30_lines_works() -> None:
    text = (ROOT / "docs" / "data.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    lines = [line for line in program.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 30
    names: dict[str, object] = {}
    exec(compile(program, "docs/data.md", "exec"), names)
    assert names["state"] == {"seed": 0, "epoch": 1, "consumed": 1000}
    seen: Any = names["seen"]
    assert sum(len(labels) for _, labels in seen) == 2000
    for offsets, labels in seen:  # a label is the parity of its text's length: each stands beside its own
        assert (np.diff(offsets) % 2 == labels).all()


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"
