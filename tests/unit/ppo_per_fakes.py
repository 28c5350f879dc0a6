"""Short cuts to the roles of PPO with prioritized replay, and a look at what a round did."""

import numpy as np

from offbeat.algorithms.ppo.collector import PPOCollector, segment_spec
from offbeat.algorithms.ppo_per import PPOPERConfig
from offbeat.algorithms.ppo_per.build import make_explore
from offbeat.algorithms.ppo_per.items import item_spec
from offbeat.algorithms.ppo_per.learner import PPOPERLearner
from offbeat.config.models import AsyncTrainingConfig, EnvConfig, RunConfig, RunSection, RuntimeConfig
from offbeat.models.actor import make_actor
from offbeat.models.spec import network_spec
from offbeat.replay import PrioritizedReplay
from offbeat.roles import SingleRank

LENGTHS = (3, 5, 100, 7)


def run_config(algorithm, degree=0, rounds=40, num_envs=4, num_workers=1, **dial):
    """A run of this algorithm."""
    return RunConfig(
        algorithm=algorithm,
        env=EnvConfig(id="fake", num_envs=num_envs),
        async_training=AsyncTrainingConfig(off_policy_degree=degree, **dial),
        runtime=RuntimeConfig(num_workers=num_workers),
        run=RunSection(rounds=rounds),
    )


def settings(degree=0, rounds=40, **algorithm):
    """Resolved settings of a small run: six segments of eight steps a batch."""
    chosen = {
        "num_steps": 8,
        "num_epochs": 2,
        "minibatch_size": 16,
        "batch_size": 6,
        "buffer_capacity": 24,
        "network": {"hidden": (8, 8)},
    } | algorithm
    run = run_config(PPOPERConfig(**chosen), degree, rounds)
    return run.algorithm.resolved(run)


def spec_for(config, world):
    """The network of these settings, fitted to a world."""
    return network_spec(config.network, world.single_observation_space, world.single_action_space)


def make_collector(config, world):
    """A collector that explores as the settings say."""
    spec = spec_for(config, world)
    return PPOCollector(config, world, spec, make_actor(spec), make_explore(config, spec))


def make_learner(config, world, seed=0, ranks=None, staleness_threshold=0):
    """A learner with an empty replay."""
    spec = spec_for(config, world)
    items = item_spec(segment_spec(config, spec, 1))
    return PPOPERLearner(
        config,
        spec,
        PrioritizedReplay(items, config.buffer_capacity, alpha=config.per_alpha),
        seed=seed,
        device="cpu",
        ranks=ranks or SingleRank(),
        staleness_threshold=staleness_threshold,
    )


class Watched:
    """What a learner drew and learnt, update by update; made around a learner that goes on as before."""

    def __init__(self, learner):
        self.draws, self.lessons = [], []
        self._learner, self._draw, self._learn = learner, learner._draw, learner._learn
        learner._draw, learner._learn = self._keep_draw, self._keep_lesson

    def stop(self):
        """Look no longer."""
        self._learner._draw, self._learner._learn = self._draw, self._learn

    def _keep_draw(self, *args):
        self.draws.append(self._draw(*args))
        return self.draws[-1]

    def _keep_lesson(self, *args, **options):
        self.lessons.append(self._learn(*args, **options))
        return self.lessons[-1]


def leaves(learner):
    """Priorities to the power of alpha of what the learner's replay holds, by slot."""
    return learner.state_dict()["replay"]["leaves"]


def spread_priorities(learner):
    """Give the segments in the learner's replay priorities of very different size."""
    replay = learner._replay
    everything = replay.sample_uniform(np.random.default_rng(0), len(replay)).handles
    assert replay.update(everything, np.geomspace(0.01, 100.0, len(replay))) == len(replay)


def flat(learner):
    """All parameters of a learner."""
    return np.concatenate([array.ravel() for array in learner.state_dict()["parameters"].values()])
