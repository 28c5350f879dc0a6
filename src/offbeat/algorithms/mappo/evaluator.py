"""Judges teams: plays whole episodes with frozen weights, in environments of its own. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.judging import check_length, quotas, return_metrics, sampled_metrics
from offbeat.algorithms.mappo.policy import TeamPolicy
from offbeat.config.models import EvalConfig
from offbeat.envs.teams import Team, TeamStep
from offbeat.roles import report_progress
from offbeat.types import Array, Metrics


class Witness(Protocol):
    """Looks on while episodes are played, and has something to say about them at the end."""

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take published weights, and forget what was seen."""
        ...

    def see(
        self,
        policy: TeamPolicy,
        alive: NDArray[np.bool_],
        result: TeamStep,
        counts: NDArray[np.bool_],
    ) -> None:
        """The agents ``alive`` ``[N, A]`` took a step; ``counts`` ``[N]`` says where it is judged."""
        ...

    def metrics(self) -> Metrics:
        """Return the metrics of all steps so far."""
        ...


class TeamEvaluator:
    """Plays exactly ``eval.episodes`` episodes, and others with drawn actions from the same seed."""

    def __init__(
        self, config: EvalConfig, team: Team, policy: TeamPolicy, witness: Witness | None = None
    ) -> None:
        self._config = config
        self._team = team
        self._policy = policy
        self._witness = witness

    def evaluate(self, weights: Mapping[str, Array], seed: int) -> Metrics:
        """Return statistics of returns and lengths, and the share of successes where there are such."""
        config, witness = self._config, self._witness
        self._policy.load(weights)
        if witness is not None:
            witness.load(weights)
        returns, lengths, successes = self._play(seed, config.episodes, config.deterministic, witness)
        metrics = return_metrics(returns, lengths)
        if successes:
            metrics["eval/success_rate"] = float(np.mean(successes))
        if witness is not None:
            metrics |= witness.metrics()
        if config.num_sampled:
            returns, _, _ = self._play(seed, config.num_sampled, deterministic=False, witness=None)
            metrics |= sampled_metrics(returns)
        return metrics

    def _play(
        self, seed: int, episodes: int, deterministic: bool, witness: Witness | None
    ) -> tuple[list[float], list[int], list[bool]]:
        team, num_envs = self._team, self._team.num_envs
        self._policy.reset()
        self._policy.seed(seed)
        kind = "" if deterministic == self._config.deterministic else ", actions drawn"
        missing = quotas(episodes, num_envs)
        view = team.reset(seed)
        totals, steps = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        returns: list[float] = []
        lengths: list[int] = []
        successes: list[bool] = []
        while missing.any():
            counts = missing > 0
            result = team.step(self._policy.act(view, deterministic=deterministic), counts)
            if witness is not None:
                witness.see(self._policy, view.alive, result, counts)
            view, ended = result.view, result.terminated | result.truncated
            self._policy.ended(ended)
            totals += result.rewards
            steps += counts
            for env in np.flatnonzero(ended):
                returns.append(float(totals[env]))
                lengths.append(int(steps[env]))
                if result.success is not None:
                    successes.append(bool(result.success[env]))
                report_progress(f"episode {len(returns)} of {episodes}{kind}")
            missing[ended] -= 1
            totals[ended], steps[ended] = 0, 0
            check_length(steps)
        return returns, lengths, successes
