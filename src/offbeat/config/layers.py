"""Layers of settings that know where each key was written, and how a later layer lies over an earlier one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from offbeat.config.errors import Problem

Path = tuple[str | int, ...]
"""Keys and list positions from the top, e.g. ``("env", "num_envs")``."""

_MAX_DEPTH, _MAX_VALUES = 50, 50_000
_TEXT_TAGS = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:str")
_FRESH_START: Mapping[Path, tuple[Path, ...]] = {
    ("algorithm", "name"): (("algorithm",),),
    ("env", "id"): (("env", "kwargs"), ("env", "wrappers"), ("eval", "env_kwargs")),
}
"""Naming another algorithm or environment drops what was inherited for the old one."""
_EITHER_OR: Mapping[Path, tuple[Path, ...]] = {
    ("run", "rounds"): (("run", "total_timesteps"),),
    ("run", "total_timesteps"): (("run", "rounds"),),
    ("async_training", "off_policy_degree"): (("async_training", "preset"),),
    ("async_training", "preset"): (
        ("async_training", "off_policy_degree"),
        ("async_training", "open_rounds"),
        ("async_training", "weight_sync_interval"),
    ),
}
"""Writing one key drops others where they were inherited."""


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a key in its source. ``rank`` is the number of the layer: a higher one came later."""

    source: str
    line: int | None = None
    rank: int = 0

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one source, as nested plain values, with the place of each key.

    The empty path is the place of the whole source.
    """

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, Place] = field(default_factory=dict)

    def place(self, path: Path) -> Place:
        """Return the place of ``path``; for a key that no layer has, that of the nearest section above it."""
        lengths = range(len(path), -1, -1)
        return next(self.places[path[:length]] for length in lengths if path[:length] in self.places)


def dotted(path: Path) -> str:
    """Write a path as users do. Example: ``("env", "kwargs", "g")`` is ``env.kwargs.g``."""
    return ".".join(map(str, path))


# ---------------------------------------------------------------- reading YAML


def parse_yaml(text: str, source: str) -> tuple[Layer | None, list[Problem]]:
    """Read a YAML mapping into a layer; None when the text cannot be used at all."""
    try:
        yaml = YAML(typ="safe", pure=True)
        yaml.Composer = _ShallowComposer
        root = yaml.compose(text)
    except YAMLError as error:
        return None, [_syntax_problem(error, text, source)]
    except _TooMuchError:
        return None, [Problem(source, "", None, f"it is nested deeper than {_MAX_DEPTH} levels")]
    if root is None:
        return None, [
            Problem(source, "", None, "the file is empty; it needs at least algorithm.name and env.id")
        ]
    if not isinstance(root, MappingNode):
        where = f"{source}:{root.start_mark.line + 1}"
        return None, [Problem(where, "", None, "expected sections such as `env:`, found something else")]
    reader = _Reader(source)
    reader.places[()] = Place(source, root.start_mark.line + 1)
    try:
        values = reader.mapping(root, ())
    except _TooMuchError:
        return None, [Problem(source, "", None, f"its aliases stand for more than {_MAX_VALUES:,} values")]
    return Layer(values, reader.places), reader.problems


def parse_value(text: str) -> object:
    """Read one value of the command line as YAML: ``1e-3``, ``true``, ``[64, 64]``, ``null``, or text."""
    reader = _Reader("command line")
    root = YAML(typ="safe", pure=True).compose(text)
    value = None if root is None else reader.value(root, ())
    if reader.problems:
        raise MarkedYAMLError(problem=reader.problems[0].message)
    return value


def _syntax_problem(error: YAMLError, text: str, source: str) -> Problem:
    if isinstance(error, MarkedYAMLError):
        # What is never closed is noticed later, or at the end of the file: look at where it begins.
        marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
        if _is_flow(error):
            marks.reverse()
        lines = max(1, len(text.splitlines()))
        inside = [mark.line + 1 for mark in marks if mark.line < lines]
        line = inside[0] if inside else lines
    else:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
    return Problem(f"{source}:{line}", "", None, f"not valid YAML: {_reason(error)}")


def _is_flow(error: MarkedYAMLError) -> bool:
    """Return True for mistakes within ``{...}`` or ``[...]``."""
    return "parsing a flow" in (error.context or "")


def _reason(error: YAMLError) -> str:
    """Return the complaint of the library, without its excerpt of the text."""
    if isinstance(error, MarkedYAMLError):
        if "'\\t'" in (error.problem or ""):
            return "a tab; YAML is indented with spaces"
        if _is_flow(error):
            bracket = "[" if "sequence" in (error.context or "") else "{"
            return f"a {bracket} that is not closed, or an entry in it without a comma before"
        return ", ".join(part for part in (error.context, error.problem) if part)
    return "a character that YAML does not allow"


class _TooMuchError(Exception):
    """A text says more than any configuration does."""


class _ShallowComposer(Composer):
    """Follows a text only so deep: the library needs far more than a second for thousands of levels."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _TooMuchError
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Reader:
    """Turns YAML nodes into plain values, noting the line of every key and every mistake on the way."""

    def __init__(self, source: str) -> None:
        self.places: dict[Path, Place] = {}
        self.problems: list[Problem] = []
        self._source = source
        self._scalars = YAML(typ="safe", pure=True).constructor
        self._open: list[Node] = []
        self._num_values = 0

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = Place(self._source, key_node.start_mark.line + 1)
            key = key_node.value
            if not isinstance(key_node, ScalarNode):
                self._complain(place, path, "a key must be text, not a list or a mapping")
            elif key_node.tag not in _TEXT_TAGS:
                self._complain(place, (*path, key), "a key must be text; put it in quotes")
            elif key in values:
                first = self.places[(*path, key)]
                self._complain(place, (*path, key), f"written twice, first in line {first.line}; keep one")
            else:
                self.places[(*path, key)] = place
                values[key] = self.value(value_node, (*path, key))
        return values

    def value(self, node: Node, path: Path) -> object:
        self._num_values += 1
        if self._num_values > _MAX_VALUES:
            raise _TooMuchError
        if any(node is parent for parent in self._open):
            self._complain(Place(self._source, node.start_mark.line + 1), path, "the alias contains itself")
            return None
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self._open.append(node)
        value = self.mapping(node, path) if isinstance(node, MappingNode) else self._sequence(node, path)
        self._open.pop()
        return value

    def _sequence(self, node: Node, path: Path) -> list[object]:
        for index, item in enumerate(node.value):
            self.places[(*path, index)] = Place(self._source, item.start_mark.line + 1)
        return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]

    def _scalar(self, node: ScalarNode, path: Path) -> object:
        # YAML 1.2 has no dates: 2026-01-02 is text there, though the library reads one.
        if node.tag in _TEXT_TAGS:
            return node.value
        try:
            value = self._scalars.construct_object(node, deep=True)
            if isinstance(value, int):
                str(value)  # ValueError for a hexadecimal number of more digits than Python prints
            return value
        except (YAMLError, ValueError) as error:
            reason = getattr(error, "problem", None) or str(error)
            self._complain(Place(self._source, node.start_mark.line + 1), path, f"cannot be read: {reason}")
            return None

    def _complain(self, place: Place, path: Path, message: str) -> None:
        self.problems.append(Problem(str(place), dotted(path), None, message))


# ---------------------------------------------------------------- overrides


def override_layer(overrides: Mapping[str, object] | Sequence[str]) -> tuple[Layer, list[Problem]]:
    """Make a layer of dotted keys: ``key=value`` strings of a command line, or a mapping from Python."""
    if isinstance(overrides, Mapping):
        return _nest("overrides", overrides.items()), []
    pairs: list[tuple[str, object]] = []
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            problems.append(Problem("command line", "", None, f"{text!r} is not of the form key=value"))
            continue
        try:
            pairs.append((key.strip(), parse_value(value)))
        except YAMLError as error:
            problems.append(Problem("command line", key, value, f"not valid YAML: {_reason(error)}"))
    return _nest("command line", pairs), problems


def _nest(source: str, pairs: Iterable[tuple[str, object]]) -> Layer:
    layer = Layer()
    for key, value in pairs:
        path = tuple(key.split("."))
        layer.places.update({path[:length]: Place(source) for length in range(1, len(path) + 1)})
        nested = reduce(lambda inner, part: {part: inner}, reversed(path), value)
        layer.values.update(_merged(layer.values, cast("dict[str, object]", nested)))
    return layer


# ---------------------------------------------------------------- merging


def merge(layers: Sequence[Layer]) -> Layer:
    """Lay the layers over each other, the last on top: mappings merge key by key, all else is replaced."""
    result = Layer()
    for rank, layer in enumerate(layers):
        below = _without_outdated(result, layer)
        places = {path: Place(place.source, place.line, rank) for path, place in layer.places.items()}
        result = Layer(_merged(below.values, layer.values), below.places | places)
    return result


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


def _without_outdated(below: Layer, above: Layer) -> Layer:
    """Drop what ``above`` makes meaningless: replaced lists and the settings of another algorithm."""
    dropped = set(_leaves(above.values, ()))
    values = below.values
    for switch, belonging in _FRESH_START.items():
        new, old = _get(above.values, switch), _get(values, switch)
        if new is not None and old is not None and new != old:
            values = reduce(_removed, belonging, values)
            dropped.update(belonging)
    for written, others in _EITHER_OR.items():
        if _get(above.values, written) is not None:
            values = reduce(_removed, others, values)
            dropped.update(others)
    places = {
        path: place
        for path, place in below.places.items()
        if not any(path[:length] in dropped for length in range(1, len(path) + 1))
    }
    return Layer(values, places)


def _leaves(values: Mapping[str, Any], path: Path) -> Iterator[Path]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key)


def _get(values: Mapping[str, Any], path: Path) -> object:
    found: object = values
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _removed(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    head, *rest = path
    if not rest:
        return {key: value for key, value in values.items() if key != head}
    inner = values.get(str(head))
    return {**values, str(head): _removed(inner, tuple(rest))} if isinstance(inner, Mapping) else dict(values)
