"""A runtime without workers and a clock without time: for tests of the driver."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.config.models import AsyncTrainingConfig, EvalConfig, ObserveConfig, RunSection, RuntimeConfig
from offbeat.config.settings import Settings
from offbeat.observe import RunControl, RunSummary
from offbeat.observe.callbacks import Callback
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing import events as pacing_events
from offbeat.pacing.actions import Pace
from offbeat.pacing.events import (
    Checksum,
    CollectorDown,
    CollectorUp,
    EvalDone,
    Event,
    Notice,
    OpenWork,
    Published,
    Request,
    RoundTrained,
    SegmentArrived,
    SnapshotTaken,
)
from offbeat.roles import PerWorker
from offbeat.run.driver import Driver
from offbeat.run.observers import attach
from offbeat.run.parts import StartPoint
from offbeat.runtime.messages import Begun
from offbeat.runtime.spec import CollectorState, RunSpec
from offbeat.types import Batch, Piece, Segment, StateTree, Ticket

ALL_EVENTS = tuple(
    kind for kind in vars(pacing_events).values() if isinstance(kind, type) and hasattr(kind, "__slots__")
)
_TICK_S = 0.001
_QUIET = {"console": "none", "tensorboard": {"enabled": False}}


class Clock:
    """Time that only the test and the fake runtime move."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class FakeRuntime:
    """Answers each request with its event in the next `wait`, but for the kinds in ``silent``.

    ``calls`` are the requests so far. A wait that has no event takes its whole time-out, and the next one
    ``suspended_s`` more: the machine is suspended.
    """

    def __init__(
        self,
        clock: Clock,
        silent: Sequence[str] = (),
        replaces_collectors: bool = True,
        takes_turns: bool = True,
    ) -> None:
        self.takes_turns = takes_turns
        self.replaces_collectors = replaces_collectors
        self.clock = clock
        self.silent = set(silent)
        self.calls: list[tuple[Any, ...]] = []
        self.events: deque[Event] = deque()
        self.suspended_s = 0.0
        self.batch: Batch | None = None
        self.states: list[CollectorState] = []
        self.num_closed = 0
        self.weights = 0
        self.work: dict[int, dict[int, StateTree]] = {}  # by collector; those that have any are asked
        self.begun: dict[int, StateTree] = {}  # what came with a ticket

    def _answer(self, kind: str, event: Event) -> None:
        if kind not in self.silent:
            self.events.append(event)

    def start(
        self, spec: RunSpec, collectors: Mapping[int, CollectorState], learner_state: StateTree | None
    ) -> None:
        self.calls.append(("start", learner_state))
        for index, state in collectors.items():
            self.start_collector(index, state)

    def start_collector(self, index: int, state: CollectorState) -> None:
        self.calls.append(("start_collector", index, state))
        self._answer("start_collector", CollectorUp(index))

    def kill_collector(self, index: int, reason: str) -> None:
        self.calls.append(("kill_collector", index, reason))
        self.events.append(CollectorDown(index, reason))

    def end_collector(self, index: int) -> None:
        self.calls.append(("end_collector", index))

    def cut(self, tickets: Sequence[Ticket]) -> None:
        self.calls.append(("cut", tuple(ticket.number for ticket in tickets)))

    def ask_work(self) -> Sequence[int]:
        self.calls.append(("ask_work",))
        for index, work in self.work.items():
            self._answer("ask_work", OpenWork(index, work))
        return tuple(self.work)

    def working_s(self, index: int) -> float | None:
        return math.inf  # one that does not answer hangs

    def collect(self, ticket: Ticket, begun: Begun | None = None, script: tuple[Piece, ...] = ()) -> None:
        self.calls.append(("collect", ticket.number))
        if begun is not None:
            self.begun[ticket.number] = begun.tree
        data = {"x": np.array([float(ticket.number)])}
        segment = Segment(ticket, data, np.array([ticket.version]), {"env_steps": 1})
        self._answer("collect", SegmentArrived(segment, 8, {"of": ticket.number}))

    def train(self, batch: Batch) -> None:
        self.calls.append(("train", batch.version))
        self.batch = batch
        if "train" not in self.silent:
            self.finish_training()

    def finish_training(self, **metrics: float) -> None:
        """End the round under way."""
        assert self.batch is not None
        batch, now_s = self.batch, self.clock.now_s
        learned = {f"learn/{name}": value for name, value in metrics.items()}
        self.events.append(RoundTrained(batch.version + 1, batch, learned, now_s, now_s))

    def release(self, tickets: Sequence[int]) -> None:
        self.calls.append(("release", *tickets))

    def publish(self, version: int) -> None:
        self.calls.append(("publish", version))
        self._answer("publish", Published(version, 0.0, Checksum.of(version)))

    def snapshot(self) -> None:
        self.calls.append(("snapshot",))
        self._answer("snapshot", SnapshotTaken({"w": np.zeros(2)}, {"w": np.zeros(2)}))

    def evaluate(self, version: int, seed: int) -> None:
        self.calls.append(("evaluate", version))
        self._answer("evaluate", EvalDone(version, {"eval/return_mean": 1.0}, 0.1))

    def give_up_evaluation(self, version: int, reason: str) -> None:
        self.calls.append(("give_up_evaluation", version, reason))
        self.events.append(EvalDone(version, None, 0.0, reason))

    def wait(self, timeout_s: float) -> list[Event]:
        suspended_s, self.suspended_s = self.suspended_s, 0.0
        self.clock.now_s += suspended_s + (_TICK_S if self.events else max(timeout_s, _TICK_S))
        events = list(self.events)
        self.events.clear()
        return events

    def stacks(self) -> dict[str, str]:
        return {"learner": "in train"}

    def pids(self) -> dict[str, int]:
        return {}

    def close(self, at_once: bool = False) -> None:
        self.num_closed += 1

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Arguments of the calls of this name."""
        return [call[1:] for call in self.calls if call[0] == name]


class FakeRun:
    """A driver with a real pace and a fake runtime. ``seen`` is what observers got, in order.

    ``limits`` are settings by section, such as ``{"runtime": {"train_timeout_s": 5.0}}``.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        silent: Sequence[str] = (),
        num_workers: int = 2,
        limits: Mapping[str, Mapping[str, Any]] | None = None,
        callbacks: Sequence[Callback] = (),
        make_pace: Callable[[PaceConfig], Pace] = Coordinator,
        requests: deque[Request] | None = None,
        clock: Clock | None = None,
        replaces_collectors: bool = True,
        takes_turns: bool = True,
        **pace: Any,
    ) -> None:
        limits = limits or {}
        self.settings = Settings(
            runtime=RuntimeConfig(kind="threads", num_workers=num_workers, **limits.get("runtime", {})),
            async_training=AsyncTrainingConfig(**limits.get("async_training", {})),
            eval=EvalConfig(**limits.get("eval", {})),
            run=RunSection(**limits.get("run", {})),
            observe=ObserveConfig(**{**_QUIET, **limits.get("observe", {})}),
        )
        self.clock = Clock() if clock is None else clock
        self.runtime = FakeRuntime(self.clock, silent, replaces_collectors, takes_turns)
        self.requests: deque[Request] = deque() if requests is None else requests
        self.directory = directory
        unused = PerWorker(_no_role)
        log_dir = None if directory is None else directory / "logs"
        spec = RunSpec(unused, unused, unused, self.settings, 0, log_dir)  # type: ignore[arg-type]
        config = {"rounds": 3, "segments_per_round": num_workers, "num_collectors": num_workers, **pace}
        self.pace = make_pace(PaceConfig(**config))
        self.driver = Driver(spec, self.pace, self.runtime, self.clock, self.requests)
        self.seen: list[Event] = []
        self.driver.observe(dict.fromkeys(ALL_EVENTS, self._see))
        self.callbacks = tuple(callbacks)

    def _see(self, event: Event, now_s: float) -> None:
        self.seen.append(event)

    def write_files(self, point: StartPoint = StartPoint()) -> None:
        """Add the observers that write the run's directory, and the callbacks."""
        summary = RunSummary("fake", "", "", "", 0, 0, 0, self.directory)
        control = RunControl(print, print, print)
        attach(self.driver, point, summary, self.callbacks, control, quiet=True)

    def start(self, point: StartPoint = StartPoint()) -> FakeRun:
        self.driver.start(point)
        return self

    def steps(self, count: int) -> None:
        """Take so many steps."""
        for _ in range(count):
            self.driver.step()

    def step_until(self, is_there: Callable[[], bool]) -> None:
        """Step until something is there; it has to be soon."""
        for _ in range(1000):
            if is_there():
                return
            self.driver.step()
        raise AssertionError(f"it never came: {self.seen[-5:]}")

    def pass_time(self, seconds: float) -> None:
        """Step until so much time has passed."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.driver.step()

    def complete(self) -> None:
        """Drive to the end."""
        self.step_until(lambda: self.driver.finished)

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.seen]

    def of(self, kind: type) -> list[Any]:
        """Events of a kind that observers got."""
        return [event for event in self.seen if type(event) is kind]

    def notices(self) -> list[str]:
        return [event.text for event in self.of(Notice)]


def _no_role(context: Any) -> Any:
    raise AssertionError("a fake runtime makes no roles")
