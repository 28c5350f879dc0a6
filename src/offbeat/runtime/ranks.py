"""A learner of several processes that train together. Rank 0 lives where the learner lives; it leads.

Rank 0 sends the others what it does itself (load this state, train this batch), so that all go through the
same steps; the learner's own code adds up what each rank computed. The others are `Peer`s: child processes
here, and whatever else keeps the protocol, such as actors on other machines.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from offbeat.errors import LearnerLost, OffbeatError, TrainError
from offbeat.models.ranks import Rendezvous, RendezvousHost, TorchRanks, choose_backend, choose_device
from offbeat.roles import Learner, PerWorker, WorkerContext
from offbeat.runtime.base import ManyRanks, with_stack
from offbeat.runtime.children import WorkerProcess
from offbeat.runtime.shared import Address, Block, pack_object
from offbeat.runtime.spec import RunSpec
from offbeat.types import Batch, Metrics, StateTree

_POLL_S = 0.5
_VERDICT_S = 3.0
_CLOSE_TIMEOUT_S = 2.0


# ---------------------------------------------------------------- the other ranks


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The role of a rank other than 0, and the address of the others."""

    role: PerWorker[Learner]
    context: WorkerContext
    rank: int
    device: str
    rendezvous: Rendezvous


Request = tuple[Literal["load"], StateTree] | tuple[Literal["train"], Batch]
Answer = tuple[Any, ...]
"""``("ready",)`` to meet, ``("up", checksum)``, ``("done", checksum)``, ``("refused", text)`` for an error
that all ranks make alike, ``("cut off", text)`` when other ranks are gone, ``("error", doing, text)``."""


class Follower:
    """A rank other than 0, in its own process."""

    def __init__(self, assignment: RankAssignment) -> None:
        """Join the others and make the learner. To be called when rank 0 knows that it comes."""
        device = choose_device(assignment.device, assignment.rank)
        ranks = TorchRanks(assignment.rendezvous, assignment.rank, device)
        self._learner = assignment.role.make(replace(assignment.context, ranks=ranks))

    def up(self) -> Answer:
        """Say that requests are welcome."""
        return ("up", checksum_of(self._learner))

    def serve(self, request: Request) -> Answer:
        """Do what rank 0 does."""
        try:
            if request[0] == "load":
                self._learner.load_state_dict(request[1])
            else:
                self._learner.train(request[1])
        except LearnerLost as error:
            return ("cut off", str(error))
        except OffbeatError as error:
            return ("refused", str(error))
        return ("done", checksum_of(self._learner))


def checksum_of(learner: Learner) -> int:
    """A number that learners with the same parameters share: their ``checksum()``, or that of the weights."""
    own = getattr(learner, "checksum", None)
    if own is not None:
        return int(own())
    value = 0
    for part in pack_object(learner.weights()).parts:
        value = zlib.crc32(part, value)
    return value


class PeerGone(Exception):
    """A rank has ended; the text says how."""


class Peer(Protocol):
    """A rank other than 0, as rank 0 sees it.

    One thread calls, another one ``failure_reason`` and ``kill``.
    """

    @property
    def name(self) -> str:
        """``learner_rank_1`` and so on."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process, where that is one of this machine."""
        ...

    def send(self, packed: Any) -> None:
        """Send a request that its launcher has packed; to a rank that has ended it is lost."""
        ...

    def receive(self, timeout_s: float) -> Answer | None:
        """Its next answer, None when there is none in time. Raises `PeerGone`."""
        ...

    def failure_reason(self) -> str | None:
        """Return the reason of a failure, None while it lives; called twice a second from another thread."""
        ...

    def stack(self) -> str:
        """Return its stack, empty when it has none to report."""
        ...

    def kill(self) -> None:
        """End it at once, from any thread; `receive` then raises."""
        ...

    def end(self, timeout_s: float) -> None:
        """End it, kindly for ``timeout_s``, and free what it holds."""
        ...


class RankLauncher(Protocol):
    """Starts the other ranks of one learner and gets requests ready for them."""

    def spawn(self, assignment: RankAssignment) -> Peer:
        """Start a rank; it answers ``("ready",)`` when it can meet the others, then ``("up", checksum)``."""
        ...

    def pack(self, request: Request) -> Any:
        """Put a request where all ranks can get it. All have answered the one before."""
        ...

    def close(self) -> None:
        """All ranks have ended: free what is left."""
        ...


class ProcessRankLauncher:
    """Ranks in child processes, which read requests from shared memory."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._block: Block | None = None

    def spawn(self, assignment: RankAssignment) -> Peer:
        """Start a process."""
        return ProcessPeer(self._spec, assignment)

    def pack(self, request: Request) -> tuple[str, Address, int]:
        """Write a request into a block; return its kind, address and size."""
        packed = pack_object(request)
        if self._block is None or self._block.size < packed.num_bytes:
            self.close()
            self._block = Block.create(packed.num_bytes * 5 // 4)
        packed.write(self._block.memory)
        return request[0], self._block.address, packed.num_bytes

    def close(self) -> None:
        """Free the block."""
        if self._block is not None:
            self._block.close()
            self._block = None


class ProcessPeer(WorkerProcess):
    """A rank in a child process."""

    def __init__(self, spec: RunSpec, assignment: RankAssignment) -> None:
        super().__init__(f"learner_rank_{assignment.rank}", spec, "rank", assignment)
        self._silence_s = spec.settings.runtime.heartbeat_timeout_s

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    def receive(self, timeout_s: float) -> Answer | None:
        """Its next answer, None when there is none in time."""
        try:
            if not self.connection.poll(timeout_s):
                return None
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            raise PeerGone(self.how_it_ended()) from None
        if answer[0] == "up":
            self.came_up()
        return answer

    def failure_reason(self) -> str | None:
        """Return the reason if its process has ended or gives no sign of life."""
        if self.process.poll() is not None:
            return self.how_it_ended()
        if self.is_up and self.is_dead(time.monotonic()):
            limit = f"within runtime.heartbeat_timeout_s ({self._silence_s} s)"
            return f"{self.name} (pid {self.pid}) gave no sign of life {limit}"
        return None

    def kill(self) -> None:
        """End its process."""
        self.process.kill()


# ---------------------------------------------------------------- rank 0


class Watch:
    """Looks after the peers in a thread of its own: one that has died must not leave the others waiting."""

    def __init__(self, peers: Sequence[Peer], on_loss: Callable[[], None]) -> None:
        self._peers = peers
        self._on_loss = on_loss
        self._stop = threading.Event()
        self.failures: dict[str, str] = {}
        self._thread = threading.Thread(target=self._loop, name="learner-ranks", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.wait(_POLL_S):
            for peer in self._peers:
                failure_reason = peer.failure_reason() if peer.name not in self.failures else None
                if failure_reason is not None and not self._stop.is_set():
                    self.failures[peer.name] = failure_reason
                    peer.kill()
                    self._on_loss()

    def stop(self) -> None:
        """Look no longer."""
        self._stop.set()
        self._thread.join(_VERDICT_S)


class RankedLearner(ManyRanks):
    """Rank 0 of a learner of several ranks, with the others in tow. Keeps the `Learner` protocol."""

    def __init__(
        self, own: Learner, ranks: TorchRanks, launcher: RankLauncher, peers: Sequence[Peer], timeout_s: float
    ) -> None:
        self._own = own
        self._ranks = ranks
        self._launcher = launcher
        self._peers = peers
        self._timeout_s = timeout_s
        self._is_whole = True
        self._is_closed = False
        self.lost: dict[str, str] = {}
        # gloo notices a closed connection by itself, NCCL does not.
        self._watch = Watch(peers, ranks.abort if ranks.is_nccl else lambda: None)

    def train(self, batch: Batch) -> Metrics:
        """Train a round together."""
        metrics: Metrics = self._together(
            ("train", batch), lambda: self._own.train(batch), f"round {batch.version}"
        )
        return metrics

    def weights(self) -> Any:
        """Rank 0's, which are those of all."""
        return self._own.weights()

    def state_dict(self) -> StateTree:
        """Rank 0's, which is that of all."""
        return self._own.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Put all ranks where ``state`` says."""
        self._together(("load", state), lambda: self._own.load_state_dict(state), "loading a state")

    def pids(self) -> dict[str, int | None]:
        """The other ranks by name, with their process where it is one of this machine."""
        return {peer.name: peer.pid for peer in self._peers}

    def stacks(self) -> dict[str, str]:
        """Return the current stacks of the other ranks."""
        found = {peer.name: peer.stack() for peer in self._peers} if not self._is_closed else {}
        return {name: stack for name, stack in found.items() if stack}

    def close(self) -> None:
        """End the other ranks. The learner still has its weights and its state, but trains no longer."""
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.stop()
        for peer in self._peers:
            peer.end(_CLOSE_TIMEOUT_S if self._is_whole else 0.0)
        self._launcher.close()
        self._ranks.close()

    # ------------------------------------------------------------ all ranks at once

    def _together(self, request: Request, do: Callable[[], Any], doing: str) -> Any:
        """Send the request to the others, do the same, and compare."""
        if not self._is_whole or self._is_closed:
            raise LearnerLost("the learner has lost some of its ranks: the run has to be started again")
        self._is_whole = False  # until all have answered, whatever ends this before
        packed = self._launcher.pack(request)
        for peer in self._peers:
            peer.send(packed)
        try:
            result = do()
        except LearnerLost as error:
            raise self._whoever_is_lost(doing, str(error)) from error
        except OffbeatError:
            with contextlib.suppress(LearnerLost):
                # All ranks refuse the same things, and can then go on together.
                self._is_whole = all(answer[0] == "refused" for answer in self._answers(doing))
            raise
        except Exception as error:
            if self._watch.failures:  # an aborted exchange shows in many ways
                raise self._whoever_is_lost(doing, str(error)) from error
            raise
        self._compare(self._answers(doing), doing)
        self._is_whole = True
        return result

    def _answers(self, doing: str) -> list[Answer]:
        give_up_s = time.monotonic() + self._timeout_s
        answers = []
        for peer in self._peers:
            try:
                answer = peer.receive(max(0.0, give_up_s - time.monotonic()))
            except PeerGone as error:
                raise self._lose(peer, doing, str(error)) from None
            if answer is None:
                raise self._lose(peer, doing, self._silence(peer))
            answers.append(answer)
        return answers

    def _compare(self, answers: Sequence[Answer], doing: str) -> None:
        expected = checksum_of(self._own)
        for peer, answer in zip(self._peers, answers, strict=True):
            if answer[0] != "done":
                raise self._lose(peer, doing, f"{peer.name} raised:\n{answer[-1]}")
            if answer[1] != expected:
                raise TrainError(
                    f"the ranks of the learner came apart in {doing}: {peer.name} has checksum {answer[1]},"
                    f" rank 0 has {expected}. All ranks need processors of one kind and the same packages;"
                    " and a learner has to add up (Ranks.sum_) whatever its steps depend on"
                )

    def _whoever_is_lost(self, doing: str, symptom: str) -> LearnerLost:
        """Find the rank that the others wait for: one that died or raised, else one that says nothing."""
        give_up_s = time.monotonic() + _VERDICT_S
        silent = []
        for peer in self._peers:
            try:
                answer = peer.receive(max(0.0, give_up_s - time.monotonic()))
            except PeerGone as error:
                return self._lose(peer, doing, str(error))
            if answer is None:
                silent.append(peer)
            elif answer[0] in ("error", "refused"):
                return self._lose(peer, doing, f"{peer.name} raised:\n{answer[-1]}")
        if silent:
            return self._lose(silent[0], doing, self._silence(silent[0]))
        return LearnerLost(f"the ranks of the learner lost each other in {doing}: {symptom}")

    def _lose(self, peer: Peer, doing: str, how: str) -> LearnerLost:
        self.lost[peer.name] = self._watch.failures.get(peer.name, how)
        return LearnerLost(f"the learner lost a rank in {doing}: {self.lost[peer.name]}")

    def _silence(self, peer: Peer) -> str:
        text = f"{peer.name} did not answer within {self._timeout_s:g} s (learner.timeout_s)"
        return with_stack(text, peer.stack())


# ---------------------------------------------------------------- starting


def make_ranked(
    spec: RunSpec, context: WorkerContext, host: str, launcher: RankLauncher | None = None
) -> RankedLearner:
    """Start all ranks of a learner, rank 0 here. ``host``: this machine's address, as the others reach it.

    Without a ``launcher`` the others are child processes.
    """
    settings, size = spec.settings, spec.settings.learner.num_ranks
    device = choose_device(settings.trainer.device)
    per_node = size // settings.trainer.nnodes
    backend = choose_backend(settings.learner.backend, device, per_node, settings.trainer.n_gpus_per_node)
    point = RendezvousHost(host, size, backend, spec.start_timeout_s, settings.learner.timeout_s)
    launcher, peers = launcher or ProcessRankLauncher(spec), list[Peer]()
    with contextlib.ExitStack() as made:  # what is undone when not all ranks can be started
        made.callback(launcher.close)
        for rank in range(1, size):
            assignment = RankAssignment(spec.learn, context, rank, settings.trainer.device, point.rendezvous)
            peers.append(launcher.spawn(assignment))
            made.callback(peers[-1].end, 0.0)
        # Only when all are there: a rank that cannot start is then named, and nobody waits for it in vain.
        _expect(peers, "ready", spec.start_timeout_s)
        ranks = TorchRanks(point.rendezvous, 0, device, point.store)
        made.callback(ranks.close)
        own = spec.learn.make(replace(context, ranks=ranks))
        _expect(peers, "up", spec.start_timeout_s)
        made.pop_all()
    return RankedLearner(own, ranks, launcher, peers, settings.learner.timeout_s)


def _expect(peers: Sequence[Peer], wanted: str, timeout_s: float) -> None:
    give_up_s = time.monotonic() + timeout_s
    for peer in peers:
        try:
            answer = peer.receive(max(0.0, give_up_s - time.monotonic()))
        except PeerGone as error:
            raise LearnerLost(f"a rank of the learner ended while starting: {error}") from None
        if answer is None:
            text = f"{peer.name} did not start within {timeout_s:g} s (start_timeout_s)"
            raise LearnerLost(with_stack(text, peer.stack()))
        if answer[0] != wanted:
            raise TrainError(f"{peer.name} of the learner raised while starting:\n{answer[-1]}")
