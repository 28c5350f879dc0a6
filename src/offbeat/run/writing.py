"""Writing the checkpoints of a run: beside training where that goes on, with scores, failures and skips."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from offbeat.checkpoint import CheckpointManager, pack
from offbeat.errors import CheckpointError
from offbeat.pacing.events import EvalDone, Notice, Saved, SaveFailed, SaveSkipped
from offbeat.runtime.learning import JobThread
from offbeat.types import StateTree

_SOON_S = 0.5
"""A write takes less in short runs, whose rounds take milliseconds: they wait for it and skip none."""
Parts = dict[str, StateTree]
"""The parts of a checkpoint by name."""
Outcome = Sequence[Saved | SaveFailed | SaveSkipped | Notice]
"""Events that saving resulted in, in the order in which to emit them."""


class Writer:
    """Writes checkpoints of one run and their scores, in one thread ``beside`` the driver's or at once.

    Without a manager nothing is written. What came of the work beside is returned by `poll`.
    """

    def __init__(
        self, manager: CheckpointManager | None, clock: Callable[[], float], beside: bool = False
    ) -> None:
        self.is_writing = False
        self._manager = manager
        self._clock = clock
        self._beside = beside
        self._thread: JobThread | None = None
        self._num_jobs = 0
        self._began_s = 0.0
        self._done: deque[Outcome | Exception] = deque()  # from the thread
        self._scores: dict[int, float] = {}
        self._told: set[str] = set()
        self._failure = ""

    @property
    def is_busy(self) -> bool:
        """True while something is on its way to the disk, or its outcome is not known here."""
        return self._num_jobs > 0

    @property
    def saves(self) -> bool:
        """False when nothing is ever written."""
        return self._manager is not None

    @property
    def loss(self) -> str:
        """Reason for which the run has nothing to resume from although it saved; empty: it has something."""
        return self._failure if self._manager is not None and not self._manager.versions() else ""

    # ------------------------------------------------------------ jobs

    def write(self, version: int, parts: Parts, weights: Any) -> Outcome:
        """Write a checkpoint. When that fails training continues; older ones are intact.

        The parts are not to be changed before `is_writing` is false.
        """
        if self._manager is None:
            return ()
        if parts["learner"] is None:
            return self.give_up()
        self.is_writing, self._began_s = self._beside, self._clock()
        return self._do(partial(self._write, self._manager, version, parts, weights))

    def _write(self, manager: CheckpointManager, version: int, parts: Parts, weights: Any) -> Outcome:
        started_s, score, wrong = self._clock(), self._scores.get(version), _unsavable(weights)
        try:
            path = manager.save(version, parts, {} if wrong else weights, score)
        except CheckpointError as error:
            return self.failed(version, error)
        seconds = self._clock() - started_s
        without = f"checkpoints can be resumed and replayed, but not evaluated or played: {wrong}"
        notices = self._notice_once(without) if wrong else ()
        return (Saved(version, path, seconds, score, 0.0 if self._beside else seconds), *notices)

    def score(self, event: EvalDone) -> Outcome:
        """Keep the score of a version, and enter it into its checkpoint if that is there already."""
        score = (event.metrics or {}).get("eval/return_mean")
        if score is None or self._manager is None:
            return ()
        self._scores[event.version] = score
        return self._do(partial(self._set_score, self._manager, event.version, score))

    def _set_score(self, manager: CheckpointManager, version: int, score: float) -> Outcome:
        try:
            if version in manager.versions():
                manager.set_score(version, score)
        except CheckpointError as error:
            return (Notice(f"the score of version {version} was not saved: {error}", is_warning=True),)
        return ()

    def _do(self, job: Callable[[], Outcome]) -> Outcome:
        if not self._beside:
            return job()
        if self._thread is None:
            self._thread = JobThread("checkpoints", lambda event: None)
        self._num_jobs += 1
        self._thread.submit(partial(self._report, job))
        return ()

    def _report(self, job: Callable[[], Outcome]) -> None:
        try:
            self._done.append(job())
        except Exception as error:
            self._done.append(error)

    # ------------------------------------------------------------ outcomes

    def poll(self) -> Outcome:
        """Return what came of the work beside since the last call; raise what it raised."""
        found: list[Any] = []
        while self._done:
            outcome = self._done.popleft()
            self._num_jobs -= 1
            if isinstance(outcome, Exception):
                raise outcome
            found += outcome
            if any(isinstance(event, Saved | SaveFailed) for event in outcome):
                self.is_writing = False
        return found

    def await_soon(self) -> float:
        """Wait for a write that began a moment ago; return the seconds that took."""
        now_s = self._clock()
        if not self.is_writing or self._thread is None or now_s > self._began_s + _SOON_S:
            return 0.0
        self._thread.drain(self._began_s + _SOON_S - now_s)
        return self._clock() - now_s

    def settle(self, limit_s: float) -> bool:
        """Wait until all is written, and end; return False if something was not by then: it is given up.

        What came of the rest is there for a last `poll`.
        """
        thread, self._thread = self._thread, None
        is_done = thread is None or thread.drain(limit_s)
        if not is_done and self._manager is not None:
            self._manager.abandon()
        if thread is not None:
            thread.stop()
        return is_done

    def give_up(self) -> Outcome:
        """Write nothing from now on: the learner has no state."""
        self._manager = None
        return self._notice_once("no checkpoints: the learner has no state_dict() that could be saved")

    def failed(self, version: int, error: CheckpointError) -> Outcome:
        """Note that a checkpoint could not be captured or written."""
        self._failure = str(error)
        text = f"checkpoint of version {version} failed: {error}"
        return SaveFailed(version, self._failure), Notice(text, is_warning=True)

    def skipped(self, version: int) -> Outcome:
        """Note that a checkpoint came due before the one at hand was written."""
        text = (
            "checkpoints come due faster than they can be written: those that do meanwhile are skipped and "
            "counted; a larger checkpoint.interval_rounds or interval_s wants fewer"
        )
        return SaveSkipped(version), *self._notice_once(text)

    def _notice_once(self, text: str) -> Outcome:
        is_new = text not in self._told
        self._told.add(text)
        return (Notice(text, is_warning=True),) if is_new else ()


def _unsavable(weights: Any) -> str:
    """Return why a checkpoint cannot hold what ``weights()`` returned; empty when it can."""
    try:
        pack(weights, "weights()")
    except CheckpointError as error:
        return str(error)
    return ""
