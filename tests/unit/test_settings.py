from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from stoker.errors import UserError
from stoker.settings import (
    AlsoCalled,
    Layer,
    as_yaml,
    config,
    default_origins,
    difference,
    leaves,
    parse_overrides,
    read_yaml,
    resolve,
)


@config
class Inner:
    lr: Annotated[float, Field(gt=0), AlsoCalled("learning_rate")] = 1e-3
    steps: int | None = None
    files: tuple[int, ...] | float = 0.5
    path: Path | None = None
    low: int = 0
    high: int = 10

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} lies above high {self.high}")


@config
class Outer:
    recipe: str = "mine"
    inner: Inner = Inner()


def changed(*words: str) -> Outer:
    return resolve(Outer(), [Layer("the command line", parse_overrides(list(words)))])[0]


def test_overrides_by_dotted_path_are_read_as_yaml() -> None:
    result = changed("--inner.lr", "1e-4", "--inner.files=[1, 2]", "--inner.path", "a/b", "--inner.low", "-3")
    assert result.inner == Inner(lr=1e-4, files=(1, 2), path=Path("a/b"), low=-3)


def test_a_word_that_yaml_would_read_as_more_than_a_string_can_still_be_a_string() -> None:
    assert changed("--recipe", "2024").recipe == "2024"
    assert changed("--inner.path", "x: y").inner.path == Path("x: y")


def test_a_file_reads_1e_4_as_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("inner:\n  lr: 1e-4\n")
    assert resolve(Outer(), [Layer("a file", read_yaml(path))])[0].inner.lr == 1e-4


def test_later_layers_win_and_origins_name_them() -> None:
    layers = [Layer("the file", {"inner": {"lr": 0.1, "steps": 5}}), Layer("the command line", {"inner": {"lr": 0.2}})]
    result, origins = resolve(Outer(inner=Inner(low=2)), layers)
    assert (result.inner.lr, result.inner.steps) == (0.2, 5)
    every = default_origins(result, "preset mine:small", origins)
    assert every["inner.lr"] == "the command line"
    assert every["inner.steps"] == "the file"
    assert every["inner.low"] == "preset mine:small"
    assert every["inner.high"] == "default"


def test_a_saved_configuration_loads_to_the_same_one(tmp_path: Path) -> None:
    saved = changed("--inner.files", "[3]", "--inner.path", "x: y", "--inner.lr", "3e-05")
    path = tmp_path / "saved.yaml"
    path.write_text(as_yaml(saved, default_origins(saved, "preset", {})))
    assert resolve(Outer(), [Layer("file", read_yaml(path))])[0] == saved


def test_difference_names_both_values() -> None:
    assert difference(Outer(), changed("--inner.lr", "1")) == {"inner.lr": (1e-3, 1.0)}


def test_leaves_come_in_the_order_of_the_fields() -> None:
    assert [key for key, _ in leaves(Outer())][:2] == ["recipe", "inner.lr"]


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--inner.learning_rat", "1"], ["inner.learning_rat", "command line", "inner.lr"]),
        (["--inner.stepps", "1"], ["inner.steps"]),
        (["--inne.lr", "1"], ["inne", "inner"]),
        (["--other.lr", "1"], ["other"]),
        (["--inner.lr", "fast"], ["inner.lr", "'fast'", "number"]),
        (["--inner.lr", "-1"], ["inner.lr", "-1", "greater than 0"]),
        (["--inner.steps", "1.5"], ["inner.steps", "1.5", "integer"]),
        (["--inner.steps", "'5'"], ["inner.steps", "integer"]),
        (["--inner.steps"], ["inner.steps", "value"]),
        (["--inner", "3"], ["inner", "group"]),
        (["--inner.low", "11"], ["low 11", "high 10"]),
    ],
)
def test_a_wrong_override_names_key_value_and_remedy(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as error:
        changed(*words)
    assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "\x00"])
def test_a_file_that_is_no_mapping_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"bad\.yaml"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("target", "words", "why"),
    [
        ("icecube", "--train.momentum 0.5", "the optimizer is adamw"),
        ("icecube", "--train.decay_by 0.5", "the schedule is cosine"),
        ("icecube", "--data.path somewhere --data.simulate_events 100", "data.path is given"),
        ("imagenet", "--train.warmup_steps 10", "onecycle has a warm-up of its own"),
        ("imagenet", "--data.shift 2", "data.crop is random"),
        ("imagenet:cifar10", "--data.smallest_crop 0.5", "data.crop is shift"),
        ("imagenet:baseline", "--data.magnitude 5", "data.rand_augment is 0"),
    ],
)
def test_a_key_that_would_change_nothing_is_refused(target: str, words: str, why: str) -> None:
    from stoker.launch.targets import resolve_target

    with pytest.raises(UserError, match=why):
        resolve_target(target, words.split())


def test_a_key_of_the_other_choice_is_taken_with_that_choice(tmp_path: Path) -> None:
    """And a file may hold keys without effect: a run writes all of them down."""
    from stoker.launch.targets import resolve_target

    resolve_target(
        "icecube",
        ["--train.optimizer", "sgd", "--train.momentum", "0.5", "--train.schedule", "step", "--train.decay_by", "0.5"],
    )
    target = resolve_target("imagenet", ["--data.crop", "shift", "--data.shift", "2"])
    (tmp_path / "all.yaml").write_text(as_yaml(target.config))
    assert resolve_target(str(tmp_path / "all.yaml"), []).config == target.config


def test_ranks_that_found_different_machines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may differ; how a step is cut may not."""
    from stoker.launch import checks
    from stoker.launch.targets import resolve_target

    mine = resolve_target("icecube:seed", []).config
    for words, fails in ((["--loader.threads", "7"], False), (["--loader.micro_cost", "900000"], True)):
        other = dict(leaves(resolve_target("icecube:seed", words).config))
        monkeypatch.setattr(checks.parallel, "gather", lambda value, other=other: [value, other])
        if fails:
            with pytest.raises(UserError, match=r"loader.micro_cost is .* here and 900000 elsewhere"):
                checks.check_same_settings(mine)
        else:
            checks.check_same_settings(mine)


@pytest.mark.parametrize(
    ("target", "words", "key"),
    [
        ("imagenet:baseline", ["--model.width", "32"], "model.width"),
        ("imagenet", ["--loader.window", "100"], "loader.window"),
        ("icecube", ["--data.mode", "packed", "--loader.window", "100"], "loader.window"),
        ("icecube", ["--log.offline", "true"], "log.offline"),
        ("icecube", ["--log.project", "mine"], "log.project"),
        ("icecube", ["--data.only_present", "true"], "data.only_present"),
    ],
)
def test_keys_that_another_group_makes_useless_are_refused(target: str, words: list[str], key: str) -> None:
    from stoker.launch.targets import resolve_target

    with pytest.raises(UserError, match=rf"--{key} would change nothing"):
        resolve_target(target, words)


def test_every_generator_follows_the_seed(tmp_path: Path, events_dir: Path) -> None:
    import random

    import numpy as np
    import torch

    from stoker.launch.build import build_run
    from stoker.launch.targets import resolve_target
    from stoker.train.parallel import Ranks

    target = resolve_target("icecube", ["--data.path", str(events_dir), "--run.device", "cpu", "--run.seed", "5"])

    def drawn() -> tuple[float, float, float]:
        random.seed()
        build_run(target.recipe, target.config, Ranks())
        return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002

    assert drawn() == drawn()


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan"])
def test_numbers_that_are_not_finite_are_no_settings(text: str) -> None:
    from stoker.launch.targets import resolve_target

    with pytest.raises(UserError, match=r"train\.lr cannot be"):
        resolve_target("icecube", ["--train.lr", text])


def test_a_size_measured_on_one_machine_is_kept_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset asks the GPU how much fits; a run that goes on elsewhere computes the same steps."""
    import torch

    from stoker.launch.targets import resolve_target

    def with_memory(gib: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: type("Properties", (), {"total_memory": gib << 30})
        )

    with_memory(140)
    first = resolve_target("icecube:seed", []).config
    (tmp_path / "config.yaml").write_text(as_yaml(first))
    with_memory(16)
    assert resolve_target("icecube:seed", []).config.loader.micro_cost != first.loader.micro_cost
    assert resolve_target(str(tmp_path / "config.yaml"), []).config.loader.micro_cost == first.loader.micro_cost
