"""A discrete-event simulator that drives the very same coordinator through random schedules with faults.

``python -m offbeat.pacing.simulate --schedules 100000 --json`` tries the promises; an
`InvariantChecker`, which shares nothing with the coordinator, checks them.
``--rule lag`` shows what the usual rule does.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

import numpy as np

from offbeat.errors import PromiseBroken
from offbeat.pacing.actions import Action, Checkpoint, Cut, Evaluate, Finish, Issue, Publish, Retire, Train
from offbeat.pacing.checker import (
    BOUND,
    CONSERVATION,
    CONTRACT,
    DEADLOCK,
    KINDS,
    InvariantChecker,
    Violation,
    gates_at_first,
)
from offbeat.pacing.config import PaceConfig
from offbeat.pacing.coordinator import Coordinator
from offbeat.pacing.deadlines import RULES, BoundBroken
from offbeat.pacing.events import (
    CollectorDown,
    CollectorRemoved,
    CollectorsAdded,
    CollectorUp,
    DialTurned,
    EvalDone,
    Event,
    GatesSet,
    Published,
    PublishFailed,
    RoundTrained,
    SegmentArrived,
    SegmentDropped,
    Signals,
    StopRequested,
)
from offbeat.pacing.schedules import Closing, Schedule, draw_schedule, steady_schedule
from offbeat.types import Segment, Ticket

_MOST_EVENTS = 100_000
_MOST_LOSSES_PER_TICKET = 5
_TOTALS = (
    *("rounds", "segments", "lost", "reissued", "publish_failures", "dial_turns"),
    *("evaluations", "evaluations_skipped", "resumes", "gates_set", "steps", "batched"),
    *("dropped", "given_up", "cuts", "resized", "joined", "left", "tried_alone"),
)


_Planned = tuple[float, float, int, bool, Callable[..., None], tuple[Any, ...]]
"""Time, random tie-breaker, number, True if it comes from outside, function, its arguments."""


@dataclass(slots=True)
class _Collector:
    """A simulated collector. ``life`` counts its incarnations: work of an older one is void.

    It works on ``capacity`` tickets at once, by number in ``work``; others wait in ``line``.
    """

    capacity: int = 1
    up: bool = False
    life: int = 0
    line: deque[Ticket] = field(default_factory=deque)
    work: dict[int, Ticket] = field(default_factory=dict)
    busy_since_s: float = 0.0


@dataclass(slots=True)
class _Meter:
    """Busy time of learner and collectors since the last round ended."""

    since_s: float = 0.0
    collect_s: float = 0.0
    train_s: float = 0.0

    def signals(self, now_s: float, num_collectors: int, ess: float) -> Signals:
        """Return what a runtime would measure, and reset."""
        round_s = now_s - self.since_s
        collect_idle = 1 - self.collect_s / (round_s * num_collectors) if round_s else 0.0
        train_idle = 1 - self.train_s / round_s if round_s else 0.0
        signals = Signals(round_s, self.collect_s, self.train_s, collect_idle, train_idle, ess)
        self.since_s, self.collect_s, self.train_s = now_s, 0.0, 0.0
        return signals


class Simulation:
    """One schedule, run to its end by `run`. ``totals`` says what happened, ``degrees`` is k by round."""

    def __init__(
        self,
        schedule: Schedule,
        make: Callable[[PaceConfig], Coordinator] = Coordinator,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.schedule = schedule
        self.now_s = 0.0
        self.totals: Counter[str] = Counter()
        self.degrees: list[int] = []
        self.finish: Finish | None = None
        self._make = make
        self._log = log
        self._rng = Random(schedule.seed)
        self._step_rng = Random(f"steps of {schedule.seed}")
        self._heap: list[_Planned] = []
        self._pending = self._number = self._publishes = 0
        self._losses: Counter[int] = Counter()
        self._keeps_checkpoints = bool(schedule.faults.crashes) or schedule.faults.resume_after_stop
        self._saved: tuple[str, InvariantChecker] | None = None
        self._gates = gates_at_first(schedule.config)
        self._is_thinking = False

    def run(self) -> None:
        """Simulate until the coordinator finishes; raises `Violation` or `PromiseBroken`."""
        self._plan_from_outside()
        self._begin_life()
        while self.finish is None:
            if self._pending == 0 or self._number > _MOST_EVENTS:
                raise Violation(DEADLOCK, self.coordinator.waiting_for())
            self.now_s, _, _, from_outside, do, arguments = heappop(self._heap)
            self._pending -= not from_outside
            do(*arguments)

    # ------------------------------------------------------------ time

    def _at(
        self, after_s: float, do: Callable[..., None], *arguments: Any, from_outside: bool = False
    ) -> None:
        at_s, grid_s = self.now_s + after_s, self.schedule.grid_s
        if grid_s:  # a power of two, so that the product is exact and never before at_s
            at_s = math.ceil(at_s / grid_s) * grid_s
        self._number += 1
        self._pending += not from_outside
        heappush(self._heap, (at_s, self._rng.random(), self._number, from_outside, do, arguments))

    def _spread(self, typical_s: float) -> float:
        tail = self.schedule.tail
        return typical_s if tail is None else typical_s * self._rng.paretovariate(tail)

    def _plan_from_outside(self) -> None:
        """Plan the events that no action of the run causes; they never count as its progress."""
        schedule, faults = self.schedule, self.schedule.faults
        stops = () if faults.stop_at_s is None else (faults.stop_at_s,)
        planned: list[tuple[Callable[..., None], Sequence[tuple[Any, ...]]]] = [
            (self._turn, schedule.dial_turns),
            (self._die, faults.kills),
            (self._close, [(closing.at_s, closing) for closing in schedule.closings]),
            (self._crash, [(at_s,) for at_s in faults.crashes]),
            (self._resize, schedule.resizes),
            (self._move, schedule.moves),
            (self._stop, [(at_s,) for at_s in stops]),
        ]
        for do, times in planned:
            for at_s, *arguments in times:
                self._at(at_s, do, *arguments, from_outside=True)

    def _begin_life(self) -> None:
        """Start the run, or start it again from its last checkpoint."""
        config = self.schedule.config
        self._heap = [planned for planned in self._heap if planned[3]]
        heapify(self._heap)
        self._pending = 0
        self._wake_at_s: float | None = None
        self._inbox: list[Event] = []
        self._is_step_planned = False
        self._is_thinking = False
        self._meter = _Meter(self.now_s)
        wide = self.schedule.capacities or (1,) * config.num_collectors
        self.collectors = {number: _Collector(capacity) for number, capacity in enumerate(wide)}
        self.coordinator = self._make(config)
        degree = config.off_policy_degree
        self.checker = InvariantChecker(config, degree, always_zero=degree == 0)
        self.checker.gates = gates_at_first(config)
        if self._saved is not None:
            state, checker = self._saved
            kept = self.schedule.faults.keeps_segments
            self.coordinator.load_state_dict(json.loads(state), None if kept else ())
            self.checker = checker.after_crash(kept)
            self.checker.check(self.coordinator.counts())
            self.collectors = {n: self.collectors.get(n, _Collector()) for n in self.checker.members}
        self._carry_out(self.coordinator.start(self.now_s))
        if config.stepwise:  # the gates of a stepwise run hold for the whole run
            self._set_gates(self._gates)
        for number in self.collectors:
            self._at(self._rng.uniform(0, self.schedule.start_s), self._up, number)

    # ------------------------------------------------------------ events and actions

    def _dispatch(self, *events: Event) -> None:
        """Queue events; the driver's next step applies them."""
        self._inbox += events
        self._step_soon()

    def _step_soon(self) -> None:
        """Let the driver take a step, at once or when it is no longer busy with the one before."""
        if self.schedule.busy_s is None:
            self._step()
        elif not self._is_step_planned:
            self._is_step_planned = True
            self._at(self._step_rng.uniform(0, self.schedule.busy_s), self._step)

    def _step(self) -> None:
        """Apply everything that happened since the last step, then decide once."""
        events, self._inbox, self._is_step_planned = self._inbox, [], False
        num_steps = sum(not isinstance(event, SegmentDropped) for event in events)  # those come with another
        self.totals["batched"] += num_steps if num_steps > 1 else 0
        for event in events:
            self._apply(event)
        self._carry_out(self.coordinator.decide(self.now_s))
        self.checker.check(self.coordinator.counts())
        wake_at_s = self.coordinator.wake_at_s(self.now_s)
        if wake_at_s is not None and wake_at_s != self._wake_at_s:
            self._wake_at_s = wake_at_s
            self._at(wake_at_s - self.now_s, self._wake)
        if self.schedule.config.stepwise and not self._is_thinking and self._next_gates() is not None:
            self._is_thinking = True
            self._at(self.schedule.think_s * self._rng.random(), self._act)

    def _apply(self, event: Event) -> None:
        if self._log is not None:
            self._log(f"{self.now_s:10.3f}  {event}")
        actions = self.coordinator.apply(event, self.now_s)
        if any(type(action) is not Publish for action in actions):
            raise Violation(CONTRACT, f"{event} led to {actions} before a decision")
        self._carry_out(actions)
        if isinstance(event, RoundTrained):
            self.degrees.append(self.coordinator.degree)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        finish = None
        for action in actions:
            if self._log is not None:
                self._log(f"{'':10}  -> {action}")
            match action:
                case Issue(ticket):
                    self._collect(ticket)
                case Cut(tickets):
                    self.checker.cut(action)
                    self.totals["cuts"] += len(tickets)
                    for ticket in tickets:
                        life = self.collectors[ticket.collector].life
                        self._at(0.1, self._arrive, ticket.collector, life, ticket)
                case Retire(collector):
                    self.checker.retire(collector)
                    self.totals["left"] += 1
                    self.collectors.pop(collector)
                case Train():
                    degree = self.checker.degree(self.coordinator.degree)
                    ess = 1 - self.schedule.ess_cost * self.checker.train(action, degree)
                    self._at(self._spread(self.schedule.train_s), self._end_round, self.now_s, ess)
                case Publish(version):
                    self.checker.asked_to_publish = version
                    self._at(
                        self.schedule.publish_s * self._rng.uniform(0.5, 1.5), self._end_publish, version
                    )
                case Evaluate(version):
                    self.checker.evaluate(action)
                    self.totals["evaluations"] += 1
                    self._at(self._spread(self.schedule.eval_s), self._end_evaluation, version)
                case Checkpoint(version):
                    self.checker.checkpointed = version
                case Finish():
                    finish = action
        if self._keeps_checkpoints and any(type(action) is Checkpoint for action in actions):
            self._saved = (
                json.dumps(self.coordinator.state_dict()),
                self.checker.after_crash(keeps_segments=True),
            )
        if finish is not None:
            self._end(finish)

    def _end(self, action: Finish) -> None:
        self.checker.finish(action, self.coordinator.eval_skipped)
        self.checker.check(self.coordinator.counts())
        self.totals["evaluations_skipped"] += self.coordinator.eval_skipped
        self.totals["given_up"] += self.checker.has_too_many_drops
        stopped = self.checker.stop_requested and not action.failed
        if stopped and self.schedule.faults.resume_after_stop and self._saved is not None:
            self._crash()
        else:
            self.finish = action

    # ------------------------------------------------------------ collectors

    def _up(self, number: int) -> None:
        if (collector := self.collectors.get(number)) is not None:
            collector.up = True
            self.checker.come_up(number, collector.capacity)
            self._dispatch(CollectorUp(number, collector.capacity))

    def _resize(self, number: int, capacity: int) -> None:
        if (collector := self.collectors.get(number)) is not None:
            self.totals["resized"] += 1
            collector.capacity = capacity
            if collector.up:
                self._begin_tickets(number)
                self._up(number)

    def _move(self, leaving: int | None) -> None:
        """Let a collector join, or this one leave, unless it is the last one or gone already."""
        members = self.checker.members
        if leaving is None:
            self.checker.join(1)
            self.totals["joined"] += 1
            self.collectors[members[-1]] = _Collector()
            self._dispatch(CollectorsAdded())
            self._at(self.schedule.start_s, self._up, members[-1])
        elif leaving in members and len(members) > 1:
            self.checker.leave(leaving)
            self._dispatch(CollectorRemoved(leaving))

    def _collect(self, ticket: Ticket) -> None:
        degree = self.checker.degree(self.coordinator.degree)
        self.checker.issue(ticket, degree, self.now_s)
        self.totals["reissued" if ticket.attempt else "segments"] += 1
        self.totals["tried_alone"] += ticket.number in self.checker.suspects
        self.collectors[ticket.collector].line.append(ticket)
        self._begin_tickets(ticket.collector)

    def _begin_tickets(self, number: int) -> None:
        collector, rng, faults = self.collectors[number], self._rng, self.schedule.faults
        while collector.line and len(collector.work) < collector.capacity:
            ticket, all_s = collector.line.popleft(), self.schedule.collect_s
            seconds = self._spread(all_s[number % len(all_s)])
            if not collector.work:
                collector.busy_since_s = self.now_s
            collector.work[ticket.number] = ticket
            is_poison = faults.poison is not None and ticket.number % faults.poison == 3
            loss = 1.0 if is_poison else faults.loss / collector.capacity
            if self._losses[ticket.number] < _MOST_LOSSES_PER_TICKET and rng.random() < loss:
                self._losses[ticket.number] += 1
                self._at(seconds * rng.random(), self._die, number, collector.life)
            else:
                self._at(seconds, self._arrive, number, collector.life, ticket)

    def _count_busy(self, collector: _Collector) -> None:
        self._meter.collect_s += self.now_s - max(collector.busy_since_s, self._meter.since_s)

    def _arrive(self, number: int, life: int, ticket: Ticket) -> None:
        collector = self.collectors.get(number)
        if collector is None or life != collector.life or ticket.number not in collector.work:
            return  # it was lost, or was cut before
        del collector.work[ticket.number]
        if not collector.work:
            self._count_busy(collector)
        self._begin_tickets(number)
        newer = self.checker.published if self._rng.random() < self.schedule.newer else None
        version = self.checker.arrive(ticket.number, newer)
        arrived = SegmentArrived(Segment(ticket, None, np.array([version])))
        # Whether a segment is worth training depends on its ticket alone.
        if Random(f"{self.schedule.seed}:{ticket.number}").random() < self.schedule.faults.drop:
            self.checker.drop(ticket.number)
            self.totals["dropped"] += 1
            self._dispatch(arrived, SegmentDropped(ticket.number, "simulated"))
        else:
            self._dispatch(arrived)

    def _die(self, number: int, life: int | None = None) -> None:
        """Lose a collector, in this life of it or (None) whatever it does."""
        collector = self.collectors.get(number)
        if collector is None or life not in (None, collector.life) or not collector.up:
            return
        if collector.work:
            self._count_busy(collector)
        collector.line.clear()
        collector.work.clear()
        collector.up, collector.life = False, collector.life + 1
        self.totals["lost"] += self.checker.lose(number)
        self._dispatch(CollectorDown(number))
        self._at(self.schedule.faults.replace_s, self._up, number)

    # ------------------------------------------------------------ learner, publisher, evaluator

    def _end_round(self, started_s: float, ess: float) -> None:
        self.checker.end_round()
        self.totals["rounds"] += 1
        self._meter.train_s += self.now_s - started_s
        for collector in self.collectors.values():
            if collector.work:
                self._count_busy(collector)
        signals = self._meter.signals(self.now_s, len(self.collectors), ess)
        self._dispatch(RoundTrained(self.checker.version, signals=signals))

    def _end_publish(self, version: int) -> None:
        faults, checker = self.schedule.faults, self.checker
        self._publishes += 1
        broken = faults.publish_breaks_at is not None and self._publishes > faults.publish_breaks_at
        may_fail = checker.failures < self.schedule.config.max_publish_retries
        if broken or (may_fail and self._rng.random() < faults.publish_failure):
            checker.failures += 1
            self.totals["publish_failures"] += 1
            self._dispatch(PublishFailed(version, "simulated"))
        else:
            checker.failures, checker.published = 0, max(checker.published, version)
            self._dispatch(Published(version))

    def _end_evaluation(self, version: int) -> None:
        self.checker.end_evaluation()
        self._dispatch(EvalDone(version))

    # ------------------------------------------------------------ gates

    def _set_gates(self, gates: GatesSet) -> None:
        self.totals["gates_set"] += 1
        self._gates = self.checker.gates = gates
        self._dispatch(gates)

    def _close(self, closing: Closing) -> None:
        """Close gates; a stepwise run opens them again by itself, any other after a time."""
        if self.schedule.config.stepwise:
            self._set_gates(GatesSet(collect=False, until=self._gates.until))
            return
        until = None if closing.rounds is None else self.checker.version + closing.rounds
        self._set_gates(GatesSet(closing.collect, until))
        self._at(closing.for_s, self._set_gates, GatesSet())

    def _next_gates(self) -> GatesSet | None:
        """Return the next gates of a stepwise run; None: wait."""
        until, version = self._gates.until or 0, self.checker.version
        if self.coordinator.is_ending or until > version:
            return None
        if self.coordinator.can_train(self.now_s):
            return GatesSet(self._gates.collect and bool(version % 3), until=version + 1)
        return None if self._gates.collect else GatesSet(collect=True, until=until)

    def _act(self) -> None:
        if self._inbox:  # the user of a stepwise run sees it as it is now
            self._step()
        self._is_thinking = False
        if self.finish is None and (gates := self._next_gates()) is not None:
            self.totals["steps"] += (gates.until or 0) > self.checker.version
            self._set_gates(gates)

    # ------------------------------------------------------------ from outside

    def _wake(self) -> None:
        self._wake_at_s = None
        self._step_soon()

    def _turn(self, degree: int) -> None:
        self.totals["dial_turns"] += 1
        self.checker.dial, self.checker.always_zero = degree, False
        self._dispatch(DialTurned(degree))

    def _stop(self) -> None:
        self.checker.stop_requested = True
        self._dispatch(StopRequested("asked to stop"))

    def _crash(self) -> None:
        if self._log is not None:
            self._log(f"{self.now_s:10.3f}  the run dies and goes on from its last checkpoint")
        self.totals["resumes"] += 1
        self._begin_life()


# ---------------------------------------------------------------- many schedules


@dataclass(slots=True)
class Report:
    """Result of many schedules. ``failures`` describes the first violations."""

    schedules: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """True when every promise was kept in every schedule."""
        return not any(self.totals[kind] for kind in KINDS)

    def add(self, other: Report) -> None:
        """Take in another report."""
        self.schedules += other.schedules
        self.totals.update(other.totals)
        self.failures = (self.failures + other.failures)[:10]

    def as_dict(self) -> dict[str, Any]:
        """The counts by name, and whether all promises held."""
        counts = {name: self.totals[name] for name in (*KINDS, *_TOTALS)}
        return {"schedules": self.schedules, **counts, "holds": self.holds}


def run_schedule(schedule: Schedule, make: Callable[[PaceConfig], Coordinator] = Coordinator) -> Report:
    """Simulate one schedule to its end or its first violation."""
    simulation = Simulation(schedule, make)
    report = Report(1, simulation.totals)
    try:
        simulation.run()
    except Violation as violation:
        kind, text = violation.kind, str(violation)
    except BoundBroken as error:
        kind, text = BOUND, str(error)
    except PromiseBroken as error:
        kind, text = CONSERVATION, str(error)
    except Exception as error:
        error.add_note(f"in the simulated schedule {schedule.seed}")
        raise
    else:
        return report
    report.totals[kind] += 1
    report.failures.append(f"schedule {schedule.seed}, {kind}: {text}")
    return report


def run_seeds(seeds: Iterable[int], rule: str = "deadline") -> Report:
    """Simulate the schedules with these seeds under one of `RULES`."""
    report = Report()
    for seed in seeds:
        report.add(run_schedule(draw_schedule(seed), lambda config: Coordinator(config, RULES[rule])))
    return report


def run_many(schedules: int, seed: int = 0, rule: str = "deadline", processes: int = 1) -> Report:
    """Simulate ``schedules`` random schedules; schedule i of seed s has the seed s * 10^9 + i."""
    first = seed * 10**9
    if processes <= 1:
        return run_seeds(range(first, first + schedules), rule)
    chunk = max(1, min(1000, schedules // (4 * processes)))
    ranges = [
        range(first + start, first + min(start + chunk, schedules)) for start in range(0, schedules, chunk)
    ]
    report = Report()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for part in pool.map(run_seeds, ranges, [rule] * len(ranges)):
            report.add(part)
    return report


def pipeline_figures(degrees: Sequence[int] = (0, 1, 2)) -> dict[str, float]:
    """Time per round over max(C, T) for steady C = T, by k: 2 is serial, 1 is the pipeline limit."""
    figures = {}
    for degree in degrees:
        simulation = Simulation(steady_schedule(collect_s=1.0, train_s=1.0, degree=degree))
        simulation.run()
        figures[f"k={degree}"] = round(simulation.now_s / simulation.schedule.config.rounds, 4)
    return figures


# ---------------------------------------------------------------- command line


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="offbeat.pacing.simulate", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many random schedules (1000)")
    parser.add_argument("--seed", type=int, default=0, help="which random schedules (0)")
    parser.add_argument("--rule", choices=sorted(RULES), default="deadline", help="admission rule (deadline)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at once (all cores)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print what happens in this one schedule")
    return parser.parse_args(arguments)


def _trace(seed: int, rule: str) -> int:
    schedule = draw_schedule(seed)
    print(schedule)
    simulation = Simulation(schedule, lambda config: Coordinator(config, RULES[rule]), log=print)
    try:
        simulation.run()
    except (Violation, PromiseBroken) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the simulator; return 0 when every promise held, else 1."""
    options = _parse(arguments)
    if options.trace is not None:
        return _trace(options.trace, options.rule)
    began_s = time.perf_counter()
    report = run_many(options.schedules, options.seed, options.rule, options.processes)
    result = report.as_dict()
    result["seconds"] = round(time.perf_counter() - began_s, 1)
    result["pipeline"] = pipeline_figures()
    for failure in report.failures:
        print(failure, file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name:24} {value}" for name, value in result.items()))
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
