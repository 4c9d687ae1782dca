"""From words to a resolved configuration: which recipe, which preset, which values, and where each came from."""

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker import settings
from stoker.errors import UserError
from stoker.launch import trust
from stoker.recipe import Recipe, RunConfig
from stoker.settings import Layer

IN_HAND = "notebook"  # stands before the name of a recipe that is an object of a program, and in no module
COMMAND_LINE = "the command line"  # where a value came from
BUILT_IN = {"icecube": "stoker.recipes.icecube.recipe:RECIPE", "imagenet": "stoker.recipes.imagenet.recipe:RECIPE"}
OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*(:[\w.-]+)?")  # module:attribute, module:attribute:preset


@dataclass(frozen=True)
class Target:
    """What the word TARGET stands for, once resolved."""

    recipe: Recipe
    config: RunConfig
    origins: dict[str, str]  # where each value came from
    notes: Sequence[str] = ()  # of the preset
    module: trust.Module | None = None  # of a recipe of one's own
    changed: Mapping[str, Any] = field(default_factory=dict)  # keys that differ from the preset -> what the preset has


def resolve_target(target: str, overrides: list[str], *, trusted: bool = False, recipe: Recipe | None = None) -> Target:
    """TARGET is `recipe`, `recipe:preset`, `file.yaml`, `module:attribute` or `module:attribute:preset`.

    `recipe`: one that is in hand already, instead of the one that is named.
    """
    layers, file = [], None
    if target.endswith((".yaml", ".yml")):
        file = Path(target)
        values = settings.read_yaml(file)
        base = values.pop("recipe", None)
        if not isinstance(base, str):
            raise UserError(f"{target} does not say which recipe it configures: add a line like `recipe: icecube`.")
        layers.append(Layer(f"the file {target}", values))
    else:
        base = target
    if recipe is None:
        recipe, preset, module = find_recipe(base, file, trusted=trusted)
    else:
        preset, module = _preset(recipe, base.rpartition(":")[2]), None
        base = f"{IN_HAND}:{recipe.name}"
    layers.append(Layer(COMMAND_LINE, settings.parse_overrides(overrides)))
    base_config = recipe.presets[preset]()
    config, origins = settings.resolve(base_config, layers)
    for key, why in settings.without_effect(config).items():
        if origins.get(key) == COMMAND_LINE:  # in a file it may stand beside what it was written for
            raise UserError(f"--{key} would change nothing: {why}.")
    origins = settings.default_origins(config, f"preset {recipe.name}:{preset}", origins)
    # By its own name: a preset that was derived from another recipe's must come back as what it is.
    named = replace(_located(config), recipe=f"{_without_preset(base)}:{preset}")
    return Target(recipe, named, origins, recipe.notes.get(preset, ()), module, _changed(base_config, named))


def _changed(preset: RunConfig, config: RunConfig) -> dict[str, Any]:
    before, now = settings.kept_values(preset), settings.kept_values(config)
    return {key: before.get(key) for key in now if key != "recipe" and now[key] != before.get(key)}


def names_recipe(word: str) -> bool:
    return word.partition(":")[0] in BUILT_IN or bool(OWN.fullmatch(word))


def _without_preset(words: str) -> str:
    name, colon, rest = words.partition(":")
    return name if name in BUILT_IN or not colon else f"{name}:{rest.partition(':')[0]}"


def find_recipe(words: str, file: Path | None = None, *, trusted: bool = True) -> tuple[Recipe, str, Any]:
    """The recipe, the name of the preset, and the module of a recipe of one's own, named by the user or in a file."""
    name, _, preset = words.partition(":")
    module = None
    if name == IN_HAND:
        raise UserError(
            f"The run was started from a program with a Recipe of its own ({preset}). stoker.load_run(RUN, recipe=RECIPE) "
            f"uses it there; to use it from here, put the recipe into a module and start it as module:RECIPE."
        )
    if name in BUILT_IN:
        recipe = _import(BUILT_IN[name])
    else:
        if not OWN.fullmatch(words):
            raise UserError(
                f"There is no recipe {words!r}. Built in: {', '.join(BUILT_IN)}; a file ends in .yaml; a recipe of "
                f"your own is named module:attribute."
            )
        parts = words.split(":")
        module = trust.find_module(name, trust.kept_root(file, name) if file else None)
        if file is not None and not trusted:
            trust.check_trusted(words, module, str(file))
        recipe, preset = _import(":".join(parts[:2]), module), parts[2] if len(parts) == 3 else ""
        trust.remember(module)
    return recipe, _preset(recipe, preset), module


def _preset(recipe: Recipe, name: str) -> str:
    """The name of a preset, or of the first where none is given."""
    name = name or next(iter(recipe.presets))
    if name not in recipe.presets:
        raise UserError(f"The recipe {recipe.name} has no preset {name!r}; it has {', '.join(recipe.presets)}.")
    return name


def _located(config: RunConfig) -> RunConfig:
    """With the place that a relative data.path means here: the run may be used from another directory later."""
    path = getattr(config.data, "path", None)
    if not isinstance(path, Path | str):
        return config
    there = Path(path).expanduser().absolute()
    if isinstance(path, str) and not there.exists():  # it may be a name, or a URL
        return config
    return replace(config, data=replace(config.data, path=type(path)(there)))


def _import(words: str, module: trust.Module | None = None) -> Recipe:
    name, _, attribute = words.partition(":")
    root = str(module.root) if module else ""  # without a file: whatever Python finds, from this directory on
    # In front of all others, also where it stands behind them already: the file that was looked at is the one to run.
    sys.path[:] = [root, *(entry for entry in sys.path if entry != root)]
    try:
        imported = importlib.import_module(name)
        if module is not None and Path(imported.__file__ or "").resolve() != module.file:
            raise UserError(
                f"The module {name} is {imported.__file__} here, and not {module.file}, which was looked at."
            )
        found = getattr(imported, attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # something that the user's module needs is missing: its traceback says what
        raise UserError(f"There is no module {name} to take the recipe {words!r} from.") from error
    except AttributeError as error:
        raise UserError(f"The module {name} has no {attribute}, asked for by the target {words!r}.") from error
    if not isinstance(found, Recipe):
        raise UserError(f"{words} is a {type(found).__name__}, and a recipe must be a stoker.recipe.Recipe.")
    return found
