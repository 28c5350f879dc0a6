"""Checks that need more than one field: each names the values, why they cannot run, and the fix."""

from __future__ import annotations

from offbeat.config.models import AUTO, Conflict, RunConfig


def conflicts(config: RunConfig) -> list[Conflict]:
    """List what cannot run together in a configuration whose fields are valid one by one."""
    checks = (_envs_per_worker, _sync_interval, _staleness_cap, _queue_size, _first_batch)
    return [conflict for check in checks for conflict in check(config)]


def algorithm_conflicts(config: RunConfig) -> list[Conflict]:
    """List what the algorithm refuses about the run it is part of."""
    found = config.algorithm.problems(config)
    return [Conflict((key if "." in key else f"algorithm.{key}",), message) for key, message in found]


def _envs_per_worker(config: RunConfig) -> list[Conflict]:
    envs, workers = config.env.num_envs, config.runtime.num_workers
    if envs % workers == 0:
        return []
    below, above = envs // workers * workers, (envs // workers + 1) * workers
    fitting = f"{below} or {above}" if below else str(above)
    message = (
        f"{envs} environments do not divide by {workers} workers: set env.num_envs to {fitting},"
        " or change runtime.num_workers"
    )
    return [Conflict(("env.num_envs", "runtime.num_workers"), message)]


def _sync_interval(config: RunConfig) -> list[Conflict]:
    dial = config.async_training
    longest = dial.smallest_degree + 1
    if dial.weight_sync_interval <= longest:
        return []
    message = (
        f"weights must be published at least every k + 1 rounds: with off_policy_degree"
        f" {dial.off_policy_degree} set weight_sync_interval to at most {longest},"
        f" or off_policy_degree to {dial.weight_sync_interval - 1} or more"
    )
    keys = ("async_training.weight_sync_interval", "async_training.off_policy_degree")
    return [Conflict(keys, message)]


def _staleness_cap(config: RunConfig) -> list[Conflict]:
    dial = config.async_training
    cap = dial.max_staleness_allowed
    if cap is None or dial.largest_degree <= cap:
        return []
    key = "auto_max" if dial.off_policy_degree == AUTO else "off_policy_degree"
    message = (
        f"{key} {dial.largest_degree} is above max_staleness_allowed {cap}:"
        f" lower it to {cap} or raise the cap"
    )
    return [Conflict((f"async_training.{key}", "async_training.max_staleness_allowed"), message)]


_ROUND_SIZE_KEYS = ("algorithm.segments_per_round", "runtime.num_workers")


def _queue_size(config: RunConfig) -> list[Conflict]:
    limit, needed = config.async_training.max_queue_size, config.segments_per_round
    if limit is None or limit >= needed:
        return []
    message = (
        f"a round trains {needed} segments, so with max_queue_size {limit} none could ever start:"
        f" set max_queue_size to {needed} or more"
    )
    return [Conflict(("async_training.max_queue_size", *_ROUND_SIZE_KEYS), message)]


def _first_batch(config: RunConfig) -> list[Conflict]:
    dial = config.async_training
    rounds = min(dial.smallest_degree + 1, config.run.rounds)
    most = min(rounds * config.segments_per_round, dial.max_queue_size or rounds * config.segments_per_round)
    if dial.min_batch_count is None or dial.min_batch_count <= most:
        return []
    message = (
        f"min_batch_count {dial.min_batch_count} can never arrive: with off_policy_degree"
        f" {dial.off_policy_degree} at most {most} segments wait for the first round;"
        f" set it to {most} or less"
    )
    keys = (
        "async_training.min_batch_count",
        "async_training.off_policy_degree",
        "run.rounds",
        *_ROUND_SIZE_KEYS,
    )
    return [Conflict((*keys, "async_training.max_queue_size"), message)]
