"""The block of component statistics that goes to ``logs/run.log`` every ``observe.stats_interval_s``."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from offbeat.observe.callbacks import MetricValue
from offbeat.observe.text import fill

_BLOCK = """\
Component Statistics
  learner     {learn/global_steps:k} steps, {learn/processed_samples:k} samples ({learn/samples_per_s:k}/s), \
train {time/train_s:3} s, wait {time/wait_s:3} s, idle {pace/train_idle_ratio:%}
  collectors  {rollout/total_generated_samples:k} samples ({rollout/steps_per_s:k}/s), \
collect {time/collect_s:3} s, idle {pace/collect_idle_ratio:%}, {system/workers_alive:0} alive, \
{system/worker_restarts:0} restarts, {rollout/generation_errors:0} errors
  queue       {queue/size:0} waiting ({queue/bytes:B}), {queue/total_produced:k} in, \
{queue/total_consumed:k} out, {pace/dropped_samples:k} samples dropped
  weights     version {weights/current_param_version:0}, published {weights/published_version:0} \
(lag {weights/publish_lag:0}), {weights/param_sync_count:0} of {weights/param_sync_requests:0} syncs worked, \
last took {weights/sync_time_s:3} s
  pace        k {pace/off_policy_degree:0}, age {pace/avg_sample_age:2} mean {pace/max_sample_age:0} max, \
lag {pace/lag:2} rounds, bottleneck {pace/bottleneck}, overlap {pace/overlap_efficiency:2}, \
left {time/eta_s:t}"""


def component_statistics(metrics: Mapping[str, MetricValue]) -> str:
    """Format what each component has done and is waiting for, as a few lines of text."""
    return fill(_BLOCK, metrics)


class StatsLog:
    """Writes the block at most every ``interval_s`` seconds."""

    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._written_at_s: float | None = None

    def write_if_due(self, metrics: Mapping[str, MetricValue], now_s: float) -> bool:
        """Write the block when it is time (the first call is); return whether it was."""
        if self._written_at_s is not None and now_s - self._written_at_s < self._interval_s:
            return False
        self._written_at_s = now_s
        self._logger.info("%s", component_statistics(metrics))
        return True
