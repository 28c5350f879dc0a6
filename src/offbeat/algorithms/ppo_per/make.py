"""Making the learner of PPO with prioritized replay, in the process it is to live in."""

from __future__ import annotations

import torch

from offbeat.algorithms.ppo.augment import make_augment
from offbeat.algorithms.ppo.collector import segment_spec
from offbeat.algorithms.ppo.policy import environment_spec
from offbeat.algorithms.ppo_per.config import per_config
from offbeat.algorithms.ppo_per.items import item_spec
from offbeat.algorithms.ppo_per.learner import PPOPERLearner
from offbeat.algorithms.ppo_per.ranked import RankedReplay, agreed
from offbeat.config.models import RunConfig
from offbeat.models.ranks import choose_device
from offbeat.models.spec import NetworkSpec
from offbeat.replay import PrioritizedReplay, Replay, SharedReplayBuffer
from offbeat.replay.shared import is_ray_actor
from offbeat.roles import Ranks


def make_learner(config: RunConfig, ranks: Ranks) -> PPOPERLearner:
    """Make the learner of a run, or one of its ranks, in the calling process."""
    # Before the parameters are drawn: their orthogonal bases must not depend on the number of threads.
    torch.set_num_threads(config.runtime.torch_threads)
    algorithm, spec = per_config(config), environment_spec(config)
    return PPOPERLearner(
        algorithm,
        spec,
        make_replay(config, spec, ranks),
        seed=config.run.seed,
        device=config.trainer.device,
        ranks=ranks,
        staleness_threshold=config.async_training.staleness_threshold,
        augment=make_augment(config),
    )


def make_replay(config: RunConfig, spec: NetworkSpec, ranks: Ranks) -> Replay:
    """The replay of a learner: of its own, or one in a Ray actor that its ranks share.

    A run that is repeated lives in no actor: there each rank has its own, with the same draws.
    """
    algorithm = per_config(config)
    items = item_spec(segment_spec(algorithm, spec, 1))
    capacity, alpha = algorithm.buffer_capacity, algorithm.per_alpha
    device = choose_device(config.trainer.device, ranks.rank)
    if not algorithm.shared_buffer or not agreed(ranks, is_ray_actor(), device):
        return PrioritizedReplay(items, capacity, alpha=alpha)
    shared = None
    if ranks.rank == 0:
        shared = SharedReplayBuffer.start(
            items,
            capacity,
            alpha=alpha,
            resources=config.runtime.ray.store_resources,
            timeout_s=config.async_training.sync_timeout,
            start_timeout_s=config.runtime.start_timeout_s,
        )
    return RankedReplay(shared, capacity, ranks, device) if shared is None or ranks.size > 1 else shared
