"""Searches with networks: what trees choose among, what they are told, what nodes remember."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.algorithms.muzero.build import PARTS as MUZERO
from offbeat.algorithms.muzero.fitting import fit_environment, players
from offbeat.algorithms.muzero.lane import Roots
from offbeat.algorithms.muzero.planning import Planner, draw_actions
from offbeat.algorithms.unizero.build import PARTS as UNIZERO
from offbeat.algorithms.unizero.planning import UniZeroPlanner
from offbeat.errors import ConfigError, EnvError, OffbeatError
from offbeat.roles import SingleRank, WorkerContext
from offbeat.run.start import make_roles
from offbeat.types import Ticket

SMALL = {
    "algorithm.network.latent": 8,
    "algorithm.network.hidden": 8,
    "algorithm.search.num_simulations": 12,
    "env.num_envs": 4,
    "async_training.enable_async_eval": False,
}


def planner_of(recipe: str, num_trees: int, **changes: Any) -> tuple[Planner, Any]:
    """A planner with the weights of an untrained learner, and the settings."""
    config = offbeat.load_config(recipe, overrides={**SMALL, **changes})
    roles = make_roles(config)
    weights = roles.learner(SingleRank()).weights()
    parts = UNIZERO if "unizero" in recipe else MUZERO
    made = parts.planner(config, fit_environment(config), num_trees, 0)
    made.load(weights)
    return made, config


def generators(count: int) -> list[np.random.Generator]:
    return [np.random.default_rng(number) for number in range(count)]


def roots_of(obs: np.ndarray, context: int = 1, **more: Any) -> Roots:
    count = len(obs)
    seen = np.zeros((count, context, *obs.shape[1:]), np.float32)
    seen[:, -1] = obs
    return Roots(seen, np.zeros((count, context - 1), np.int64), np.full(count, context - 1), **more)


# ---------------------------------------------------------------- actions that are drawn


def test_actions_are_drawn_in_proportion_and_merged() -> None:
    policy = torch.tensor([[0.5, 0.0, 0.3, 0.2]])
    uniform = torch.tensor([[0.1, 0.45, 0.6, 0.99]])
    drawn, logits = draw_actions(policy.log(), uniform)
    assert drawn.tolist() == [[0, 0, 2, 3]]
    assert logits.exp().tolist() == [[2.0, 0.0, 1.0, 1.0]]
    many, _ = draw_actions(
        policy.log().expand(500, -1), torch.rand((500, 20), generator=torch.manual_seed(1))
    )
    shares = np.bincount(many.flatten().numpy(), minlength=4) / many.numel()
    np.testing.assert_allclose(shares, policy[0], atol=0.02)


def test_no_action_of_probability_0_is_drawn_at_either_end() -> None:
    logits = torch.tensor([[-np.inf, 0.0, -np.inf]])
    drawn, _ = draw_actions(logits, torch.tensor([[0.0, 1.0]]))
    assert drawn.tolist() == [[1, 1]]


def test_a_tree_over_drawn_actions_tells_a_policy_over_all_of_them() -> None:
    planner, config = planner_of("connect4-muzero", 5, **{"algorithm.search.num_samples": 3})
    obs = np.zeros((5, 3, 6, 7), np.float32)
    obs[0, 0, 0, :3] = 1  # three full columns
    legal = fit_environment(config).legal(obs)
    plan = planner.plan(roots_of(obs, legal=legal), generators(5), explores=True)
    assert plan.drawn is not None and plan.drawn.shape == (5, 3) and plan.candidates is None
    assert plan.policy.shape == (5, 7)
    np.testing.assert_allclose(plan.policy.sum(1), 1, rtol=1e-6)
    assert (plan.policy[0, :3] == 0).all()
    actions = plan.act(0.0, None)
    assert all(plan.policy[row, action] > 0 for row, action in enumerate(actions))


# ---------------------------------------------------------------- what roots are told


def test_a_prior_from_elsewhere_leads_the_search() -> None:
    planner, _ = planner_of("connect4-muzero", 4)
    prior = np.full((4, 7), -20, np.float32)
    prior[:, 5] = 0
    obs = np.zeros((4, 3, 6, 7), np.float32)
    told = planner.plan(roots_of(obs, prior=prior, prior_weight=1.0), generators(4), explores=False)
    alone = planner.plan(roots_of(obs), generators(4), explores=False)
    assert (told.policy[:, 5] == 1).all() and (alone.policy[:, 5] < 0.9).all()


def test_a_prior_over_continuous_actions_is_refused() -> None:
    planner, _ = planner_of("pendulum-sampled-muzero", 4)
    roots = Roots(
        np.zeros((4, 1, 3), np.float32),
        np.zeros((4, 0, 1), np.float32),
        np.zeros(4, np.int64),
        prior=np.zeros((4, 12), np.float32),
    )
    with pytest.raises(ValueError, match="continuous"):
        planner.plan(roots, generators(4), explores=False)


def test_what_a_space_calls_legal_is_checked() -> None:
    fit = fit_environment(offbeat.load_config("connect4-muzero"))
    obs, over = np.ones((2, 3, 6, 7), np.float32), np.array([True, False])

    class Says(type(fit.space)):  # type: ignore[misc]
        def __init__(self, legal: np.ndarray) -> None:
            super().__init__()
            self.legal = lambda obs: legal

    with pytest.raises(EnvError, match=r"must give bool of shape \(2, 7\)"):
        replace(fit, space=Says(np.ones((2, 3)))).legal(obs)
    none = replace(fit, space=Says(np.zeros((2, 7), np.bool_)))
    assert none.legal(obs).all()  # somebody has to choose something
    assert none.legal(obs, np.ones(2, np.bool_)).all()
    with pytest.raises(EnvError, match="allows no action at an observation whose episode goes on"):
        none.legal(obs, over)


def test_more_samples_than_actions_are_refused() -> None:
    overrides = {"algorithm.search.num_samples": 8}
    with pytest.raises(ConfigError, match="num_samples 8 is above the 7 actions of offbeat/Connect4-v0"):
        fit_environment(offbeat.load_config("connect4-muzero", overrides=overrides))


def test_more_than_two_players_are_refused() -> None:
    space = fit_environment(offbeat.load_config("connect4-muzero")).space
    assert players("a", space) == 2
    space.num_players = 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="3 players"):
        players("a", space)


# ---------------------------------------------------------------- what nodes remember


def test_a_node_of_a_transformer_remembers_the_way_to_it() -> None:
    """What a node says is what reading the whole way to it says, as long as that fits into the window."""
    changes = {"algorithm.num_unroll": 20, "algorithm.context_length": 3}
    planner, _ = planner_of("cartpole-unizero", 3, **changes)
    assert isinstance(planner, UniZeroPlanner)
    rng = np.random.default_rng(0)
    first = np.array([0, 1, 2])
    seen, done = rng.normal(size=(3, 3, 4)).astype(np.float32), rng.integers(2, size=(3, 2))
    network, steps = planner._network, []

    class Listening(UniZeroPlanner):
        def _imagine(self, parents: Any, actions: Any, node: Any) -> Any:
            found = super()._imagine(parents, actions, node)
            steps.append((parents.clone(), actions.clone(), *(part.clone() for part in found)))
            return found

    planner.__class__ = Listening
    planner.plan(Roots(seen, done, first), generators(3), explores=True)
    assert len(steps) == 12
    deepest = 0
    with torch.inference_mode():
        for tree in range(3):
            latents = network.encode(torch.from_numpy(seen[tree : tree + 1, first[tree] :]))
            actions = torch.from_numpy(done[tree : tree + 1, first[tree] :])
            ways = [(latents, actions)]
            for parents, taken, policy, value, reward in steps:
                latents, actions = ways[int(parents[tree])]
                actions = torch.cat([actions, taken[tree : tree + 1, None]], 1)
                told = network(latents, actions)
                latents = torch.cat([latents, told.latent[:, -1:]], 1)
                ways.append((latents, actions))
                deepest = max(deepest, actions.shape[1])
                read = network(latents, torch.cat([actions, torch.zeros((1, 1), dtype=torch.long)], 1))
                torch.testing.assert_close(
                    reward[tree], network.rewards.mean(told.reward)[0, -1], atol=1e-4, rtol=1e-4
                )
                torch.testing.assert_close(policy[tree], read.policy[0, -1], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(
                    value[tree], network.values.mean(read.value)[0, -1], atol=1e-4, rtol=1e-4
                )
    assert deepest > 4


# ---------------------------------------------------------------- turns


def test_two_players_take_turns_and_returns_are_those_of_the_first() -> None:
    changes = {"env.num_envs": 16, "algorithm.network.precision": "float32", "algorithm.network.blocks": 1}
    config = offbeat.load_config("connect4-muzero", overrides={**SMALL, **changes})
    roles = make_roles(config)
    weights = roles.learner(SingleRank()).weights()
    collector = roles.collect.make(WorkerContext(0, 1, 1))
    assert collector._planner._trees.config.two_player
    games: list[tuple[float, int]] = []
    for number in range(6):
        episodes = collector.collect(Ticket(number, 0, 0, 0, number), weights).episodes
        games += zip(episodes.returns, episodes.lengths, strict=True)
    # Who moves last wins: the first player after an odd number of moves.
    assert {total for total, _ in games} >= {1.0, -1.0}
    assert all(total in (0.0, 1.0 if length % 2 else -1.0) for total, length in games)


# ---------------------------------------------------------------- policies of users


def policy_of(recipe: str, **changes: Any) -> Any:
    roles = make_roles(offbeat.load_config(recipe, overrides={**SMALL, **changes}))
    return roles.policy(roles.learner(SingleRank()).weights())


def test_a_policy_remembers_until_it_is_told_that_an_episode_ended() -> None:
    policy = policy_of("cartpole-unizero", **{"algorithm.context_length": 3})
    obs = np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32)
    for step in range(3):
        actions = policy.act(obs[step])
        assert actions.shape == (2,)
    np.testing.assert_array_equal(policy._lane.obs, obs[:3].swapaxes(0, 1))
    assert policy._lane.first.tolist() == [0, 0]
    policy.reset(np.array([False, True]))
    policy.act(obs[3])
    assert policy._lane.first.tolist() == [0, 2]
    np.testing.assert_array_equal(policy._lane.obs, obs[1:4].swapaxes(0, 1))
    policy.reset()
    policy.act(obs[4])
    assert policy._lane.first.tolist() == [2, 2]


def test_a_policy_takes_one_observation_or_many_and_refuses_others() -> None:
    policy = policy_of("connect4-muzero")
    obs = np.zeros((3, 3, 6, 7), np.float32)
    obs[:, 0, 0, :6] = 1  # one column has room
    assert policy.act(obs).tolist() == [6, 6, 6]
    assert policy.act(obs[0]) == 6
    with pytest.raises(OffbeatError, match=r"\(3, 6, 7\) or a batch of them, got \(4,\)"):
        policy.act(np.zeros(4, np.float32))
