"""Names that others rely on: adding one is a decision, so it is made here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import offbeat
import offbeat.envs.text
import offbeat.llm
from offbeat.cli.main import VERBS
from offbeat.config.models import AsyncTrainingConfig, RunConfig
from offbeat.observe.events import read_events, read_rounds
from tests.net.small import overrides as small_settings

ROUND_METRICS = [
    "pace/off_policy_degree",
    "pace/collect_count",
    "pace/train_count",
    "pace/lag",
    "pace/avg_sample_age",
    "pace/max_sample_age",
    "pace/p95_sample_age",
    "pace/stale_samples_ratio",
    "pace/dropped_stale_samples",
    "pace/dropped_samples",
    "pace/collect_idle_ratio",
    "pace/train_idle_ratio",
    "pace/overlap_efficiency",
    "rollout/return_mean",
    "rollout/return_mean_100",
    "rollout/length_mean",
    "rollout/steps_per_s",
    "rollout/total_generated_samples",
    "rollout/total_env_steps",
    "rollout/total_episodes",
    "rollout/generation_errors",
    "rollout/samples_by_env_min",
    "rollout/samples_by_env_max",
    "queue/size",
    "queue/total_produced",
    "queue/total_consumed",
    "queue/bytes",
    "learn/global_steps",
    "learn/processed_samples",
    "learn/samples_per_s",
    "weights/current_param_version",
    "weights/published_version",
    "weights/publish_lag",
    "weights/param_sync_count",
    "weights/param_sync_requests",
    "weights/sync_failures",
    "weights/sync_time_s",
    "weights/sent_bytes",
    "time/round_s",
    "time/collect_s",
    "time/train_s",
    "time/publish_s",
    "time/wait_s",
    "time/elapsed_s",
    "time/overlap_s",
    "time/state_s",
    "time/eta_s",
    "system/rss_bytes",
    "system/cpu_percent",
    "system/gpu_mem_bytes",
    "system/workers_alive",
    "system/worker_restarts",
]

ROUND_FIELDS = ["kind", "time", "version", "metrics", "counts", "bottleneck", "samples_by_env"]

PPO_METRICS = [
    "learn/loss",
    "learn/policy_loss",
    "learn/value_loss",
    "learn/entropy",
    "learn/approx_kl",
    "learn/clip_fraction",
    "learn/grad_norm",
    "learn/num_epochs",
    "learn/learning_rate",
    "learn/explained_variance",
    "learn/ess",
    "learn/behaviour_kl",
    "learn/first_ratio_max_dev",
    "learn/gradient_steps",
]

GRPO_METRICS = [
    "pace/avg_sample_age_s",
    "pace/p95_sample_age_s",
    "pace/max_sample_age_s",
    "rollout/dispatched_length_mean",
    "rollout/trained_length_mean",
    "rollout/ended_cut",
    "rollout/ended_timeout",
    "rollout/ended_error",
    "rollout/answers_failed",
    "rollout/answers_timeout",
    "rollout/length_p95",
    "rollout/length_max",
    "rollout/truncated_ratio",
    "rollout/mixed_ratio",
    "rollout/versions_max",
    "rollout/return_std",
    "rollout/no_signal_ratio",
    "rollout/live_rows_mean",
    "rollout/held_slots_mean",
    "rollout/free_slots_mean",
    "rollout/waiting_responses_mean",
    "rollout/engine_tokens_per_s",
    "learn/loss",
    "learn/grad_norm",
    "learn/learning_rate",
    "learn/entropy",
    "learn/clip_fraction",
    "learn/ess",
    "learn/ess_age_0",
    "learn/behaviour_kl",
    "learn/behaviour_kl_age_0",
    "learn/gradient_steps",
]

EVAL_METRICS = [
    "eval/return_mean",
    "eval/return_std",
    "eval/return_min",
    "eval/return_max",
    "eval/return_mean_sampled",
    "eval/return_std_sampled",
    "eval/length_mean",
    "eval/episodes",
    "eval/version",
    "eval/time_s",
    "eval/skipped",
]

DIAL = [
    "off_policy_degree",
    "open_rounds",
    "auto_max",
    "enable_async_eval",
    "weight_sync_interval",
    "staleness_threshold",
    "max_staleness_allowed",
    "max_queue_size",
    "min_batch_count",
    "max_drops_per_round",
    "straggler_policy",
    "preset",
    "batch_timeout",
    "generation_timeout",
    "batch_generation_interval",
    "max_sync_retries",
    "sync_timeout",
    "sync_retry_delay",
    "enable_async_debug_log",
]


def test_metrics_of_a_run(small_run: Callable[..., Any]) -> None:
    result = small_run({"runtime.kind": "inline"}, rounds=2)
    record = read_rounds(result.run_dir / "events.jsonl")[-1]
    assert sorted(record) == sorted(ROUND_FIELDS)
    assert sorted(record["metrics"]) == sorted(ROUND_METRICS + PPO_METRICS)
    (event,) = [e for e in read_events(result.run_dir / "events.jsonl") if e["kind"] == "eval"]
    assert sorted(event["metrics"]) == sorted(EVAL_METRICS)


def test_metrics_of_a_run_of_a_language_model(tmp_path: Path) -> None:
    settings = {**small_settings("arithmetic-grpo"), "run.dir": str(tmp_path / "run"), "run.rounds": 2}
    result = offbeat.train("arithmetic-grpo", overrides={**settings, "runtime.kind": "inline"})
    record = read_rounds(result.run_dir / "events.jsonl")[-1]
    assert sorted(record["metrics"]) == sorted(ROUND_METRICS + GRPO_METRICS)


def test_result_of_a_run(small_run: Callable[..., Any]) -> None:
    result = small_run({"runtime.kind": "inline", "eval.interval_rounds": 1}, rounds=2)
    outcome = ["run_dir", "reason", "rounds", "digest", "metrics", "eval_return", "policy", "max_staleness"]
    times = ["wall_s", "startup_s", "rounds_s", "env_steps", "steps_per_s"]
    incidents = ["interrupted", "losses", "restarts", "stopped", "save_error"]
    assert [name for name in (*outcome, *times, *incidents) if not hasattr(result, name)] == []
    assert result.rounds == 2
    evals = [event for event in read_events(result.run_dir / "events.jsonl") if event["kind"] == "eval"]
    assert result.eval_return == evals[-1]["metrics"]["eval/return_mean"]
    assert not result.interrupted
    assert "array(" not in repr(result)


def test_commands() -> None:
    assert list(VERBS) == [
        "train",
        "resume",
        "status",
        "eval",
        "play",
        "replay",
        "check",
        "generate",
        "convert",
        "text",
        "list",
        "digest",
        "doctor",
    ]


def test_configuration_sections_and_dial() -> None:
    machines = ["runtime", "learner", "trainer", "rollout"]
    sections = ["algorithm", "env", "async_training", *machines, "run", "eval", "checkpoint", "observe"]
    assert list(RunConfig.model_fields) == sections
    assert list(AsyncTrainingConfig.model_fields) == DIAL


def test_public_names() -> None:
    classes = ["Batch", "Callback", "PerWorker", "Pipeline", "PlayResult", "Result", "Segment", "SyncRun"]
    classes.append("Ticket")
    functions = ["digest", "env_factory", "evaluate", "load_config", "play", "register", "replay_run"]
    functions += ["resume", "token_loss", "train"]
    assert sorted(offbeat.__all__) == [*classes, "__version__", *functions]
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None


def test_public_names_of_text_games() -> None:
    classes = ["ActionTable", "Family", "Game", "OwnGame", "Part", "RemoteGame", "Scene", "SolvedGame"]
    classes.append("ValidActions")
    assert offbeat.envs.text.__all__ == ["FAMILIES", "PARTS", *classes, "find_family", "open_game"]


def test_public_names_of_language_models() -> None:
    classes = ["Backend", "CharTokenizer", "Decoder", "Engine", "HubTokenizer", "Packing", "Request"]
    classes += ["Response", "RopeScaling", "Scorer", "Scores", "Shape", "Stream", "Tokenizer"]
    classes += ["TransformersBackend", "WordTokenizer"]
    functions = ["check_fits", "config_of", "load_tokenizer", "read_folder", "shape_of", "text_after"]
    functions.append("write_folder")
    assert offbeat.llm.__all__ == [*classes, *functions]
    for name in offbeat.llm.__all__:
        assert getattr(offbeat.llm, name) is not None
