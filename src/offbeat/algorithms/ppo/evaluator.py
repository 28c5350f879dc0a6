"""PPO's evaluator: plays whole episodes with frozen weights, in environments of its own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from offbeat.algorithms.judging import check_length, quotas, return_metrics, sampled_metrics
from offbeat.algorithms.ppo.config import ppo_config
from offbeat.config.models import EvalConfig, RunConfig
from offbeat.envs import World, make_world
from offbeat.models.actor import Actor, initial_memory, make_actor
from offbeat.models.spec import NetworkSpec, network_spec
from offbeat.roles import WorkerContext, report_progress
from offbeat.types import Array, Metrics


class PPOEvaluator:
    """Plays exactly ``eval.episodes`` episodes, and others with drawn actions from the same seed."""

    def __init__(self, config: EvalConfig, world: World, spec: NetworkSpec, actor: Actor) -> None:
        self._config = config
        self._world = world
        self._spec = spec
        self._actor = actor

    def evaluate(self, weights: Mapping[str, Array], seed: int) -> Metrics:
        """Return mean, deviation, least and largest return, mean length and number of episodes."""
        config = self._config
        self._actor.load(weights)
        metrics = return_metrics(*self._play(seed, config.episodes, config.deterministic))
        if config.num_sampled:
            returns, _ = self._play(seed, config.num_sampled, deterministic=False)
            metrics |= sampled_metrics(returns)
        return metrics

    def _play(self, seed: int, episodes: int, deterministic: bool) -> tuple[list[float], list[int]]:
        num_envs, rng = self._world.num_envs, np.random.default_rng(seed)
        kind = "" if deterministic == self._config.deterministic else ", actions drawn"
        missing = quotas(episodes, num_envs)
        obs, memory = self._world.reset(seed), initial_memory(self._spec, num_envs)
        totals, steps = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        ended = np.zeros(num_envs, np.bool_)
        returns: list[float] = []
        lengths: list[int] = []
        while missing.any():
            valid = ~ended
            actions, memory = self._act(obs, memory, None if deterministic else rng)
            result = self._world.step(actions)
            obs, ended = result.obs, result.terminated | result.truncated
            memory = memory * valid[:, None]
            totals += result.rewards * valid
            steps += valid
            for env in np.flatnonzero(ended & (missing > 0)):
                returns.append(float(totals[env]))
                lengths.append(int(steps[env]))
                report_progress(f"episode {len(returns)} of {episodes}{kind}")
            missing[ended] = np.maximum(missing[ended] - 1, 0)
            totals[ended], steps[ended] = 0, 0
            check_length(steps)
        return returns, lengths

    def _act(self, obs: Array, memory: Array, rng: np.random.Generator | None) -> tuple[Array, Array]:
        head = self._spec.actions
        stored = np.asarray(obs, self._spec.observation.dtype)
        outputs, memory = self._actor.outputs(stored, memory)
        if rng is None:
            return head.to_env(head.mode(outputs), stored), memory
        return head.to_env(head.sample(outputs, head.noise(rng, 1, len(obs))[0]), stored), memory


def make_evaluator(config: RunConfig, context: WorkerContext) -> PPOEvaluator:
    """Make the evaluator with its own environments and actor, inside its worker."""
    network, settings = ppo_config(config).network, config.eval
    world = make_world(config.eval_env, min(settings.num_envs, settings.episodes))
    spec = network_spec(network, world.single_observation_space, world.single_action_space)
    actor = make_actor(spec, num_threads=config.runtime.worker_torch_threads)
    return PPOEvaluator(settings, world, spec, actor)
