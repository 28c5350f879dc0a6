"""Writes ``docs/configuration.md`` from the models: ``python -m offbeat.config.reference [FILE]``."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from offbeat.config.fields import allowed, nested_section
from offbeat.config.loader import AlgorithmModel
from offbeat.config.models import AlgorithmConfig, RunConfig
from offbeat.config.short import ALIASES

_INTRODUCTION = """\
# Configuration

<!-- Written by `python -m offbeat.config.reference`. Change the models, not this page. -->

A run is described by one YAML file with the sections below, or by a recipe that comes with offbeat
(`offbeat list`). Only `algorithm.name` and `env.id` have no default.

```yaml
extends: cartpole-ppo        # optional: start from a recipe, or from a file relative to this one
async_training:
  off_policy_degree: 1
run:
  rounds: 200
```

- **Precedence**: defaults, then what the file extends, then the file, then `key=value` on the command line
  (`offbeat train my.yaml run.seed=3 env.num_envs=32`). Mappings merge key by key; all else is replaced.
- **Another algorithm or environment**: a layer that changes `algorithm.name` starts that section afresh, one
  that changes `env.id` drops the inherited `env.kwargs`, `env.wrappers` and `eval.env_kwargs`.
- **Length**: a layer that writes one of `run.rounds` and `run.total_timesteps` drops the other one where it
  inherits it: `offbeat train cartpole-ppo total_timesteps=200000` takes these steps, and a resume may be
  given more of them. Where both are written in one place, the one that ends first holds.
- **Short names**: a setting that only one section has may be written without it, at the top level of a file
  or on the command line: `offbeat train cartpole-ppo num_workers=4 lr=1e-3`. The run's `config.yaml` has the
  full key. A name that several sections have, such as `num_envs`, needs its section, and so does everything
  in a nested section. Names that stand for others:
  {aliases}.
- **Values** are YAML 1.2: `1e-3` is a number, `no` is text, and so is `"8"`. A whole number may be `1e6`.
- **Mistakes** are reported all at once, each with file, line, key, value and what would be right; nothing
  runs, and the exit code is 2. `offbeat check FILE` shows the resolved configuration and what it would do.
"""


def render(algorithms: Mapping[str, type[AlgorithmConfig]]) -> str:
    """The reference page: a table for each section, and one for each of the ``algorithms`` by name."""
    aliases = ",\n  ".join(f"`{name}` for `{full}`" for name, full in ALIASES.items())
    parts = [_INTRODUCTION.replace("{aliases}", aliases)]
    for name, field in RunConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        parts.append(_section(f"## `{name}`", model, ""))
        if name == "algorithm":
            shared = set(AlgorithmConfig.model_fields)
            parts += [
                _section(f"### `algorithm` for `{one}`", algorithms[one], "", shared)
                for one in sorted(algorithms)
            ]
    return "\n".join(parts)


def _section(heading: str, model: type[BaseModel], prefix: str, skipped: set[str] | None = None) -> str:
    about = (model.__doc__ or "").split("\n\n")[0].replace("``", "`").strip()
    rows = [
        row
        for name, field in model.model_fields.items()
        if name not in (skipped or ())
        for row in _rows(prefix + name, field)
    ]
    table = ["| key | accepts | default | meaning |", "|---|---|---|---|", *rows]
    return "\n".join([heading, "", about, "", *table, ""])


def _rows(name: str, field: FieldInfo) -> list[str]:
    """The row of a field, or those of the section nested in it."""
    inner = nested_section(field.annotation)
    is_section, is_optional = isinstance(field.annotation, type), NoneType in get_args(field.annotation)
    if inner is None or not (is_section or is_optional):
        return [_row(name, field)]
    rows = [] if is_section else [_row(name, field)]
    for key, nested in inner.model_fields.items():
        rows += _rows(f"{name}.{key}", nested)
    return rows


def _row(name: str, field: FieldInfo) -> str:
    cells = [f"`{name}`", allowed(field), _default(field), field.description or ""]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def shipped_algorithms() -> dict[str, type[AlgorithmConfig]]:
    """The config models of the built-in algorithms by name."""
    # By name, not by import: configuration lies below the algorithms, and only this page looks up at them.
    builtin: Mapping[str, str] = pkgutil.resolve_name("offbeat.algorithms:BUILTIN")
    config_model: AlgorithmModel = pkgutil.resolve_name("offbeat.algorithms:config_model")
    return {name: config_model(name) for name in builtin}


def main() -> None:
    """Write the page to the file named on the command line, ``docs/configuration.md`` by default."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/configuration.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(shipped_algorithms()), encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
