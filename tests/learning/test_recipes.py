"""Recipes have to learn, not only to run. The quick ones are part of `make test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import offbeat

QUIET = {"observe.console": "none", "observe.tensorboard": False}


def train(recipe: str, directory: Path, overrides: dict[str, Any] | None = None, **options: Any) -> Any:
    settings = {**QUIET, "run.dir": str(directory / "run"), **(overrides or {})}
    return offbeat.train(recipe, overrides=settings, **options)


@pytest.mark.parametrize("seed", [0, 1])
def test_cartpole_is_solved(seed: int, tmp_path: Path) -> None:
    result = train("cartpole-ppo", tmp_path, {"runtime.kind": "inline"}, seed=seed)
    assert result.eval_return >= 475


@pytest.mark.parametrize(
    ("degree", "settings", "bound"),
    [
        (1, {}, 1),
        (4, {"algorithm.clip_coef": 0.1, "run.rounds": 70}, 4),
        (-1, {"async_training.auto_max": 2, "run.rounds": 60}, 2),
    ],
)
def test_cartpole_is_learned_asynchronously(
    degree: int, settings: dict[str, Any], bound: int, tmp_path: Path
) -> None:
    result = train("cartpole-ppo-async", tmp_path, settings, off_policy_degree=degree)
    # Timing decides what is trained when, so no two of these runs are alike; and at k = 4 the policy that
    # is evaluated has moved on for four rounds since the episodes that reached the goal.
    assert result.metrics["rollout/return_mean_100"] > 200
    assert result.max_staleness <= bound


@pytest.mark.parametrize("correction", ["gae", "vtrace", "decoupled"])
def test_every_correction_learns_from_samples_two_versions_old(correction: str, tmp_path: Path) -> None:
    settings = {"runtime.kind": "inline", "algorithm.correction": correction, "run.rounds": 60}
    result = train("cartpole-ppo", tmp_path, settings, off_policy_degree=2)
    assert result.metrics["rollout/return_mean_100"] > 200


def test_memory_task_needs_the_gru(tmp_path: Path) -> None:
    with_memory = train("memory-ppo", tmp_path / "gru", {"runtime.kind": "inline"})
    assert with_memory.eval_return > 0.9
    settings = {"runtime.kind": "inline", "algorithm.network.kind": "mlp", "run.stop_return": None}
    without = train("memory-ppo", tmp_path / "mlp", settings)
    assert without.eval_return < 0.85


@pytest.mark.slow
def test_cartpole_is_solved_by_two_ranks(tmp_path: Path) -> None:
    result = train("cartpole-ppo", tmp_path, {"learner.num_ranks": 2}, seed=0)
    assert result.eval_return >= 475
    assert offbeat.replay_run(result.run_dir).identical


@pytest.mark.slow
def test_cartpole_is_solved_with_replay(tmp_path: Path) -> None:
    result = train("cartpole-ppo-per", tmp_path)
    # As above, timing decides what is trained when; the learnt policy plays perfectly in all of these runs.
    assert result.eval_return >= 475
    assert result.metrics["rollout/return_mean_100"] > 300
    assert offbeat.replay_run(result.run_dir).identical


@pytest.mark.slow
@pytest.mark.parametrize("degree", [0, 1])
def test_cartpole_is_solved_with_replay_whatever_the_timing(degree: int, tmp_path: Path) -> None:
    settings = {"runtime.kind": "inline", "async_training.enable_async_eval": False}
    result = train("cartpole-ppo-per", tmp_path, settings, off_policy_degree=degree)
    assert result.metrics["rollout/return_mean_100"] >= 475, "the goal of the recipe"
    assert result.eval_return >= 475


@pytest.mark.slow
def test_pendulum_learns_continuous_actions(tmp_path: Path) -> None:
    result = train("pendulum-ppo", tmp_path)
    assert result.metrics["rollout/return_mean_100"] > -350


@pytest.mark.slow
def test_lunar_lander_learns_to_land(tmp_path: Path) -> None:
    pytest.importorskip("Box2D", reason="needs offbeat[box2d]")
    result = train("lunarlander-ppo", tmp_path)
    assert result.metrics["rollout/return_mean_100"] > 150


@pytest.mark.slow
def test_minatar_breakout_learns_from_pictures(tmp_path: Path) -> None:
    pytest.importorskip("minatar", reason="needs offbeat[minatar]")
    result = train("minatar-breakout-ppo", tmp_path, rounds=120)
    assert result.metrics["rollout/return_mean_100"] > 2.0


@pytest.mark.slow
def test_skills_solve_alice_and_bob_where_rewards_alone_do_not(tmp_path: Path) -> None:
    solved, alone = (
        train(recipe, tmp_path / recipe, {"runtime.kind": "inline"}, seed=1, rounds=260)
        for recipe in ("alice-bob-hmasd", "alice-bob-mappo")
    )
    assert solved.eval_return >= 0.9, "of the episodes: the reward is 1 where one is solved"
    assert solved.metrics["learn/first_ratio_max_dev"] <= 1e-5
    assert alone.eval_return < 0.5


@pytest.mark.slow
def test_a_team_learns_to_lift_food_together(tmp_path: Path) -> None:
    pytest.importorskip("lbforaging", reason="needs offbeat[marl]")
    result = train("lbf-coop-mappo", tmp_path, {"runtime.kind": "inline"}, seed=1, rounds=200)
    assert result.eval_return > 0.9, "of all food; agents that act at random get almost none"


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "rounds"), [("cartpole-muzero", 80), ("cartpole-unizero", 40)])
def test_planning_solves_cartpole(recipe: str, rounds: int, tmp_path: Path) -> None:
    result = train(recipe, tmp_path, seed=1, rounds=rounds)
    assert result.eval_return >= 475
