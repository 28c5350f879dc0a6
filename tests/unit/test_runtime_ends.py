"""What runtimes leave behind: threads, processes, memory, and words about what went wrong."""

from __future__ import annotations

import subprocess
import threading
import weakref
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pytest

from offbeat.config.models import LearnerConfig
from offbeat.config.settings import Settings
from offbeat.errors import TrainError
from offbeat.pacing.events import EvalDone, Event
from offbeat.roles import PerWorker, WorkerContext
from offbeat.runtime import children, processes, ranks, worker
from offbeat.runtime.children import WorkerProcess
from offbeat.runtime.processes import ProcessRuntime
from offbeat.runtime.shared import WeightsWriter
from offbeat.runtime.spec import RunSpec
from offbeat.runtime.threads import ThreadRuntime
from offbeat.runtime.wire import Lender
from offbeat.types import Metrics
from tests.integration.test_runtimes import ChecksSlots


def test_an_evaluation_that_was_given_up_leaves_no_thread_and_no_result() -> None:
    is_evaluating, may_end = threading.Event(), threading.Event()

    class Slow:
        def evaluate(self, weights: Any, seed: int) -> Metrics:
            is_evaluating.set()
            may_end.wait(10.0)
            return {"eval/return_mean": 1.0}

    spec = RunSpec(
        PerWorker(lambda context: None),
        PerWorker(lambda context: ChecksSlots()),
        PerWorker(lambda context: Slow()),
    )
    before = set(threading.enumerate())
    runtime, events = ThreadRuntime(), list[Event]()
    runtime.start(spec, {}, None)
    try:
        runtime.evaluate(3, seed=0)
        assert is_evaluating.wait(10.0)
        (thread,) = (found for found in set(threading.enumerate()) - before if found.name == "evaluator")
        runtime.give_up_evaluation(3, "it took too long")
        may_end.set()
        thread.join(10.0)
        assert not thread.is_alive()
        events += runtime.wait(0.0)
    finally:
        runtime.close()
    assert [event for event in events if isinstance(event, EvalDone)] == [
        EvalDone(3, None, 0.0, "it took too long")
    ]


def test_workers_are_asked_to_stop_all_at_once_and_waited_for_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, calls = 100.0, list[tuple[str, float]]()
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Idle:
        is_up = True

        def ask_to_stop(self) -> None:
            calls.append(("ask", 0.0))

        def end(self, timeout_s: float) -> None:
            nonlocal now_s
            now_s += timeout_s  # as if it did not stop
            calls.append(("end", timeout_s))

    runtime: Any = ProcessRuntime()
    runtime._collectors = {
        index: SimpleNamespace(worker=Idle(), sent={}, lender=Lender()) for index in range(3)
    }
    runtime.close()
    assert [name for name, _ in calls] == ["ask"] * 3 + ["end"] * 3
    assert now_s == 100.0 + processes._CLOSE_TIMEOUT_S


def test_a_process_that_cannot_be_killed_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck:
        """In an uninterruptible call, of a network file system for one."""

        kills = 0

        def poll(self) -> None:
            return None

        def wait(self, timeout: float) -> None:
            raise subprocess.TimeoutExpired("worker", timeout)

        def kill(self) -> None:
            self.kills += 1

    closed: list[str] = []
    monkeypatch.setattr(children.os, "close", lambda descriptor: closed.append(descriptor))
    process: Any = WorkerProcess.__new__(WorkerProcess)
    process.process, process._stack_fd = Stuck(), "stack"
    process.ask_to_stop = lambda: None
    for name in ("_payload", "_counter", "connection"):
        setattr(process, name, SimpleNamespace(close=lambda name=name: closed.append(name)))
    process.end()
    assert process.process.kills > 0
    assert closed == ["_payload", "_counter", "connection", "stack"]


@pytest.mark.parametrize("error", [EOFError("the file is empty"), BrokenPipeError("a simulator has gone")])
def test_errors_like_those_of_a_lost_driver_are_reported(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        def __init__(self, connection: Connection, assignment: Any) -> None:
            pass

        def serve(self, message: Any) -> None:
            raise error

    monkeypatch.setitem(worker._SERVERS, "rank", Server)  # type: ignore[arg-type]
    sent: list[Any] = []
    connection: Any = SimpleNamespace(recv=lambda: ("train", None, 0), send=sent.append)
    worker._serve("rank", connection, cloudpickle.dumps(None))
    ((kind, doing, text),) = sent
    assert (kind, doing) == ("error", "in the request 'train'")
    assert str(error) in text


def test_a_reader_drops_a_block_that_weights_have_outgrown() -> None:
    writer, reader = WeightsWriter(), worker.Weights(1.0)
    writer.publish(0, np.zeros(3))
    assert writer.address is not None
    assert reader.get(writer.address, 0)[0] == 0
    outgrown = weakref.ref(reader._block)  # type: ignore[arg-type]
    writer.publish(1, np.zeros(100_000))
    assert reader.get(writer.address, 1)[0] == 1
    assert outgrown() is None
    writer.close()


def test_ranks_that_do_not_all_start_are_left_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Peer:
        name, pid = "learner_rank_1", None

        def __init__(self) -> None:
            self.answers = [("ready",), ("error", "while starting", "no GPU here")]

        def receive(self, timeout_s: float) -> Any:
            return self.answers.pop(0)

        def end(self, timeout_s: float) -> None:
            done.append("peer ended")

    launcher: Any = SimpleNamespace(
        spawn=lambda assignment: Peer(), close=lambda: done.append("launcher closed")
    )
    group = SimpleNamespace(close=lambda: done.append("group left"), is_nccl=False)
    point = SimpleNamespace(rendezvous=None, store=None)
    monkeypatch.setattr(ranks, "RendezvousHost", lambda *arguments: point)
    monkeypatch.setattr(ranks, "TorchRanks", lambda *arguments: group)
    role = PerWorker(lambda context: ChecksSlots())
    context = WorkerContext(0, 1, 0)
    spec = RunSpec(role, role, settings=Settings(learner=LearnerConfig(num_ranks=2)))
    with pytest.raises(TrainError, match="no GPU here"):
        ranks.make_ranked(spec, context, "127.0.0.1", launcher)
    assert done == ["group left", "peer ended", "launcher closed"]
