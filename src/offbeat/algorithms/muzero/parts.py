"""How algorithms with a world model are put together: what they share, and what each brings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from offbeat.algorithms.base import Roles
from offbeat.algorithms.muzero.config import num_streams, planning_config
from offbeat.algorithms.muzero.fitting import Fit, fit, fit_environment, players
from offbeat.algorithms.muzero.steps import step_spec
from offbeat.config.models import RunConfig
from offbeat.envs import make_world
from offbeat.errors import ConfigError
from offbeat.ops.compiled import uses_numba
from offbeat.replay.streams import StreamReplay
from offbeat.roles import Evaluator, Learner, PerWorker, Ranks, SerialCollector, WorkerContext
from offbeat.types import Array

if TYPE_CHECKING:
    from offbeat.algorithms.muzero.planning import Planner

MakePlanner = Callable[[int], "Planner"]
"""Makes a planner for so many roots."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What one algorithm brings: functions that import torch when they are called.

    ``planner(config, fit, num_trees, lane)``, with None for a lane to evaluate, and ``learner(config, fit)``.
    """

    planner: Callable[[RunConfig, Fit, int, int | None], Planner]
    learner: Callable[[RunConfig, Fit], Learner]


@dataclass(frozen=True, slots=True)
class MakeCollector:
    """Makes a lane's collector inside its worker."""

    config: RunConfig
    parts: Parts

    def __call__(self, context: WorkerContext) -> SerialCollector:
        """Make the lane's environments and its planner."""
        from offbeat.algorithms.muzero.collector import MuZeroCollector

        algorithm = planning_config(self.config)
        world = make_world(self.config.env, self.config.envs_per_worker)
        fitted = fit(algorithm, world, self.config.env.id)
        planner = self.parts.planner(self.config, fitted, world.num_envs, context.collector)
        return MuZeroCollector(self.config, algorithm, world, fitted, planner)


@dataclass(frozen=True, slots=True)
class MakeEvaluator:
    """Makes the evaluator inside its worker."""

    config: RunConfig
    parts: Parts

    def __call__(self, context: WorkerContext) -> Evaluator:
        """Make the evaluator's own environments and planner."""
        from offbeat.algorithms.muzero.evaluator import MuZeroEvaluator

        algorithm, judged = planning_config(self.config), self.config.eval
        # Networks and turns are those of the environments that were trained in.
        fitted = fit_environment(self.config)
        world = make_world(self.config.eval_env, min(judged.num_envs, judged.episodes))
        planner = self.parts.planner(self.config, fitted, world.num_envs, None)
        return MuZeroEvaluator(judged, algorithm, world, fitted, planner)


@dataclass(frozen=True, slots=True)
class MakeLearner:
    """Makes the learner inside its process."""

    config: RunConfig
    parts: Parts

    def __call__(self, ranks: Ranks) -> Learner:
        """Make model, optimizer and replay."""
        return self.parts.learner(self.config, fit_environment(self.config))


@dataclass(frozen=True, slots=True)
class MakePolicy:
    """Turns published weights of a run into a policy."""

    config: RunConfig
    parts: Parts

    def __call__(self, weights: Mapping[str, Array]) -> Any:
        """Fit the run's model to its environment and load the weights."""
        from offbeat.algorithms.muzero.policy import MuZeroPolicy

        fitted = fit_environment(self.config)

        def make(num_trees: int) -> Planner:
            planner = self.parts.planner(self.config, fitted, num_trees, None)
            planner.load(weights)
            return planner

        return MuZeroPolicy(planning_config(self.config), fitted, make, seed=self.config.run.seed)


@dataclass(frozen=True, slots=True)
class Build:
    """Makes the roles of a run from an algorithm's parts."""

    parts: Parts

    def __call__(self, config: RunConfig) -> Roles:
        """The roles of a run."""
        algorithm = planning_config(config)
        return Roles(
            collect=PerWorker(MakeCollector(config, self.parts)),
            learner=MakeLearner(config, self.parts),
            evaluate=PerWorker(MakeEvaluator(config, self.parts)),
            policy=MakePolicy(config, self.parts),
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
    """Whether this processor says that it can; where it says nothing, yes."""
    told = Path("/proc/cpuinfo")
    flags = told.read_text() if told.exists() else "bf16"
    return "bf16" in flags


def facts(config: RunConfig) -> dict[str, str]:
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
    return found
