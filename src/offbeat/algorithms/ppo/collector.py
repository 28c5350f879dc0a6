"""PPO's collector: steps one lane's environments and writes what the learner needs."""

from __future__ import annotations

from collections.abc import Mapping
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


@dataclass(slots=True)
class Lane:
    """Where a collector's N environments stand between two segments."""

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
    distribution each action was drawn from. Values are the learner's business.
    """

    def __init__(self, config: PPOConfig, world: World, spec: NetworkSpec, actor: Actor) -> None:
        self._config = config
        self._world = world
        self._spec = spec
        self._actor = actor
        self._lane: Lane | None = None

    def segment_spec(self) -> dict[str, ArraySpec]:
        """Names, shapes and dtypes of a segment's arrays."""
        steps, envs = self._config.num_steps, self._world.num_envs
        observation, actions = self._spec.observation, self._spec.actions
        flags = ("terminated", "truncated", "valid")
        specs = {
            "obs": ArraySpec((steps + 1, envs, *observation.shape), observation.dtype),
            "actions": ArraySpec((steps, envs, *actions.shape), actions.dtype),
            **{name: ArraySpec((steps, envs), "float32") for name in ("logp", "rewards")},
            **{name: ArraySpec((steps, envs), "bool") for name in flags},
        }
        if self._spec.memory_size:
            specs["memory"] = ArraySpec((envs, self._spec.memory_size), "float32")
        if self._config.normalize_reward:
            specs["discounted_returns"] = ArraySpec((steps, envs), "float32")
        return specs

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
        outputs = self._roll(lane, np.random.Generator(np.random.SFC64(ticket.seed)), out)
        out["logp"][:] = self._spec.actions.log_prob(outputs, out["actions"])
        episodes = self._account(lane, out)
        num_steps = int(np.count_nonzero(out["valid"]))
        return Segment(ticket, out, np.array([ticket.version]), {"env_steps": num_steps}, episodes)

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

    def _roll(self, lane: Lane, rng: np.random.Generator, out: Mapping[str, Array]) -> Floats:
        """Step the environments T times; return the actor's outputs ``[T, N, P]``."""
        head, act, step = self._spec.actions, self._actor.outputs, self._world.step
        num_steps, num_envs = out["rewards"].shape
        noise = head.noise(rng, num_steps, num_envs)
        outputs = np.empty((num_steps, num_envs, head.num_outputs), np.float32)
        obs, actions, rewards, valid = out["obs"], out["actions"], out["rewards"], out["valid"]
        terminated, truncated = out["terminated"], out["truncated"]
        obs[0], valid[0], memory = lane.obs, ~lane.ended, lane.memory
        for t in range(num_steps):
            outputs[t], memory = act(obs[t], memory)
            actions[t] = head.sample(outputs[t], noise[t])
            result = step(head.to_env(actions[t]))
            obs[t + 1], rewards[t] = result.obs, result.rewards
            terminated[t], truncated[t] = result.terminated, result.truncated
            if memory.size:
                memory = memory * valid[t][:, None]
            if t + 1 < num_steps:
                valid[t + 1] = ~(terminated[t] | truncated[t])
        lane.obs, lane.memory = obs[-1].copy(), memory
        lane.ended = terminated[-1] | truncated[-1]
        return outputs

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


def _finished(returns: NDArray[np.float64], lengths: NDArray[np.int64], ended: Bools) -> Episodes:
    """Take the episodes that ended out of running sums ``[T, N]``; leaves in the last row what goes on."""
    found: list[tuple[float, int]] = []
    for t, env in np.argwhere(ended).tolist():
        total, length = returns[t, env], lengths[t, env]
        found.append((float(total), int(length)))
        returns[t:, env] -= total
        lengths[t:, env] -= length
    return Episodes(tuple(total for total, _ in found), tuple(length for _, length in found))


@dataclass(frozen=True, slots=True)
class MakeCollector:
    """Makes a lane's collector inside its worker."""

    config: RunConfig

    def __call__(self, context: WorkerContext) -> PPOCollector:
        """Make the lane's environments and its actor."""
        algorithm = ppo_config(self.config)
        world = make_world(self.config.env, self.config.envs_per_worker)
        spec = network_spec(algorithm.network, world.single_observation_space, world.single_action_space)
        actor = make_actor(spec, num_threads=self.config.runtime.worker_torch_threads)
        return PPOCollector(algorithm, world, spec, actor)
