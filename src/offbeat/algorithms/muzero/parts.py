"""Assembly of algorithms with a world model: the parts they share, and those each brings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from offbeat.algorithms.base import Roles
from offbeat.algorithms.muzero.config import num_streams, planning_config
from offbeat.algorithms.muzero.fitting import Fit, fit, fit_environment, players
from offbeat.algorithms.muzero.steps import step_spec
from offbeat.config.models import RunConfig
from offbeat.envs import make_world
from offbeat.errors import ConfigError
from offbeat.ops.compiled import uses_numba
from offbeat.pacing.config import AUTO
from offbeat.replay.streams import StreamReplay
from offbeat.roles import Evaluator, Learner, PerWorker, Ranks, SerialCollector, WorkerContext
from offbeat.types import Array

if TYPE_CHECKING:
    from offbeat.algorithms.muzero.planning import Planner
    from offbeat.algorithms.muzero.policy import MuZeroPolicy

MakePlanner = Callable[[int], "Planner"]
"""Makes a planner for so many roots."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Functions that one algorithm brings; they import torch when they are called.

    ``planner(config, fit, num_trees, lane)``, with None for a lane to evaluate, and ``learner(config, fit)``.
    """

    planner: Callable[[RunConfig, Fit, int, int | None], Planner]
    learner: Callable[[RunConfig, Fit], Learner]


def make_collector(config: RunConfig, parts: Parts, context: WorkerContext) -> SerialCollector:
    """Make a collector with its environments and its planner, inside its worker."""
    from offbeat.algorithms.muzero.collector import MuZeroCollector

    algorithm = planning_config(config)
    world = make_world(config.env, config.envs_per_worker)
    fitted = fit(algorithm, world, config.env.id)
    planner = parts.planner(config, fitted, world.num_envs, context.collector)
    return MuZeroCollector(config, algorithm, world, fitted, planner)


def make_evaluator(config: RunConfig, parts: Parts, context: WorkerContext) -> Evaluator:
    """Make the evaluator with its own environments and planner, inside its worker."""
    from offbeat.algorithms.muzero.evaluator import MuZeroEvaluator

    algorithm, settings = planning_config(config), config.eval
    # Networks and turns are those of the environments that were trained in.
    fitted = fit_environment(config)
    world = make_world(config.eval_env, min(settings.num_envs, settings.episodes))
    planner = parts.planner(config, fitted, world.num_envs, None)
    return MuZeroEvaluator(settings, algorithm, world, fitted, planner)


def make_learner(config: RunConfig, parts: Parts, ranks: Ranks) -> Learner:
    """Make the learner with model, optimizer and replay, inside its process."""
    return parts.learner(config, fit_environment(config))


def make_policy(config: RunConfig, parts: Parts, weights: Mapping[str, Array]) -> MuZeroPolicy:
    """Fit the run's model to its environment and load published weights."""
    from offbeat.algorithms.muzero.policy import MuZeroPolicy

    fitted = fit_environment(config)

    def make(num_trees: int) -> Planner:
        planner = parts.planner(config, fitted, num_trees, None)
        planner.load(weights)
        return planner

    return MuZeroPolicy(planning_config(config), fitted, make, seed=config.run.seed)


def make_roles(config: RunConfig, parts: Parts) -> Roles:
    """Make the roles of a run from an algorithm's parts."""
    algorithm = planning_config(config)
    return Roles(
        collect=PerWorker(partial(make_collector, config, parts)),
        learner=partial(make_learner, config, parts),
        evaluate=PerWorker(partial(make_evaluator, config, parts)),
        policy=partial(make_policy, config, parts),
        mode="replay",
        segments_per_round=config.segments_per_round,
        replay_ratio=1 / config.segments_per_round,
        min_segments=algorithm.min_segments(config),
    )


def replay_bytes(config: RunConfig) -> int:
    """Memory of the replay, known before a run starts."""
    streams = num_streams(config)
    length = planning_config(config).buffer_capacity // streams
    return StreamReplay.num_bytes(step_spec(fit_environment(config)), streams, length)


def check(config: RunConfig) -> None:
    """Fit the model to its environments, and see whether the replay fits into memory."""
    _check_opponent(config)
    needed, free = replay_bytes(config), psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the replay needs {needed / 1e6:,.1f} MB for buffer_capacity"
            f" {planning_config(config).buffer_capacity}, and {free / 1e6:,.1f} MB are free: lower"
            " algorithm.buffer_capacity"
        )


def _check_opponent(config: RunConfig) -> None:
    """Evaluations of a game want somebody to play against: a player who wins against itself loses, too."""
    if not config.eval.at_end and config.eval.interval_rounds is None:
        return
    world = make_world(config.eval_env, 1)
    try:
        count = players(config.env.id, world.single_action_space)
    finally:
        world.close()
    if count == 2:
        raise ConfigError(
            f"evaluations of {config.env.id} have two players: name an opponent by eval.env_kwargs, for"
            " Connect Four {opponent: random} or {opponent: 'minimax:3'}. An environment that answers moves"
            " has action_space.num_players 1"
        )


def _multiplies_bfloat16() -> bool:
    """Return True if this processor reports bfloat16, or reports nothing."""
    told = Path("/proc/cpuinfo")
    flags = told.read_text() if told.exists() else "bf16"
    return "bf16" in flags


def startup_notes(config: RunConfig) -> dict[str, str]:
    """The size of the replay, what is trained when, and how trees are searched."""
    algorithm = planning_config(config)
    steps = algorithm.samples_per_round(config)
    before = steps * (config.first_segments - config.segments_per_round) // config.segments_per_round
    found = {
        "replay": f"{algorithm.buffer_capacity:,} steps, {replay_bytes(config) / 1e6:,.1f} MB;"
        f" {before:,} are collected before those of the first round",
        "updates": f"{algorithm.replay_ratio:g} for each step, {steps * algorithm.replay_ratio:g} a round",
        "trees": "compiled by numba" if uses_numba() else "in numpy; install offbeat[numba] to compile them",
    }
    on_cpu = "cpu" in (config.trainer.device, config.rollout.device)
    if algorithm.network.precision == "bfloat16" and on_cpu and not _multiplies_bfloat16():
        found["precision"] = (
            "bfloat16, which this processor cannot multiply: slow; set algorithm.network.precision=float32"
        )
    if config.async_training.off_policy_degree == AUTO and not fit_environment(config).spec.num_actions:
        found["tuning"] = (
            "k = -1 is tuned by speed alone: of continuous actions there is no learn/search_kl, so nothing"
            " measures what staleness costs. Compare evaluations with those at a fixed k, or lower"
            " async_training.auto_max"
        )
    return found
