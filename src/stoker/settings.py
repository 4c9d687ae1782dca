"""Strict configuration: frozen dataclasses that are loaded, overridden by dotted path, compared and saved.

In go a complete configuration (a preset) and layers of changes, each with its origin: a YAML file, the command line.
Out comes the resolved configuration and the origin of every value. Unknown keys, wrong types and impossible values are
errors that name the key, the value, where it was set, and the nearest right key.
"""

import dataclasses
import difflib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from stoker.errors import UserError
from stoker.files import check_regular

T = TypeVar("T")
# Last parts of keys whose texts are secrets: they are used and never kept. None of ours is one; a recipe's may be.
SECRETS = ("token", "secret", "password", "passphrase", "credential", "credentials", "api_key", "access_key",
           "secret_key", "private_key", "auth")  # fmt: skip
DEEPEST, MOST_VALUES = 20, 100_000  # levels and values of a configuration file
NOT_KEPT = "(a secret, not kept)"
IN_URL = re.compile(r"(?<=://)[^/@\s]+@")  # name and password before a host


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type[T]) -> type[T]:
    """Marks a class as a part of a configuration: a frozen dataclass with keyword arguments only."""
    return dataclass(frozen=True, kw_only=True)(cls)


class AlsoCalled:
    """In an `Annotated` type: other names people use for a key, so that a wrong guess finds it."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Word(str):
    """A value as typed on the command line: read as YAML where that fits the key, else taken as it stands."""


@dataclass(frozen=True)
class Layer:
    """Changes from one place: nested keys and values, and the words that name the place."""

    origin: str
    values: Mapping[str, Any]


def resolve(base: T, layers: list[Layer]) -> tuple[T, dict[str, str]]:
    """Applies the layers in their order; returns the configuration and the origin of each value changed by a layer."""
    origins: dict[str, str] = {}
    missing: dict[str, str] = {}
    for layer in layers:
        values = _without_secrets(layer, missing)
        base = _apply(base, base, values, layer.origin, "", origins)
    for key, origin in missing.items():
        if key not in origins:
            raise UserError(f"{key} is a secret and was not kept in {origin}: give it again, --{key} VALUE.")
    return base, origins


def _without_secrets(layer: Layer, missing: dict[str, str]) -> dict[str, Any]:
    """The layer's values but those that were left out when they were saved; these are put into `missing`."""

    def kept(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in values.items():
            if value == NOT_KEPT:
                missing[f"{prefix}{name}"] = layer.origin
            else:
                found[name] = kept(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        return found

    return kept(layer.values, "")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML 1.2 file whose top is a mapping; `1e-4` is a number there."""
    try:
        check_regular(path)
        content = _yaml(pure=True).load(path.read_text())
    except FileNotFoundError:
        raise UserError(f"The configuration file {path} does not exist.") from None
    except RecursionError:
        raise UserError(f"The configuration file {path} is nested far too deeply to be one.") from None
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"The configuration file {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"The configuration file {path} must hold keys and values, and holds {type(content).__name__}.")
    _check_plain(content, path)
    return content


def _check_plain(content: dict[str, Any], path: Path) -> None:
    """Keys are words; nothing contains itself, or others over and over, as YAML's references allow."""
    waiting: list[tuple[Any, int]] = [(content, 0)]
    for _ in range(MOST_VALUES):
        if not waiting:
            return
        value, depth = waiting.pop()
        if depth > DEEPEST:
            break
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UserError(f"The configuration file {path} has the key {key!r}, which is no word.")
            waiting += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(item, depth + 1) for item in value]
        elif not isinstance(value, str | int | float | None):
            raise UserError(
                f"The configuration file {path} holds {value!s}, a {type(value).__name__}: put it in quotes."
            )
    raise UserError(f"The configuration file {path} is nested far too deeply to be one, or refers to itself.")


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Turns `--train.lr 1e-4 --loader.threads=2` into nested values; kept as typed until its key is known."""
    values: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            text = next(rest, "")
            if text == "" or text.startswith("--"):
                raise UserError(f"--{key} needs a value after it, as in --{key} VALUE.")
        _put(values, key, Word(text))
    return values


def leaves(configuration: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, in the order of the fields."""
    for field in dataclasses.fields(configuration):
        value = getattr(configuration, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def kept_values(configuration: Any) -> dict[str, Any]:
    """Every dotted key with its value as it may be written down: paths as text, secrets left out."""
    return {key: _kept(key, value) for key, value in leaves(configuration)}


def kept_words(words: list[str]) -> list[str]:
    """A command as it may be written down."""
    found: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        before = found[-1] if found else ""
        if before.startswith("--") and "=" not in before and _is_secret(before):
            found.append(NOT_KEPT)
        elif word.startswith("--") and equals and _is_secret(name):
            found.append(f"{name}={NOT_KEPT}")
        else:
            found.append(IN_URL.sub("", word))
    return found


def _is_secret(key: str) -> bool:
    last = key.lstrip("-").rpartition(".")[2].lower().replace("-", "_")
    return last in SECRETS or last.endswith(tuple(f"_{word}" for word in SECRETS))


def _kept(key: str, value: Any) -> Any:
    plain = _plain(value)
    if isinstance(plain, str):
        return NOT_KEPT if _is_secret(key) else IN_URL.sub("", plain)
    return plain


def difference(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, with both values; a key that only one side has shows None on the other."""
    before, after = dict(leaves(old)), dict(leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def without_effect(configuration: Any) -> dict[str, str]:
    """Keys that change nothing beside the others, and why; each group says so (`without_effect`), of itself by a plain
    name and of another group by a dotted one, unless a third one makes use of them all the same (`with_effect`)."""
    found: dict[str, str] = {}
    wanted: set[str] = set()
    for field in dataclasses.fields(configuration):
        group = getattr(configuration, field.name)
        wanted |= group.with_effect() if hasattr(group, "with_effect") else set()
        reasons = group.without_effect() if hasattr(group, "without_effect") else {}
        found |= {name if "." in name else f"{field.name}.{name}": why for name, why in reasons.items()}
    return {key: why for key, why in found.items() if key not in wanted}


def as_yaml(configuration: Any, comments: Mapping[str, str] | None = None) -> str:
    """The configuration as a file that loads again; `comments` by dotted key stand behind the values."""
    text = io.StringIO()
    _yaml().dump(_commented(configuration, comments or {}, ""), text)
    return text.getvalue()


def plain_yaml(values: Mapping[str, Any]) -> str:
    """Values that are no configuration of ours, as a file."""
    text = io.StringIO()
    _yaml().dump({key: _plain(value) for key, value in values.items()}, text)
    return text.getvalue()


def default_origins(configuration: Any, preset: str, origins: Mapping[str, str]) -> dict[str, str]:
    """The origin of every value: a layer, else the preset where it departs from the default, else the default."""
    result = {}
    for key, value in leaves(configuration):
        owner = configuration
        *parents, name = key.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        field = next(field for field in dataclasses.fields(owner) if field.name == name)
        origin = "default" if _default(field) == value else preset
        result[key] = origins.get(key, origin)
    return result


def _apply(top: Any, base: Any, values: Mapping[str, Any], origin: str, prefix: str, origins: dict[str, str]) -> Any:
    changes: dict[str, Any] = {}
    names = {field.name for field in dataclasses.fields(base)}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in names:
            raise UserError(unknown_key(top, key, origin))
        old = getattr(base, name)
        if dataclasses.is_dataclass(old):
            if not isinstance(value, Mapping):
                raise UserError(f"{key} (from {origin}) is a group of keys, and {value!r} is a single value.")
            changes[name] = _apply(top, old, value, origin, f"{key}.", origins)
        else:
            changes[name] = _validate(_hints(type(base))[name], key, value, origin)
            origins[key] = origin
    try:
        return dataclasses.replace(base, **changes)
    except ValueError as error:  # a check over several keys in __post_init__
        raise UserError(
            f"{prefix.rstrip('.') or 'The configuration'} (from {origin}) is impossible: {error}"
        ) from error


def _validate(hint: Any, key: str, value: Any, origin: str) -> Any:
    """Strict: a number in quotes is no number. Through JSON, so that a list becomes a tuple and a string a path."""
    if isinstance(value, Word):
        return _validate_word(hint, key, value, origin)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} cannot be {value!r} (from {origin}): it must be a finite number.")
    try:
        return _adapter(hint).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ValidationError):
            reasons = "; ".join(dict.fromkeys(problem["msg"] for problem in error.errors()))
        else:
            reasons = str(error)
        raise UserError(f"{key} cannot be {_shown(value)!r} (from {origin}): {reasons}.") from error


def _validate_word(hint: Any, key: str, word: Word, origin: str) -> Any:
    try:
        value = _yaml(pure=True).load(word)
    except (YAMLError, ValueError, RecursionError):
        value = str(word)
    try:
        return _validate(hint, key, value, origin)
    except UserError as error:
        # A name like 2024 or a path with a colon in it: YAML sees more than a string, the key wants a string.
        try:
            return _validate(hint, key, str(word), origin)
        except UserError:
            raise error from None


def unknown_key(top: Any, key: str, origin: str) -> str:
    """That there is no such key, and which one may be meant."""
    known = _known_names(top)
    name = key.rpartition(".")[2]
    by_path = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
    by_name = difflib.get_close_matches(name, [path.rpartition(".")[2] for path in known], n=1, cutoff=0.6)
    near = by_path or [path for path in known if by_name and path.rpartition(".")[2] == by_name[0]][:1]
    hint = f" Did you mean {known[near[0]]}?" if near else " `stoker config TARGET` prints all keys."
    return f"There is no key {key} (from {origin}).{hint}"


def _known_names(top: Any, prefix: str = "") -> dict[str, str]:
    """Every name that could be meant, the right ones and the usual wrong ones, with the right key."""
    known: dict[str, str] = {}
    for field in dataclasses.fields(top):
        value, path = getattr(top, field.name), f"{prefix}{field.name}"
        known[path] = path
        if dataclasses.is_dataclass(value):
            known |= _known_names(value, f"{path}.")
            continue
        for note in _notes(_hints(type(top))[field.name]):
            if isinstance(note, AlsoCalled):
                known |= {f"{prefix}{name}": path for name in note.names}
    return known


def _notes(hint: Any) -> Iterator[Any]:
    """What stands beside a type, also inside of `... | None`."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(hint) if get_origin(hint) in (Union, UnionType) else ():
        yield from _notes(inner)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for name in parents:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise UserError(f"--{key} goes into {name}, which was given a single value before.")
    values[last] = value


def _commented(configuration: Any, comments: Mapping[str, str], prefix: str) -> CommentedMap:
    mapping = CommentedMap()
    for field in dataclasses.fields(configuration):
        value, key = getattr(configuration, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            mapping[field.name] = _commented(value, comments, f"{key}.")
            continue
        mapping[field.name] = _kept(key, value)
        if key in comments:
            mapping.yaml_add_eol_comment(comments[key], field.name, column=32)
    return mapping


def _shown(value: Any) -> Any:
    """A URL may hold a password or a signature."""
    if not isinstance(value, str) or "://" not in value:
        return value
    return re.sub(r"\?.*", "?***", re.sub(r"://[^/]*@", "://***@", value))


def _plain(value: Any) -> Any:
    if isinstance(value, Path) or hasattr(value, "scheme"):  # a place, local or a URL
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _yaml(*, pure: bool = False) -> YAML:
    yaml = YAML(typ="safe", pure=True) if pure else YAML()
    yaml.default_flow_style = False
    yaml.width = 4096  # a long path stays on its line
    # `null` in words: an empty value after a colon looks like a mistake.
    if not pure:
        yaml.representer.add_representer(
            type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null")
        )
    return yaml


def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)
