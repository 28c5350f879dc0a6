"""Runs with other losses and settings than the default: on every runtime, asynchronous, resumed, repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.errors import OffbeatError
from offbeat.llm.tasks import TASKS, Problem
from offbeat.llm.tasks.arithmetic import Arithmetic
from offbeat.observe.events import read_rounds
from tests.integration.test_grpo import run

ALL = {
    "algorithm.loss": "ppo",
    "algorithm.num_minibatches": 2,
    "algorithm.num_epochs": 2,
    "algorithm.correction.proximal": "round_start",
    "algorithm.correction.weight": "token",
    "algorithm.correction.mask_high": 1.5,
    "algorithm.kl.coef": 0.01,
    "algorithm.kl.place": "reward",
    "algorithm.lr_schedule": "cosine",
    "algorithm.lr_warmup_rounds": 2,
    "algorithm.schedule_rounds": 20,
    "algorithm.max_new_tokens": 12,
    "algorithm.overlong.buffer": 4,
    "runtime.num_workers": 1,
}


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_zero_is_the_same_on_every_runtime(kind: str, tmp_path: Path) -> None:
    assert run(tmp_path / kind, kind, **ALL) == run(tmp_path / "inline", "inline", **ALL)


def test_asynchronous_run_with_everything_resumes_and_repeats(tmp_path: Path) -> None:
    path, whole = tmp_path / "run", tmp_path / "whole"
    run(path, "threads", degree=2, rounds=8, **ALL)
    assert offbeat.replay_run(path).identical
    run(whole, "inline", rounds=6, **ALL)
    run(tmp_path / "half", "inline", rounds=3, **ALL)
    offbeat.resume(tmp_path / "half", overrides={"run.rounds": 6})
    assert offbeat.digest(tmp_path / "half") == offbeat.digest(whole)


class Parity(Arithmetic):
    """A reward that a new model has now and then: responses whose tokens have an even sum."""

    def reward(self, problem: Problem, response: str) -> float:
        return float(sum(map(ord, response)) % 2)


DYNAMIC: dict[str, Any] = {
    "env.id": "parity",
    "algorithm.dynamic_sampling": True,
    "algorithm.max_new_tokens": 30,
    "runtime.num_workers": 1,
}


def test_groups_without_spread_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round trains as many groups, all with spread; at k = 0 on every runtime the same ones."""
    monkeypatch.setitem(TASKS, "parity", Parity)
    paths = {kind: tmp_path / kind for kind in ("inline", "threads")}
    digests = {run(path, kind, rounds=6, **DYNAMIC) for kind, path in paths.items()}
    assert len(digests) == 1
    rounds = list(read_rounds(paths["inline"] / "events.jsonl"))
    assert rounds[-1]["metrics"]["pace/dropped_samples"] > 0
    assert all(np.isfinite(event["metrics"]["learn/loss"]) for event in rounds)
    run(tmp_path / "later", "threads", degree=2, rounds=8, **DYNAMIC)
    assert offbeat.replay_run(tmp_path / "later").identical


def test_run_without_any_signal_ends_and_says_why(tmp_path: Path) -> None:
    """Sums are never right at the start, without a warm-up: dynamic sampling finds nothing to train."""
    more = {**DYNAMIC, "env.id": "arithmetic", "async_training.max_drops_per_round": 20}
    with pytest.raises(OffbeatError, match="no_spread"):
        run(tmp_path / "run", "inline", **more)
