"""Checkpoints of a run: all parts as they are now, with the learner's snapshot once it is there."""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint, digest, pack
from offbeat.config.models import CheckpointConfig
from offbeat.errors import CheckpointError, OffbeatError
from offbeat.observe.events import Record, read_rounds
from offbeat.pacing.events import EvalDone, Notice, Saved, SaveFailed, SnapshotTaken
from offbeat.types import StateTree

_NETWORKS = "offbeat.models."
Parts = dict[str, StateTree]
"""The parts of a checkpoint by name."""
Outcome = tuple[Saved | SaveFailed | Notice, ...]
"""Events that saving resulted in, in the order in which to emit them."""


def learner_digest(state: StateTree) -> str:
    """Return a sha256 over everything a learner is: parameters, optimizer, statistics."""
    return digest(pack(state)[1])


def check_algorithm(saved: LoadedCheckpoint, algorithm: str) -> None:
    """Raise CheckpointError when a checkpoint is known to be of another algorithm than the run."""
    recorder = saved.parts.get("recorder")
    found = recorder.get("algorithm") if isinstance(recorder, dict) else None
    if found is not None and found != algorithm:
        raise CheckpointError(
            f"checkpoint {saved.version} is of {found}, this run is of {algorithm}: put the checkpoints of "
            f"this run back into {saved.path.parent}"
        )


@contextlib.contextmanager
def fitting_weights(saved: LoadedCheckpoint) -> Iterator[None]:
    """Use the weights of a checkpoint in the block; CheckpointError when they do not fit the networks."""
    try:
        yield
    except OffbeatError:
        raise
    except Exception as error:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if not any(str(frame.f_globals.get("__name__")).startswith(_NETWORKS) for frame in frames):
            raise
        raise CheckpointError(
            f"the weights of checkpoint {saved.version} do not fit the networks of this run "
            f"({type(error).__name__}: {error}); put this run's checkpoints back into {saved.path.parent}"
        ) from error


def notice_of_lost_rounds(events: Path) -> str:
    """Return what a run without a checkpoint has to say when it starts again."""
    rounds: list[Record] = []
    with contextlib.suppress(OffbeatError, KeyError, TypeError):
        rounds = read_rounds(events)
    if not rounds:
        return "the run has no checkpoint yet: it starts again from round 0"
    known = f"{len(rounds):,} round{'s' * (len(rounds) > 1)}"
    return f"the run has no checkpoint: {known} trained before, by events.jsonl, are lost; it starts anew"


class Saving:
    """Captures and writes the checkpoints of one run, and keeps the newest snapshot of its learner.

    ``capture()`` returns all parts but the learner. Without a directory nothing is written.
    """

    def __init__(
        self,
        directory: Path | None,
        config: CheckpointConfig,
        capture: Callable[[], Parts],
        clock: Callable[[], float],
    ) -> None:
        self._manager = (
            None
            if directory is None
            else CheckpointManager(directory / "checkpoints", config.keep, config.keep_best)
        )
        self.capture = capture
        self._clock = clock
        self._pending: deque[tuple[int, Parts | None]] = deque()  # snapshots asked for: version, other parts
        self._scores: dict[int, float] = {}
        self._told: set[str] = set()
        self._failure = ""
        self.snapshot: SnapshotTaken | None = None
        self.requested_version = -1

    @property
    def is_pending(self) -> bool:
        """True while a snapshot of the learner is on its way."""
        return bool(self._pending)

    @property
    def loss(self) -> str:
        """Reason for which the run has nothing to resume from although it saved; empty: it has something."""
        return self._failure if self._manager is not None and not self._manager.versions() else ""

    def begin(self, version: int, whole: bool = True) -> Outcome:
        """Keep everything but the learner as it is now; the caller asks for the learner's snapshot.

        With ``whole`` false only the snapshot is wanted. What is returned says that nothing could be kept.
        """
        try:
            self._pending.append((version, self.capture() if whole else None))
        except CheckpointError as error:
            return self._failed(version, error)
        self.requested_version = version
        return ()

    def complete(self, snapshot: SnapshotTaken) -> Outcome:
        """Write the oldest pending checkpoint. When that fails training continues; older ones are intact."""
        version, parts = self._pending.popleft()
        self.snapshot = snapshot
        if parts is None or self._manager is None:
            return ()
        if snapshot.state is None:
            return self._notice_once("no checkpoints: the learner has no state_dict() that could be saved")
        started_s, score = self._clock(), self._scores.get(version)
        weights, wrong = snapshot.weights, _unsavable(snapshot.weights)
        try:
            whole = {"learner": snapshot.state, **parts}
            path = self._manager.save(version, whole, {} if wrong else weights, score)
        except CheckpointError as error:
            return self._failed(version, error)
        without = f"checkpoints can be resumed and replayed, but not evaluated or played: {wrong}"
        notices = self._notice_once(without) if wrong else ()
        return (Saved(version, path, self._clock() - started_s, score), *notices)

    def _failed(self, version: int, error: CheckpointError) -> Outcome:
        self._failure = str(error)
        text = f"checkpoint of version {version} failed: {error}"
        return SaveFailed(version, self._failure), Notice(text, is_warning=True)

    def score(self, event: EvalDone) -> Notice | None:
        """Keep the score of a version, and enter it into its checkpoint if that is there already."""
        score = (event.metrics or {}).get("eval/return_mean")
        if score is None or self._manager is None:
            return None
        self._scores[event.version] = score
        try:
            if event.version in self._manager.versions():
                self._manager.set_score(event.version, score)
        except CheckpointError as error:
            return Notice(f"the score of version {event.version} was not saved: {error}", is_warning=True)
        return None

    def digest(self) -> str | None:
        """Return the digest of the newest snapshot; None for a learner without a state that can be saved."""
        if self.snapshot is None or self.snapshot.state is None:
            return None
        try:
            return learner_digest(self.snapshot.state)
        except CheckpointError:
            return None

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
