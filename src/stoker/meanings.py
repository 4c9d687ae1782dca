"""What every key of a configuration means, and which values it takes: from the comments beside it and from its type."""

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo


def meanings(configuration: Any, prefix: str = "") -> dict[str, str]:
    """Key -> its comment and its choices, where there are any."""
    found: dict[str, str] = {}
    hints = get_type_hints(type(configuration), include_extras=True)
    comments = {name: text for kind in reversed(type(configuration).__mro__) for name, text in _comments(kind).items()}
    for field in dataclasses.fields(configuration):
        value, key = getattr(configuration, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            found |= meanings(value, f"{key}.")
            continue
        words = [comments.get(field.name, ""), _choices(hints[field.name])]
        found[key] = "; ".join(word for word in words if word)
    return found


@cache
def _comments(kind: Any) -> dict[str, str]:
    """The comment behind each field, wherever in the class's source it ends; none where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
        body = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return {}
    if not isinstance(body, ast.ClassDef):
        return {}
    lines = source.splitlines()
    found: dict[str, str] = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                _, mark, comment = lines[number].partition("  # ")
                if mark:
                    found[node.target.id] = comment.strip()
    return found


def _choices(hint: Any) -> str:
    """`one of a, b` for words, `above 0, at most 1` for numbers."""
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        return "; ".join(word for word in (_choices(base), _range(notes)) if word)
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is bool:
        return "true or false"
    if get_origin(hint) in (Union, UnionType):
        words = [_choices(one) for one in get_args(hint) if one is not NoneType]
        optional = ["or null"] if NoneType in get_args(hint) else []
        return ", ".join([word for word in words if word] + optional)
    return ""


def _range(notes: list[Any]) -> str:
    words: list[str] = []
    for note in notes:
        for bound in note.metadata if isinstance(note, FieldInfo) else [note]:
            for kind, name, text in (
                (Ge, "ge", "at least"),
                (Gt, "gt", "above"),
                (Le, "le", "at most"),
                (Lt, "lt", "below"),
            ):
                if isinstance(bound, kind):
                    words.append(f"{text} {getattr(bound, name):,}")
    return ", ".join(words)
