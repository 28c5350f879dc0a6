"""Writing the checkpoints of a run: what is on the disk, scores, failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.checkpoint import CheckpointManager, pack
from offbeat.errors import CheckpointError
from offbeat.pacing.events import EvalDone, Notice, Saved, SaveFailed, SaveSkipped
from offbeat.types import StateTree

Parts = dict[str, StateTree]
"""The parts of a checkpoint by name."""
Outcome = tuple[Saved | SaveFailed | SaveSkipped | Notice, ...]
"""Events that saving resulted in, in the order in which to emit them."""


class Writer:
    """Writes checkpoints of one run, and their scores. Without a manager nothing is written."""

    def __init__(self, manager: CheckpointManager | None, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._scores: dict[int, float] = {}
        self._told: set[str] = set()
        self._failure = ""

    @property
    def loss(self) -> str:
        """Reason for which the run has nothing to resume from although it saved; empty: it has something."""
        return self._failure if self._manager is not None and not self._manager.versions() else ""

    def write(self, version: int, parts: Parts, weights: Any) -> Outcome:
        """Write a checkpoint. When that fails training continues; older ones are intact."""
        if self._manager is None:
            return ()
        if parts["learner"] is None:
            return self._notice_once("no checkpoints: the learner has no state_dict() that could be saved")
        started_s, score, wrong = self._clock(), self._scores.get(version), _unsavable(weights)
        try:
            path = self._manager.save(version, parts, {} if wrong else weights, score)
        except CheckpointError as error:
            return self.failed(version, error)
        without = f"checkpoints can be resumed and replayed, but not evaluated or played: {wrong}"
        notices = self._notice_once(without) if wrong else ()
        return (Saved(version, path, self._clock() - started_s, score), *notices)

    def skipped(self, version: int) -> Outcome:
        """Note that a checkpoint came due before the one at hand was written."""
        text = (
            "checkpoints come due faster than they can be written: those that do meanwhile are skipped and "
            "counted; a larger checkpoint.interval_rounds or interval_s wants fewer"
        )
        return SaveSkipped(version), *self._notice_once(text)

    def failed(self, version: int, error: CheckpointError) -> Outcome:
        """Note that a checkpoint could not be captured or written."""
        self._failure = str(error)
        text = f"checkpoint of version {version} failed: {error}"
        return SaveFailed(version, self._failure), Notice(text, is_warning=True)

    def score(self, event: EvalDone) -> Outcome:
        """Keep the score of a version, and enter it into its checkpoint if that is there already."""
        score = (event.metrics or {}).get("eval/return_mean")
        if score is None or self._manager is None:
            return ()
        self._scores[event.version] = score
        try:
            if event.version in self._manager.versions():
                self._manager.set_score(event.version, score)
        except CheckpointError as error:
            text = f"the score of version {event.version} was not saved: {error}"
            return (Notice(text, is_warning=True),)
        return ()

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
