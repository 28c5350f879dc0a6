"""Checkpoints of a run: all parts as they are now, with the learner's snapshot once it is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.checkpoint import CheckpointManager, digest, pack
from offbeat.config.models import CheckpointConfig
from offbeat.errors import CheckpointError
from offbeat.pacing.events import EvalDone, Notice, Saved, SnapshotTaken
from offbeat.types import Array, StateTree

Parts = dict[str, StateTree]
"""The parts of a checkpoint by name."""


def learner_digest(state: StateTree) -> str:
    """Return a sha256 over everything a learner is: parameters, optimizer, statistics."""
    return digest(pack(state)[1])


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
        self._has_told = False
        self.snapshot: SnapshotTaken | None = None
        self.requested_version = -1

    @property
    def is_pending(self) -> bool:
        """True while a snapshot of the learner is on its way."""
        return bool(self._pending)

    def begin(self, version: int, whole: bool = True) -> Notice | None:
        """Keep everything but the learner as it is now; the caller asks for the learner's snapshot.

        With ``whole`` false only the snapshot is wanted. A notice is returned when nothing could be kept.
        """
        try:
            self._pending.append((version, self.capture() if whole else None))
        except CheckpointError as error:
            return Notice(f"checkpoint of version {version} failed: {error}")
        self.requested_version = version
        return None

    def complete(self, snapshot: SnapshotTaken) -> Saved | Notice | None:
        """Write the oldest pending checkpoint. When that fails training continues; older ones are intact."""
        version, parts = self._pending.popleft()
        self.snapshot = snapshot
        if parts is None or self._manager is None:
            return None
        if snapshot.state is None:
            told, self._has_told = self._has_told, True
            text = "no checkpoints: the learner has no state_dict() that could be saved"
            return None if told else Notice(text)
        started_s, score = self._clock(), self._scores.get(version)
        try:
            whole = {"learner": snapshot.state, **parts}
            path = self._manager.save(version, whole, _as_arrays(snapshot.weights), score)
        except CheckpointError as error:
            return Notice(f"checkpoint of version {version} failed: {error}")
        return Saved(version, path, self._clock() - started_s, score)

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
            return Notice(f"the score of version {event.version} was not saved: {error}")
        return None

    def digest(self) -> str | None:
        """Return the digest of the newest snapshot; None for a learner without a state that can be saved."""
        if self.snapshot is None or self.snapshot.state is None:
            return None
        try:
            return learner_digest(self.snapshot.state)
        except CheckpointError:
            return None


def _as_arrays(weights: Any) -> dict[str, Array]:
    if isinstance(weights, Mapping) and all(isinstance(value, np.ndarray) for value in weights.values()):
        return dict(weights)
    return {}
