"""A world whose episodes have known lengths, and short cuts to PPO's roles in it."""

from dataclasses import dataclass, field

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from offbeat.algorithms.ppo import PPOConfig
from offbeat.algorithms.ppo.collector import PPOCollector
from offbeat.algorithms.ppo.learner import PPOLearner
from offbeat.config.models import AsyncTrainingConfig, EnvConfig, RunConfig
from offbeat.envs import Step
from offbeat.models.actor import make_actor
from offbeat.models.spec import network_spec
from offbeat.types import Batch, Ticket

FLOATS = Box(-np.inf, np.inf, (3,), np.float32)


@dataclass
class FakeWorld:
    """Environment i plays episodes of ``lengths[i]`` steps, odd ones truncated; rewards count 1, 2, 3, ...

    Observations are random; actions are remembered in ``seen``.
    """

    lengths: tuple[int, ...]
    single_observation_space: Box = field(default_factory=lambda: FLOATS)
    single_action_space: Space = field(default_factory=lambda: Discrete(2))
    seen: list = field(default_factory=list)

    def __post_init__(self):
        self.num_envs = len(self.lengths)

    def reset(self, seed):
        self._rng = np.random.default_rng(seed)
        self._age = np.zeros(self.num_envs, np.int64)
        self._ended = np.zeros(self.num_envs, bool)
        return self._observe()

    def step(self, actions):
        self.seen.append(np.array(actions))
        self._age = np.where(self._ended, 0, self._age + 1)
        rewards = self._age.astype(np.float64)
        self._ended = self._age == np.array(self.lengths)
        odd = np.arange(self.num_envs) % 2 == 1
        return Step(self._observe(), rewards, self._ended & ~odd, self._ended & odd)

    def state_dict(self):
        return {"rng": self._rng.bit_generator.state, "age": self._age.copy(), "ended": self._ended.copy()}

    def load_state_dict(self, state):
        self._rng = np.random.default_rng()
        self._rng.bit_generator.state = state["rng"]
        self._age, self._ended = state["age"].copy(), state["ended"].copy()

    def close(self):
        pass

    def _observe(self):
        space = self.single_observation_space
        shape = (self.num_envs, *space.shape)
        if space.dtype == np.float32:
            return self._rng.normal(2, 3, shape).astype(np.float32)
        return self._rng.integers(0, 2, shape).astype(space.dtype)


def settings(off_policy_degree=0, **algorithm):
    """Resolved PPO settings of a small run."""
    chosen = {
        "num_steps": 8,
        "num_epochs": 2,
        "minibatch_size": 12,
        "network": {"hidden": (8, 8)},
    } | algorithm
    run = RunConfig(
        algorithm=PPOConfig(**chosen),
        env=EnvConfig(id="fake"),
        async_training=AsyncTrainingConfig(off_policy_degree=off_policy_degree),
    )
    return run.algorithm.resolved(run)


def make_collector(config, world):
    """A collector in a fake world."""
    spec = network_spec(config.network, world.single_observation_space, world.single_action_space)
    return PPOCollector(config, world, spec, make_actor(spec))


def make_learner(config, world, seed=0):
    """A learner for a fake world."""
    spec = network_spec(config.network, world.single_observation_space, world.single_action_space)
    return PPOLearner(config, spec, seed=seed)


def ticket(number=0, version=0):
    """A ticket whose seed depends on its number."""
    return Ticket(number=number, collector=0, version=version, deadline=version, seed=1000 + number)


def collect_batch(collector, learner, version=0, number=0, num_segments=1, of_version=None):
    """A round's batch of fresh segments, or of segments that claim an older version."""
    of_version = version if of_version is None else of_version
    weights = learner.weights()
    segments = [collector.collect(ticket(number + i, of_version), weights) for i in range(num_segments)]
    return Batch(version, tuple(segments), version - of_version)


def train_rounds(collector, learner, rounds, first=0):
    """Serial rounds of two fresh segments each; returns the last metrics."""
    metrics = {}
    for version in range(first, first + rounds):
        metrics = learner.train(collect_batch(collector, learner, version, 2 * version, num_segments=2))
    return metrics
