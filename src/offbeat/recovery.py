"""When a run goes on by itself after its learner crashed or diverged, and from where."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.models import RunSection
from offbeat.errors import CheckpointError, DivergedError, LearnerLost, OffbeatError
from offbeat.lanes import Loss
from offbeat.recording import Restart
from offbeat.session import Beginning, Report, Session


class Recovery:
    """Finds the checkpoint that a run can go on from, as long as its budget lasts.

    A learner whose process was lost gets another one. One that raised is tried once more: when it raises in
    the same round again, trying is no use. One that diverged goes back to the newest checkpoint, further back
    each time it diverges again without a new checkpoint in between.
    """

    def __init__(self, settings: RunSection, run_dir: Path | None) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._attempts = 0
        self._losses: list[Loss] = []
        self._raised_at: int | None = None
        self._went_back_to: int | None = None

    def after(self, error: OffbeatError, session: Session) -> Beginning | None:
        """Where to go on after this error; None: nowhere, it ends the run."""
        is_rollback = isinstance(error, DivergedError)
        if self._attempts >= self._settings.max_restarts or (
            is_rollback and self._settings.on_nan != "rollback"
        ):
            return None
        if not isinstance(error, LearnerLost) and not is_rollback:
            if self._raised_at == session.version:
                return None
            self._raised_at = session.version
        saved = self._checkpoint(is_rollback)
        if saved is None:
            return None
        self._attempts += 1
        kind: Literal["rollback", "restart"] = "rollback" if is_rollback else "restart"
        session.go_on(Restart(kind, saved.version, str(error), self._attempts, self._settings.max_restarts))
        self._losses += [*session.losses, Loss("learner", str(error), session.version)]
        return Beginning(saved, resumed=True, other_samples=is_rollback)

    def _checkpoint(self, is_rollback: bool) -> LoadedCheckpoint | None:
        if self._run_dir is None:
            return None
        manager = CheckpointManager(self._run_dir / "checkpoints")
        try:
            saved = manager.load()
            if is_rollback:
                if saved.version == self._went_back_to and len(manager.versions()) > 1:
                    saved = manager.load(manager.versions()[-2])
                    manager.forget_after(saved.version)
                self._went_back_to = saved.version
        except CheckpointError:
            return None
        return saved

    def pause(self) -> None:
        """Wait before the run is begun again, longer each time."""
        time.sleep(self._settings.restart_delay_s * 2.0 ** (self._attempts - 1))

    def complete(self, report: Report) -> Report:
        """The report of the last session, with what earlier ones lost."""
        return replace(report, losses=(*self._losses, *report.losses), restarts=self._attempts)
