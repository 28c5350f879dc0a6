"""``offbeat check``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offbeat.cli.output import EXIT_FAILED, JsonFlag, Report, reporting, show_table
from offbeat.cli.train import Overrides
from offbeat.errors import ConfigError, EnvError

if TYPE_CHECKING:
    from offbeat.config.models import RunConfig
    from offbeat.envs.judged import EnvSpaces


def check(
    source: Annotated[
        str,
        typer.Argument(metavar="RECIPE|FILE|RUN", help="A recipe's name, a YAML file or a run's directory."),
    ],
    overrides: Overrides = None,
    no_import: Annotated[
        bool,
        typer.Option("--no-import", help="Import no code that the file names: its values are checked only."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Check a configuration, or the files of a run.

    Of a configuration, show what it would do: its environment is imported and made. Nothing that the files
    of a run name is imported.
    """
    with reporting(as_json) as report:
        from offbeat.config.plan import remarks

        if Path(source).is_dir():
            _check_run(source, overrides or (), report)
        elif no_import:
            config = load_unimported(source, overrides or ())
            _show(config, None, {}, remarks(config), report)
        else:
            _check_config(source, overrides or (), report)


def _check_config(source: str, overrides: Sequence[str], report: Report) -> None:
    import offbeat
    from offbeat.config.code import announce_env, announced_imports
    from offbeat.config.plan import remarks
    from offbeat.observe import check_sinks
    from offbeat.run.start import check_devices, check_ranks

    with announced_imports():
        config = offbeat.load_config(source, overrides)
        announce_env(config)
        check_devices(config)
        check_ranks(config)
        check_sinks(config.observe)
        seen, facts = probe_environment(config), probe_algorithm(config)
        _show(config, seen.step_bytes, facts, [*seen.notes, *remarks(config)], report)


def _show(
    config: RunConfig, step_bytes: int | None, facts: dict[str, str], notes: Sequence[str], report: Report
) -> None:
    from offbeat.config.plan import describe, plan

    print(describe(config, step_bytes, facts, notes))
    report.values.update(
        config=config.resolved().model_dump(),
        plan={**plan(config, step_bytes), **facts},
        notes=list(notes),
    )


def _check_run(run: str, overrides: Sequence[str], report: Report) -> None:
    from offbeat.cli.check_run import examine
    from offbeat.cli.status import check_is_run

    if overrides:
        raise ConfigError(f"{run} is the directory of a run, which is checked as it is: leave KEY=VALUE out")
    check_is_run(Path(run))
    rows, problems = examine(Path(run))
    verdict = f"PROBLEMS with {', '.join(problems)}" if problems else "whole"
    show_table(f"check of {run}: {verdict}", rows)
    report.values.update(run_dir=run, found=rows, problems_with=problems)
    report.exit_code = EXIT_FAILED if problems else 0


def load_unimported(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a configuration without the code it names; of foreign algorithms, any settings are taken."""
    from pydantic import ConfigDict

    from offbeat import algorithms
    from offbeat.config import loader
    from offbeat.config.models import AlgorithmConfig

    class Unknown(AlgorithmConfig):
        """Settings of an algorithm whose code is not imported."""

        model_config = ConfigDict(extra="allow")

    def model(name: str) -> type[AlgorithmConfig]:
        return algorithms.config_model(name) if name in algorithms.BUILTIN else Unknown

    config = loader.load_config(source, overrides, algorithm_model=model, algorithms=algorithms.BUILTIN)
    if isinstance(config.algorithm, Unknown):
        name = config.algorithm.name
        print(f"note: the settings of {name} were not checked: its code is not imported", file=sys.stderr)
    return config


def probe_environment(config: RunConfig) -> EnvSpaces:
    """Make one environment, look at it and take a step in it."""
    from offbeat import algorithms
    from offbeat.cli.doctor import random_play
    from offbeat.envs.judged import EnvSpaces, check_eval_env

    probe = algorithms.find(config.algorithm.name).probe_env
    if probe is None:
        return EnvSpaces({}, 0)
    try:
        seen = probe(config.env)
        check_eval_env(config, probe)
        take_step, close = random_play(config.env.model_copy(update={"num_envs": 1}))
        take_step(0)
        close()
    except EnvError as error:
        raise ConfigError(f"env.id = {config.env.id!r}: {error}") from error
    return seen


def probe_algorithm(config: RunConfig) -> dict[str, str]:
    """Run the algorithm's checks of the environment, and return its notes on the run by name."""
    from offbeat import algorithms

    algorithm = algorithms.find(config.algorithm.name)
    try:
        if algorithm.check is not None:
            algorithm.check(config)
    except EnvError as error:
        raise ConfigError(f"env.id = {config.env.id!r}: {error}") from error
    return {} if algorithm.startup_notes is None else dict(algorithm.startup_notes(config))
