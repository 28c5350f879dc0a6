"""The recipes, made so small that a run takes a second or two."""

from __future__ import annotations

from importlib import resources
from typing import Any

import offbeat

RUN: dict[str, Any] = {
    "env.num_envs": 8,
    "async_training.off_policy_degree": 0,
    "async_training.enable_async_eval": False,
    "runtime.num_workers": 2,
    "runtime.heartbeat_timeout_s": 60.0,  # a busy machine loses no worker
    "run.rounds": 3,
    "eval.interval_rounds": 2,
    "eval.episodes": 2,
    "eval.num_envs": 2,
    "checkpoint.interval_rounds": 2,
    "checkpoint.interval_s": None,
    "observe.console": "none",
    "observe.tensorboard": False,
}
PPO: dict[str, Any] = {"algorithm.num_steps": 16, "algorithm.num_epochs": 2, "algorithm.minibatch_size": 64}
TEAM: dict[str, Any] = {
    "env.num_envs": 4,
    "algorithm.sync_batch_size": 64,
    "algorithm.num_epochs": 2,
    "algorithm.hidden": 16,
}
PLAN: dict[str, Any] = {
    "algorithm.num_steps": 4,
    "algorithm.batch_size": 16,
    "algorithm.num_unroll": 4,
    "algorithm.td_steps": 2,
    "algorithm.replay_ratio": 0.1,
    "algorithm.buffer_capacity": 400,
    "algorithm.search.num_simulations": 4,
    "algorithm.search.eval_simulations": 4,
    "algorithm.network.latent": 8,
    "algorithm.network.hidden": 8,
    "eval.num_envs": 1,
    "eval.episodes": 1,
}
TEXT: dict[str, Any] = {
    "algorithm.segments_per_round": 4,
    "algorithm.group_size": 3,
    "algorithm.model.width": 16,
    "algorithm.model.num_layers": 1,
    "algorithm.model.num_heads": 2,
    "algorithm.model.num_kv_heads": 1,
    "algorithm.model.ff_width": 16,
    "algorithm.warmup.accuracy": None,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": TEXT,
    "ppo": PPO,
    "ppo_per": {**PPO, "algorithm.batch_size": 12, "algorithm.buffer_capacity": 64},
    "mappo": TEAM,
    "hmasd": {
        **TEAM,
        "algorithm.skill_interval": 8,
        "algorithm.discriminator.num_updates": 2,
        "algorithm.discriminator.batch_size": 32,
    },
    "muzero": PLAN,
    "unizero": {**PLAN, "algorithm.context_length": 2},
}
RECIPES: dict[str, dict[str, Any]] = {
    # Several wide collectors in one thread take turns by time.
    "arithmetic-grpo": {"runtime.num_workers": 1},
    "arithmetic-ppo": {"runtime.num_workers": 1},
    # What takes no time is called in its turn, so that segments arrive in one order.
    "calculator-grpo": {"runtime.num_workers": 1, "env.kwargs.latency_s": 0},
    "slow-reward-grpo": {"runtime.num_workers": 1, "env.kwargs.latency_s": 0},
    "reverse-grpo": {"runtime.num_workers": 1, "env.kwargs": {"mean": 12, "limit": 64}},
    # Any CPU can do float32.
    "connect4-muzero": {"algorithm.network.precision": "float32", "eval.env_kwargs": {"opponent": "random"}},
    "pendulum-sampled-muzero": {"algorithm.search.num_samples": 4},
}
NEEDS: dict[str, str] = {
    "colorlines-ppo-per-ray": "ray",
    "lbf-coop-hmasd": "lbforaging",
    "lbf-coop-mappo": "lbforaging",
    "lunarlander-ppo": "Box2D",
    "minatar-breakout-muzero": "minatar",
    "minatar-breakout-ppo": "minatar",
    "mpe-spread-mappo": "mpe2",
}
"""Packages that a recipe needs, by the name to import."""


def recipes() -> list[str]:
    """The names of all recipes."""
    folder = resources.files("offbeat") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if ".yaml" in entry.name)


def overrides(recipe: str) -> dict[str, Any]:
    """The settings that make a recipe small and strictly synchronous."""
    algorithm = offbeat.load_config(recipe).algorithm.name
    return {**RUN, **ALGORITHMS[algorithm], **RECIPES.get(recipe, {})}
