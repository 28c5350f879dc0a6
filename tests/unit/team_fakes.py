"""A team whose observations tell everything: environment, episode, step and agent."""

from __future__ import annotations

import gymnasium
import numpy as np

from offbeat.envs.teams.team import TeamStep, View
from offbeat.models.actions import CategoricalActions
from offbeat.models.team_spec import TeamSpec


class CountingTeam:
    """N environments with A agents; environment i's episodes have ``lengths[i]`` steps, the team earns 1 a
    step.

    An observation is (environment, episode, step, agent); the state is (environment, episode, step).
    """

    def __init__(self, lengths, num_agents=2, truncates=(), num_actions=3, legal=None, absent=()):
        self.num_envs, self.num_agents = len(lengths), num_agents
        self.obs_size, self.state_size = 4, 3
        self.single_action_space = gymnasium.spaces.Discrete(num_actions)
        self.has_legal = legal is not None
        self._legal, self._absent = legal, absent
        self._lengths = np.array(lengths)
        self._truncates = np.isin(np.arange(len(lengths)), truncates)
        self._episode = np.zeros(self.num_envs, np.int64)
        self._step = np.zeros(self.num_envs, np.int64)
        self.seen_actions = []

    def reset(self, seed):
        self._episode[:], self._step[:] = 0, 0
        return self._view()

    def step(self, actions, active=None):
        self.seen_actions.append(np.array(actions))
        active = np.ones(self.num_envs, np.bool_) if active is None else active
        self._step += active
        view = self._view()
        ended = active & (self._step >= self._lengths)
        self._episode += ended
        self._step[ended] = 0
        return TeamStep(
            view=self._view(),
            next_obs=view.obs,
            next_state=view.state,
            rewards=active.astype(np.float64),
            terminated=ended & ~self._truncates,
            truncated=ended & self._truncates,
            success=ended & ~self._truncates,
        )

    def state_dict(self):
        return {"episode": self._episode.copy(), "step": self._step.copy()}

    def load_state_dict(self, state):
        self._episode, self._step = np.array(state["episode"]), np.array(state["step"])
        return self._view()

    def close(self):
        pass

    def _view(self):
        state = np.stack([np.arange(self.num_envs), self._episode, self._step], axis=1).astype(np.float32)
        agents = np.arange(self.num_agents, dtype=np.float32)
        obs = np.concatenate(
            [
                np.broadcast_to(state[:, None], (self.num_envs, self.num_agents, 3)),
                np.broadcast_to(agents[None, :, None], (self.num_envs, self.num_agents, 1)),
            ],
            axis=-1,
        )
        alive = np.ones((self.num_envs, self.num_agents), np.bool_)
        alive[:, list(self._absent)] = False
        legal = None
        if self._legal is not None:
            legal = np.broadcast_to(
                np.array(self._legal, np.bool_), (self.num_envs, self.num_agents, 3)
            ).copy()
        return View(np.ascontiguousarray(obs), state, legal, alive)


def spec_of(team, **changes):
    """The networks of a small team with skills."""
    settings = {
        "num_agents": team.num_agents,
        "obs_size": team.obs_size,
        "state_size": team.state_size,
        "actions": CategoricalActions((team.single_action_space.n,), (0,), ()),
        "hidden": 8,
        "num_team_skills": 2,
        "num_skills": 3,
        "has_legal": team.has_legal,
    }
    return TeamSpec(**{**settings, **changes})


def hmasd_settings(**options):
    """Small settings of HMASD, resolved as a strict run would."""
    from offbeat.algorithms.hmasd.config import HMASDConfig

    small = {
        "sync_batch_size": 12,
        "skill_interval": 4,
        "num_team_skills": 2,
        "num_skills": 3,
        "hidden": 8,
        "num_epochs": 2,
        "chunk_length": 5,
        "straddle": "cut",
        "correction": "gae",
        "schedule_rounds": 10,
        "batch_size_end": options.get("sync_batch_size", 12),
    }
    return HMASDConfig(**{**small, **options})


def make_pair(lengths=(7, 5, 9), *, num_agents=2, truncates=(), seed=1, **options):
    """Collector, learner and team of a run on a `CountingTeam`."""
    from offbeat.algorithms.hmasd.learner import HMASDLearner
    from offbeat.algorithms.hmasd.skills import Skills
    from offbeat.algorithms.mappo.collector import TeamCollector

    config = hmasd_settings(**options)
    team = CountingTeam(lengths, num_agents, truncates)
    spec = spec_of(team)
    collector = TeamCollector(config, team, spec, total_envs=len(lengths), layer=Skills(config, spec))
    learner = HMASDLearner(config, spec, seed=seed, num_envs=len(lengths))
    return collector, learner, team


def ticket(number, version=None, degree=0):
    """The ticket of a strict run, or of one whose dial is open."""
    from offbeat.types import Ticket

    version = number if version is None else version
    return Ticket(number, 0, version, version + degree, 100 + number)


def batch_of(*segments, version, degree=0):
    """A round."""
    from offbeat.types import Batch

    return Batch(version, segments, degree)


def shaken(net, generator, noise):
    """Give a network trained-looking parameters: heads of almost 0 would hide errors."""
    import torch

    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return net


def skill_spec(num_agents, obs_size, state_size, **fields):
    """A team of three actions with skills."""
    return TeamSpec(num_agents, obs_size, state_size, CategoricalActions((3,), (0,), ()), **fields)


def published(net, name):
    """The parameters of a network as learners publish them."""
    return {f"{name}.{part}": value.detach().numpy() for part, value in net.named_parameters()}
