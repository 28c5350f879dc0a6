"""A run as it goes, one step after the other, through every session that it takes."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from offbeat.errors import LearnerLost, TrainError
from offbeat.observe.callbacks import MetricValue
from offbeat.observe.tensorboard_server import TensorBoardServer
from offbeat.pacing import Coordinator
from offbeat.pacing.events import Event
from offbeat.recovery import Recovery
from offbeat.session import Beginning, Job, Report, Session

_log = logging.getLogger(__name__)


class OpenRun:
    """A run that goes on by `step`, inside a with-block.

    A session whose learner crashed or diverged is followed by another one that goes on from a checkpoint, as
    often as ``run.max_restarts`` allows. Leaving the block ends everything that was started.

    Example::

        with pipeline.open(rounds=100) as run:
            while not run.finished:
                run.step()
            report = run.report()
    """

    def __init__(self, make_job: Callable[[], Job], beginning: Beginning, recovery: Recovery) -> None:
        self._make_job = make_job
        self._beginning: Beginning | None = beginning  # until it has begun: checkpoints can be large
        self._recovery = recovery
        self._requests: deque[Event] = deque()
        self._session: Session | None = None
        self._server: TensorBoardServer | None = None
        self._metrics: dict[str, MetricValue] = {}

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        beginning, self._beginning = self._beginning, None
        try:
            self._begin(beginning)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(error)

    def _begin(self, beginning: Beginning | None) -> None:
        """Begin a session, and again for as long as beginning fails in a way that a run survives."""
        while beginning is not None:
            job = self._make_job()
            self._requests = job.requests
            self._serve(job)
            self._session = Session(job, beginning)
            beginning = self._attempt(self._session.begin)

    def _serve(self, job: Job) -> None:
        """Start TensorBoard where it is asked for: once, for all sessions."""
        directory, asked = job.recording.directory, job.settings.observe.tensorboard
        if asked.serve and directory is not None and self._server is None:
            try:
                self._server = TensorBoardServer(directory, asked.port)
            except OSError as error:
                _log.warning("TensorBoard could not be started: %s", error)

    def _attempt(self, do: Callable[[], None]) -> Beginning | None:
        """Do something in the session; where to go on when that is its end, but not that of the run."""
        try:
            do()
        except (LearnerLost, TrainError) as error:
            chance = self._recovery.after(error, self._now)
            if chance is None:
                raise
            self._metrics = self.metrics
            self._requests.extendleft(reversed(self._now.standing_requests))
            self._close_session(error)
            self._recovery.pause(self._requests)
            return chance
        return None

    def _close(self, error: BaseException | None) -> None:
        try:
            self._close_session(error)
        finally:
            if self._server is not None:
                self._server.close()

    def _close_session(self, error: BaseException | None) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(None if error is None else type(error), error, None)

    # ------------------------------------------------------------ going on

    @property
    def _now(self) -> Session:
        assert self._session is not None, "the run is not open"
        return self._session

    @property
    def coordinator(self) -> Coordinator:
        """What decides, to look at."""
        return self._now.coordinator

    @property
    def finished(self) -> bool:
        """Whether the run is over and can be reported."""
        return self._now.finished

    @property
    def metrics(self) -> dict[str, MetricValue]:
        """What the newest round measured; empty before the first."""
        return self._now.metrics or self._metrics

    @property
    def has_requests(self) -> bool:
        """Whether something was asked of the run that its next step deals with."""
        return bool(self._requests)

    def step(self, at_most_s: float = math.inf) -> None:
        """Wait for something to happen, for a fraction of a second and ``at_most_s``, and deal with it."""
        self._tell_of_server()
        self._begin(self._attempt(lambda: self._now.step(at_most_s)))

    def ask(self, event: Event) -> None:
        """Ask something of the run, and let it deal with that at once."""
        self._requests.append(event)
        self.step()

    def report(self) -> Report:
        """Sum the run up, once it is finished."""
        return self._recovery.complete(self._now.report())

    def _tell_of_server(self) -> None:
        if self._server is not None and (news := self._server.news()) is not None:
            self._now.notice(news)
