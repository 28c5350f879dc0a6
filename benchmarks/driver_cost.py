"""What the driver costs: calls, files and processor time per segment, and how much code it is.

The same script measures two versions of offbeat, each in processes of its own that take turns:

    python benchmarks/driver_cost.py --compare ../old/src src

Without ``--compare`` it measures the offbeat that it imports. Rows (``--only NAME`` selects some):

  calls        Python calls for one more segment, inline: rounds of 2 and of 4 segments, the difference.
  round        functions and files that a steady round of cartpole-ppo runs through, and its calls, outside of
               algorithms, envs, models, ops and testing.
  coordinator  issue, arrival and training of one segment, with 1,000, 5,000 and 100,000 tickets outstanding
               (k = 7, one ticket a collector, times of collecting log-normal, sigma 0.3): when it decides
               after each arrival, and after each 32.
  inline       a run with empty functions, journals on, 64 and 600 collectors.
  instant      the same on a runtime that answers at once, 64, 1,000 and 10,000 collectors, and 32 answers or
               one at a time.
  processes    the same on processes, 16 collectors: the main thread, and the whole process without workers.
  workers      the whole process without workers: 64 workers that sleep for 50 ms, 8 with segments of 1 MB.
  messages     a ticket and a segment's message, sent and received, without what is in the segment.
  records      kinds of records for what happens, and how many types of them runtime, pace and observers use.
  size         files, classes and code lines (no blanks, comments, docstrings) of the core, lines of all.

Runs are measured from the end of one round to the end of another, so that start and end do not count. Times
are processor times of the thread (microseconds per segment), medians over the repeats. ``–``: not measured,
since it takes minutes or is not there.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import heapq
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_args

import numpy as np
from common import ONE_THREAD, conclude, median, parser, say

import offbeat
from offbeat.config.models import AsyncTrainingConfig, CheckpointConfig
from offbeat.observe.callbacks import Callback, RoundInfo
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pipeline import Pipeline, Settings
from offbeat.types import Segment, Ticket

SOURCE = Path(offbeat.__file__).parent
IS_OLD = (SOURCE / "session.py").exists()
EVENTS: Any = import_module("offbeat.pacing.messages" if IS_OLD else "offbeat.pacing.events")
LIMIT_S = 60
ALL = "all of src: code lines"
AIMS = {
    "calls k=0": 50,
    "calls k=4": 50,
    "round: functions": 110,
    "round: files": 14,
    "coordinator 1,000": 30,
    "coordinator 5,000": 30,
    "coordinator 100,000": 30,
    "coordinator 100,000 / 1,000": 2,
    "inline 64 k=0": 30,
    "inline 64 k=4": 30,
    "inline 600 k=0": 30,
    "inline 600 k=4": 30,
    "instant 64": 80,
    "instant 1,000": 80,
    "instant 10,000": 80,
    "instant 10,000 / 64": 1.3,
    "processes 16": 120,
    "messages": 15,
    "records": 24,
    "records: forms": 1,
    "core: classes": 95,
    "core: code lines": 4000,
}
"""What each figure may be at most."""
Figures = dict[str, float | None]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help="these rows")
    made.add_argument("--compare", nargs=2, metavar=("OLD_SRC", "NEW_SRC"), help="measure both, taking turns")
    made.add_argument("--repeats", type=int, default=3, help="runs of each timed row with --compare")
    options = made.parse_args()
    if options.compare:
        before, after = compare(options)
    else:
        before, after = {}, {}
        for name in options.only:
            after |= ROWS[name](options.quick)
            say(f"{name} done")
    with_ratios(before)
    with_ratios(after)
    missed = show(before, after)
    return conclude({"before": before, "after": after, "missed": missed}, not missed, options)


# ---------------------------------------------------------------- before and after


def compare(options: argparse.Namespace) -> tuple[Figures, Figures]:
    """Measure each row with both sources in turns; return the medians."""
    measured: tuple[dict[str, list[float | None]], ...] = ({}, {})
    for name in options.only:
        for _ in range(1 if name in COUNTED or options.quick else options.repeats):
            for source, into in zip(options.compare, measured, strict=True):
                for figure, value in run_alone(name, source, options.quick).items():
                    into.setdefault(figure, []).append(value)
        say(f"{name} done")
    before, after = ({name: middle(values) for name, values in side.items()} for side in measured)
    return before, after


def run_alone(name: str, source: str, quick: bool) -> Mapping[str, float | None]:
    """Run one row of this script in a process that imports offbeat from ``source``."""
    command = [sys.executable, __file__, "--json", "--only", name, *(["--quick"] if quick else [])]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(Path(source).resolve())}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if not done.stdout.strip().startswith(name):
        raise SystemExit(f"{name} with {source} failed:\n{done.stderr}")
    figures: Mapping[str, float | None] = json.loads(done.stdout.splitlines()[-1])["after"]
    return figures


def middle(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if len(numbers) == len(values) else None


def with_ratios(figures: Figures) -> None:
    """Add how costs grow with the size of a run."""
    for many, few in (("coordinator 100,000", "1,000"), ("instant 10,000", "64")):
        more, less = figures.get(many), figures.get(f"{many.split()[0]} {few}")
        if more is not None and less is not None:
            figures[f"{many} / {few}"] = more / less


def show(before: Figures, after: Figures) -> list[str]:
    """Print the table; return what is above its aim or could not be measured."""
    say(f"\n| {'figure':<32} | {'before':>8} | {'after':>8} | {'ratio':>6} | {'aim':>6} |      |")
    say(f"|{'-' * 34}|{'-' * 9}:|{'-' * 9}:|{'-' * 7}:|{'-' * 7}:|------|")
    missed = []
    for name in dict.fromkeys([*before, *after]):
        old, new, aim = before.get(name), after.get(name), AIMS.get(name)
        ratio = f"{new / old:.2f}" if old and new is not None else ""
        judged = "" if aim is None else "ok" if new is not None and new <= aim else "MISS"
        missed += [name] * (judged == "MISS")
        shown = f"{number(old):>8} | {number(new):>8} | {ratio:>6} | {'' if aim is None else f'{aim:,}':>6}"
        say(f"| {name:<32} | {shown} | {judged:<4} |")
    return missed


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


@contextlib.contextmanager
def limited(limit_s: int = LIMIT_S) -> Iterator[None]:
    """Raise TimeoutError in the block when it takes more processor time."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def or_none(measure: Callable[[], Any], limit_s: int = LIMIT_S) -> Any:
    """Return what is measured, None when that takes too long."""
    try:
        with limited(limit_s):
            return measure()
    except TimeoutError:
        return None


# ---------------------------------------------------------------- runs with empty functions


class Between(Callback):
    """Calls ``begin`` at the end of round ``first`` and ``end`` at that of round ``last``."""

    def __init__(self, first: int, last: int, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._calls = {first: begin, last: end}

    def on_round(self, info: RoundInfo) -> None:
        if info.version in self._calls:
            self._calls[info.version]()


def empty_run(
    kind: Any,
    collectors: int,
    degree: int,
    rounds: int,
    probe: Callback,
    collect: Callable[[Any, Any], Any] = lambda ticket, weights: weights,
) -> None:
    """Run a pipeline whose learner does nothing, with a run directory."""
    theta = np.zeros(3)
    at_once = {"open_rounds": 0} if "open_rounds" in AsyncTrainingConfig.model_fields else {}
    with tempfile.TemporaryDirectory() as place:
        Pipeline(
            collect=collect,
            train=lambda segments: None,
            weights=theta.copy,
            off_policy_degree=degree,
            runtime=kind,
            num_workers=collectors,
            run_dir=Path(place) / "run",
            settings=Settings(AsyncTrainingConfig(**at_once), checkpoint=CheckpointConfig(enabled=False)),
            callbacks=(probe,),
        ).run(rounds=rounds)


def run_cost(kind: str, collectors: int, degree: int, rounds: int, **options: Any) -> tuple[float, float]:
    """Microseconds per segment over ``rounds`` steady rounds: of the driver's thread, of its process."""
    times: list[tuple[float, float]] = []

    def note() -> None:
        times.append((time.thread_time(), time.process_time()))

    first = degree + 2
    probe = Between(first, first + rounds, note, note)
    empty_run(kind, collectors, degree, first + rounds + 1, probe, **options)
    thread_s, process_s = (after - before for before, after in zip(*times, strict=True))
    return 1e6 * thread_s / (rounds * collectors), 1e6 * process_s / (rounds * collectors)


def inline(quick: bool) -> Figures:
    figures: Figures = {}
    for collectors in (64, 600):
        for degree in (0, 4):
            rounds = 3 if quick else max(10, 6400 // collectors)
            figures[f"inline {collectors} k={degree}"] = run_cost("inline", collectors, degree, rounds)[0]
    return figures


def processes(quick: bool) -> Figures:
    thread, process = run_cost("processes", 16, 2, 10 if quick else 150)
    return {"processes 16": thread, "processes 16: whole process": process}


def asleep(ticket: Any, weights: Any) -> Any:
    time.sleep(0.05)
    return weights


def one_mb(ticket: Any, weights: Any) -> Any:
    return {"x": np.full(131_072, 1.0)}


def workers(quick: bool) -> Figures:
    """Many workers that sleep, as slow environments do, and a few with large segments."""
    sleeping = run_cost("processes", 8 if quick else 64, 2, 3 if quick else 40, collect=asleep)
    large = run_cost("processes", 8, 2, 3 if quick else 40, collect=one_mb)
    return {"processes 64, asleep": sleeping[1], "processes 8, 1 MB": large[1]}


# ---------------------------------------------------------------- calls


class CallCounter:
    """Counts Python calls of this thread by function, from ``begin`` to ``end``."""

    def __init__(self) -> None:
        self.calls = Counter[Any]()

    def begin(self) -> None:
        sys.setprofile(self._note)

    def end(self) -> None:
        sys.setprofile(None)
        self.calls = Counter({code: count for code, count in self.calls.items() if not _is_ours(code)})

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1


def _is_ours(code: Any) -> bool:
    return bool(code.co_filename == __file__)


def calls(quick: bool) -> Figures:
    return {f"calls k={degree}": sum(calls_by_function(degree).values()) for degree in (0, 4)}


def calls_by_function(degree: int, few: int = 2, rounds: int = 4) -> dict[str, float]:
    """Calls for one more segment: in rounds of twice as many segments, the difference."""
    counted = []
    for collectors in (few, 2 * few):
        counter, first = CallCounter(), degree + 2
        probe = Between(first, first + rounds, counter.begin, counter.end)
        empty_run("inline", collectors, degree, first + rounds + 1, probe)
        counted.append(counter.calls)
    fewer, more = counted
    difference = {code: (more[code] - fewer[code]) / (few * rounds) for code in {**fewer, **more}}
    named = dict[str, float]()
    for code, count in difference.items():
        name = f"{_place(code)}:{code.co_qualname}"
        named[name] = named.get(name, 0.0) + count
    return dict(sorted(named.items(), key=lambda one: -one[1]))


def _place(code: Any) -> str:
    path = Path(code.co_filename)
    return str(path.relative_to(SOURCE)) if path.is_relative_to(SOURCE) else path.name


ELSEWHERE = ("algorithms", "envs", "models", "ops", "testing")
"""Folders that do not belong to the driver."""


def steady_round(quick: bool) -> Figures:
    from offbeat import load_config, train

    counter = CallCounter()
    sizes = ["algorithm.num_steps=8", "env.num_envs=4", "run.rounds=10", "observe.console=none"]
    rare = ["checkpoint.interval_rounds=100", "eval.interval_rounds=100", "observe.tensorboard.enabled=false"]
    with tempfile.TemporaryDirectory() as place:
        config = load_config(
            "cartpole-ppo", [*sizes, *rare, "runtime.kind=inline", f"run.dir={place}", "run.name=x"]
        )
        train(config, callbacks=(Between(5, 8, counter.begin, counter.end),))
    ours = {code: count for code, count in counter.calls.items() if is_driver(code)}
    return {
        "round: functions": len(ours),
        "round: files": len({code.co_filename for code in ours}),
        "round: calls": sum(ours.values()) / 3,
    }


def is_driver(code: Any) -> bool:
    path = Path(code.co_filename)
    return path.is_relative_to(SOURCE) and path.relative_to(SOURCE).parts[0] not in ELSEWHERE


# ---------------------------------------------------------------- the coordinator alone


def coordinator(quick: bool) -> Figures:
    figures: Figures = {}
    for per_decision in (1, 32):
        for outstanding in (1_000,) if quick else (1_000, 5_000, 100_000):
            name = f"coordinator {outstanding:,}" + (f", {per_decision} at once" if per_decision > 1 else "")
            if IS_OLD and (per_decision > 1 or outstanding > 5_000):
                figures[name] = None  # it decides after each event, and needs hours for 100,000 tickets
            else:
                figures[name] = or_none(
                    lambda m=outstanding, n=per_decision: CoordinatorRun(m, n).cost(quick)
                )
    return figures


class CoordinatorRun:
    """Plays collectors and a learner that take no time to a coordinator, and times only its answers."""

    def __init__(self, outstanding: int, per_decision: int) -> None:
        config: dict[str, Any] = {"num_lanes" if IS_OLD else "num_collectors": outstanding}
        config |= {"segments_per_round": outstanding // 8, "off_policy_degree": 7, "rounds": 10**9}
        self._coordinator: Any = Coordinator(PaceConfig(**config))
        self._size, self._collectors, self._per_decision = outstanding // 8, outstanding, per_decision
        self._running: list[tuple[float, int, Any]] = []  # by the time at which its segment arrives
        self._due: list[Any] = []  # events of the learner
        self._random = np.random.default_rng(0)
        self._now_s = 0.0
        self.num_trained = 0

    def cost(self, quick: bool) -> float:
        """Microseconds per segment over whole generations of tickets, eight rounds each, after the first."""
        self._perform(self._coordinator.start(0.0))
        self._tell([event_up(collector) for collector in range(self._collectors)])
        self._train(8)
        rounds = 8 * max(1, (1 if quick else 4 if IS_OLD else 20) * 1_000 // self._collectors)
        rounds = rounds if quick or IS_OLD else max(rounds, 16)
        before = self.num_trained
        seconds = self._train(rounds)
        return 1e6 * seconds / (self.num_trained - before)

    def _train(self, rounds: int) -> float:
        until, seconds = self.num_trained + rounds * self._size, 0.0
        while self.num_trained < until:
            seconds += self._tell([*self._due, *self._arrivals()])
        return seconds

    def _arrivals(self) -> list[Any]:
        self._due = []
        arriving = [heapq.heappop(self._running) for _ in range(min(32, len(self._running)))]
        self._now_s = max([self._now_s, *(at_s for at_s, _, _ in arriving)])
        return [event_arrived(ticket) for _, _, ticket in arriving]

    def _tell(self, events: Sequence[Any]) -> float:
        """Enter events, carry out what the coordinator says to them, and return the time it needed."""
        tell = self._handle if IS_OLD else self._apply
        started_s = time.thread_time()
        actions = tell(events)
        seconds = time.thread_time() - started_s
        self._perform(actions)
        return seconds

    def _handle(self, events: Sequence[Any]) -> list[Any]:
        handle, now_s, actions = self._coordinator.handle, self._now_s, []
        for event in events:
            actions += handle(event, now_s)
        return actions

    def _apply(self, events: Sequence[Any]) -> list[Any]:
        apply, decide, now_s, actions = self._coordinator.apply, self._coordinator.decide, self._now_s, []
        for begin in range(0, len(events), self._per_decision):
            for event in events[begin : begin + self._per_decision]:
                actions += apply(event, now_s)
            actions += decide(now_s)
        return actions

    def _perform(self, actions: Sequence[Any]) -> None:
        for action in actions:
            kind = type(action).__name__
            if kind == "Issue":
                ticket, takes_s = action.ticket, self._random.lognormal(0.0, 0.3)
                heapq.heappush(self._running, (self._now_s + takes_s, ticket.number, ticket))
            elif kind == "Train":
                self.num_trained += len(action.tickets)
                self._due.append(EVENTS.RoundTrained(action.version + 1))
            elif kind == "Publish":
                self._due.append(EVENTS.Published(action.version))


def event_up(collector: int) -> Any:
    return EVENTS.LaneReady(collector) if IS_OLD else EVENTS.CollectorUp(collector)


def event_arrived(ticket: Ticket) -> Any:
    if IS_OLD:
        return EVENTS.SegmentArrived(ticket.number, ticket.version)
    return EVENTS.SegmentArrived(Segment(ticket, None, np.array([ticket.version], np.int64)))


# ---------------------------------------------------------------- a runtime that answers at once


class InstantRuntime:
    """Every ticket has its segment at the next `wait`, which returns at most ``at_once`` answers."""

    at_once = 32
    takes_turns = True
    replaces_collectors = True

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self._up, self._arrived, self._trained, self._published, self._snapshot = _answers()
        self._versions = (-1, np.array([-1]))
        self._units, self._data = {"segments": 1}, np.zeros(3)

    def start(self, plan: Any, collectors: Sequence[Any], learner_state: Any) -> None:
        self._events.extend(self._up(index) for index in range(len(collectors)))

    def collect(self, ticket: Ticket, *rest: object) -> None:
        if ticket.version != self._versions[0]:
            self._versions = (ticket.version, np.array([ticket.version], np.int64))
        segment = Segment(ticket, self._data, self._versions[1], self._units, collect_s=1e-5)
        self._events.append(self._arrived(segment))

    def train(self, batch: Any) -> None:
        now_s = time.perf_counter()
        self._events.append(self._trained(batch, now_s))

    def publish(self, version: int) -> None:
        self._events.append(self._published(version))

    def snapshot(self) -> None:
        self._events.append(self._snapshot(None, None))

    def wait(self, timeout_s: float) -> list[Any]:
        return [self._events.popleft() for _ in range(min(self.at_once, len(self._events)))]

    def release(self, tickets: Sequence[int]) -> None:
        """Nothing: there is no memory to free."""

    def close(self) -> None:
        """Nothing: there is nothing to end."""

    start_collector = kill_collector = start_lane = kill_lane = None  # nobody is ever lost
    cut = end_collector = None

    def ask_work(self) -> Sequence[int]:
        return ()

    def working_s(self, index: int) -> None:
        return None

    def stacks(self) -> dict[str, str]:
        return {}

    pids = stacks


def _answers() -> tuple[Callable[..., Any], ...]:
    """What makes the events of a runtime: up, segment, round, published, snapshot."""
    if IS_OLD:
        base: Any = import_module("offbeat.runtime.base")
        return (
            base.CollectorUp,
            lambda segment: base.SegmentReady(segment, None, 0),
            lambda batch, now_s: base.RoundDone(batch.version + 1, {}, now_s, now_s),
            lambda version: base.WeightsOut(version, 0.0),
            base.SnapshotTaken,
        )
    return (
        EVENTS.CollectorUp,
        EVENTS.SegmentArrived,
        lambda batch, now_s: EVENTS.RoundTrained(batch.version + 1, batch, {}, now_s, now_s),
        EVENTS.Published,
        EVENTS.SnapshotTaken,
    )


def runtimes() -> dict[str, Any]:
    """The table from which a pipeline takes its runtime."""
    if IS_OLD:
        return import_module("offbeat.session")._RUNTIMES
    return import_module("offbeat.runtime").RUNTIMES


@contextlib.contextmanager
def answering_at_once(at_once: int) -> Iterator[None]:
    """Put `InstantRuntime` in the place of the inline runtime."""
    table, kept = runtimes(), runtimes()["inline"]
    InstantRuntime.at_once = at_once
    table["inline"] = InstantRuntime
    try:
        yield
    finally:
        table["inline"] = kept


def instant(quick: bool) -> Figures:
    figures: Figures = {}
    for at_once in (1, 32):
        for collectors in (64, 1_000) if quick else (64, 1_000, 10_000):
            name = f"instant {collectors:,}" + (f", {at_once} at once" if at_once > 1 else "")
            if IS_OLD and collectors > 1_000:
                figures[name] = None  # minutes
                continue
            rounds = 3 if quick else max(4, (6_400 if IS_OLD else 12_800) // collectors)
            with answering_at_once(at_once):
                figures[name] = or_none(lambda n=collectors, r=rounds: run_cost("inline", n, 1, r)[0])
    return figures


# ---------------------------------------------------------------- messages


def messages(quick: bool) -> Figures:
    """Microseconds to send and receive a ticket and the message of its segment, both ends in one thread."""
    try:
        exchange = old_exchange if IS_OLD else new_exchange()
    except ImportError:
        return {"messages": None}
    ours, theirs = socket.socketpair()
    ticket = Ticket(123_456, 7, 1_234, 1_238, 0x1234_5678_9ABC, 0)
    with ours, theirs:
        exchange(ours, theirs, ticket, 100)
        times = []
        for _ in range(3 if quick else 9):
            started_s = time.thread_time()
            exchange(ours, theirs, ticket, 1000)
            times.append(time.thread_time() - started_s)
    return {"messages": 1e6 * median(times) / 1000}


def old_exchange(ours: socket.socket, theirs: socket.socket, ticket: Ticket, count: int) -> None:
    """Tuples, pickled: the ticket with the addresses of weights and of two blocks; the segment's size."""
    driver, worker = Connection(os.dup(ours.fileno())), Connection(os.dup(theirs.fileno()))
    address = "/proc/123456/fd/17:1048576:42"
    with driver, worker:
        for _ in range(count):
            driver.send(("collect", ticket, address, address, address))
            worker.recv()
            worker.send(("segment", ticket.number, 512))
            driver.recv()


def new_exchange() -> Callable[[socket.socket, socket.socket, Ticket, int], None]:
    """Records of fixed size. ImportError where there are none yet."""
    wire: Any = import_module("offbeat.runtime.wire")

    def exchange(ours: socket.socket, theirs: socket.socket, ticket: Ticket, count: int) -> None:
        driver, worker = ours.fileno(), theirs.fileno()
        at_driver, at_worker = wire.DriverInput(driver), wire.WorkerInput(worker, 7)
        for _ in range(count):
            wire.write_all(driver, wire.pack_ticket(ticket))
            at_worker.receive(None)
            wire.write_all(worker, wire.pack_text(wire.SEGMENT, b"", ticket.number))
            at_driver.read()

    return exchange


# ---------------------------------------------------------------- records, and size of the code


def records(quick: bool) -> Figures:
    events = get_args(EVENTS.Event)
    if not IS_OLD:
        return {"records": len(events), "records: forms": len(forms_between_parts())}
    hooks = [name for name in vars(Callback) if name.startswith("on_")]
    kinds = re.search(
        r"Kinds in use: ([^.]*)", import_module("offbeat.observe.events").EventLog.__doc__ or ""
    )
    assert kinds is not None
    schedule = ("segment", "round", "gap")
    happenings = get_args(import_module("offbeat.runtime.base").Happening)
    forms = (happenings, events, hooks, kinds[1].split(","), schedule)
    return {"records": sum(map(len, forms)), "records: forms": len(forms)}


def forms_between_parts() -> set[str]:
    """Types of the records that a runtime returns, the pace applies, and the driver emits to observers."""
    base, actions, driver = (f"offbeat.{name}" for name in ("runtime.base", "pacing.actions", "run.driver"))
    passed = [
        import_module(base).Runtime.wait.__annotations__["return"],
        import_module(actions).Pace.apply.__annotations__["event"],
        import_module(driver).Driver.emit.__annotations__["event"],
    ]
    return {re.fullmatch(r"(?:list\[)?(\w+)\]?", text)[1] for text in passed}  # type: ignore[index]


TOP = "__init__ api errors pipeline roles seeding types"
CORE_OLD = {
    "": f"{TOP} adapters lanes launch recording recovery replaying running session sync_run",
    "pacing": "__init__ auto config coordinator deadlines ledger messages",
    "runtime": "__init__ base inline learning supervision threads",
    "observe": "__init__ callbacks events lanes logs meter stats",
    "replay": "__init__ stream",
}
"""What a reader has to know to understand a run, by folder."""
CORE_NEW = {
    "": TOP,
    "run": "__init__ adapters begun collectors directory driver observers replay restarts saving"
    " signals start stepwise waits writing",
    "pacing": "__init__ actions auto config coordinator deadlines drops events ledger members recorded"
    " stragglers",
    "runtime": "__init__ adapting base checksum clock inline learning messages serve spec supervision"
    " threads",
    "observe": "__init__ callbacks events journal logs meter",
    "replay": "__init__ stream",
    "config": "settings",
}


def size(quick: bool) -> Figures:
    core = [
        path
        for folder, names in (CORE_OLD if IS_OLD else CORE_NEW).items()
        for name in names.split()
        for path in sorted((SOURCE / folder).glob(f"{name}.py"))
    ]
    return {
        "core: files": len(core),
        "core: classes": sum(map(num_classes, core)),
        "core: code lines": sum(map(code_lines, core)),
        ALL: sum(map(code_lines, SOURCE.rglob("*.py"))),
    }


def num_classes(path: Path) -> int:
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(path.read_text())))


def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments, docstrings."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    ignored |= {tokenize.ENCODING, tokenize.ENDMARKER}
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in ignored:
                lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(path))


def docstring_lines(path: Path) -> set[int]:
    """Lines of every string that is a statement of its own."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


ROWS: dict[str, Callable[[bool], Figures]] = {
    "calls": calls,
    "round": steady_round,
    "coordinator": coordinator,
    "inline": inline,
    "instant": instant,
    "processes": processes,
    "workers": workers,
    "messages": messages,
    "records": records,
    "size": size,
}
COUNTED = ("calls", "round", "records", "size")
"""Rows that are the same every time."""

if __name__ == "__main__":
    sys.exit(main())
