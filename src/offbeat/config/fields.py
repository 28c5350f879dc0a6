"""Values that a configuration field accepts, in words: for error messages and for the reference page."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offbeat.config.models import Section

_ATOMS: Mapping[object, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Any: ("any value", "any values"),
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def allowed(field: FieldInfo) -> str:
    """Say what the field accepts. Example: ``a whole number, at least 1, or null``."""
    return _allowed(field.annotation, field.metadata)


def nested_section(annotation: object) -> type[Section] | None:
    """The one section that a field of this type holds, optional or not; None when it holds values."""
    kinds = (annotation, *get_args(annotation))
    nested = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return nested[0] if len(nested) == 1 else None


def _allowed(annotation: object, metadata: list[Any]) -> str:
    kinds, bounds = _flatten(annotation, metadata)
    named = [_kind(kind) for kind in kinds if kind is not types.NoneType]
    text = " or ".join(dict.fromkeys(named))
    text = ", ".join([text, *bounds])
    if types.NoneType not in kinds:
        return text
    return f"{text}, or null" if bounds else f"{text} or null"


def _flatten(annotation: object, metadata: list[Any]) -> tuple[list[object], list[str]]:
    """Take unions and ``Annotated`` apart: the kinds inside, and the bounds on them in words."""
    bounds = _bounds(metadata)
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        kinds: list[object] = []
        for part in get_args(annotation):
            inner, more = _flatten(part, [])
            kinds += inner
            bounds += more
        return kinds, bounds
    if hasattr(annotation, "__metadata__"):
        kinds, more = _flatten(get_args(annotation)[0], list(annotation.__metadata__))
        return kinds, bounds + more
    return [annotation], bounds


def _bounds(metadata: list[Any]) -> list[str]:
    found: list[str] = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            found += _bounds(item.metadata)
        for attribute, words in _BOUNDS.items():
            if (limit := getattr(item, attribute, None)) is not None:
                found.append(f"{words} {limit:g}")
        if getattr(item, "min_length", None):
            found.append("not empty")
    return found


def _kind(kind: object) -> str:
    if kind in _ATOMS:
        return _ATOMS[kind][0]
    origin = get_origin(kind)
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(kind)))
    if origin in (tuple, list):
        return _sequence(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        bare_key = kind.bare_key if issubclass(kind, Section) else None
        bare = f"{allowed(kind.model_fields[bare_key])}, or " if bare_key is not None else ""
        return f"{bare}a mapping with {', '.join(kind.model_fields)}"
    if origin is dict or kind is dict:
        return "a mapping"
    return getattr(kind, "__name__", str(kind))


def _sequence(items: tuple[object, ...]) -> str:
    if len(items) > 1 and items[-1] is not Ellipsis:
        return f"a list of {len(items)} values: " + ", ".join(map(_kind, items))
    kinds, bounds = _flatten(items[0], []) if items else ([Any], [])
    plural = " or ".join(_ATOMS[kind][1] if kind in _ATOMS else _kind(kind) for kind in kinds)
    return ", ".join([f"a list of {plural}", *bounds])
