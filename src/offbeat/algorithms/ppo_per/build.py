"""From a run's configuration to the roles of PPO with prioritized replay. No torch."""

from __future__ import annotations

from functools import partial

import psutil

from offbeat.algorithms.base import Roles
from offbeat.algorithms.ppo.augment import make_augment
from offbeat.algorithms.ppo.collector import Explore, make_collector, segment_spec
from offbeat.algorithms.ppo.evaluator import make_evaluator
from offbeat.algorithms.ppo.policy import environment_spec, make_policy
from offbeat.algorithms.ppo_per.config import PPOPERConfig, per_config
from offbeat.algorithms.ppo_per.items import item_spec
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError
from offbeat.models.actions import Explores
from offbeat.models.spec import NetworkSpec, device_for
from offbeat.replay.prioritized import PrioritizedReplay
from offbeat.roles import Learner, PerWorker, Ranks


def _make_learner(config: RunConfig, ranks: Ranks) -> Learner:
    """Make the learner inside its process; only then is torch imported."""
    from offbeat.algorithms.ppo_per.make import make_learner

    return make_learner(config, ranks)


def make_explore(config: PPOPERConfig, spec: NetworkSpec) -> Explore | None:
    """Make the exploration between a policy's outputs and the actions drawn; None: there is none."""
    head = spec.actions
    if config.explore_epsilon == 0 and config.explore_temperature == 1:
        return None
    if not isinstance(head, Explores):
        raise ConfigError(
            "explore_epsilon and explore_temperature are for discrete actions: leave them at 0 and 1"
        )
    explore, temperature = head.explore, config.explore_temperature
    return lambda outputs, version: explore(
        outputs, temperature=temperature, epsilon=config.epsilon_at(version)
    )


def replay_bytes(config: RunConfig) -> int:
    """Memory of one replay of a run, all of it, known before it starts."""
    algorithm, network = per_config(config), environment_spec(config)
    make_explore(algorithm, network)
    spec = item_spec(segment_spec(algorithm, network, 1))
    return PrioritizedReplay.num_bytes(spec, algorithm.buffer_capacity)


def check(config: RunConfig) -> None:
    """Make one environment, fit the network to it, and see whether the replay fits into memory."""
    device_for(environment_spec(config), config.trainer.device, config.learner.num_ranks)
    make_augment(config)
    needed, free = replay_bytes(config) * _copies(config), psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"the replay needs {_size(needed)} for buffer_capacity {per_config(config).buffer_capacity},"
            f" and {_size(free)} are free: lower algorithm.buffer_capacity or algorithm.num_steps"
        )


def startup_notes(config: RunConfig) -> dict[str, str]:
    """The size of the replay, what is short of it, and a learning rate with which nothing may be learned."""
    algorithm = per_config(config)
    items = f"{algorithm.buffer_capacity:,} segments of {algorithm.num_steps} steps"
    where = f" in each of {config.learner.num_ranks} ranks" if config.learner.num_ranks > 1 else ""
    if algorithm.shared_buffer:
        where = " in a Ray actor of its own"
    found = {"replay": f"{items}, {_size(replay_bytes(config))}{where}"}
    wanted = round(algorithm.fresh_fraction * algorithm.batch_size)
    arriving = config.segments_per_round * config.envs_per_worker
    if wanted > arriving:
        found["fresh segments"] = f"{arriving} arrive a round, fewer than the {wanted} that a batch asks for"
    remark = algorithm.lr_remark(environment_spec(config).kind)
    return found if remark is None else {**found, "learning rate": remark}


def _copies(config: RunConfig) -> int:
    """Replays on one machine: each rank has its own, unless they share one."""
    is_shared = per_config(config).shared_buffer
    return 1 if is_shared else max(1, config.learner.num_ranks // config.trainer.nnodes)


def build(config: RunConfig) -> Roles:
    """The roles of a run."""
    algorithm = per_config(config)
    config = config.model_copy(update={"algorithm": algorithm})
    assert algorithm.replay_ratio != "auto"
    return Roles(
        collect=PerWorker(partial(make_collector, config, make_explore=partial(make_explore, algorithm))),
        learner=partial(_make_learner, config),
        evaluate=PerWorker(partial(make_evaluator, config)),
        policy=partial(make_policy, config),
        mode="replay",
        segments_per_round=config.segments_per_round,
        replay_ratio=algorithm.replay_ratio,
        min_segments=algorithm.min_segments(config),
        warmup_s=algorithm.warmup_seconds,
        data_parallel=True,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"
