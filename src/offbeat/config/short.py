"""Short names: settings written without their section, such as ``lr`` for ``algorithm.lr``.

A field that only one section has can be written so, at the top level of a file or as ``key=value``. A few
names that training scripts commonly use stand for fields that are called otherwise here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from offbeat.config.errors import Problem, did_you_mean, nearest, shown
from offbeat.config.fields import nested_section
from offbeat.config.layers import Layer
from offbeat.config.models import RunConfig, Section

ALIASES: Mapping[str, str] = {
    "num_iterations": "run.rounds",
    "eval_interval": "eval.interval_rounds",
    "save_interval": "checkpoint.interval_rounds",
    "learning_rate": "algorithm.lr",
    "env_id": "env.id",
    "entropy_coef": "algorithm.ent_coef",
    "value_coef": "algorithm.vf_coef",
    "clip_epsilon": "algorithm.clip_coef",
}
"""Names from elsewhere, and the fields they stand for."""

Models = Mapping[str, type[Section]]
"""Sections by name, that of the chosen algorithm in full."""


def homes(name: str, models: Models) -> list[str]:
    """The dotted keys that a short name may mean: none when it is unknown, several when it is ambiguous."""
    found = [f"{section}.{name}" for section, model in models.items() if name in _leaves(model)]
    return found or [full for alias, full in ALIASES.items() if alias == name and _exists(full, models)]


def _exists(full: str, models: Models) -> bool:
    section, field = full.split(".")
    return field in models[section].model_fields


def expand(layer: Layer, models: Models) -> tuple[Layer, list[Problem]]:
    """Write the short names of a layer in full, each at its old place; unknown names stay as they are."""
    problems: list[Problem] = []
    for name in [name for name in layer.values if name not in RunConfig.model_fields]:
        found = homes(name, models) or _nested_homes(name, layer.values[name], models)
        if found:
            message = _obstacle(layer, found)
            if message is None:
                layer = _moved(layer, name, found[0])
            else:
                problems.append(Problem(str(layer.place((name,))), name, shown(layer.values[name]), message))
                layer = _without(layer, name)
    return layer, problems


def full_keys(keys: Iterable[str], config: RunConfig) -> list[str]:
    """Keys of overrides in full, for a run of this kind; leaves out those that loading will refuse."""
    models = {name: type(getattr(config, name)) for name in RunConfig.model_fields}
    found = [
        [key] * _may_exist(key, models) if "." in key or key in models else homes(key, models) for key in keys
    ]
    return [full for (full, *others) in filter(None, found) if not others]


def _may_exist(key: str, models: Models) -> bool:
    """Return False for a dotted key that no section has; what is within a value is not looked at."""
    section, *path = key.split(".")
    model = models.get(section)
    for name in path:
        if model is None:
            return section in models
        if name not in model.model_fields:
            return False
        model = nested_section(model.model_fields[name].annotation)
    return section in models


def unknown(name: str, models: Models) -> str:
    """Say what an unknown name at the top may have been: a section, or a short name."""
    short = {field for model in models.values() for field in _leaves(model)}
    close = nearest(name, {*models, *short, *ALIASES})
    if close is None or close in models:
        return did_you_mean(name, models)
    full = " or ".join(homes(close, models))
    return f"did you mean {close} ({full})?" if close in ALIASES else f"did you mean {full}?"


def _nested_homes(name: str, value: object, models: Models) -> list[str]:
    """Return the sections in which a nested one may be meant, such as ``network`` of ``network.kind=mlp``."""
    if not isinstance(value, dict):
        return []
    return [f"{section}.{name}" for section, model in models.items() if name in model.model_fields]


def _leaves(model: type[Section]) -> list[str]:
    """Names of the fields that hold values, or sections that a value can stand for."""
    nested = {name: nested_section(field.annotation) for name, field in model.model_fields.items()}
    return [name for name, inner in nested.items() if inner is None or inner.bare_key is not None]


def _obstacle(layer: Layer, found: list[str]) -> str | None:
    """Return why a short name cannot be written in full; None when it can."""
    if len(found) > 1:
        return f"could be {' or '.join(found)}: write it under its section, or with the section and a dot"
    section, field = found[0].split(".")
    inside = layer.values.get(section)
    if not isinstance(inside, dict) or field not in inside:
        return None
    line = layer.place((section, field)).line
    where = "" if line is None else f", in line {line}"
    return f"stands for {found[0]}, which is written too{where}; keep one of them"


def _moved(layer: Layer, name: str, full: str) -> Layer:
    """Put a short name's value, and the places of all within it, where they belong."""
    section, field = full.split(".")
    rest = _without(layer, name)
    inside = layer.values.get(section, {})
    if not isinstance(inside, dict):
        return rest  # the section is no section: that is what will be reported
    values = {**rest.values, section: {**inside, field: layer.values[name]}}
    own = {path: place for path, place in layer.places.items() if path[:1] == (name,)}
    places = {(section, field, *path[1:]): place for path, place in own.items()}
    return Layer(values, rest.places | places)


def _without(layer: Layer, name: str) -> Layer:
    values = {key: value for key, value in layer.values.items() if key != name}
    return Layer(values, {path: place for path, place in layer.places.items() if path[:1] != (name,)})
