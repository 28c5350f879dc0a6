"""From a run's configuration to GRPO's roles. No torch until a role is made."""

from __future__ import annotations

from functools import partial
from typing import Any

from offbeat.algorithms.base import Policy, Roles, Weights
from offbeat.algorithms.grpo.config import DecoderConfig, GRPOConfig, grpo_config
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError
from offbeat.llm.rewards import Reward, named_reward
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Task, check_expert, make_task
from offbeat.roles import Collector, Evaluator, Learner, PerWorker, Ranks, WorkerContext


def task_of(config: RunConfig) -> Task:
    """Make the run's task."""
    return make_task(config.env.id, config.env.kwargs)


def eval_task_of(config: RunConfig) -> Task:
    """Make the task as evaluations and the warm-up see it: with ``eval.env_kwargs`` over ``env.kwargs``."""
    return make_task(config.env.id, config.eval_env.kwargs)


def reward_of(own: GRPOConfig) -> Reward | None:
    """Return the reward function that the settings name; None: the task's."""
    return None if own.reward.function is None else named_reward(own.reward.function)


def shape_of(model: DecoderConfig, task: Task) -> Shape:
    """Return the shape of a run's network."""
    if model.folder is not None:
        from pathlib import Path

        from offbeat.llm.files import read_shape
        from offbeat.llm.tokens import check_fits

        shape = read_shape(Path(model.folder))
        check_fits(task.tokenizer, shape)
        return shape
    if model.width % model.num_heads or model.num_heads % model.num_kv_heads:
        raise ConfigError("algorithm.model: num_kv_heads must divide num_heads, and num_heads width")
    return Shape(
        "LlamaForCausalLM",
        vocab_size=task.tokenizer.vocab_size,
        width=model.width,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.width // model.num_heads,
        ff_width=model.ff_width,
        tied=True,
        eos_ids=task.tokenizer.eos_ids,
    )


def check(config: RunConfig) -> None:
    """Make the task, fit the network to it and find the loss: mistakes are found before anything runs."""
    own, task = grpo_config(config), task_of(config)
    shape = shape_of(own.model, task)
    if own.choices.surrogate == "own":
        from offbeat.algorithms.grpo.objective import make_token_loss

        make_token_loss(own)
    longest = own.max_new_tokens or task.max_new_tokens
    if own.overlong.buffer > longest:
        raise ConfigError(
            f"algorithm.overlong.buffer is {own.overlong.buffer}: responses have at most {longest} tokens;"
            " lower it to that"
        )
    if task.max_prompt_tokens >= shape.max_positions:
        raise ConfigError(
            f"env: prompts of {config.env.id} have up to {task.max_prompt_tokens} tokens, and the model has"
            f" {shape.max_positions} positions: choose shorter problems by env.kwargs, or another model"
        )
    eval_task_of(config)
    if reward_of(own) is not None and hasattr(task, "episode"):
        raise ConfigError(
            f"algorithm.reward.function: episodes of {config.env.id} return their own: leave it out"
        )
    if own.warmup.accuracy is not None:
        check_expert(task)


def _make_learner(config: RunConfig, ranks: Ranks) -> Learner:
    from offbeat.algorithms.grpo.learner import GRPOLearner

    own, task = grpo_config(config), eval_task_of(config)
    return GRPOLearner(own, task, shape_of(own.model, task), seed=config.run.seed)


def _make_collector(config: RunConfig, context: WorkerContext) -> Collector:
    from offbeat.algorithms.grpo.collector import GroupCollector

    own, task = grpo_config(config), task_of(config)
    return GroupCollector(
        own,
        task,
        shape_of(own.model, task),
        slots=own.slots(config),
        most=config.max_outstanding_segments,
        wake=context.wake,
        reward=reward_of(own),
    )


def _make_evaluator(config: RunConfig, context: WorkerContext) -> Evaluator:
    from offbeat.algorithms.grpo.evaluator import AccuracyEvaluator

    own, task = grpo_config(config), eval_task_of(config)
    shape = shape_of(own.model, task)
    return AccuracyEvaluator(own, task, shape, config.eval.episodes, reward_of(own))


def _make_policy(config: RunConfig, weights: Weights) -> Policy:
    from offbeat.algorithms.grpo.policy import TextPolicy

    own, task = grpo_config(config), task_of(config)
    return TextPolicy(task, shape_of(own.model, task), weights, seed=config.run.seed)


def build(config: RunConfig) -> Roles:
    """Return the roles of a GRPO run."""
    collect: PerWorker[Any] = PerWorker(partial(_make_collector, config))
    return Roles(
        collect=collect,
        learner=partial(_make_learner, config),
        evaluate=PerWorker(partial(_make_evaluator, config)),
        policy=partial(_make_policy, config),
        mode="stream",
        segments_per_round=config.segments_per_round,
    )
