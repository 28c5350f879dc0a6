"""What learners of models take in: the order of steps, the values behind targets, who searches anew."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offbeat
from offbeat.algorithms.muzero.config import (
    MuZeroConfig,
    ReanalyseSettings,
    collected_per_round,
    reanalysis_turn,
)
from offbeat.algorithms.muzero.lane import Roots
from offbeat.algorithms.muzero.learner import ModelLearner
from offbeat.algorithms.muzero.parts import check, startup_notes
from offbeat.errors import CheckpointError, ConfigError
from offbeat.replay.streams import Places, Windows
from offbeat.roles import SingleRank, WorkerContext, published
from offbeat.run.start import make_roles
from offbeat.types import Batch, Segment, Ticket

SMALL = {
    "algorithm.num_steps": 4,
    "algorithm.batch_size": 8,
    "algorithm.num_unroll": 3,
    "algorithm.td_steps": 2,
    "algorithm.buffer_capacity": 400,
    "algorithm.replay_ratio": 0.001,
    "algorithm.search.num_simulations": 2,
    "algorithm.network.latent": 8,
    "algorithm.network.hidden": 8,
    "env.num_envs": 4,
    "async_training.enable_async_eval": False,
}


def roles_of(recipe: str = "cartpole-muzero", **changes: Any) -> Any:
    return make_roles(offbeat.load_config(recipe, overrides={**SMALL, **changes}))


def breaks(learner: ModelLearner) -> set[int]:
    """Steps that do not go on where the stream was, the same in all streams."""
    begins = learner.state_dict()["replay"]["begins"]
    assert (begins == begins[:1]).all()
    return set(np.flatnonzero(begins[0]).tolist())


# ---------------------------------------------------------------- order of steps


def test_steps_of_a_lane_enter_in_the_order_in_which_they_were_taken() -> None:
    """A ticket that was lost elsewhere may be collected later than one with a larger number."""
    roles = roles_of()
    learner, collector = roles.learner(SingleRank()), roles.collect.make(WorkerContext(0, 1, 1))
    weights = learner.weights()
    first, later = (collector.collect(Ticket(number, 0, 0, 4, number), weights) for number in (6, 5))
    learner.train(Batch(0, (later, first), 4))
    obs = learner.state_dict()["replay"]["items"]["obs"]
    np.testing.assert_array_equal(obs[:, :4], first.data["obs"].swapaxes(0, 1))
    np.testing.assert_array_equal(obs[:, 4:8], later.data["obs"].swapaxes(0, 1))
    assert breaks(learner) == {0}


def test_steps_that_do_not_follow_each_other_are_not_joined() -> None:
    roles = roles_of()
    learner, collector = roles.learner(SingleRank()), roles.collect.make(WorkerContext(0, 1, 1))
    weights = learner.weights()
    segments = [collector.collect(Ticket(number, 0, 0, 9, number), weights) for number in range(3)]
    learner.train(Batch(0, (segments[0],), 4))
    learner.train(Batch(1, (segments[2],), 4))  # the one between comes too late
    assert breaks(learner) == {0, 4}
    learner.train(Batch(2, (segments[1],), 4))
    assert breaks(learner) == {0, 4, 8}
    another = roles.collect.make(WorkerContext(0, 1, 1))  # in the place of one that was lost
    learner.train(Batch(3, (another.collect(Ticket(7, 0, 0, 9, 7), weights),), 4))
    assert breaks(learner) == {0, 4, 8, 12}


# ---------------------------------------------------------------- values behind targets


def make_windows(learner: ModelLearner, truncated_at: int | None, terminated_at: int | None) -> Windows:
    width = 3 + 1 + 2
    rng = np.random.default_rng(3)
    ends = {
        name: np.broadcast_to(np.arange(width) == at, (8, width)).copy()
        for name, at in (("truncated", truncated_at), ("terminated", terminated_at))
    }
    items = {
        "obs": rng.normal(size=(8, width, 4)).astype(np.float32),
        "actions": np.zeros((8, width), np.int64),
        "rewards": rng.normal(size=(8, width)).astype(np.float32),
        "policy": rng.dirichlet(np.ones(2), size=(8, width)).astype(np.float32),
        "value": np.arange(width, dtype=np.float32) + np.zeros((8, 1), np.float32),
        "valid": np.ones((8, width), np.bool_),
        **ends,
    }
    places = Places(np.zeros(8, np.int64), np.arange(8))
    return Windows(items, places, np.ones(8, np.float32), np.zeros(8, np.int64), np.zeros(8, np.int64))


BOTH = pytest.mark.parametrize("recipe", ["cartpole-muzero", "cartpole-unizero"])


def learner_of(recipe: str, **changes: Any) -> Any:
    """A learner whose networks have something to say: as they begin, their heads say 0."""
    context = {"algorithm.context_length": 2} if "unizero" in recipe else {}
    learner = roles_of(recipe, **context, **changes).learner(SingleRank())
    generator = torch.Generator().manual_seed(1)
    for network in (learner._network, learner._target):
        for parameter in network.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return learner


@BOTH
@pytest.mark.parametrize("truncated_at", [0, 1, 2, 3])
def test_every_value_that_a_cut_off_episode_needs_is_there(recipe: str, truncated_at: int) -> None:
    learner = learner_of(recipe)
    values = learner._bootstraps(make_windows(learner, truncated_at, None))
    assert (values[:, truncated_at + 1] != 0).all()


def test_values_that_no_target_needs_are_not_asked_for() -> None:
    learner = learner_of("cartpole-muzero")
    assert (learner._bootstraps(make_windows(learner, None, 1)) == 0).all()
    assert (learner._bootstraps(make_windows(learner, None, 2))[:, 2:] != 0).all()


def test_a_transformer_never_reads_more_at_once_than_it_was_trained_on() -> None:
    learner = learner_of("cartpole-unizero", **{"algorithm.td_steps": 7})
    rng = np.random.default_rng(0)
    obs, actions = rng.normal(size=(2, 7, 4)).astype(np.float32), rng.integers(2, size=(2, 7))
    values = learner._values(obs, actions)
    for at in (0, 3, 6):
        piece = slice(at, at + 3)
        np.testing.assert_array_equal(values[:, piece], learner._values(obs[:, piece], actions[:, piece]))


@BOTH
def test_values_may_be_those_that_searches_found(recipe: str) -> None:
    learner = learner_of(recipe, **{"algorithm.bootstrap": "search", "algorithm.discount": 1.0})
    windows = make_windows(learner, None, None)
    expected = windows.items["rewards"][:, 0] + windows.items["rewards"][:, 1] + 2.0  # value of the third
    np.testing.assert_allclose(learner._lesson(windows, 0).values[:, 0], expected, rtol=1e-5)


@BOTH
def test_targets_of_old_steps_are_shorter(recipe: str) -> None:
    changes = {"algorithm.td_steps_min": 1, "algorithm.td_age": 10, "algorithm.discount": 1.0}
    learner = learner_of(recipe, **changes)
    windows = make_windows(learner, None, None)
    values = learner._bootstraps(windows)
    old, new = learner._lesson(windows, 10).values[:, 0], learner._lesson(windows, 0).values[:, 0]
    rewards = windows.items["rewards"]
    np.testing.assert_allclose(old, rewards[:, 0] + values[:, 1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(new, rewards[:, 0] + rewards[:, 1] + values[:, 2], rtol=1e-4, atol=1e-5)


def test_what_one_player_wins_the_other_loses() -> None:
    changes = {"algorithm.discount": 1.0, "algorithm.td_steps": 3}
    learner = roles_of("connect4-muzero", **changes).learner(SingleRank())
    width = 3 + 1 + 3
    items = {
        "obs": np.zeros((1, width, 3, 6, 7), np.float32),
        "actions": np.zeros((1, width), np.int64),
        "rewards": np.array([[0, 0, 1, 0, 0, 0, 0]], np.float32),
        "terminated": np.arange(width)[None] == 2,
        "truncated": np.zeros((1, width), np.bool_),
        "policy": np.full((1, width, 7), 1 / 7, np.float32),
        "valid": np.ones((1, width), np.bool_),
    }
    one = np.ones(1, np.int64)
    windows = Windows(items, Places(one, one), np.ones(1, np.float32), one, one)
    assert learner._lesson(windows, 1).values[0].tolist() == [1.0, -1.0, 1.0, 0.0]


# ---------------------------------------------------------------- losses


def loss_of(learner: Any, windows: Windows) -> Any:
    return learner._losses(learner._lesson(windows, 0)).whole.detach().numpy().copy()


@BOTH
@pytest.mark.parametrize("ends", [(None, 1), (1, None)], ids=["terminated", "truncated"])
def test_nothing_is_learned_from_what_comes_after_an_episode(recipe: str, ends: tuple[Any, Any]) -> None:
    """Its second step was the last: the third shows what was seen then, and others follow."""
    learner = learner_of(recipe)
    before = loss_of(learner, make_windows(learner, *ends))
    windows = make_windows(learner, *ends)
    for name, first in (("policy", 2), ("obs", 3), ("rewards", 2)):
        windows.items[name][:, first:] = np.flip(windows.items[name][:, first:], 0)
    np.testing.assert_array_equal(loss_of(learner, windows), before)
    for name in ("policy", "obs", "rewards"):
        windows = make_windows(learner, *ends)
        windows.items[name][:, 1] = np.flip(windows.items[name][:, 1], 0)
        assert (loss_of(learner, windows) != before).all(), name


@BOTH
def test_each_part_of_the_loss_counts_by_its_weight(recipe: str) -> None:
    learner = learner_of(recipe)
    last = "consistency" if "muzero" in recipe else "latent"
    names = {"value_coef": "value_loss", "reward_coef": "reward_loss", f"{last}_coef": f"{last}_loss"}
    losses = learner._losses(learner._lesson(make_windows(learner, None, None), 0))
    config = learner._config
    total = losses.parts["policy_loss"] - config.ent_coef * losses.parts["entropy"]
    total = total + sum(getattr(config, coef) * losses.parts[part] for coef, part in names.items())
    assert losses.whole.mean().item() == pytest.approx(total.item(), rel=1e-5)
    assert all(abs(losses.parts[part].item()) > 0.01 for part in (*names.values(), "policy_loss", "entropy"))


@BOTH
def test_search_kl_says_how_far_the_network_is_from_what_searches_found(recipe: str) -> None:
    learner = learner_of(recipe)
    lesson = learner._lesson(make_windows(learner, None, None), 0)
    found = np.broadcast_to(np.array([0.9, 0.1], np.float32), lesson.policies.shape)
    lesson = replace(lesson, policies=found, judged=np.ones_like(lesson.judged))
    assert learner._losses(lesson).parts["search_kl"].item() > 0.1

    def divergence(network: list[float], judged: list[float]) -> float:
        outputs = torch.log(torch.tensor(network)).expand(2, 2)
        chosen = replace(
            lesson,
            policies=np.array([[[0.9, 0.1]], [[1.0, 0.0]]], np.float32),
            judged=np.array(judged, np.float32)[:, None],
        )
        return learner._search_kl(outputs, chosen, 0)["search_kl"].item()

    assert divergence([0.9, 0.1], [1, 0]) == pytest.approx(0, abs=1e-6)
    assert divergence([0.5, 0.5], [1, 0]) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
    assert divergence([0.5, 0.5], [0, 1]) == pytest.approx(math.log(2))
    assert divergence([0.5, 0.5], [0, 0]) == 0
    assert learner._search_kl(torch.zeros(2, 2), replace(lesson, candidates=found), 0) == {}


@BOTH
def test_every_sample_counts_by_its_own_weight(recipe: str) -> None:
    learner = learner_of(recipe)

    def gradient(weights: list[float]) -> Any:
        windows = replace(make_windows(learner, None, None), weights=np.array(weights, np.float32))
        learner._differentiate(windows, 0)
        return learner._trainee.grad.clone()

    ones = [gradient([float(row == chosen) for row in range(8)]) for chosen in range(8)]
    assert not torch.allclose(ones[0], ones[1])
    weights = [0.1, 1.0, 0.3, 0.0, 0.7, 0.2, 0.9, 0.5]
    expected = sum(weight * one for weight, one in zip(weights, ones, strict=True))
    torch.testing.assert_close(gradient(weights), expected, atol=1e-5, rtol=1e-4)


@BOTH
def test_errors_become_priorities(recipe: str) -> None:
    context = {"algorithm.context_length": 2} if "unizero" in recipe else {}
    roles = roles_of(recipe, **{"algorithm.per_alpha": 0.6, "algorithm.replay_ratio": 0.1}, **context)
    learner, collector = roles.learner(SingleRank()), roles.collect.make(WorkerContext(0, 1, 1))
    weights = learner.weights()
    segments = [collector.collect(Ticket(number, 0, 0, 0, number), weights) for number in range(4)]
    metrics = learner.train(Batch(0, tuple(segments), 4))
    assert metrics["learn/gradient_steps"] > 0
    leaves = learner.state_dict()["replay"]["leaves"]
    assert len(np.unique(leaves)) > 4


# ---------------------------------------------------------------- who searches anew


@BOTH
def test_searches_anew_begin_where_those_began_that_chose_the_actions(recipe: str) -> None:
    context = {"algorithm.context_length": 2} if "unizero" in recipe else {}
    anew = {"algorithm.segments_per_round": 2, "algorithm.reanalyse.segments_per_round": 1}
    changes = {**SMALL, **context, **anew, "algorithm.num_steps": 12}
    config = offbeat.load_config(recipe, overrides=changes)
    roles = make_roles(config)
    learner, collector = roles.learner(SingleRank()), roles.collect.make(WorkerContext(0, 1, 1))
    searched: list[tuple[Roots, Any]] = []

    class Listening(type(collector._planner)):  # type: ignore[misc]
        def plan(self, roots: Roots, rngs: Any, *, explores: bool) -> Any:
            plan = super().plan(roots, rngs, explores=explores)
            kept = (roots.obs.copy(), roots.actions.copy(), roots.first.copy())
            searched.append((Roots(*kept), plan))
            return plan

    collector._planner.__class__ = Listening
    numbers = [number for number in range(60) if reanalysis_turn(number, config) is None]
    for version, number in enumerate(numbers[:5]):  # long enough for episodes to end
        segment = collector.collect(Ticket(number, 0, version, version, number), learner.weights())
        learner.train(Batch(version, (segment,), 2))
    played, weights = list(searched), published(learner)
    searched.clear()
    ticket = next(number for number in range(60) if reanalysis_turn(number, config) == 0)
    found = collector.collect(Ticket(ticket, 0, 5, 5, ticket), weights).data
    assert (found["stream"] >= 0).all() and len(searched) == 12
    is_late = 0
    for t, (roots, plan) in enumerate(searched):
        np.testing.assert_array_equal(found["policy"][t], plan.policy)
        np.testing.assert_array_equal(found["value"][t], plan.result.values)
        for row in range(4):
            stream, number = found["stream"][t, row], found["number"][t, row]
            then, first = played[number][0], roots.first[row]
            assert then.first[stream] == first
            np.testing.assert_array_equal(roots.obs[row, first:], then.obs[stream, first:])
            np.testing.assert_array_equal(roots.actions[row, first:], then.actions[stream, first:])
            is_late += first > 0
    assert is_late or "muzero" in recipe, "some search began in the middle of its context"


def test_every_lane_collects_and_every_search_anew_has_a_turn_of_its_own() -> None:
    plain = offbeat.load_config("cartpole-muzero", overrides=SMALL)
    sizes = [(per_round, anew) for per_round in range(2, 7) for anew in range(1, per_round)]
    for (per_round, anew), workers in itertools.product(sizes, range(1, 9)):
        algorithm = plain.algorithm.model_copy(
            update={"segments_per_round": per_round, "reanalyse": ReanalyseSettings(segments_per_round=anew)}
        )
        runtime = plain.runtime.model_copy(update={"num_workers": workers})
        config = plain.model_copy(update={"algorithm": algorithm, "runtime": runtime})
        rounds = per_round * math.lcm(per_round, workers)
        turns = [reanalysis_turn(number, config) for number in range(rounds * per_round)]
        for begin in range(0, len(turns), per_round):
            told = turns[begin : begin + per_round]
            assert sum(turn is None for turn in told) == collected_per_round(config)
        assert sorted(turn for turn in turns if turn is not None) == list(range(rounds * anew))
        collecting = {number % workers for number, turn in enumerate(turns) if turn is None}
        assert collecting == set(range(workers)), f"{per_round} a round, {anew} anew, {workers} workers"


def test_searching_anew_must_leave_something_to_collect() -> None:
    told = r"overrides: algorithm\.reanalyse\.segments_per_round = 1\s.*segments_per_round to 2 or more"
    with pytest.raises(ConfigError, match=told):
        offbeat.load_config("cartpole-muzero", overrides={"algorithm.reanalyse.segments_per_round": 1})


def test_steps_to_be_searched_anew_are_published_and_not_kept() -> None:
    changes = {"algorithm.segments_per_round": 2, "algorithm.reanalyse.segments_per_round": 1}
    roles = roles_of(**changes)
    learner, collector = roles.learner(SingleRank()), roles.collect.make(WorkerContext(0, 1, 1))
    learner.train(Batch(0, (collect_new(collector, learner),), 4))
    assert set(published(learner)) - set(learner.weights()) == {
        f"wishes.{name}" for name in ("obs", "actions", "first", "stream", "number")
    }


def collect_new(collector: Any, learner: Any) -> Segment:
    found: Segment = collector.collect(Ticket(0, 0, 0, 4, 0), learner.weights())
    return found


# ---------------------------------------------------------------- settings


def test_the_learning_rate_may_fall() -> None:
    config = MuZeroConfig(lr=0.4, lr_schedule="linear", schedule_rounds=10)
    assert [config.lr_at(version) for version in (0, 5, 10, 20)] == [0.4, 0.2, 0.0, 0.0]
    assert MuZeroConfig(lr=0.4, schedule_rounds=10).lr_at(9) == 0.4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.context_length": 5}, "context_length"),
        ({"algorithm.context_length": 1, "algorithm.num_unroll": 2}, r"num_unroll = 2\s+must be at least 3"),
        ({"algorithm.consistency_coef": 1.0}, "consistency_coef"),
    ],
)
def test_a_transformer_is_not_asked_for_what_it_cannot_do(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offbeat.load_config("cartpole-unizero", overrides=changes)


def test_a_search_begins_with_one_observation_and_looks_on() -> None:
    changes = {"algorithm.context_length": 1, "algorithm.num_unroll": 3}
    roles = roles_of("cartpole-unizero", **changes)
    weights = roles.learner(SingleRank()).weights()
    segment = roles.collect.make(WorkerContext(0, 1, 1)).collect(Ticket(0, 0, 0, 0, 0), weights)
    assert np.isfinite(segment.data["value"]).all()


def test_a_resumed_run_names_the_setting_that_was_changed() -> None:
    state = roles_of().learner(SingleRank()).state_dict()
    with pytest.raises(CheckpointError, match=r"num_unroll \+ algorithm.td_steps = 5 and now has 7"):
        roles_of(**{"algorithm.td_steps": 4}).learner(SingleRank()).load_state_dict(state)


@pytest.mark.parametrize(("flags", "is_told"), [("avx2 avx512_bf16", False), ("avx2", True)])
def test_what_the_processor_cannot_multiply_is_told(
    flags: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = offbeat.load_config("connect4-muzero", overrides=SMALL)
    monkeypatch.setattr(Path, "read_text", lambda _: f"flags : {flags}")
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert ("precision" in startup_notes(config)) == is_told


@pytest.mark.parametrize(
    ("recipe", "degree", "is_told"),
    [
        ("pendulum-sampled-muzero", -1, True),
        ("pendulum-sampled-muzero", 2, False),
        ("cartpole-unizero", -1, False),
    ],
)
def test_a_dial_that_is_tuned_by_speed_alone_is_remarked_on(recipe: str, degree: int, is_told: bool) -> None:
    config = offbeat.load_config(recipe, {"async_training.off_policy_degree": degree})
    assert ("tuned by speed alone" in startup_notes(config).get("tuning", "")) == is_told


def test_a_search_must_not_look_further_ahead_than_there_are_positions() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.search\.num_simulations = 509\s+must be at most 508"):
        offbeat.load_config("cartpole-unizero", overrides={"algorithm.search.num_simulations": 509})


def test_a_game_is_not_evaluated_against_oneself() -> None:
    alone = {"eval.env_kwargs.opponent": "none"}
    with pytest.raises(ConfigError, match="have two players: name an opponent"):
        check(offbeat.load_config("connect4-muzero", overrides=alone))
    never = {**alone, "eval.at_end": False, "eval.interval_rounds": None}
    check(offbeat.load_config("connect4-muzero", overrides=never))
