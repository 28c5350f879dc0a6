"""When a run goes on by itself after its learner crashed or diverged, and from where."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Literal

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.models import RunSection
from offbeat.errors import CheckpointError, DivergedError, LearnerLost, OffbeatError
from offbeat.lanes import Loss
from offbeat.pacing.events import Event, StopRequested
from offbeat.recording import Restart
from offbeat.session import Beginning, Report, Session

LONGEST_PAUSE_S = 30.0
"""However often a run was restarted, it waits no longer than this for the next start."""
_LOOK_EVERY_S = 0.1
_WINDOW_S = 3600.0  # so long without a crash begins a new row


class Recovery:
    """Finds the checkpoint that a run can go on from, as long as its budget lasts.

    A learner whose process was lost gets another one. One that raised is tried once more: when it raises in
    the same round again, trying is no use. One that diverged goes back to the newest checkpoint, further back
    each time it diverges again without a new checkpoint in between.
    """

    def __init__(self, settings: RunSection, run_dir: Path | None) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._attempts = self._in_a_row = 0
        self._restarted_s = time.monotonic()
        self._losses: list[Loss] = []
        self._raised_at: int | None = None
        self._went_back_to: int | None = None

    def after(self, error: OffbeatError, session: Session) -> Beginning | None:
        """Where to go on after this error; None: nowhere, it ends the run."""
        is_rollback = isinstance(error, DivergedError)
        if time.monotonic() - self._restarted_s > _WINDOW_S:
            self._in_a_row = 0
        if (
            session.is_to_stop
            or self._in_a_row >= self._settings.max_restarts
            or (is_rollback and self._settings.on_nan != "rollback")
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
        self._in_a_row += 1
        self._restarted_s = time.monotonic()
        kind: Literal["rollback", "restart"] = "rollback" if is_rollback else "restart"
        session.go_on(Restart(kind, saved.version, str(error), self._in_a_row, self._settings.max_restarts))
        self._losses += [*session.losses, Loss("learner", str(error), session.version)]
        return Beginning(saved, resumed=True, rollback=self._attempts if is_rollback else 0)

    def _checkpoint(self, is_rollback: bool) -> LoadedCheckpoint | None:
        if self._run_dir is None:
            return None
        manager = CheckpointManager(self._run_dir / "checkpoints")
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

    def pause(self, requests: Collection[Event]) -> None:
        """Wait before the run is begun again, longer each time, but not when it is asked to stop."""
        delay_s = min(self._settings.restart_delay_s * 2.0 ** (self._in_a_row - 1), LONGEST_PAUSE_S)
        until_s = time.monotonic() + delay_s
        while (left_s := until_s - time.monotonic()) > 0:
            if any(isinstance(request, StopRequested) for request in requests):
                return
            time.sleep(min(left_s, _LOOK_EVERY_S))

    def complete(self, report: Report) -> Report:
        """The report of the last session, with what earlier ones lost."""
        return replace(report, losses=(*self._losses, *report.losses), restarts=self._attempts)


def _newest_before(manager: CheckpointManager, version: int) -> LoadedCheckpoint | None:
    for older in reversed([one for one in manager.versions() if one < version]):
        try:
            return manager.load(older)
        except CheckpointError:
            continue
    return None
