"""Metrics of GRPO's rounds: lengths, ages, the price of staleness by age, and what the engine had to do.

Segments carry when their tokens were made, and what the engine did meanwhile, in arrays of their own
(``made_s``, ``load``). They are observations: no loss reads them, a repeated run makes others, and nothing is
compared or digested but weights, versions and ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from offbeat.llm.engine import Engine
from offbeat.ops.statistics import approx_kl, effective_sample_size
from offbeat.types import Array, Metrics, Segment

_SUMS = 6
_STEPS, _ROWS, _HELD, _WAITING, _FREE, _SECONDS = range(_SUMS)


class Load:
    """Sums over the engine's steps since the last segments: rows, other slots, responses without memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sums = np.zeros(_SUMS)
        self._row_steps = 0

    def count(self, began_s: float) -> None:
        """Count a step that began then, on the clock ``time.perf_counter``."""
        engine, sums = self._engine, self._sums
        sums[_STEPS] += 1
        sums[_ROWS] += engine.num_row_steps - self._row_steps
        sums[_HELD] += engine.num_held
        sums[_WAITING] += engine.num_waiting
        sums[_FREE] += engine.num_free
        sums[_SECONDS] += time.perf_counter() - began_s
        self._row_steps = engine.num_row_steps

    def take(self) -> Array:
        """Return the sums, and begin new ones."""
        sums, self._sums = self._sums, np.zeros(_SUMS)
        return sums


def round_metrics(segments: Sequence[Segment], now_s: float) -> Metrics:
    """Return what a round trained; ``now_s`` is when it began to, in seconds since 1970."""
    return {**_responses(segments), **_ages_s(segments, now_s), **_load(segments)}


def _responses(segments: Sequence[Segment]) -> Metrics:
    """Return metrics of the responses of a round; a reward that is not finite is none."""
    pieces = [piece for segment in segments for piece in segment.pieces]
    lengths = [sum(span.size for span in piece.spans) for piece in pieces]
    versions = [len({span.version for span in piece.spans}) for piece in pieces]
    rewards = [one[np.isfinite(one)] for one in (segment.data["rewards"] for segment in segments)]
    return {
        "rollout/length_p95": float(np.percentile(lengths, 95)),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_ratio": float(np.mean([piece.end == "length" for piece in pieces])),
        "rollout/mixed_ratio": float(np.mean([count > 1 for count in versions])),
        "rollout/versions_max": float(max(versions)),
        "rollout/return_std": float(np.concatenate(rewards).std()) if any(map(len, rewards)) else 0.0,
        "rollout/no_signal_ratio": float(np.mean([len(set(one.tolist())) < 2 for one in rewards])),
    }


def _ages_s(segments: Sequence[Segment], now_s: float) -> Metrics:
    """Return the ages of the trained tokens in seconds, each token by itself.

    Both times are those of the machines' clocks: on several machines they are as right as these agree.
    """
    made_s = np.concatenate([segment.data["made_s"][segment.data["is_own"]] for segment in segments])
    ages = now_s - made_s[np.isfinite(made_s)]
    if not len(ages):
        return {}
    return {
        "pace/avg_sample_age_s": float(ages.mean()),
        "pace/p95_sample_age_s": float(np.percentile(ages, 95)),
        "pace/max_sample_age_s": float(ages.max()),
    }


def _load(segments: Sequence[Segment]) -> Metrics:
    """Return what engines did while the segments of a round were made, in means over their steps."""
    sums = np.sum([segment.data["load"] for segment in segments], axis=0)
    steps, seconds = sums[_STEPS], sums[_SECONDS]
    if not steps or not seconds:
        return {}
    return {
        "rollout/live_rows_mean": float(sums[_ROWS] / steps),
        "rollout/held_slots_mean": float(sums[_HELD] / steps),
        "rollout/free_slots_mean": float(sums[_FREE] / steps),
        "rollout/waiting_responses_mean": float(sums[_WAITING] / steps),
        "rollout/engine_tokens_per_s": float(sums[_ROWS] / seconds),
    }


def by_age(log_ratios: Array, ages: Array) -> Metrics:
    """Return what staleness costs tokens of each age in versions: effective sample size and KL.

    ``log_ratios`` ``[M]`` are of the policy before the round to those that drew the tokens. An age of which a
    round has no token is left out.
    """
    found: Metrics = {}
    for age in np.unique(ages).tolist():
        own = log_ratios[ages == age]
        found[f"learn/ess_age_{age}"] = effective_sample_size(own)
        found[f"learn/behaviour_kl_age_{age}"] = approx_kl(own)
    return found
