"""The report of a finished run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.observe.callbacks import MetricValue
from offbeat.pacing import Counts
from offbeat.run.collectors import Loss
from offbeat.run.driver import Driver
from offbeat.types import Metrics


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a run. ``metrics`` are the last round's, ``eval_metrics`` the last evaluation's.

    ``env_steps`` counts from the run's first round, ``steps_per_s`` what this start of it trained, from its
    first ticket to the end of its last round.
    """

    version: int
    reason: str
    counts: Counts
    metrics: dict[str, MetricValue]
    eval_metrics: Metrics
    wall_s: float
    env_steps: int
    steps_per_s: float
    max_staleness: int
    weights: Any
    digest: str | None
    losses: tuple[Loss, ...] = ()
    restarts: int = 0


def report_of(driver: Driver, earlier_losses: tuple[Loss, ...] = (), restarts: int = 0) -> Report:
    """Return the report of a driver that has finished; OffbeatError when the run failed."""
    finish, snapshot, meter = driver.finish, driver.saving.snapshot, driver.meter
    assert finish is not None, "the run has not finished"
    if finish.failed:
        raise OffbeatError(finish.reason)
    assert snapshot is not None
    return Report(
        version=driver.pace.version,
        reason=finish.reason,
        counts=driver.pace.counts(),
        metrics=meter.metrics,
        eval_metrics=meter.eval_metrics,
        wall_s=driver.seconds,
        env_steps=meter.env_steps,
        steps_per_s=meter.steps_per_s,
        max_staleness=meter.max_staleness,
        weights=snapshot.weights,
        digest=driver.saving.digest(),
        losses=(*earlier_losses, *driver.collectors.losses),
        restarts=restarts,
    )
