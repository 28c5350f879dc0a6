"""PPO's collector: steps one lane's environments and writes what the learner needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.ppo.config import PPOConfig, ppo_config
from offbeat.config.models import RunConfig
from offbeat.envs import World, make_world
from offbeat.models.actor import Actor, initial_memory, make_actor
from offbeat.models.spec import NetworkSpec, network_spec
from offbeat.ops.advantages import discounted_returns
from offbeat.roles import WorkerContext
from offbeat.seeding import derive_seed
from offbeat.types import Array, ArraySpec, Episodes, Segment, StateTree, Ticket

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Explore = Callable[[Floats, int], Floats]
"""From the policy's outputs ``[N, P]`` and the version that acts to those that actions are drawn from."""
WIDE = 64
"""Outputs of a step above which log-probabilities are computed step by step."""


@dataclass(slots=True)
class Lane:
    """State of a collector's N environments between two segments."""

    obs: Array
    ended: Bools
    memory: Floats
    discounted: Floats
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @classmethod
    def begin(cls, obs: Array, memory: Floats) -> Self:
        """All environments at the start of an episode."""
        num_envs = len(obs)
        ended = np.zeros(num_envs, np.bool_)
        discounted = np.zeros(num_envs, np.float32)
        return cls(obs, ended, memory, discounted, np.zeros(num_envs), np.zeros(num_envs, np.int64))

    def state_dict(self) -> dict[str, Array]:
        """Copies of all arrays, by name."""
        return {name: getattr(self, name).copy() for name in self.__slots__}


class PPOCollector:
    """Collects segments of ``num_steps`` steps of N environments.

    A segment's arrays: ``obs`` ``[T + 1, N, ...]``, ``actions`` ``[T, N, ...]``, ``logp``, ``rewards``,
    ``terminated``, ``truncated``, ``valid`` ``[T, N]``; ``memory`` ``[N, H]`` before the first step for
    recurrent networks; ``discounted_returns`` ``[T, N]`` when rewards are normalised. ``logp`` is of the
    distribution each action was drawn from, ``explore`` included. Values are the learner's business.
    """

    def __init__(
        self,
        config: PPOConfig,
        world: World,
        spec: NetworkSpec,
        actor: Actor,
        explore: Explore | None = None,
    ) -> None:
        self._config = config
        self._world = world
        self._spec = spec
        self._actor = actor
        self._explore = explore
        self._lane: Lane | None = None
        self._version = 0

    def segment_spec(self) -> dict[str, ArraySpec]:
        """Names, shapes and dtypes of a segment's arrays."""
        return segment_spec(self._config, self._spec, self._world.num_envs)

    def collect(self, ticket: Ticket, weights: Mapping[str, Array]) -> Segment:
        """Collect one segment into arrays of its own."""
        out = {name: spec.empty() for name, spec in self.segment_spec().items()}
        return self.collect_into(ticket, weights, out)

    def collect_into(self, ticket: Ticket, weights: Mapping[str, Array], out: Mapping[str, Array]) -> Segment:
        """Collect one segment into ``out``."""
        self._actor.load(weights)
        if self._lane is None:
            obs = self._world.reset(derive_seed(ticket.seed, "reset"))
            self._lane = Lane.begin(obs, initial_memory(self._spec, len(obs)))
        lane = self._lane
        if self._spec.memory_size:
            out["memory"][:] = lane.memory
        self._version = ticket.version
        self._roll(lane, np.random.Generator(np.random.SFC64(ticket.seed)), out)
        episodes = self._account(lane, out)
        by_env = tuple(np.count_nonzero(out["valid"], axis=0).tolist())
        units, versions = {"env_steps": sum(by_env)}, np.array([ticket.version])
        return Segment(ticket, out, versions, units, episodes, steps_by_env=by_env)

    def state_dict(self) -> StateTree | None:
        """Environments and where they stand; {} before the first segment; None if they cannot be saved."""
        if self._lane is None:
            return {}
        world = self._world.state_dict()
        return None if world is None else {"world": world, "lane": self._lane.state_dict()}

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._lane = None
        if state:
            self._world.load_state_dict(state["world"])
            self._lane = Lane(**{name: np.array(value) for name, value in state["lane"].items()})

    def _roll(self, lane: Lane, rng: np.random.Generator, out: Mapping[str, Array]) -> None:
        """Step the environments T times."""
        head, act, step = self._spec.actions, self._actor.outputs, self._world.step
        num_steps, num_envs = out["rewards"].shape
        noise = head.noise(rng, num_steps, num_envs)
        # One look at all steps is cheaper than one at each, as long as their outputs fit into the cache.
        at_once = head.num_outputs <= WIDE
        outputs = np.empty((num_steps if at_once else 1, num_envs, head.num_outputs), np.float32)
        obs, actions, rewards, valid = out["obs"], out["actions"], out["rewards"], out["valid"]
        logp = out["logp"]
        terminated, truncated = out["terminated"], out["truncated"]
        obs[0], valid[0], memory = lane.obs, ~lane.ended, lane.memory
        for t in range(num_steps):
            row = outputs[t if at_once else 0]
            row[:], memory = act(obs[t], memory)
            if self._explore is not None:
                row[:] = self._explore(row, self._version)
            actions[t] = head.sample(row, noise[t])
            if not at_once:
                logp[t] = head.log_prob(row, actions[t])
            result = step(head.to_env(actions[t], obs[t]))
            obs[t + 1], rewards[t] = result.obs, result.rewards
            terminated[t], truncated[t] = result.terminated, result.truncated
            if memory.size:
                memory = memory * valid[t][:, None]
            if t + 1 < num_steps:
                valid[t + 1] = ~(terminated[t] | truncated[t])
        lane.obs, lane.memory = obs[-1].copy(), memory
        lane.ended = terminated[-1] | truncated[-1]
        if at_once:
            logp[:] = head.log_prob(outputs, actions)

    def _account(self, lane: Lane, out: Mapping[str, Array]) -> Episodes:
        """Move the lane's running sums over the segment; return the episodes that ended in it."""
        rewards, ended = out["rewards"], out["terminated"] | out["truncated"]
        if self._config.normalize_reward:
            stream = out["discounted_returns"]
            stream[:] = discounted_returns(rewards, ended, lane.discounted, gamma=self._config.gamma)
            lane.discounted = np.where(ended[-1], np.float32(0), stream[-1])
        returns = lane.returns + np.cumsum(rewards, axis=0, dtype=np.float64)
        lengths = lane.lengths + np.cumsum(out["valid"], axis=0)
        finished = _finished(returns, lengths, ended)
        lane.returns, lane.lengths = returns[-1], lengths[-1]
        return finished


def segment_spec(config: PPOConfig, network: NetworkSpec, num_envs: int) -> dict[str, ArraySpec]:
    """Names, shapes and dtypes of the arrays in a segment of so many environments."""
    steps, observation, actions = config.num_steps, network.observation, network.actions
    flags = ("terminated", "truncated", "valid")
    specs = {
        "obs": ArraySpec((steps + 1, num_envs, *observation.shape), observation.dtype),
        "actions": ArraySpec((steps, num_envs, *actions.shape), actions.dtype),
        **{name: ArraySpec((steps, num_envs), "float32") for name in ("logp", "rewards")},
        **{name: ArraySpec((steps, num_envs), "bool") for name in flags},
    }
    if network.memory_size:
        specs["memory"] = ArraySpec((num_envs, network.memory_size), "float32")
    if config.normalize_reward:
        specs["discounted_returns"] = ArraySpec((steps, num_envs), "float32")
    return specs


def _finished(returns: NDArray[np.float64], lengths: NDArray[np.int64], ended: Bools) -> Episodes:
    """Take the episodes that ended out of running sums ``[T, N]``; leaves in the last row what goes on."""
    found: list[tuple[float, int]] = []
    for t, env in np.argwhere(ended).tolist():
        total, length = returns[t, env], lengths[t, env]
        found.append((float(total), int(length)))
        returns[t:, env] -= total
        lengths[t:, env] -= length
    return Episodes(tuple(total for total, _ in found), tuple(length for _, length in found))


def make_collector(
    config: RunConfig,
    context: WorkerContext,
    make_explore: Callable[[NetworkSpec], Explore | None] = lambda spec: None,
) -> PPOCollector:
    """Make a collector with its environments and its actor, inside its worker."""
    algorithm = ppo_config(config)
    world = make_world(config.env, config.envs_per_worker)
    spec = network_spec(algorithm.network, world.single_observation_space, world.single_action_space)
    actor = make_actor(spec, num_threads=config.runtime.worker_torch_threads)
    return PPOCollector(algorithm, world, spec, actor, make_explore(spec))
