"""Wide collectors that hang, wait or are killed with many tickets."""

from __future__ import annotations

import ctypes
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbeat import Callback, PerWorker, Pipeline
from offbeat.config.models import AsyncTrainingConfig, RuntimeConfig
from offbeat.errors import CollectError
from offbeat.pipeline import Settings
from offbeat.roles import WorkerContext
from offbeat.types import Progress
from tests.integration.wide_fakes import Counting, Tools

KINDS = ("inline", "threads", "processes")  # Ray: test_ray.py


class Lost(Callback):
    """Keeps why collectors were lost."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_collector_lost(self, info: Any) -> None:
        self.reasons.append(info.reason)


def hold_the_gil(how: str) -> None:
    """Let no other thread of this process run, for minutes."""
    if how == "sleeps":
        ctypes.PyDLL(None).sleep(300)
    else:
        pow(7, 10**9)


class Hangs(Counting):
    """Holds the GIL in its fourth piece of work, the first time that it is made."""

    def __init__(self, context: WorkerContext, how: str, marker: Path, **options: Any) -> None:
        super().__init__(context, **options)
        self._how, self._marker, self._num_pieces = how, marker, 0

    def advance(self) -> Progress:
        self._num_pieces += 1
        if self._num_pieces == 4 and not self._marker.exists():
            self._marker.touch()
            hold_the_gil(self._how)
        return super().advance()


def run(kind: str, collect: Any, size: int, rounds: int = 2, **limits: Any) -> Lost:
    """Run at k = 0, where all tickets of a round are with the only collector at once."""
    names = AsyncTrainingConfig.model_fields.keys() & limits.keys()
    asynchronous = {name: limits.pop(name) for name in names}
    settings = Settings(
        async_training=AsyncTrainingConfig(**asynchronous), runtime=RuntimeConfig(num_workers=1, **limits)
    )
    lost = Lost()
    pipeline = Pipeline(
        collect=PerWorker(collect),
        train=lambda segments: None,
        weights=lambda: {"w": 0.0},
        runtime=kind,  # type: ignore[arg-type]
        segments_per_round=size,
        settings=settings,
        callbacks=[lost],
    )
    assert pipeline.run(rounds=rounds).version == rounds
    return lost


@pytest.mark.parametrize("how", ["sleeps", "computes"])
def test_work_that_holds_the_gil_is_found_killed_and_named(how: str, tmp_path: Path) -> None:
    collect = partial(Hangs, how=how, marker=tmp_path / "happened")
    (reason,) = run("processes", collect, 20, generation_timeout=1.5).reasons
    assert "hung: ticket 0 took more than 1.5 s (async_training.generation_timeout)" in reason
    assert "in hold_the_gil" in reason, "the report has its stack"


@pytest.mark.parametrize("kind", KINDS)
def test_collector_whose_tickets_all_wait_for_tools_is_not_killed(kind: str) -> None:
    assert run(kind, partial(Tools, tool_s=3.0), 200, rounds=1, generation_timeout=1.0).reasons == []


class DiesOver(Counting):
    """Takes its process along when it holds a certain ticket."""

    def advance(self) -> Progress:
        if 7 in self._open:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().advance()


def test_ticket_that_takes_every_collector_down_is_found_among_many_and_named() -> None:
    with pytest.raises(CollectError, match=r"ticket 7 took \d collectors down and would take more"):
        run("processes", DiesOver, 20, restart_backoff_s=0.01, max_worker_restarts=100)
