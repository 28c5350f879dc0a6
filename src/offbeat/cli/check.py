"""``offbeat check``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.output import JsonFlag, reporting
from offbeat.cli.train import Overrides
from offbeat.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from offbeat.config.models import RunConfig
    from offbeat.envs.judged import EnvLook


def check(
    source: Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name or a YAML file.")],
    overrides: Overrides = None,
    as_json: JsonFlag = False,
) -> None:
    """Check a configuration and show what it would do, without training."""
    with reporting(as_json) as report:
        import offbeat
        from offbeat.config.plan import describe, plan, remarks
        from offbeat.observe import check_sinks
        from offbeat.run.start import check_ranks

        config = offbeat.load_config(source, overrides or [])
        check_ranks(config)
        check_sinks(config.observe)
        seen, facts = probe_environment(config), probe_algorithm(config)
        step_bytes, notes = seen.step_bytes, [*seen.notes, *remarks(config)]
        print(describe(config, step_bytes, facts, notes))
        report.values.update(
            config=config.resolved().model_dump(),
            plan={**plan(config, step_bytes), **facts},
            notes=notes,
        )


def probe_environment(config: RunConfig) -> EnvLook:
    """Make one environment, look at it and take a step in it."""
    from offbeat import algorithms
    from offbeat.cli.doctor import random_play
    from offbeat.envs.judged import EnvLook, check_eval_env

    look = algorithms.find(config.algorithm.name).look
    if look is None:
        return EnvLook({}, 0)
    try:
        seen = look(config.env)
        check_eval_env(config, look)
        take_step, close = random_play(config.env.model_copy(update={"num_envs": 1}))
        take_step(0)
        close()
    except EnvError as error:
        raise ConfigError(f"env.id = {config.env.id!r}: {error}") from error
    return seen


def probe_algorithm(config: RunConfig) -> dict[str, str]:
    """Let the algorithm look at the environment, and say what is worth knowing before a run."""
    from offbeat import algorithms

    algorithm = algorithms.find(config.algorithm.name)
    try:
        if algorithm.check is not None:
            algorithm.check(config)
    except EnvError as error:
        raise ConfigError(f"env.id = {config.env.id!r}: {error}") from error
    return dict(algorithm.facts(config)) if algorithm.facts is not None else {}
