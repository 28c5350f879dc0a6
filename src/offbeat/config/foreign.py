"""Names that scripts of other projects use, and what to use here: for messages about unknown keys."""

from __future__ import annotations

from collections.abc import Mapping

from offbeat.config.fields import nested_section
from offbeat.config.models import Section

_DIAL = "async_training.off_policy_degree: 0 takes turns, k collects up to k rounds ahead, -1 is tuned"
_DIRECTORY = "run.dir: one directory holds checkpoints, logs and metrics"
_ENV = "env.id and env.kwargs: the environment and the arguments of its constructor"
_RESUME = "use `offbeat resume RUN`: it continues from the newest good checkpoint in RUN, a run's directory"
_ROUNDS = "run.rounds: each makes one version; `offbeat check` prints the samples of a round"
_SAMPLES = (
    "algorithm.sync_batch_size, in samples of a round",
    "algorithm.minibatch_size, in samples of one optimiser step",
)
_SIMULATIONS = ("algorithm.search.num_simulations",)
_STATS = "observe.stats_interval_s; events.jsonl in the run's directory has every round"
_STEPS = "run.total_timesteps, in steps of an environment"
_TEMPERATURE = (
    "training draws by temperature alone (algorithm.temperature): with anything cut off, the log-probs of the"
    " engine and those of the learner are of different distributions, and ratios are wrong"
)
_SYNC = "async_training.weight_sync_interval, in rounds"

FOREIGN: Mapping[str, tuple[str, ...]] = {
    # Asynchronous trainers of planners: LightZero, PriorZero.
    "enable_async_training": (_DIAL,),
    "async_mode": (_DIAL,),
    "sync_mode": (_DIAL,),
    "data_queue_size": ("async_training.max_queue_size, in segments",),
    "max_train_iter": (_ROUNDS,),
    "max_iter": (_ROUNDS,),
    "max_env_step": (_STEPS,),
    "num_simulations": _SIMULATIONS,
    "collect_num_simulations": _SIMULATIONS,
    "eval_num_simulations": ("algorithm.search.eval_simulations",),
    "root_dirichlet_alpha": ("algorithm.search.dirichlet_alpha",),
    "fixed_temperature_value": ("algorithm.search.temperature",),
    "game_segment_length": ("algorithm.num_steps, the steps of a segment",),
    "num_segments": ("algorithm.segments_per_round",),
    "num_unroll_steps": ("algorithm.num_unroll",),
    "discount_factor": ("algorithm.discount", "algorithm.gamma"),
    "replay_buffer_size": ("algorithm.buffer_capacity; its unit is in docs/configuration.md",),
    "priority_prob_alpha": ("algorithm.per_alpha",),
    "use_priority": ("algorithm.per_alpha: 0 draws evenly",),
    "reanalyze_ratio": ("algorithm.reanalyse.segments_per_round",),
    "buffer_reanalyze_freq": ("algorithm.reanalyse.segments_per_round",),
    "update_per_collect": ("algorithm.updates_per_round", "algorithm.replay_ratio"),
    "infer_context_length": ("algorithm.context_length, in steps",),
    "target_update_theta": ("algorithm.target_tau",),
    "collector_env_num": ("env.num_envs, over all workers together",),
    "evaluator_env_num": ("eval.num_envs",),
    "n_evaluator_episode": ("eval.episodes",),
    "eval_freq": ("eval.interval_rounds, in rounds",),
    "stop_value": ("run.stop_eval_return",),
    "exp_name": ("run.name, or run.dir for the directory",),
    "multi_gpu": ("learner.num_ranks and trainer.n_gpus_per_node",),
    "quick_test": ("run.rounds=2 for a short run; `offbeat check` shows the plan and trains nothing",),
    "no_save": ("checkpoint.enabled=false",),
    "debug": ("async_training.enable_async_debug_log",),
    # PPO with prioritized replay on Ray.
    "batch_size": _SAMPLES,
    "num_eval_episodes": ("eval.episodes",),
    "episodes_per_worker": (
        "algorithm.num_steps: workers collect steps, and episodes go on across segments",
    ),
    "update_interval": ("algorithm.updates_per_round: a round is a set of new segments",),
    "hidden_dim": ("algorithm.network.hidden, a list: [256, 256]", "algorithm.hidden"),
    "entropy_decay": ("algorithm.ent_schedule=linear",),
    "min_entropy_coef": ("algorithm.ent_schedule=linear",),
    "temperature": ("algorithm.explore_temperature", "algorithm.search.temperature"),
    "epsilon_start": ("algorithm.explore_epsilon",),
    "epsilon_end": ("algorithm.explore_schedule=linear",),
    "epsilon_decay": ("algorithm.explore_schedule=linear",),
    "log_dir": (_DIRECTORY,),
    "model_dir": (_DIRECTORY,),
    "wandb_run_name": ("run.name",),
    "wandb_entity": ("set the environment variable WANDB_ENTITY",),
    # verl's fully asynchronous policy.
    "staleness_threshold": (
        "async_training.off_policy_degree for the bound, in versions;"
        " async_training.staleness_threshold sets only what metrics count as stale",
    ),
    "max_off_policy_threshold": ("async_training.off_policy_degree, in versions",),
    "trigger_parameter_sync_step": (_SYNC + "; the preset verl_fully_async has it as it is there",),
    "require_batches": ("algorithm.segments_per_round; the preset verl_fully_async has it as it is there",),
    "partial_rollout": ("leave it out: a publication cuts no running segment off",),
    "total_rollout_steps": (_ROUNDS,),
    "total_training_steps": (_ROUNDS,),
    "total_epochs": (_ROUNDS,),
    "test_freq": ("eval.interval_rounds, in rounds",),
    "save_freq": ("checkpoint.interval_rounds, in rounds",),
    "experiment_name": ("run.name",),
    "project_name": ("observe.wandb_project",),
    "default_local_dir": (_DIRECTORY,),
    "resume_mode": (_RESUME,),
    "logger": ("observe.console, observe.tensorboard and observe.use_wandb",),
    "ppo_mini_batch_size": ("algorithm.minibatch_size, in samples", "algorithm.num_minibatches"),
    "ppo_epochs": ("algorithm.num_epochs",),
    # Losses of language models: verl, TRL, AReaL, prime-rl.
    "adv_estimator": ("algorithm.loss: grpo, rloo, ppo (gae); or algorithm.advantage alone",),
    "loss_mode": ("algorithm.loss",),
    "loss_type": ("algorithm.loss",),
    "loss_agg_mode": ("algorithm.aggregation",),
    "clip_ratio": ("algorithm.clip_low and algorithm.clip_high",),
    "clip_ratio_low": ("algorithm.clip_low",),
    "clip_ratio_high": ("algorithm.clip_high",),
    "clip_ratio_c": ("algorithm.dual_clip",),
    "epsilon": ("algorithm.clip_low",),
    "epsilon_high": ("algorithm.clip_high",),
    "norm_adv_by_std_in_grpo": ("algorithm.norm_adv: group, or none",),
    "scale_rewards": ("algorithm.norm_adv: group, batch or none",),
    "use_kl_loss": ("algorithm.kl.coef, with kl.place: loss",),
    "use_kl_in_reward": ("algorithm.kl.coef, with kl.place: reward",),
    "kl_loss_coef": ("algorithm.kl.coef",),
    "kl_loss_type": ("algorithm.kl.estimator: k1, k2, or k3 (low_var_kl)",),
    "beta": ("algorithm.kl.coef",),
    "importance_sampling_level": ("algorithm.ratio",),
    "mask_truncated_completions": ("algorithm.mask_truncated",),
    "filter_groups": ("algorithm.dynamic_sampling, bounded by async_training.max_drops_per_round",),
    "rollout_is": ("algorithm.correction.weight",),
    "rollout_is_threshold": ("algorithm.correction.weight_cap",),
    "rollout_rs": ("algorithm.correction.mask_low and mask_high",),
    "bypass_mode": ("algorithm.correction.proximal: behaviour (bypass), or round_start",),
    "use_decoupled_loss": ("algorithm.correction.proximal: round_start",),
    "behave_imp_weight_cap": ("algorithm.correction.weight_cap",),
    "val_before_train": ("eval.at_start",),
    "num_generations": ("algorithm.group_size",),
    "num_iterations": ("algorithm.num_epochs",),
    "max_completion_length": ("algorithm.max_new_tokens",),
    "max_response_length": ("algorithm.max_new_tokens",),
    "max_head_offpolicyness": (_DIAL,),
    "max_off_policy_steps": (_DIAL,),
    "max_staleness": (_DIAL,),
    "top_k": (_TEMPERATURE,),
    "top_p": (_TEMPERATURE,),
    "min_p": (_TEMPERATURE,),
    # Synchronous trainers of HMASD.
    "total_timesteps": (_STEPS,),
    "rollout_length": _SAMPLES,
    "high_level_batch_size": ("algorithm.num_minibatches",),
    "n_rollout_threads": ("env.num_envs, over all workers together",),
    "eval_rollout_threads": ("eval.num_envs",),
    "eval_episodes": ("eval.episodes",),
    "k": ("algorithm.skill_interval", "async_training.off_policy_degree, the dial k"),
    "n_Z": ("algorithm.num_team_skills",),
    "n_z": ("algorithm.num_skills",),
    "lambda_e": ("algorithm.extrinsic_coef",),
    "lambda_D": ("algorithm.team_intrinsic_coef",),
    "lambda_d": ("algorithm.skill_intrinsic_coef",),
    "lambda_h": ("algorithm.high_ent_coef",),
    "lambda_l": ("algorithm.ent_coef",),
    "scenario": (_ENV,),
    "mode": ("use the command: `offbeat train`, `offbeat eval RUN`, `offbeat play RUN`",),
    "eval_only": (
        "use `offbeat eval RUN`; `offbeat train` and `offbeat resume` take --eval-only, which trains nothing",
    ),
    "model_path": ("use `offbeat eval RUN` or `offbeat resume RUN`, with RUN the directory of a run",),
    "render": ("use `offbeat play RUN`",),
    "console_log_level": ("observe.console=none for a silent run; observe.log_level is that of the files",),
    "detailed_logging": ("async_training.enable_async_debug_log",),
    "export_interval": (_STATS,),
}
"""Names from elsewhere and what to use here, the first whose key the run's algorithm has.

The first word is that key; text that starts otherwise is the whole advice.
"""


OTHER_MEANINGS: Mapping[str, str] = {
    "async_training.staleness_threshold": "it sets what metrics count as stale; the bound is"
    " async_training.off_policy_degree, in versions, and verl's share of samples is"
    " async_training.preset.staleness_threshold, with the preset verl_fully_async",
}
"""Keys that mean something else elsewhere, and what they mean here: for messages about wrong values."""


def advice(name: str, models: Mapping[str, type[Section]]) -> str | None:
    """Say what to use instead of a name from elsewhere; None for a name that is not known.

    Example: ``advice("sync_mode", models)`` is ``"use async_training.off_policy_degree: 0 takes turns, …"``.
    """
    for text in FOREIGN.get(name.replace("-", "_"), ()):
        key = text.split(maxsplit=1)[0].rstrip(",:;").partition("=")[0]
        if "." not in key:
            return text
        if has_key(key, models):
            return f"use {text}"
    return None


def has_key(key: str, models: Mapping[str, type[Section]]) -> bool:
    """Return True if a dotted key is one of these sections."""
    section, *path = key.split(".")
    model: type[Section] | None = models.get(section)
    for name in path:
        if model is None or name not in model.model_fields:
            return False
        model = nested_section(model.model_fields[name].annotation)
    return section in models
