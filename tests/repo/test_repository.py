"""What must stay true of the repository itself."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_lock_names_no_index_and_pins_every_hash() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "index-url" not in lock
    pins = re.findall(r"^[a-z0-9._-]+==\S+", lock, re.MULTILINE)
    assert len(pins) > 20
    assert lock.count("--hash=sha256:") >= len(pins)


def test_every_dependency_is_imported_somewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for dependency in project["dependencies"]:
        name = re.split(r"[><=~\[]", dependency)[0]
        name = {"pillow": "PIL"}.get(name, name)
        assert re.search(rf"^\s*(import|from) {re.escape(name)}\b", source, re.MULTILINE), f"{name} is not used"


def test_the_readme_s_tree_names_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    tree = re.search(r"```\nsrc/stoker/\n(.*?)```", readme, re.DOTALL)
    assert tree is not None
    folder = ROOT / "src" / "stoker"
    stack: list[tuple[int, Path]] = []
    for line in tree[1].splitlines():
        if not line.strip() or not line.startswith(" "):
            break
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        while stack and stack[-1][0] >= indent:
            stack.pop()
        path = (stack[-1][1] if stack else folder) / name.rstrip("/")
        assert path.exists(), f"{path} is in the README and not in the repository"
        stack.append((indent, path))


def test_ci_runs_what_the_readme_says() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make demo" in (ROOT / "README.md").read_text()


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports them by their names: with two of one name it runs the tests of neither folder to the end."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
