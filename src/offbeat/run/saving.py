"""Taking the checkpoints of a run: all parts as they are now, the learner once its snapshot is there."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from offbeat.checkpoint import LoadedCheckpoint, digest, pack
from offbeat.errors import CheckpointError, OffbeatError
from offbeat.observe.events import Record, read_rounds
from offbeat.pacing.actions import Pace
from offbeat.pacing.events import Event, Notice, OpenWork, SnapshotTaken
from offbeat.run.begun import BegunWork
from offbeat.run.collectors import Collector
from offbeat.run.waits import Wait, Waits
from offbeat.run.writing import Outcome, Parts, Writer
from offbeat.types import StateTree

_NETWORKS = "offbeat.models."
_ANSWER_LIMIT_S = 2.0
"""After the learner's snapshot a checkpoint is written without begun work that has not come."""


def learner_digest(state: StateTree) -> str:
    """Return a sha256 over everything a learner is: parameters, optimizer, statistics."""
    return digest(pack(state)[1])


def check_algorithm(saved: LoadedCheckpoint, algorithm: str) -> None:
    """Raise CheckpointError when a checkpoint is known to be of another algorithm than the run."""
    recorder = saved.parts.get("recorder")
    found = recorder.get("algorithm") if isinstance(recorder, dict) else None
    if found is not None and str(found) != algorithm:
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


@dataclass(slots=True)
class _Checkpoint:
    """One that is being taken. ``parts`` None: only the learner's snapshot is wanted."""

    version: int
    parts: Parts | None
    num_issued: int
    awaited: set[int] = field(default_factory=set)  # collectors that were asked for begun work
    lost: set[int] = field(default_factory=set)  # those of them that are gone
    snapshot: SnapshotTaken | None = None


class Saving:
    """Takes the checkpoints of a run, one at a time, and keeps the newest snapshot of its learner.

    ``capture()`` returns all parts but the learner and the begun work; ``take_snapshot(version)`` asks for
    the learner, within a limit; ``ask_work()`` asks collectors and returns those that will answer. ``tell``
    gets the events that come of it. ``requested`` is the newest version that a checkpoint was begun of.
    """

    def __init__(
        self,
        writer: Writer,
        begun: BegunWork,
        collectors: Sequence[Collector],
        pace: Pace,
        waits: Waits,
        clock: Callable[[], float],
        *,
        capture: Callable[[], Parts],
        take_snapshot: Callable[[int], None],
        ask_work: Callable[[], Iterable[int]],
        tell: Callable[[Event], None],
    ) -> None:
        self.writer = writer
        self.capture = capture
        self.snapshot: SnapshotTaken | None = None
        self._begun, self._collectors, self._pace = begun, collectors, pace
        self._waits, self._clock = waits, clock
        self._take_snapshot, self._ask_work, self._tell = take_snapshot, ask_work, tell
        self._at_hand: _Checkpoint | None = None
        self._last: tuple[int, bool] | None = None  # waits for the one at hand: version, whole
        self.requested = self._skipped = -1  # newest versions
        self._num_unanswered = 0

    @property
    def is_pending(self) -> bool:
        """True while a checkpoint is not on the disk, or a snapshot of the learner not there."""
        return self._is_taking or self._last is not None or self.writer.is_busy

    @property
    def _is_taking(self) -> bool:
        return self._at_hand is not None or self.writer.is_writing

    def digest(self) -> str | None:
        """Return the digest of the newest snapshot; None for a learner without a state that can be saved."""
        if self.snapshot is None or self.snapshot.state is None:
            return None
        try:
            return learner_digest(self.snapshot.state)
        except CheckpointError:
            return None

    # ------------------------------------------------------------ beginning

    def begin(self, version: int, whole: bool = True) -> None:
        """Keep everything but the learner as it is now, and ask for the rest; training may go on meanwhile.

        With ``whole`` false only the learner's snapshot is wanted. One that comes due while another one is at
        hand is skipped; the last one of the run waits.
        """
        self.poll()
        if whole and not self.writer.saves:
            return
        if not self._is_taking:
            self._begin(version, whole)
        elif self._pace.is_ending:
            self.requested, self._last = version, (version, whole)
        else:
            self._skipped = version
            self._tell_all(self.writer.skipped(version))

    def give_up(self) -> None:
        """Save nothing: the learner has no state."""
        self._tell_all(self.writer.give_up())

    def finish(self) -> None:
        """Ask for the learner as the run leaves it, unless a checkpoint of this version has it."""
        version = self._pace.version
        if self.requested != version:
            self.begin(version, whole=self._skipped == version)

    def _begin(self, version: int, whole: bool) -> None:
        try:
            parts = self.capture() if whole else None
        except CheckpointError as error:
            self._tell_all(self.writer.failed(version, error))
            return
        self.requested = version
        at_hand = self._at_hand = _Checkpoint(version, parts, self._pace.counts().issued)
        if whole:
            at_hand.awaited.update(index for index in self._ask_work() if self._collectors[index].is_up)
        self._take_snapshot(version)

    # ------------------------------------------------------------ answers

    def snapshot_taken(self, event: SnapshotTaken) -> None:
        """Take the learner's snapshot."""
        self._waits.end("snapshot")
        assert self._at_hand is not None, "nobody asked for a snapshot"
        self.snapshot = self._at_hand.snapshot = event
        self._write_if_complete()

    def answered(self, event: OpenWork) -> None:
        """Take the begun work of a collector."""
        self._begun.take(event)
        if self._at_hand is not None:
            self._at_hand.awaited.discard(event.collector)
            self._write_if_complete()

    def collector_lost(self, collector: int) -> None:
        """Note that a collector will not answer."""
        at_hand = self._at_hand
        if at_hand is not None and collector in at_hand.awaited:
            at_hand.awaited.remove(collector)
            at_hand.lost.add(collector)
            self._write_if_complete()

    def _write_if_complete(self) -> None:
        """Write once the snapshot is there, and soon after it without the answers that are missing."""
        at_hand = self._at_hand
        if at_hand is None or at_hand.snapshot is None:
            return
        if not at_hand.awaited:
            self._write()
        elif "work" not in self._waits:
            owner, limit_s = f"checkpoint {at_hand.version}", _ANSWER_LIMIT_S
            row = ("work", owner, partial(self._names, at_hand.awaited), limit_s, "a fixed limit")
            phase = "saving" if self._pace.is_ending else ""
            self._waits.begin(Wait(*row, self._write, phase), self._clock())

    def _names(self, collectors: Iterable[int]) -> str:
        return ", ".join(self._collectors[index].name for index in sorted(collectors))

    def _write(self) -> None:
        """Write what is at hand, and name who did not answer."""
        self._waits.end("work")
        at_hand, self._at_hand = self._at_hand, None
        assert at_hand is not None, "nothing is at hand"
        snapshot = at_hand.snapshot
        if at_hand.parts is not None and snapshot is not None:
            work = self._begun.parts(at_hand.version, at_hand.num_issued)
            parts = {"learner": snapshot.state, **at_hand.parts, **work}
            self._tell_all(self.writer.write(at_hand.version, parts, snapshot.weights))
            self._name_silent(at_hand)

    def poll(self) -> None:
        """Tell what was written meanwhile; begin what waited for that."""
        self._tell_all(self.writer.poll())
        if self._last is not None and not self._is_taking:
            (version, whole), self._last = self._last, None
            self._begin(version, whole)
            if self._at_hand is None:  # it failed: the report needs the snapshot all the same
                self._begin(version, whole=False)

    def settle(self, limit_s: float) -> None:
        """Wait until what is being written is on the disk, before the run ends or goes back to it."""
        if not self.writer.settle(limit_s):
            text = f"a checkpoint was given up: it was not written within {limit_s:g} s"
            self._tell(Notice(text, is_warning=True))
        try:
            self._tell_all(self.writer.poll())
        except Exception as error:  # the run ends for another reason
            self._tell(Notice(f"a checkpoint could not be written: {error!r}", is_warning=True))

    def _name_silent(self, at_hand: _Checkpoint) -> None:
        silent = at_hand.awaited | at_hand.lost
        self._num_unanswered += len(silent)
        if silent:
            text = (
                f"checkpoint {at_hand.version} has no new begun work of {self._names(silent)}: no answer "
                f"within {_ANSWER_LIMIT_S:g} s ({self._num_unanswered} missing in all)"
            )
            self._tell(Notice(text, is_warning=True))

    def _tell_all(self, outcome: Outcome) -> None:
        for event in outcome:
            self._tell(event)
