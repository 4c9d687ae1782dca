"""`import stoker`: what is promised, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import stoker

ROOT = Path(__file__).parents[2]


def test_every_name_is_there_and_on_its_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    told = set(re.findall(r"`stoker\.(\w+)", page))
    assert told == set(stoker.__all__)
    assert len(stoker.__all__) == len(set(stoker.__all__))
    for name in stoker.__all__:
        assert getattr(stoker, name) is not None
    assert set(stoker.__all__) <= set(dir(stoker))


def test_importing_it_needs_no_torch_and_training_is_a_call() -> None:
    program = (
        "import sys, stoker\n"
        "assert 'torch' not in sys.modules\n"
        "assert callable(stoker.train)\n"
        "from stoker.train.config import TrainConfig\n"
        "assert callable(stoker.train) and stoker.TrainConfig is TrainConfig\n"
        "try: stoker.nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "module 'stoker' has no attribute 'nothing'\n"
