"""Checks that need more than one field: each names the values, why they cannot run, and the fix."""

from __future__ import annotations

import os

from offbeat.config.models import AUTO, Conflict, RunConfig

_MOST_WORKERS_PER_CORE = 2


def conflicts(config: RunConfig) -> list[Conflict]:
    """List what cannot run together in a configuration whose fields are valid one by one."""
    checks = (
        _envs_per_worker,
        _preset,
        _sync_interval,
        _staleness_cap,
        _queue_size,
        _least_batch,
        _nodes,
        _ranks_per_node,
        _gpus_of_ranks,
        _nccl,
        _heartbeat,
        _gpus,
        _served_files,
        _stop_at_evaluation,
    )
    return [conflict for check in checks for conflict in check(config)]


def algorithm_conflicts(config: RunConfig) -> list[Conflict]:
    """List what the algorithm refuses about the run it is part of."""
    found = config.algorithm.problems(config)
    return [Conflict((key if "." in key else f"algorithm.{key}",), message) for key, message in found]


def _envs_per_worker(config: RunConfig) -> list[Conflict]:
    envs, workers = config.env.num_envs, config.runtime.num_workers
    if envs % workers == 0 or not config.algorithm.has_envs:
        return []
    below, above = envs // workers * workers, (envs // workers + 1) * workers
    fitting = f"{below} or {above}" if below else str(above)
    message = (
        f"{envs} environments do not divide by {workers} workers: set env.num_envs to {fitting},"
        " or change runtime.num_workers"
    )
    crowd = crowding(config)
    return [
        Conflict(("env.num_envs", "runtime.num_workers"), message if crowd is None else f"{message}; {crowd}")
    ]


def crowding(config: RunConfig) -> str | None:
    """Return a remark on more collectors than the cores of this machine have a use for."""
    workers, cores = config.runtime.num_workers, usable_cores()
    if config.runtime.kind not in ("threads", "processes") or workers <= _MOST_WORKERS_PER_CORE * cores:
        return None
    least, most = max(1, cores - 1), _MOST_WORKERS_PER_CORE * cores
    return (
        f"{workers:,} collectors share {cores:,} core{'' if cores == 1 else 's'} with the learner: unless"
        f" they wait for something else than a core, runtime.num_workers={least} to {most} is as fast"
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _preset(config: RunConfig) -> list[Conflict]:
    dial = config.async_training
    found = dial.preset_problems()
    if dial.preset is not None and config.algorithm.mode == "replay":
        message = f"{config.algorithm.name} replays its samples: a preset is for those that train each once"
        return [Conflict(("async_training.preset", "algorithm.name"), message)]
    return [Conflict((f"async_training.{key}", "async_training.preset"), text) for key, text in found]


def _sync_interval(config: RunConfig) -> list[Conflict]:
    dial = config.async_training
    longest = dial.smallest_degree + 1
    if dial.weight_sync_interval <= longest or config.algorithm.mode == "replay":
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
    limit = config.async_training.max_queue_size
    # Without an environment for each worker nothing can be counted; that is a conflict of its own.
    if limit is None or config.envs_per_worker == 0 or limit >= config.first_segments:
        return []
    needed, key = config.first_segments, "async_training.max_queue_size"
    if needed <= config.segments_per_round:
        message = (
            f"a round trains {needed} segments, so with max_queue_size {limit} none could ever start:"
            f" set max_queue_size to {needed} or more"
        )
        return [Conflict((key, *_ROUND_SIZE_KEYS), message)]
    causes = _prefill_keys(config)
    message = (
        f"the first round waits for {needed} segments, so with max_queue_size {limit} it could never start:"
        f" set max_queue_size to {needed} or more, or change {' or '.join(causes)}"
    )
    return [Conflict((key, *causes, "env.num_envs", *_ROUND_SIZE_KEYS), message)]


def _prefill_keys(config: RunConfig) -> list[str]:
    """Settings that make the first round of a replay run wait."""
    known = type(config.algorithm).model_fields
    names = ("min_buffer_size", "batch_size", "replay_ratio")
    causes = [f"algorithm.{name}" for name in names if name in known]
    dial = config.async_training
    return causes if dial.min_batch_count is None else [*causes, "async_training.min_batch_count"]


def _least_batch(config: RunConfig) -> list[Conflict]:
    dial = config.async_training
    by_dial = (dial.largest_degree + 1) * config.segments_per_round
    most = min(by_dial, dial.max_queue_size or by_dial)
    if dial.min_batch_count is None or dial.min_batch_count <= most or config.algorithm.mode == "replay":
        return []
    message = (
        f"min_batch_count {dial.min_batch_count} can never arrive: with k = {dial.largest_degree} at most"
        f" {most} segments wait for a round; set it to {most} or less"
    )
    keys = (
        "async_training.min_batch_count",
        "async_training.off_policy_degree",
        "async_training.auto_max",
        *_ROUND_SIZE_KEYS,
    )
    return [Conflict((*keys, "async_training.max_queue_size"), message)]


def _heartbeat(config: RunConfig) -> list[Conflict]:
    interval_s, limit_s = config.runtime.heartbeat_interval_s, config.runtime.heartbeat_timeout_s
    if limit_s is None or interval_s <= limit_s / 2:
        return []
    message = (
        f"signs of life every {interval_s:g} s leave a limit of {limit_s:g} s no room: set"
        f" heartbeat_interval_s to at most {limit_s / 2:g}, or raise heartbeat_timeout_s"
    )
    return [Conflict(("runtime.heartbeat_interval_s", "runtime.heartbeat_timeout_s"), message)]


def _stop_at_evaluation(config: RunConfig) -> list[Conflict]:
    if config.run.stop_eval_return is None or config.eval.interval_rounds is not None:
        return []
    message = "nothing is evaluated before the end: set eval.interval_rounds"
    return [Conflict(("run.stop_eval_return", "eval.interval_rounds"), message)]


def _served_files(config: RunConfig) -> list[Conflict]:
    asked = config.observe.tensorboard
    if not asked.serve or asked.enabled is not False:
        return []
    message = "TensorBoard has nothing to show without its files: set enabled to true, or serve to false"
    return [Conflict(("observe.tensorboard.serve", "observe.tensorboard.enabled"), message)]


def _gpus(config: RunConfig) -> list[Conflict]:
    trainer, is_ray = config.trainer, config.runtime.kind == "ray"
    found = []
    if trainer.device == "cpu" and trainer.n_gpus_per_node > 0:
        message = (
            f"{trainer.n_gpus_per_node} GPUs for a learner on the CPU: set trainer.device to cuda,"
            " or trainer.n_gpus_per_node to 0"
        )
        found.append(Conflict(("trainer.device", "trainer.n_gpus_per_node"), message))
    if not is_ray and config.rollout.n_gpus_per_node > 0:
        message = "GPUs are given to collectors by Ray only: set runtime.kind to ray, or this to 0"
        found.append(Conflict(("rollout.n_gpus_per_node", "runtime.kind"), message))
    rollout = config.rollout
    if rollout.device != "cpu" and not config.algorithm.acts_anywhere:
        message = f"collectors of {config.algorithm.name} act on the CPU: set rollout.device to cpu"
        found.append(Conflict(("rollout.device", "algorithm.name"), message))
    if is_ray and rollout.device == "cpu" and rollout.n_gpus_per_node > 0:
        message = (
            f"{rollout.n_gpus_per_node} GPUs for collectors on the CPU: set rollout.device to cuda,"
            " or rollout.n_gpus_per_node to 0"
        )
        found.append(Conflict(("rollout.device", "rollout.n_gpus_per_node"), message))
    if is_ray and rollout.device == "cuda" and rollout.n_gpus_per_node == 0:
        message = "on Ray collectors see the GPUs they ask for: set rollout.n_gpus_per_node to 1 or more"
        found.append(Conflict(("rollout.device", "rollout.n_gpus_per_node"), message))
    return found


def _nodes(config: RunConfig) -> list[Conflict]:
    asked = {"trainer.nnodes": config.trainer.nnodes, "rollout.nnodes": config.rollout.nnodes}
    if config.runtime.kind == "ray":
        return []
    return [
        Conflict(
            (key, "runtime.kind"),
            f"{count} nodes need Ray: set runtime.kind to ray, or {key} to 1",
        )
        for key, count in asked.items()
        if count > 1
    ]


def _ranks_per_node(config: RunConfig) -> list[Conflict]:
    ranks, nodes = config.learner.num_ranks, config.trainer.nnodes
    if ranks % nodes == 0:
        return []
    message = (
        f"{ranks} ranks do not divide by {nodes} nodes: set learner.num_ranks to"
        f" {-(-ranks // nodes) * nodes}, or change trainer.nnodes"
    )
    return [Conflict(("learner.num_ranks", "trainer.nnodes"), message)]


def _gpus_of_ranks(config: RunConfig) -> list[Conflict]:
    gpus, nodes = config.trainer.n_gpus_per_node, config.trainer.nnodes
    ranks = config.learner.num_ranks // nodes
    if gpus == 0 or config.trainer.device == "cpu" or ranks % gpus == 0:
        return []
    message = (
        f"{ranks} ranks on a node cannot share {gpus} GPUs evenly: set learner.num_ranks to {gpus * nodes}"
        f" or a multiple, or trainer.n_gpus_per_node to a number that divides {ranks}"
    )
    return [Conflict(("learner.num_ranks", "trainer.n_gpus_per_node"), message)]


def _nccl(config: RunConfig) -> list[Conflict]:
    if config.learner.backend != "nccl":
        return []
    gpus, ranks = config.trainer.n_gpus_per_node, config.learner.num_ranks // config.trainer.nnodes
    if config.trainer.device == "cpu":
        message = (
            "nccl exchanges gradients between GPUs: set trainer.device to cuda, or backend to gloo or auto"
        )
        return [Conflict(("learner.backend", "trainer.device"), message)]
    if gpus and ranks > gpus:
        message = (
            f"nccl needs a GPU for each rank, and a node has {ranks} ranks and {gpus} GPUs: set backend to"
            " gloo or auto, or lower learner.num_ranks"
        )
        return [Conflict(("learner.backend", "learner.num_ranks", "trainer.n_gpus_per_node"), message)]
    return []
