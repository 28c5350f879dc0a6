"""Settings that could never run are refused, with the fix in the message."""

from __future__ import annotations

from typing import Any

import pytest

from offbeat.errors import ConfigError
from offbeat.pacing import AUTO, PaceConfig


def config(**changes: Any) -> PaceConfig:
    return PaceConfig(**({"rounds": 10, "segments_per_round": 4} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": -1}, "rounds must be at least 0"),
        ({"segments_per_round": 0}, "segments_per_round must be at least 1"),
        ({"num_collectors": 0}, "num_collectors must be at least 1"),
        ({"publish_interval": 0}, "publish_interval must be at least 1"),
        ({"eval_interval": 0}, "eval_interval must be at least 1"),
        ({"checkpoint_interval": 0}, "checkpoint_interval must be at least 1"),
        ({"max_publish_retries": -1}, "max_publish_retries must be at least 0"),
        ({"off_policy_degree": -2}, "-1 .auto., 0 .synchronous. or more, not -2"),
        ({"publish_interval": 2}, "weight_sync_interval to at most 1, or raise off_policy_degree"),
        ({"publish_interval": 2, "off_policy_degree": AUTO}, "weight_sync_interval to at most 1"),
        ({"off_policy_degree": 3, "publish_interval": 5}, "needs off_policy_degree >= 4, not 3"),
        (
            {"off_policy_degree": 3, "max_staleness": 2},
            "off_policy_degree 3 is above max_staleness_allowed 2",
        ),
        ({"off_policy_degree": AUTO, "max_staleness": 2}, "auto_max 8 is above max_staleness_allowed 2"),
        ({"max_outstanding": 3}, "raise max_queue_size, or lower segments_per_round$"),
        (
            {"min_segments": 5},
            "min_batch_count 5 .* at most 4 .* lower it to that, or raise off_policy_degree",
        ),
        (
            {"off_policy_degree": 1, "max_outstanding": 4, "min_segments": 5},
            "at most 4 .* raise max_queue_size",
        ),
        ({"off_policy_degree": AUTO, "auto_max": 2, "min_segments": 13}, "at most 12 .* raise auto_max"),
        ({"max_drops_per_round": -1}, "max_drops_per_round must be at least 0"),
        ({"straggler_policy": "kill"}, "straggler_policy must be 'wait' or 'cut', not 'kill'"),
        ({"open_rounds": -1}, "open_rounds must be at least 0"),
        ({"mode": "replay", "max_outstanding": 5, "min_segments": 6}, "max_queue_size 5 .* min_batch_count"),
        ({"mode": "replay", "max_outstanding": 9, "replay_ratio": 0.1}, "below the 10 segments"),
        ({"mode": "replay", "replay_ratio": 0.0}, "replay_ratio must be above 0, not 0.0"),
    ],
)
def test_refused_with_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_a_dial_that_opens_may_wait_for_more_than_the_first_round_can_get() -> None:
    assert config(off_policy_degree=3, open_rounds=1, min_segments=16).min_segments == 16


def test_replay_may_publish_as_rarely_as_it_likes() -> None:
    assert config(mode="replay", publish_interval=5).publish_interval == 5


@pytest.mark.parametrize(
    ("ratio", "rounds_done", "degree", "limit"),
    [
        (None, 0, 0, 6),  # min_segments
        (None, 1, 0, 10),  # and the four of the second round
        (None, 1, 2, 18),  # two rounds further ahead
        (None, 9, 5, 42),  # never beyond the last round
        (0.1, 0, 0, 10),  # ten segments for one round
        (0.1, 2, 1, 40),
        (1 / 49, 0, 0, 49),  # no segment too many by rounding
        (1 / 49, 2, 0, 147),
    ],
)
def test_replay_limit(ratio: float | None, rounds_done: int, degree: int, limit: int) -> None:
    replay = config(mode="replay", min_segments=6, replay_ratio=ratio)
    assert replay.replay_limit(rounds_done, degree) == limit
