"""MuZero's evaluator: plays whole episodes with frozen weights, in environments of its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from offbeat.algorithms.judging import check_length, quotas, return_metrics
from offbeat.algorithms.muzero.config import PlanningConfig
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.lane import Lane
from offbeat.algorithms.muzero.planning import Planner
from offbeat.config.models import EvalConfig
from offbeat.envs import World
from offbeat.roles import report_progress
from offbeat.seeding import derive_seed
from offbeat.types import Array, Metrics


class MuZeroEvaluator:
    """Plays exactly ``eval.episodes`` episodes, each environment a number fixed beforehand."""

    def __init__(
        self, config: EvalConfig, algorithm: PlanningConfig, world: World, fit: Fit, planner: Planner
    ) -> None:
        self._config, self._algorithm = config, algorithm
        self._world, self._fit, self._planner = world, fit, planner

    def evaluate(self, weights: Mapping[str, Array], seed: int) -> Metrics:
        """Return mean, deviation, least and largest return, mean length and number of episodes."""
        self._planner.load(weights)
        returns, lengths = self._play(seed)
        metrics = return_metrics(returns, lengths)
        if self._fit.two_player:
            metrics["eval/win_rate"] = float(np.mean(np.array(returns) > 0))
            metrics["eval/loss_rate"] = float(np.mean(np.array(returns) < 0))
        return metrics

    def _play(self, seed: int) -> tuple[list[float], list[int]]:
        world, fit, algorithm = self._world, self._fit, self._algorithm
        rngs = [np.random.default_rng(derive_seed(seed, "tree", tree)) for tree in range(world.num_envs)]
        missing = quotas(self._config.episodes, world.num_envs)
        lane = Lane.begin(world.reset(seed), algorithm.context, fit)
        returns: list[float] = []
        lengths: list[int] = []
        temperature = 0.0 if self._config.deterministic else algorithm.search.temperature
        while missing.any():
            plan = self._planner.plan(lane.roots(fit), rngs, explores=False)
            actions = plan.act(temperature, rngs)
            step = world.step(fit.to_env(actions))
            lane.returns += step.rewards
            lane.lengths += ~lane.ended
            ended = step.terminated | step.truncated
            for env in np.flatnonzero(ended & (missing > 0)):
                returns.append(float(lane.returns[env]))
                lengths.append(int(lane.lengths[env]))
                report_progress(f"episode {len(returns)} of {self._config.episodes}")
            missing[ended] = np.maximum(missing[ended] - 1, 0)
            lane.returns[ended], lane.lengths[ended] = 0, 0
            check_length(lane.lengths)
            lane.move(actions, step.obs, ended)
        return returns, lengths
