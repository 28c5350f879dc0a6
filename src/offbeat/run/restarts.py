"""Restarts: when a run continues by itself after its learner crashed or diverged, and from where."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.checkpoint.codec import UNFIT
from offbeat.checkpoint.lock import RunLock
from offbeat.config.models import RunSection
from offbeat.errors import (
    CheckpointError,
    CollectError,
    DivergedError,
    LearnerLost,
    OffbeatError,
    TrainError,
)
from offbeat.observe.logs import make_logs_dir
from offbeat.observe.tensorboard_server import TensorBoardServer
from offbeat.pacing import Counts
from offbeat.pacing.actions import Pace
from offbeat.pacing.events import Request, Restarting, StopRequested
from offbeat.run.collectors import Loss
from offbeat.run.driver import Driver
from offbeat.run.parts import StartPoint
from offbeat.run.waits import Wait, Waits
from offbeat.runtime.base import shortened
from offbeat.runtime.clock import Clock
from offbeat.types import Metrics

_log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 30.0
"""However often a run was restarted, it waits no longer than this for the next start."""
_SHORT_S, _LOOK_EVERY_S = 0.001, 0.1
_WINDOW_S = 3600.0  # after so long without a crash the count of restarts in a row begins again


class RestartPolicy:
    """Finds the checkpoint that a run can continue from, as long as its budget lasts.

    A learner whose process was lost gets another one. One that raised is tried once more: when it raises in
    the same round again, trying is no use. One that diverged goes back to the newest checkpoint, further back
    each time it diverges again without a new checkpoint in between. ``waits`` holds the pause between two
    drivers, each of which has deadlines of its own. Without ``checkpoints`` it finds none.
    """

    def __init__(self, settings: RunSection, checkpoints: CheckpointManager | None, clock: Clock) -> None:
        self._settings = settings
        self._checkpoints = checkpoints
        self._clock = clock
        self.waits = Waits()
        self.attempts = self._in_a_row = 0
        self._restarted_s = clock.now_s()
        self.losses: tuple[Loss, ...] = ()
        self._raised_at: int | None = None
        self._went_back_to: int | None = None

    def restart_point(self, error: OffbeatError, driver: Driver) -> tuple[StartPoint, Restarting] | None:
        """Return where to continue after this error, and the record of it; None: the error ends the run."""
        is_rollback = isinstance(error, DivergedError)
        if self._clock.now_s() - self._restarted_s > _WINDOW_S:
            self._in_a_row = 0
        if (
            driver.is_to_stop
            or self._in_a_row >= self._settings.max_restarts
            or (is_rollback and self._settings.on_nan != "rollback")
        ):
            return None
        version = driver.pace.version
        if not isinstance(error, LearnerLost) and not is_rollback:
            if self._raised_at == version:
                return None
            self._raised_at = version
        saved = self._checkpoint(is_rollback)
        if saved is None:
            return None
        self.attempts += 1
        self._in_a_row += 1
        self._restarted_s = self._clock.now_s()
        self.losses = (*self.losses, *driver.collectors.losses, Loss("learner", str(error), version))
        kind: Literal["rollback", "restart"] = "rollback" if is_rollback else "restart"
        rollback = self.attempts if is_rollback else 0
        record = Restarting(kind, saved.version, str(error), self._in_a_row, self._settings.max_restarts)
        return start_point(saved, rollback), record

    def _checkpoint(self, is_rollback: bool) -> LoadedCheckpoint | None:
        manager = self._checkpoints
        if manager is None:
            return None
        try:
            saved = manager.load()
        except CheckpointError:
            return None
        if is_rollback:
            if saved.version == self._went_back_to and (older := _newest_before(manager, saved.version)):
                saved = older
                manager.forget_after(saved.version)
            self._went_back_to = saved.version
        return saved

    def pause(self, requests: Collection[Request]) -> None:
        """Wait before the restart, longer each time, but not when the run is asked to stop."""
        limit_s = min(self._settings.restart_delay_s * 2.0 ** (self._in_a_row - 1), LONGEST_PAUSE_S)
        waits, now_s, key = self.waits, self._clock.now_s(), "restart"
        row = (key, "the run", f"restart {self._in_a_row} of {self._settings.max_restarts}", limit_s)
        waits.begin(Wait(*row, "run.restart_delay_s", partial(waits.end, key), "restarting"), now_s)
        while key in waits and not any(isinstance(one, StopRequested) for one in tuple(requests)):
            timeout_s = min(max(waits.next_s() - now_s, _SHORT_S), _LOOK_EVERY_S)
            self._clock.sleep(timeout_s)
            expected_s, now_s = now_s + timeout_s, self._clock.now_s()
            waits.extend_if_suspended(expected_s, now_s)
            for wait in waits.expired(now_s):
                wait.expire()
        waits.end(key)


def start_point(saved: LoadedCheckpoint, rollback: int = 0) -> StartPoint:
    """Return the point at which a run continues from a checkpoint."""
    return StartPoint(saved.version, saved.parts, saved.warnings, resumed=True, rollback=rollback)


def _newest_before(manager: CheckpointManager, version: int) -> LoadedCheckpoint | None:
    for older in reversed([one for one in manager.versions() if one < version]):
        try:
            return manager.load(older)
        except CheckpointError:
            continue
    return None


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a run. ``metrics`` are the last round's, ``eval_metrics`` the last evaluation's.

    ``env_steps`` and ``samples``, with their unit, count from the run's first round. Of this start of the run
    are ``wall_s``, ``startup_s`` (until the first ticket), ``rounds_s`` (from then to the end of the last
    round) and ``steps_per_s``, samples per second.
    ``stopped``: it was asked to end. ``save_error`` says why nothing could be saved; it is empty when the run
    has a checkpoint, or wanted none.
    """

    version: int
    reason: str
    counts: Counts
    metrics: Metrics
    eval_metrics: Metrics
    wall_s: float
    env_steps: int
    samples: tuple[int, str]
    startup_s: float
    rounds_s: float
    steps_per_s: float
    max_staleness: int
    weights: Any = field(repr=False)
    digest: str | None
    losses: tuple[Loss, ...] = ()
    restarts: int = 0
    stopped: bool = False
    save_error: str = ""


class OpenRun:
    """A run that its caller drives by `step`, inside a with-block; its learner's loss restarts the driver.

    Example::

        with pipeline.open(rounds=100) as run:
            report = run.complete()
    """

    def __init__(
        self,
        make_driver: Callable[[StartPoint], Driver],
        point: StartPoint,
        policy: RestartPolicy,
        requests: deque[Request],
        directory: Path | None,
    ) -> None:
        self._make_driver = make_driver
        self._point: StartPoint | None = point  # until the run has started: checkpoints can be large
        self._is_resumed = point.resumed
        self._refused: tuple[int, CheckpointError] | None = None  # and the version at which it was
        self._policy = policy
        self._requests = requests
        self._directory = directory
        self._lock: RunLock | None = None
        self._driver: Driver | None = None
        self._server: TensorBoardServer | None = None
        self._metrics: Metrics = {}
        self.signals: Sequence[str] = ()  # that asked the run to end

    # ------------------------------------------------------------ start and end

    def __enter__(self) -> Self:
        point, self._point = self._point, None
        assert point is not None, "a run is opened once"
        try:
            if self._directory is not None:
                make_logs_dir(self._directory)
                self._lock = RunLock(self._directory)
            self._start(point)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _start(self, point: StartPoint | None) -> None:
        """Start a driver, and another one for as long as starting fails in a way that a run survives."""
        while point is not None:
            self._driver = self._make_driver(point)
            self._serve_tensorboard(self._driver)
            point = self._guarded(partial(self._driver.start, point))

    def _guarded(self, do: Callable[[], None]) -> StartPoint | None:
        """Run one operation of the driver; return where to continue if that ends it, but not the run."""
        try:
            do()
        except (LearnerLost, TrainError) as raised:
            driver, refusal = self.driver, self._refusal(raised)
            error = refusal or raised
            driver.settle()
            found = self._policy.restart_point(error, driver)
            if found is None:
                if refusal is None:
                    raise
                raise refusal from raised
            point, record = found
            self._metrics = self.metrics
            self._requests.extendleft(reversed(driver.requests_since(point.version)))
            self._driver = None
            driver.close(error, record)
            self._policy.pause(self._requests)
            return point
        except (CollectError, *UNFIT) as raised:
            if (refusal := self._refusal(raised)) is None:
                raise
            raise refusal from raised
        return None

    def _refusal(self, error: Exception) -> CheckpointError | None:
        """Return what to tell the user of an unexpected error if the resumed checkpoint may be its cause.

        None for others: of a callback, with words of their own, or once what was restored has worked. A retry
        that fails in the same round is of the same cause.
        """
        driver, is_first = self.driver, self._policy.attempts == 0
        version, text = driver.pace.version, f"{type(error).__name__}: {error}"
        if not is_first and self._refused is not None and self._refused[0] == version:
            return self._refused[1]
        is_unexplained = not getattr(error, "__notes__", ())
        if isinstance(error, OffbeatError):
            is_unexplained = (text := shortened(str(error))) != str(error)
        if not (self._is_resumed and is_first and is_unexplained and driver.is_on_trial(error)):
            return None
        where = "the traceback" if self._directory is None else self._directory / "logs" / "run.log"
        refusal = CheckpointError(
            f"the run cannot go on from checkpoint {driver.resumed_at}: {text}. Use a checkpoint that this "
            f"run and this version of its code wrote; if it is one, {where} shows where the code fails"
        )
        _log.error("%s", refusal, exc_info=error)
        self._refused = version, refusal
        return refusal

    def _close(self, error: BaseException | None) -> None:
        driver, self._driver = self._driver, None
        try:
            if driver is not None:
                driver.close(error)
        finally:
            if self._server is not None:
                self._server.close()
            if self._lock is not None:
                self._lock.release()

    def _serve_tensorboard(self, driver: Driver) -> None:
        """Start TensorBoard where it is asked for: once, for all drivers of the run."""
        asked = driver.spec.settings.observe.tensorboard
        if asked.serve and self._directory is not None and self._server is None:
            try:
                self._server = TensorBoardServer(self._directory, asked.port)
            except OSError as error:
                _log.warning("TensorBoard could not be started: %s", error)

    # ------------------------------------------------------------ driving

    @property
    def driver(self) -> Driver:
        """The driver of the present start."""
        assert self._driver is not None, "the run is not open"
        return self._driver

    @property
    def pace(self) -> Pace:
        """The pace, read-only."""
        return self.driver.pace

    @property
    def finished(self) -> bool:
        """True when the run is over and can be reported."""
        return self.driver.finished

    @property
    def metrics(self) -> Metrics:
        """Metrics of the newest round; empty before the first."""
        return self.driver.meter.metrics or self._metrics

    @property
    def has_requests(self) -> bool:
        """True when the next step deals with a request."""
        return bool(self._requests)

    def step(self, at_most_s: float = math.inf) -> None:
        """Wait for events, for a fraction of a second and ``at_most_s``, and deal with them."""
        if self._server is not None and (status := self._server.poll_status()) is not None:
            self.driver.notice(status)
        if point := self._guarded(partial(self.driver.step, at_most_s)):
            self._start(point)

    def ask(self, request: Request) -> None:
        """Send a request to the run, and deal with it at once."""
        self._requests.append(request)
        self.step()

    def complete(self) -> Report:
        """Drive the run to its end and report."""
        while not self.finished:
            self.step()
        return self.report()

    def report(self) -> Report:
        """Return the report of the run, once it is finished; OffbeatError when it failed."""
        driver = self.driver
        finish, snapshot, meter = driver.finish, driver.saving.snapshot, driver.meter
        assert finish is not None, "the run has not finished"
        if finish.failed:
            raise OffbeatError(finish.reason)
        assert snapshot is not None
        return Report(
            version=driver.pace.version,
            reason=driver.reason,
            counts=driver.pace.counts(),
            metrics=meter.metrics,
            eval_metrics=meter.eval_metrics,
            wall_s=driver.seconds,
            env_steps=meter.env_steps,
            samples=meter.samples,
            startup_s=meter.first_ticket_s - driver.started_s if meter.first_ticket_s else driver.seconds,
            rounds_s=meter.rounds_s,
            steps_per_s=meter.steps_per_s,
            max_staleness=meter.max_staleness,
            weights=snapshot.weights,
            digest=driver.saving.digest(),
            losses=(*self._policy.losses, *driver.collectors.losses),
            restarts=self._policy.attempts,
            stopped=driver.is_stopped,
            save_error=driver.saving.writer.loss,
        )
