"""From a recipe name, a YAML file or a ``RunConfig``, with overrides, to a checked ``RunConfig``.

Later layers win: defaults, then what a file extends, then the file, then ``key=value``. Every mistake is
reported at once, with the place where its key was written.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML

from offbeat.config import foreign, layers, short
from offbeat.config.checks import algorithm_conflicts, conflicts
from offbeat.config.errors import ConfigProblems, Problem, did_you_mean, nearest, shown
from offbeat.config.fields import allowed, nested_section
from offbeat.config.layers import Layer, dotted
from offbeat.config.models import AlgorithmConfig, Conflict, RunConfig, Section
from offbeat.config.recipes import RecipeBook
from offbeat.errors import ConfigError
from offbeat.reading import CONFIG_BYTES, read_file

AlgorithmModel = Callable[[str], type[AlgorithmConfig]]
"""Finds the config model of an algorithm by name; raises ``ConfigError`` with the fix when it cannot."""
ConfigSource = str | Path | Mapping[str, object] | RunConfig
"""A recipe's name, a YAML file, its contents as a mapping, or a config made in Python."""
_NEVER_FOLD = 2**31


def load_config(
    source: ConfigSource,
    overrides: Mapping[str, object] | Sequence[str] = (),
    *,
    algorithm_model: AlgorithmModel,
    algorithms: Iterable[str] = (),
    recipes: RecipeBook | None = None,
) -> RunConfig:
    """Load, merge and check a configuration.

    ``overrides`` are dotted keys: as ``key=value`` strings whose values are read as YAML, or as a mapping.
    Raises ``ConfigProblems``, which lists every mistake. A key that only other ones of the ``algorithms``
    have is reported as such.

    Example: ``load_config("cartpole-ppo", ["run.seed=3"], algorithm_model=find_model)``.
    """
    name, found, problems = _read(source, recipes or RecipeBook())
    on_top, more = layers.override_layer(overrides)
    problems += more
    if not found:
        raise ConfigProblems(problems)
    if isinstance(source, RunConfig):
        algorithm_model = _reuse_model(source.algorithm, algorithm_model)
    found, more = _in_full([*found, on_top], algorithm_model)
    problems += more
    config, more = _Validation(layers.merge(found), algorithm_model, algorithms).result()
    if problems or more:
        raise ConfigProblems(problems + more)
    return config if config.run.name else _named(config, name)


def dump_yaml(config: RunConfig) -> str:
    """Write a configuration as YAML that ``load_config`` reads back to an equal one."""
    stream = io.StringIO()
    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style = False
    # The library's folded lines and unescaped line separators do not come back as they were.
    writer.allow_unicode = False
    writer.width = _NEVER_FOLD
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    writer.dump(config.model_dump(), stream)
    return stream.getvalue()


def _named(config: RunConfig, name: str | None) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _reuse_model(algorithm: AlgorithmConfig, algorithm_model: AlgorithmModel) -> AlgorithmModel:
    return lambda name: type(algorithm) if name == algorithm.name else algorithm_model(name)


# ---------------------------------------------------------------- finding and reading files


def _read(source: ConfigSource, recipes: RecipeBook) -> tuple[str | None, list[Layer], list[Problem]]:
    """Name of the run, its layers from bottom to top (none when one cannot be read), and problems."""
    if isinstance(source, Mapping):
        layer, problems = layers.override_layer(source)
        layer = Layer(layer.values, {path: layers.Place("mapping") for path in ((), *layer.places)})
        return None, *_with_base(layer, problems, Path("mapping"), recipes, ())
    if not isinstance(source, str | Path | RunConfig):
        raise ConfigError(
            f"a run is described by a recipe's name, a YAML file or a mapping with the sections"
            f" {', '.join(RunConfig.model_fields)}, not by a {type(source).__name__}: start from a recipe, as"
            ' in offbeat.train("cartpole-unizero", overrides={"env.num_envs": 8})'
        )
    if isinstance(source, RunConfig):
        return None, [Layer(_written(source), {(): layers.Place("RunConfig")})], []
    try:
        path, called = _locate(source, recipes, Path())
    except ConfigError as error:
        return None, [], [Problem(str(source), "", None, str(error))]
    found, problems = _read_chain(path, called, recipes, ())
    return path.stem, found, problems


def _written(config: RunConfig) -> dict[str, Any]:
    """Return the values of a config made in Python, without a number of rounds that nobody chose."""
    values = config.model_dump()
    if config.run.total_timesteps is not None and "rounds" not in config.run.model_fields_set:
        del values["run"]["rounds"]
    return values


def _locate(source: str | Path, recipes: RecipeBook, relative_to: Path) -> tuple[Path, str]:
    """The file behind a recipe's name or a path, and how to call it in messages."""
    if isinstance(source, str) and source in recipes.names():
        return recipes.path(source), f"recipe {source}"
    path = relative_to / source
    try:
        if path.is_file():
            return path, str(source) if relative_to == Path() else str(path)
        if path.is_dir():
            raise ConfigError("is a directory; name a YAML file or a recipe")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    close = nearest(Path(source).stem, recipes.names())
    hint = f"did you mean the recipe {close}?" if close else f"recipes: {', '.join(recipes.names())}"
    raise ConfigError(f"there is no file and no recipe of this name; {hint}")


def _read_chain(
    path: Path, name: str, recipes: RecipeBook, opened: tuple[Path, ...]
) -> tuple[list[Layer], list[Problem]]:
    """Read a file and, below it, what it extends."""
    try:
        text = read_file(path, CONFIG_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return [], [Problem(name, "", None, f"cannot be read: {reason}")]
    layer, problems = layers.parse_yaml(text, name)
    if layer is None:
        return [], problems
    return _with_base(layer, problems, path, recipes, opened)


def _with_base(
    layer: Layer, problems: list[Problem], path: Path, recipes: RecipeBook, opened: tuple[Path, ...]
) -> tuple[list[Layer], list[Problem]]:
    """Read, below a layer, what it extends."""
    base = layer.values.pop("extends", None)
    _forget_empty_sections(layer)
    if base is None:
        return [layer], problems
    where = str(layer.place(("extends",)))
    try:
        below, name_below = _extended(base, path, recipes, (*opened, path.resolve()))
    except ConfigError as error:
        return [], [*problems, Problem(where, "extends", shown(base), str(error))]
    chain, more = _read_chain(below, name_below, recipes, (*opened, path.resolve()))
    return ([*chain, layer] if chain else []), problems + more


def _extended(base: object, path: Path, recipes: RecipeBook, opened: tuple[Path, ...]) -> tuple[Path, str]:
    if not isinstance(base, str):
        raise ConfigError("must be the name of a recipe or a file relative to this one")
    below, name = _locate(base, recipes, path.parent)
    if below.resolve() in opened:
        raise ConfigError("the files extend each other in a circle; remove one of these lines")
    return below, name


def _forget_empty_sections(layer: Layer) -> None:
    """A section with nothing under it changes nothing (its place stays known)."""
    for name in RunConfig.model_fields:
        if layer.values.get(name, ...) is None:
            del layer.values[name]


# ---------------------------------------------------------------- short names


def _in_full(found: Sequence[Layer], algorithm_model: AlgorithmModel) -> tuple[list[Layer], list[Problem]]:
    """The layers with short names written in full, each by the algorithm that holds where it was written."""
    names = [_algorithm_name(layer) for layer in found]
    expanded: list[Layer] = []
    problems: list[Problem] = []
    for rank, layer in enumerate(found):
        # The newest name up to this layer; below the first layer that names one, that first.
        nearby = [name for name in (*reversed(names[: rank + 1]), *names[rank + 1 :]) if name is not None]
        full, more = short.expand(layer, _section_models(nearby[0] if nearby else None, algorithm_model))
        expanded.append(full)
        problems += more
    return expanded, problems


def _algorithm_name(layer: Layer) -> str | None:
    section = layer.values.get("algorithm")
    name = section.get("name") if isinstance(section, dict) else None
    return name if isinstance(name, str) else None


def _section_models(algorithm: str | None, algorithm_model: AlgorithmModel) -> dict[str, type[Section]]:
    """The model of every section; an algorithm that cannot be found has what all have in common."""
    models: dict[str, Any] = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    if algorithm is not None:
        with contextlib.suppress(ConfigError):
            models["algorithm"] = algorithm_model(algorithm)
    return models


# ---------------------------------------------------------------- validation


class _Validation:
    """Turns merged settings into a config, collecting what is wrong with them."""

    def __init__(self, layer: Layer, algorithm_model: AlgorithmModel, others: Iterable[str]) -> None:
        self._layer = layer
        self._algorithm_model = algorithm_model
        self._others = others
        self._problems: list[tuple[layers.Place, Problem]] = []
        self._models = _section_models(_algorithm_name(layer), algorithm_model)
        self._check_algorithm(algorithm_model)

    def result(self) -> tuple[RunConfig, list[Problem]]:
        """The config and the problems, in the order in which their keys were written."""
        self._unknown_sections()
        sections: dict[str, Any] = {name: self._section(name, model) for name, model in self._models.items()}
        config = RunConfig.model_construct(**sections)
        broken = self._broken_sections()
        for conflict in conflicts(config):
            if not broken.intersection(key.split(".")[0] for key in conflict.keys):
                self._conflict(conflict, config)
        if not broken:
            config = self._with_rounds(RunConfig(**sections))
            for conflict in algorithm_conflicts(config.resolved()):
                self._conflict(conflict, config)
        self._problems.sort(key=lambda found: (found[0].rank, found[0].line or 0))
        return config, [problem for _, problem in self._problems]

    def _with_rounds(self, config: RunConfig) -> RunConfig:
        """Return the config with the rounds that ``run.total_timesteps`` comes to."""
        steps, path = config.run.total_timesteps, ("run", "total_timesteps")
        if steps is None:
            return config
        rounds = config.resolved().rounds_of(steps)
        if rounds is None:
            name = config.algorithm.name
            if not any(algorithm_conflicts(config.resolved())):  # a conflict can be what leaves them unknown
                self._add(
                    path, f"the steps of a round of {name} are not known before: set run.rounds instead"
                )
            return config
        if "rounds" in self._layer.values.get("run", {}):
            rounds = min(rounds, config.run.rounds)
        return config.model_copy(update={"run": config.run.model_copy(update={"rounds": rounds})})

    def _check_algorithm(self, algorithm_model: AlgorithmModel) -> None:
        name, section = _algorithm_name(self._layer), self._layer.values.get("algorithm", {})
        if name is not None:
            try:
                algorithm_model(name)
            except ConfigError as error:
                self._add(("algorithm", "name"), str(error))
        elif isinstance(section, dict):
            self._add(("algorithm", "name"), "is required: the name of an algorithm (`offbeat list`)")

    def _unknown_sections(self) -> None:
        is_algorithm_known = "algorithm" not in self._broken_sections()
        for name, value in self._layer.values.items():
            # Of an algorithm that nobody knows, nobody knows the short names.
            if name in self._models or not (is_algorithm_known or isinstance(value, dict)):
                continue
            if isinstance(value, dict) and nearest(name, self._models) is None:
                self._foreign_section(name, value)
            else:
                self._add((name,), self._unknown(name) or _unknown_name(name, self._models))

    def _foreign_section(self, name: str, value: Mapping[str, object]) -> None:
        """Report a section from elsewhere: at its keys, if some of them have a place here."""
        found = {key: self._at_home(key) for key in value}
        if any(found.values()):
            for key, message in found.items():
                self._add((name, key), message or _unknown_name(key, self._models))
        else:
            self._add((name,), self._unknown(name) or _unknown_name(name, self._models))

    def _at_home(self, key: str) -> str | None:
        """Say what to write for a key of a section from elsewhere."""
        homes = short.homes(key, self._models)
        return f"unknown key; use {' or '.join(homes)}" if homes else self._unknown(key)

    def _broken_sections(self) -> set[str]:
        return {problem.key.split(".")[0] for _, problem in self._problems}

    def _section(self, name: str, model: type[Section]) -> Section:
        """The valid section, or one of defaults that stands in for a broken one."""
        if name in self._broken_sections():
            return model.model_construct()
        try:
            return model.model_validate(self._layer.values.get(name, {}))
        except ValidationError as error:
            for details in error.errors(include_url=False):
                self._explain(name, model, details)
            return model.model_construct()

    def _explain(self, name: str, model: type[Section], details: ErrorDetails) -> None:
        location = details["loc"]
        path, owner, field = _field_at(model, location)
        if details["type"] == "extra_forbidden" and len(path) == len(location):
            key, is_own = str(path[-1]), name == "algorithm" and len(path) == 1
            another = self._unknown(key, is_algorithm=is_own)
            below = _sections_below(owner, ".".join((name, *map(str, path[:-1]))))
            message = another or _unknown_key(key, owner.model_fields, {**self._models, **below})
        elif "error" in details.get("ctx", {}):
            message = str(details["ctx"]["error"])
        elif field is None:
            message = "must be a section: indented `key: value` lines"
        elif details["type"] == "missing":
            message = f"is required: {allowed(field)}"
        else:
            message = f"must be {allowed(field)}" + (", finite" * (details["type"] == "finite_number"))
            meaning = foreign.OTHER_MEANINGS.get(dotted((name, *path)))
            message += "" if meaning is None else f": {meaning}"
        self._add((name, *path), message)

    def _unknown(self, key: str, is_algorithm: bool = True) -> str | None:
        """Say what to use for a name from elsewhere, or whose key it is if another algorithm has it."""
        advice = foreign.advice(key.rpartition(".")[2], self._models)
        if advice is not None:
            return f"unknown key; {advice}"
        return self._of_another(key) if is_algorithm else None

    def _of_another(self, key: str) -> str | None:
        owners = [name for name in self._others if key in self._algorithm_model(name).model_fields]
        if not owners:
            return None
        return f"belongs to the algorithm {' or '.join(owners)}: set algorithm.name to that, or leave it out"

    def _conflict(self, conflict: Conflict, config: RunConfig) -> None:
        """Report at the key written last: the one the user just changed."""
        paths = [tuple(key.split(".")) for key in conflict.keys]
        written = [path for path in paths if path in self._layer.places] or paths[:1]
        path = max(written, key=lambda path: self._layer.place(path).rank)
        self._add(path, conflict.message, config.model_dump())

    def _add(self, path: layers.Path, message: str, values: Mapping[str, object] | None = None) -> None:
        place = self._layer.place(path)
        given = _value_at(values or self._layer.values, path)
        text = None if given is _NOTHING else shown(given)
        found = (place, Problem(str(place), dotted(path), text, message))
        if found not in self._problems:
            self._problems.append(found)


def _field_at(
    model: type[Section], location: Sequence[str | int]
) -> tuple[layers.Path, type[Section], FieldInfo | None]:
    """The deepest field that a pydantic location names: its path, the model that owns it, and itself.

    What follows inside a field (a list position, a branch of a union) is not part of the path: the message
    says what the whole field accepts.
    """
    owner, field = model, None
    for depth, part in enumerate(location):
        if part not in owner.model_fields:
            return tuple(location[: depth + 1]), owner, field
        field = owner.model_fields[str(part)]
        inner = nested_section(field.annotation)
        if inner is None:
            return tuple(location[: depth + 1]), owner, field
        owner = inner
    return tuple(location), owner, field


def _sections_below(owner: type[Section], path: str) -> dict[str, type[Section]]:
    """The sections that a section holds, by their whole names."""
    found = {name: nested_section(field.annotation) for name, field in owner.model_fields.items()}
    return {f"{path}.{name}": section for name, section in found.items() if section is not None}


def _unknown_key(key: str, siblings: Mapping[str, object], sections: Mapping[str, type[Section]]) -> str:
    """Say what an unknown key may have been: a sibling, or a field of that name in some section."""
    section, dot, field = key.partition(".")
    if dot and section in sections:
        return f"unknown key; a dot does not nest in a file: write {field} under {section}:"
    elsewhere = [f"{name}.{key}" for name, model in sections.items() if key in model.model_fields]
    if elsewhere and nearest(key, siblings) is None:
        return f"unknown key; did you mean {' or '.join(elsewhere)}?"
    return f"unknown key; {did_you_mean(key, siblings)}"


def _unknown_name(name: str, sections: Mapping[str, type[Section]]) -> str:
    """Say what an unknown key at the top may have been: a section, a field of one, or a short name."""
    if "." in name or any(name in model.model_fields for model in sections.values()):
        return _unknown_key(name, sections, sections)
    return f"unknown key; {short.unknown(name, sections)}"


_NOTHING = object()


def _value_at(values: object, path: layers.Path) -> object:
    for part in path:
        if not isinstance(values, Mapping) or part not in values:
            return _NOTHING
        values = values[part]
    return values
