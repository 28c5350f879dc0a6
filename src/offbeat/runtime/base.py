"""The protocol that all runtimes keep, and what they share."""

from __future__ import annotations

import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import OffbeatError
from offbeat.pacing.events import Event
from offbeat.roles import Learner, progress_to
from offbeat.types import Batch, Piece, StateTree, Ticket

if TYPE_CHECKING:
    from offbeat.runtime.messages import Begun
    from offbeat.runtime.spec import CollectorState, RunSpec

Post = Callable[[Event], None]


class Runtime(Protocol):
    """Carries out the driver's requests and reports events. It decides nothing."""

    replaces_collectors: bool
    """True where `kill_collector` ends a collector and not the run."""
    takes_turns: bool
    """True where everything happens in the driver's thread, one thing after the other: saving, too."""

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        """Start these collectors (each reports `CollectorUp`); make the learner from its saved state."""
        ...

    def start_collector(self, index: int, state: CollectorState) -> None:
        """Start one collector in the place of a lost one, or of an idle one, which ends without a report."""
        ...

    def kill_collector(self, index: int, reason: str) -> None:
        """End a collector that hangs or does not start; reported as `CollectorDown` with its stack."""
        ...

    def end_collector(self, index: int) -> None:
        """End a collector that holds no ticket, and whose place nobody takes; without a report."""
        ...

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        """Queue a ticket for its collector, with begun work, or the pieces of the segment to repeat."""
        ...

    def cut(self, tickets: Sequence[Ticket]) -> None:
        """Ask the collectors of these tickets to end them with what there is."""
        ...

    def ask_work(self) -> Sequence[int]:
        """Ask wide collectors for begun work; return those that answer with `OpenWork` if they live."""
        ...

    def working_s(self, index: int) -> float | None:
        """Seconds since a collector began the piece of work at hand; None: between two, or down."""
        ...

    def train(self, batch: Batch) -> None:
        """Start a round."""
        ...

    def release(self, tickets: Sequence[int]) -> None:
        """Free the memory of these tickets' segments for other segments."""
        ...

    def publish(self, version: int) -> None:
        """Make the learner's weights available to collectors."""
        ...

    def snapshot(self) -> None:
        """Copy the learner's state and weights between rounds; reported as `SnapshotTaken`."""
        ...

    def evaluate(self, version: int, seed: int) -> None:
        """Evaluate a copy of the learner's weights, where a crash cannot hurt the learner if possible."""
        ...

    def give_up_evaluation(self, version: int, reason: str) -> None:
        """End an evaluation that takes too long, where that is possible, and report that it failed."""
        ...

    def wait(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call, waiting at most ``timeout_s`` for the first."""
        ...

    def stacks(self) -> dict[str, str]:
        """Return the current stack of each component, for the report of a stall."""
        ...

    def pids(self) -> dict[str, int]:
        """Return the processes of this runtime by role, without the calling one."""
        ...

    @property
    def progress(self) -> Mapping[str, str]:
        """Newest reports of progress, by ``learner``, ``evaluator`` and ``collector_0``, …"""
        ...

    def close(self, at_once: bool = False) -> None:
        """End everything that was started; ``at_once``: wait for no work. Safe to call twice."""
        ...


# ---------------------------------------------------------------- shared by runtimes


class ManyRanks(ABC):
    """A learner of several processes, of which this one leads."""

    lost: dict[str, str]
    """Other ranks that are gone, by name, and how they ended."""

    @abstractmethod
    def pids(self) -> dict[str, int | None]:
        """The other ranks by name, with their process where it is one of this machine."""

    @abstractmethod
    def stacks(self) -> dict[str, str]:
        """Return the current stacks of the other ranks."""

    @abstractmethod
    def close(self) -> None:
        """End the other ranks. The learner keeps its weights and its state, but trains no longer."""


@contextmanager
def keep_progress(progress: dict[str, str], component: str) -> Iterator[None]:
    """Keep the newest report of a component while it works in this thread."""
    try:
        with progress_to(partial(progress.__setitem__, component)):
            yield
    finally:
        progress.pop(component, None)


def close_learner(learner: Learner) -> None:
    """End the processes of a learner that has any of its own."""
    if isinstance(learner, ManyRanks):
        learner.close()


def describe(error: Exception) -> str:
    """Return the message of an error that has one for users, or else its traceback."""
    if isinstance(error, OffbeatError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def shortened(text: str) -> str:
    """Return a text that ends in a traceback in one line, any other as it is.

    Example: ``the learner raised in round 7 (KeyError: 'obs')``.
    """
    told, begin, stack = text.partition("\nTraceback (most recent call last):\n")
    if not begin:
        return text
    lines, error = stack.splitlines(), ""
    while lines and not lines[-1].startswith("  "):
        if not (last := lines.pop()).startswith(" "):
            error = last
    return f"{told.rstrip(':')} ({error})"


def with_stack(text: str, stack: str) -> str:
    """Add to a text where its component was, if that is known."""
    return f"{text}, it was here:\n{stack}" if stack else text


def thread_stacks() -> dict[str, str]:
    """The stack of every thread of this process but the calling one, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {
        ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()
    }
    stacks = {ident: "".join(traceback.format_stack(frame)).rstrip() for ident, frame in frames.items()}
    return {names.get(ident, f"thread {ident}"): stack for ident, stack in stacks.items()}
