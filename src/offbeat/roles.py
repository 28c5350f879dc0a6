"""The contracts between offbeat and what it runs. Anything with these methods fits; nothing is inherited.

Randomness comes in as a seed (``ticket.seed``, or the ``seed`` argument), never from globals: that is
what makes runs repeatable. ``state_dict`` returns a tree of plain values, numpy arrays and torch tensors, so
that a checkpoint can hold it without pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from offbeat.errors import ConfigError
from offbeat.progress import progress_to as progress_to
from offbeat.progress import report_progress as report_progress
from offbeat.types import Array, ArraySpec, Batch, Metrics, Piece, Progress, Segment, StateTree, Ticket


@runtime_checkable
class Collector(Protocol):
    """Works on tickets with weights that may change between two pieces of work, and makes segments.

    Lives in a worker; its environments outlive its tickets. Most are written as a `SerialCollector` or a
    function ``collect(ticket, weights)``, which offbeat adapts. A *wide* collector holds many tickets, and
    finishes them in any order: a segment depends on its ticket and on the versions that made it, never on
    what else was there.
    """

    @property
    def capacity(self) -> int:
        """Number of tickets that it wants to hold; it may change while the run goes on."""
        ...

    def accept(self, ticket: Ticket, begun: StateTree | None = None, script: Sequence[Piece] = ()) -> None:
        """Take a ticket; it may come before the ones before it are finished.

        ``begun``: what `open_work` of some collector gave for it. Keep only what was made with versions up to
        the one that is loaded: newer ones are of a future that a crash took back. ``script``: the pieces of
        its segment in the run that is being repeated, to be made again exactly so: where its next span has a
        newer version than the one loaded, it waits.
        """
        ...

    def load(self, version: int, weights: Any) -> None:
        """Use these weights from the next `advance` on; the first ones come before the first ticket."""
        ...

    def advance(self) -> Progress:
        """Do one piece of work, at most about 20 ms where it holds many tickets, without waiting.

        Draw randomness from the tickets' seeds only. What it waits for (tools, rewards, slow environments)
        runs in threads of its own, which call ``context.wake()``.
        """
        ...

    def state_dict(self) -> StateTree | None:
        """Return everything that the next segments depend on, without what belongs to open tickets.

        None when the environments cannot give it; ``{}`` where tickets are all there is.
        """
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a state taken after some segment."""
        ...


@runtime_checkable
class WideCollector(Collector, Protocol):
    """A collector whose tickets may be ended early, and whose begun work may be continued elsewhere.

    Both are optional, and come together. Without them nothing is cut, whatever the straggler policy says, and
    what is begun is collected again when the run is resumed or the collector is lost.
    """

    def cut(self, tickets: Sequence[int]) -> None:
        """End these tickets at the next boundary, with what there is; their pieces end with ``cut``."""
        ...

    def open_work(self) -> Mapping[int, StateTree]:
        """Return what is begun, by ticket: enough for another collector to continue it, and no live arrays.

        Trees that a checkpoint can hold, as for `state_dict`.
        """
        ...


@runtime_checkable
class SerialCollector(Protocol):
    """Turns one ticket at a time into a segment."""

    def collect(self, ticket: Ticket, weights: Any) -> Segment:
        """Collect one segment with the given weights, drawing randomness from ``ticket.seed`` only."""
        ...

    def state_dict(self) -> StateTree | None:
        """Return everything that the next segment depends on; None when the environments cannot give it."""
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a state taken after some segment."""
        ...


@runtime_checkable
class InPlaceCollector(Protocol):
    """A serial collector that writes its arrays into given memory: straight into shared memory."""

    def segment_spec(self) -> dict[str, ArraySpec]:
        """Return names, shapes and dtypes of the arrays in a segment's data."""
        ...

    def collect_into(self, ticket: Ticket, weights: Any, out: Mapping[str, Array]) -> Segment:
        """Collect a segment as ``collect`` does, filling ``out``; the segment's ``data`` is ``out``."""
        ...


@runtime_checkable
class Learner(Protocol):
    """Owns the parameters. One call of ``train`` is one round and makes one new version."""

    def train(self, batch: Batch) -> Metrics:
        """Train on the batch's segments, in order; return metrics named ``learn/...``."""
        ...

    def weights(self) -> Any:
        """Return a snapshot of what collectors act with: a dict of numpy arrays, or any picklable object.

        A dict of `Part` travels part by part, those that have changed.
        """
        ...

    def state_dict(self) -> StateTree:
        """Parameters, optimizer, normalizers: everything the next round depends on.

        Live arrays and tensors will do: they are copied before the next round.
        """
        ...

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a saved state."""
        ...


@runtime_checkable
class Publisher(Protocol):
    """A learner that sends collectors more than the weights, which alone are kept and judged."""

    def published(self) -> Any:
        """The weights with what comes with them, or a dict of `Part`."""
        ...


def published(learner: Learner) -> Any:
    """Return what a learner sends to collectors."""
    return learner.published() if isinstance(learner, Publisher) else learner.weights()


def state_of(role: Collector | SerialCollector | Learner) -> StateTree | None:
    """Return the state of a role; None when it has none that could be saved."""
    return role.state_dict() if hasattr(role, "state_dict") else None


@runtime_checkable
class Evaluator(Protocol):
    """Evaluates frozen weights. Never touches training state."""

    def evaluate(self, weights: Any, seed: int) -> Metrics:
        """Return metrics named ``eval/...``; ``eval/return_mean`` decides which checkpoint is best."""
        ...


class Ranks(Protocol):
    """The processes that a learner consists of, as one of them sees it.

    All ranks get the same batches and make the same decisions. Each differentiates its own share of a
    minibatch and calls ``sum_`` on the gradient, so that all apply the same step.
    """

    @property
    def rank(self) -> int:
        """Number of this rank; 0 publishes, saves and reports."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum_(self, tensor: Any) -> None:
        """Replace a torch tensor by its sum over all ranks, in place. All ranks call it, in one order."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The ranks of a learner that is one process."""

    rank: int = 0
    size: int = 1

    def sum_(self, tensor: Any) -> None:
        """Nothing to add."""


def _nobody_waits() -> None:
    """Wake nobody: the role is called whenever there is work."""


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Arguments of a role's factory. ``seed`` differs by collector and incarnation.

    ``ranks`` is for learners of several processes. ``wake()`` is for threads of a collector: it has `advance`
    called again, from any thread.
    """

    collector: int
    num_collectors: int
    seed: int
    incarnation: int = 0
    ranks: Ranks = SingleRank()
    wake: Callable[[], None] = _nobody_waits

    @property
    def lane(self) -> int:
        """Older name of ``collector``."""
        return self.collector

    @property
    def num_lanes(self) -> int:
        """Older name of ``num_collectors``."""
        return self.num_collectors


RoleT = TypeVar("RoleT", covariant=True)


@dataclass(frozen=True, slots=True)
class PerWorker(Generic[RoleT]):
    """A role that each worker makes for itself, so that environments are born where they live.

    Example: ``Pipeline(collect=PerWorker(make_collector), ...)`` with
    ``def make_collector(context: WorkerContext) -> Collector``.
    """

    make: Callable[[WorkerContext], RoleT]


def check_methods(made: object, wanted: Sequence[str], role: str) -> None:
    """Raise ConfigError that names the methods (or attributes) of a role which ``made`` lacks."""
    if missing := [name for name in wanted if not hasattr(made, name)]:
        raise ConfigError(f"{role} {type(made).__qualname__} has no {' and no '.join(missing)}: {_SEE[role]}")


def has_state(made: object, role: str) -> bool:
    """Return True if ``made`` gives and takes its state; one without the other is refused."""
    methods = ("state_dict", "load_state_dict")
    if any(hasattr(made, name) for name in methods):
        check_methods(made, methods, role)
        return True
    return False


_SEE = {
    "the collector": "it needs collect(ticket, weights), and state_dict and load_state_dict or neither",
    "the collector with advance": "it needs capacity, accept, load, advance, state_dict and load_state_dict",
    "the wide collector": "it needs cut and open_work, or neither",
    "the learner": "it needs train and weights, and state_dict and load_state_dict or neither",
    "the algorithm's learner": "it needs train, weights, state_dict and load_state_dict",
    "the evaluator": "it needs evaluate(weights, seed)",
}
