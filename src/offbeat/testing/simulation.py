"""The simulator: random schedules with faults, run by the real driver in a world with time of its own.

`Simulation` runs one schedule through all its restarts and resumptions; its `Books` find what is wrong.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.models import AsyncTrainingConfig, EvalConfig, RunSection, RuntimeConfig
from offbeat.config.settings import Settings
from offbeat.errors import CheckpointError, CollectError, DivergedError, LearnerLost, OffbeatError, StallError
from offbeat.pacing.actions import Finish, Pace
from offbeat.pacing.checker import CONTRACT, DEADLOCK, InvariantChecker, gates_at_first
from offbeat.pacing.config import PaceConfig
from offbeat.pacing.coordinator import Coordinator
from offbeat.pacing.events import (
    CollectorRemoved,
    CollectorsAdded,
    DialTurned,
    Event,
    GatesSet,
    Request,
    RoundTrained,
    StopRequested,
)
from offbeat.pacing.schedules import Closing, Schedule
from offbeat.roles import PerWorker, WorkerContext
from offbeat.run.driver import Driver
from offbeat.run.observers import ScheduleRecorder
from offbeat.run.parts import StartPoint
from offbeat.run.restarts import OpenRun, RestartPolicy, start_point
from offbeat.run.writing import Outcome, Writer
from offbeat.runtime.spec import RunSpec
from offbeat.seeding import derive_seed, reseed
from offbeat.testing.books import WINDOW_S, Books, require
from offbeat.testing.repeats import MemoryLog, check_replay, digest_at_zero, no_figures
from offbeat.testing.simulated import Killed, MakeCollector, SimulatedRuntime, World, typical_s
from offbeat.testing.simulated_roles import Serial, Wide
from offbeat.types import StateTree

_MOST_LIVES = 8
_ENDS: dict[type, str] = {
    CollectError: "ended_by_collectors",
    DivergedError: "ended_by_divergence",
    LearnerLost: "ended_by_learner",
    StallError: "ended_by_stall",
}
MakePace = Callable[[PaceConfig], Pace]


def make_collector(
    world: World, schedule: Schedule, context: WorkerContext, wide: type[Wide] = Wide
) -> Serial:
    """Make a collector as the schedule says; ``wide`` makes those of many tickets."""
    index, collectors = context.collector, schedule.collectors
    collect_s = typical_s(schedule, index)
    if collectors is None:
        return Serial(world, collect_s, seed=context.seed)
    if (capacity := collectors.capacities[index % len(collectors.capacities)]) == 0:
        return Serial(world, collect_s, collectors.saves, context.seed)
    shares = collectors.piece_s, collectors.changes, collectors.sleeps, collectors.drops
    return wide(world, collect_s, context.wake, capacity, *shares)


class Checkpoints(CheckpointManager):
    """Checkpoints in memory: the newest two. ``check(version, parts)`` sees each before it is kept."""

    def __init__(self, check: Callable[[int, Mapping[str, StateTree]], None]) -> None:
        self._check = check
        self._kept: dict[int, bytes] = {}

    def versions(self) -> tuple[int, ...]:
        """Return the versions that have a checkpoint."""
        return tuple(sorted(self._kept))

    def save(
        self,
        version: int,
        parts: Mapping[str, StateTree],
        weights: StateTree,
        score: float | None = None,
    ) -> Path:
        """Keep a checkpoint."""
        self._check(version, parts)
        self.forget_after(version)
        self._kept[version] = pickle.dumps(dict(parts))
        for older in self.versions()[:-2]:
            del self._kept[older]
        return Path(f"version {version}")

    def set_score(self, version: int, score: float | None) -> bool:
        """Keep no score."""
        return False

    def forget_after(self, version: int) -> None:
        """Remove newer checkpoints."""
        for newer in [one for one in self._kept if one > version]:
            del self._kept[newer]

    def load(self, version: int | None = None) -> LoadedCheckpoint:
        """Return a checkpoint, or the newest."""
        if not self._kept:
            raise CheckpointError("nothing was saved")
        version = max(self._kept) if version is None else version
        return LoadedCheckpoint(version, pickle.loads(self._kept[version]), {}, Path(), None)


class SimulatedWriter(Writer):
    """Writes beside the driver, which takes up to ``write_s`` of simulated time."""

    def __init__(
        self, manager: CheckpointManager, world: World, write_s: float, runtime: SimulatedRuntime
    ) -> None:
        super().__init__(manager, world.now_s, beside=True)
        self._world, self._write_s, self._runtime = world, write_s, runtime
        self._jobs: deque[Callable[[], Outcome]] = deque()
        self._ends_s = 0.0

    def _do(self, job: Callable[[], Outcome]) -> Outcome:
        """Do a job after those before it, some time later."""
        self._num_jobs += 1
        self._jobs.append(job)
        now_s = self._world.time_s
        self._ends_s = max(now_s, self._ends_s) + self._write_s * self._world.rng.random()
        self._world.plan(self._ends_s - now_s, self._do_next)
        return ()

    def _do_next(self) -> None:
        if self._jobs:
            self._report(self._jobs.popleft())
            self._runtime.interrupt()

    def await_soon(self) -> float:
        """Wait for nothing: the driver goes on."""
        return 0.0

    def settle(self, limit_s: float) -> bool:
        """Do all that is left."""
        while self._jobs:
            self._report(self._jobs.popleft())
        return True


def settings_of(schedule: Schedule) -> Settings:
    """Return the settings of a run whose deadlines are longer than anything that does not hang."""
    config = schedule.config
    dial = AsyncTrainingConfig(
        off_policy_degree=config.off_policy_degree,
        enable_async_eval=config.async_eval,
        generation_timeout=500.0,
        batch_timeout=4000.0,
        sync_timeout=60.0,
    )
    runtime = RuntimeConfig(
        kind="threads",
        num_workers=config.num_collectors,
        max_worker_restarts=schedule.faults.max_restarts,
        restart_window_s=WINDOW_S,
        start_timeout_s=60.0,
        train_timeout_s=200.0,
    )
    run = RunSection(on_nan="rollback", max_restarts=3)
    return Settings(dial, runtime, EvalConfig(timeout_s=1500.0), run=run)


class Simulation:
    """One schedule, run to its end by `run`. ``totals`` says what happened, ``degrees`` is k by round.

    ``finish`` is how the run finished, None when an error that was due ended it.
    """

    def __init__(
        self,
        schedule: Schedule,
        make: MakePace = Coordinator,
        log: Callable[[str], None] | None = None,
        roles: MakeCollector = make_collector,
        is_recorded: bool = False,
    ) -> None:
        self.schedule = schedule
        self.totals: Counter[str] = Counter()
        self.degrees: list[int] = []
        self.finish: Finish | None = None
        self.world = World(schedule.seed, schedule.grid_s, schedule.tail)
        self._began_s = self.world.time_s
        self._make, self._log, self._roles = make, log, roles
        self._settings = settings_of(schedule)
        self._requests: deque[Request] = deque()
        self._losses: Counter[int] = Counter()
        self._checkpoints = Checkpoints(self._check_saved)
        self._saved: dict[int, InvariantChecker] = {}
        self._history: dict[int, int] = {}
        self._gates = gates_at_first(schedule.config)
        self._is_thinking = self._is_awake = False
        self._recording = MemoryLog() if is_recorded else None
        self._as_before: tuple[list[int], int, GatesSet] | None = None

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return self.world.time_s - self._began_s

    def run(self) -> None:
        """Simulate until the run is over; raises `Violation` or what else is wrong."""
        self._plan_from_outside()
        goes_on = True
        lives = 0
        while goes_on:
            lives += 1
            goes_on = self._live() and lives < _MOST_LIVES
            self.totals["resumes"] += goes_on

    # ------------------------------------------------------------ from outside

    def _plan_from_outside(self) -> None:
        """Plan what no action of the run causes."""
        faults, plan = self.schedule.faults, partial(self.world.plan, outside=True)
        for at_s, degree in self.schedule.dial_turns:
            plan(at_s, self._turn, degree)
        for at_s, collector in faults.kills:
            plan(at_s, self._kill_collector, collector)
        for at_s, leaving in self.schedule.moves:
            plan(at_s, self._move, leaving)
        for closing in self.schedule.closings:
            plan(closing.at_s, self._close, closing)
        for at_s in faults.crashes:
            plan(at_s, self._kill)
        for at_s in faults.learner_crashes:
            plan(at_s, self._lose_learner)
        for at_s, for_s in faults.suspensions:
            plan(at_s, self.world.sleep, for_s)
        if faults.stop_at_s is not None:
            plan(faults.stop_at_s, self._stop)

    def _ask(self, request: Request) -> None:
        """Ask for something, as a user does."""
        self._as_before = None
        self._requests.append(request)

    def _turn(self, degree: int) -> None:
        self.totals["dial_turns"] += 1
        self._ask(DialTurned(degree))

    def _move(self, leaving: int | None) -> None:
        """Have a collector join, or this one leave."""
        self._ask(CollectorsAdded() if leaving is None else CollectorRemoved(leaving))

    def _stop(self) -> None:
        self._ask(StopRequested("asked to stop"))

    def _kill_collector(self, index: int) -> None:
        self._runtime.kill_from_outside(index)

    def _lose_learner(self) -> None:
        self._runtime.lose_learner()

    def _kill(self) -> None:
        raise Killed

    # ------------------------------------------------------------ gates

    def _set_gates(self, gates: GatesSet) -> None:
        self.totals["gates_set"] += 1
        self._gates = gates
        self._ask(gates)

    def _close(self, closing: Closing) -> None:
        """Close gates; a stepwise run opens them again by itself, any other after a time."""
        if self.schedule.config.stepwise:
            self._set_gates(GatesSet(collect=False, until=self._gates.until))
            return
        until = None if closing.rounds is None else self.books.checker.version + closing.rounds
        self._set_gates(GatesSet(closing.collect, until))
        self.world.plan(closing.for_s, self._set_gates, GatesSet(), outside=True)

    def _next_gates(self) -> GatesSet | None:
        """Return the next gates of a stepwise run; None: wait."""
        until, version, pace = self._gates.until or 0, self.books.checker.version, self.driver.pace
        if pace.is_ending or until > version:
            return None
        assert isinstance(pace, Coordinator)
        if pace.can_train(self.world.time_s):
            return GatesSet(self._gates.collect and bool(version % 3), until=version + 1)
        return None if self._gates.collect else GatesSet(collect=True, until=until)

    def _go_step_by_step(self) -> None:
        """Be the user of a stepwise run: look at it after some thought, and open a gate."""
        if self._is_awake:
            self._is_awake = self._is_thinking = False
            if (gates := self._next_gates()) is not None:
                self.totals["steps"] += (gates.until or 0) > self.books.checker.version
                self._set_gates(gates)
        elif not self._is_thinking and self._next_gates() is not None:
            self._is_thinking = True
            think_s = self.schedule.think_s * self.world.rng.random()
            self.world.plan(think_s, self._awake, outside=True)

    def _awake(self) -> None:
        self._is_awake = True
        self._runtime.interrupt()

    # ------------------------------------------------------------ one life of the run's process

    def _live(self) -> bool:
        """Run until the process ends; return True if the run is to be resumed."""
        self.world.forget_run()
        self._requests.clear()
        self._as_before = None
        self._is_thinking = self._is_awake = False
        if self.schedule.config.stepwise:  # the gates of a stepwise run hold for the whole run
            self._set_gates(self._gates)
        point = start_point(self._checkpoints.load()) if self._checkpoints.versions() else StartPoint()
        self._policy = RestartPolicy(self._settings.run, self._checkpoints, self.world)
        run = OpenRun(self._make_driver, point, self._policy, self._requests, None)
        try:
            run.__enter__()
            while not run.finished:
                run.step()
                self.books.check()
                self._check_restart()
                if self.schedule.config.stepwise and run.driver.finish is None:
                    self._go_step_by_step()
        except Killed:
            self._tell("the process is killed")
            return True
        except (CollectError, DivergedError, LearnerLost, StallError) as error:
            return self._end_by(error)
        run.__exit__(None, None, None)
        return self._end()

    def _tell(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.now_s:10.3f}  {text}")

    def _tell_event(self, event: Event, now_s: float) -> None:
        self._tell(str(event))

    def _make_driver(self, point: StartPoint) -> Driver:
        """Make the driver of one start, with new books; those of a checkpoint go on from there."""
        config, faults = self.schedule.config, self.schedule.faults
        if self._policy.attempts:
            self._expect_restart(point)
        if point.resumed:
            checker = self._saved[point.version].after_crash(not point.rollback)
            rollbacks = point.parts["collectors"]["rollbacks"] + point.rollback
            for number in checker.lost:
                seed = reseed(derive_seed(config.seed, "collect", number), rollbacks)
                checker.tickets[number] = replace(checker.tickets[number], seed=seed)
        else:
            degree = config.off_policy_degree
            checker = InvariantChecker(config, degree, always_zero=degree == 0, gates=gates_at_first(config))
        self._history = {version: mark for version, mark in self._history.items() if version <= point.version}
        self.books = Books(self.world, checker, self.totals, self._history, faults.max_restarts)
        self._runtime = SimulatedRuntime(
            self.world, self.schedule, self.books, self._requests, self._losses, self._roles
        )
        spec = RunSpec(
            PerWorker(self._runtime.make_collector), PerWorker(_no_role), None, self._settings, config.seed
        )
        self.driver = driver = Driver(
            spec,
            self._make(config),
            self._runtime,
            self.world.now_s,
            self._requests,
            writer=SimulatedWriter(self._checkpoints, self.world, self.schedule.write_s, self._runtime),
            system=no_figures,
        )
        driver.poll_s = math.inf
        driver.observe({RoundTrained: self._round_trained})
        if self._recording is not None:
            self._recording.truncate(point.parts["recorder"]["schedule_offset"] if point.resumed else 0)
            recorder = ScheduleRecorder(
                self._recording, driver.collectors, driver.pace, config.num_collectors
            )
            driver.observe(recorder.handlers(), state=recorder.state_dict)
        self.books.watch(driver)
        if self._log is not None:
            driver.observe(dict.fromkeys(get_args(Event), self._tell_event))
        return driver

    def _expect_restart(self, point: StartPoint) -> None:
        """Keep what has to be as before the restart, unless the user has asked for something meanwhile."""
        self.totals["restarts"] += 1
        again, checker = self.driver.requests_since(point.version), self.books.checker
        if len(again) == len(self._requests):
            self._as_before = (checker.members, checker.dial, checker.gates)

    def _check_restart(self) -> None:
        """Compare what the user had asked for with what holds after a restart."""
        if self._as_before is not None and not self._requests:
            checker = self.books.checker
            found, self._as_before, due = (
                (checker.members, checker.dial, checker.gates),
                None,
                self._as_before,
            )
            require(found == due, CONTRACT, "after a restart {} hold, not {}", found, due)

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        self.degrees.append(self.driver.pace.degree)

    def _check_saved(self, version: int, parts: Mapping[str, StateTree]) -> None:
        self.totals["saved"] += 1
        self._saved[version] = self.books.check_saved(version, parts)

    def _end(self) -> bool:
        """Check a run that has finished; return True if it is to be resumed."""
        driver, checker = self.driver, self.books.checker
        finish, counts = driver.finish, driver.pace.counts()
        assert finish is not None
        checker.check(counts)
        if checker.config.checkpoint_at_end and checker.version and not finish.failed:
            is_there = checker.version in self._checkpoints.versions()
            require(is_there, CONTRACT, "{} without a checkpoint of version {}", finish, checker.version)
        self.totals["evaluations_skipped"] += driver.pace.eval_skipped
        self.totals["dropped"] += counts.dropped - len(checker.dropped)
        stopped = checker.stop_requested and not finish.failed
        if stopped and self.schedule.faults.resume_after_stop and self._checkpoints.versions():
            return True
        self.finish = finish
        self._check_weights()
        return False

    def _check_weights(self) -> None:
        """Compare the weights of a finished run with its replay's, and at k = 0 with the right ones."""
        driver, learner, config = self.driver, self._runtime.learner, self.schedule.config
        collectors = self.schedule.collectors
        is_fixed = self.books.checker.always_zero and config.mode == "stream" and config.publish_interval == 1
        if collectors is not None:
            is_fixed = is_fixed and collectors.saves and not collectors.drops
        if is_fixed and not driver.pace.rollbacks:
            due = digest_at_zero(driver.spec, self.schedule, learner.version)
            require(learner.digest == due, CONTRACT, "other weights than at k = 0")
        if self._recording is not None and learner.version:
            check_replay(driver.spec, self.schedule, self._recording, learner, self._roles)
            self.totals["replayed"] += 1

    def _end_by(self, error: OffbeatError) -> bool:
        """Check that a run had to end by an error; return True if it is to be resumed."""
        match error:
            case CollectError():
                is_due = self.books.budget.is_spent
            case StallError():
                require(self._runtime.is_stuck, DEADLOCK, "{}", error)
                is_due = True
            case _:
                settings = self._settings.run
                is_due = (
                    not self._checkpoints.versions()
                    or self.books.checker.stop_requested
                    or self._policy.attempts >= settings.max_restarts
                )
        require(is_due, CONTRACT, "the run ended by {}", error)
        self._tell(f"ends: {error}")
        self.totals[_ENDS[type(error)]] += 1
        return bool(self._checkpoints.versions()) and self.world.rng.random() < 0.5


def _no_role(context: Any) -> Any:
    raise AssertionError("a simulated runtime makes its learner itself")
