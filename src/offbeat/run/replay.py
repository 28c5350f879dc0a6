"""Replay: a recorded run driven once more, by the ordinary driver with a pace that reads the schedule."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from offbeat.checkpoint import CheckpointManager, LoadedCheckpoint
from offbeat.config.models import ObserveConfig
from offbeat.errors import CheckpointError, OffbeatError, ReplayError
from offbeat.observe.callbacks import RunControl, RunSummary
from offbeat.observe.events import ANSWERS, Record, read_answers, read_schedule
from offbeat.pacing.answers import ChangedAnswer, answers_of
from offbeat.pacing.events import RoundTrained
from offbeat.pacing.recorded import Difference, RecordedPace, Schedule
from offbeat.run.driver import Driver
from offbeat.run.observers import attach
from offbeat.run.parts import StartPoint
from offbeat.run.restarts import OpenRun, RestartPolicy
from offbeat.run.saving import learner_digest
from offbeat.runtime import make_runtime
from offbeat.runtime.clock import Clock
from offbeat.runtime.spec import RunSpec

Stage = tuple[int, RunSpec]
"""A version, and the spec that holds from there: a run may be resumed with other settings."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of a replay; ``difference`` names the first round whose published weights differ.

    ``recorded_digest`` is empty when there is no checkpoint of the version that was reached; ``identical`` is
    None when the schedule has no checksums either, so that nothing could be compared. ``changed`` is the
    first answer of a tool or a reward that was another one when it was asked for again, at which it ended.
    """

    identical: bool | None
    digest: str
    recorded_digest: str
    rounds: int
    warnings: tuple[str, ...] = ()
    difference: Difference | None = None
    changed: ChangedAnswer | None = None


def replay(
    stages: Sequence[Stage],
    manager: CheckpointManager,
    summary: RunSummary,
    clock: Clock,
    *,
    runtime: str,
    until: int | None,
    directory: Path | None,
    on_round: Callable[[int, int], None] | None,
    calls: bool = False,
) -> ReplayReport:
    """Repeat a run and compare its weights with the recorded ones; end at the first round that differs.

    The arguments are those of `Pipeline.replay`; ``stages`` are the run's settings by version.
    """
    saved = manager.load()
    last = last_version(saved, until)
    records = read_schedule(_schedule_of(saved.path.parents[1]))
    schedule, answers = _with_answers(records, saved.path.parents[1], calls)
    stages = [(begin, spec) for begin, spec in stages if begin < last]
    ends = [*(begin for begin, _ in stages[1:]), last]
    point, num_compared = StartPoint(), 0
    difference, changed = None, None

    def report_round(event: RoundTrained, now_s: float) -> None:
        if on_round is not None:
            on_round(event.version, last)

    for (begin, spec), end in zip(stages, ends, strict=True):
        target = directory if end == last else None
        if target is not None:
            _copy_schedule(records, answers, target, begin)
        spec_here = replace(
            spec,
            settings=replace(spec.settings, observe=_here_only(spec.settings.observe)),
            log_dir=None if target is None else target / "logs",
        )
        saves = target is not None
        pace = RecordedPace(schedule, spec.seed, end, spec.num_collectors, saves=saves, calls=calls)
        summary = replace(summary, directory=target)
        driver = Driver(spec_here, pace, make_runtime(runtime), clock.now_s, deque())
        driver.loss_watch = None  # what was recorded was accepted, over every resumption
        driver.observe({RoundTrained: report_round})
        point = _repeat(driver, pace, point, summary, clock)
        num_compared += pace.num_compared
        difference, changed = pace.difference, pace.changed
        if difference is not None or changed is not None:
            break
    repeated = learner_digest(point.parts["learner"])
    if changed is not None:
        return ReplayReport(False, repeated, "", point.version, saved.warnings, difference, changed)
    recorded = _recorded_digest(manager, last)
    identical: bool | None = difference is None and recorded in ("", repeated)
    if identical is False and difference is None:
        difference = schedule.rest(last)
    if difference is not None:
        difference = replace(difference, strayed=pace.strayed)
    if identical and not recorded and not num_compared:
        identical = None
    return ReplayReport(identical, repeated, recorded, point.version, saved.warnings, difference)


def _schedule_of(directory: Path) -> Path:
    path = directory / "schedule.jsonl"
    if not path.exists():
        raise ReplayError(f"{directory} is a run, but its {path.name} is missing, so it cannot be repeated")
    return path


def _with_answers(records: Sequence[Record], directory: Path, calls: bool) -> tuple[Schedule, list[Record]]:
    """Return the schedule with the recorded answers; without them where they are damaged and called for."""
    try:
        answers = read_answers(directory)
        return Schedule.from_records(records, answers_of(answers)), answers
    except OffbeatError as error:
        if not calls:
            raise error if isinstance(error, ReplayError) else ReplayError(str(error)) from error
    return Schedule.from_records(records), []


def _here_only(observe: ObserveConfig) -> ObserveConfig:
    """Return settings under which a replay writes its own files and starts or calls nothing else."""
    tensorboard = observe.tensorboard.model_copy(update={"serve": False})
    return observe.model_copy(update={"use_wandb": False, "tensorboard": tensorboard})


def _recorded_digest(manager: CheckpointManager, version: int) -> str:
    """Return the digest of the recorded learner at a version; empty without a good checkpoint of it."""
    try:
        return learner_digest(manager.load(version).parts["learner"]) if version in manager.versions() else ""
    except CheckpointError:
        return ""


def _copy_schedule(
    records: Sequence[Record], answers: Sequence[Record], directory: Path, version: int
) -> None:
    """Begin a schedule with the lines of earlier stages, as a replay repeats them, and their answers."""
    earlier = [one for one in records if one.get("version", -1) < version]
    tickets = {one["ticket"] for one in earlier if one["kind"] == "segment"}
    answered = [one for one in answers if one["ticket"] in tickets]
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("schedule.jsonl", earlier), (ANSWERS, answered)):
        if rows or name != ANSWERS:
            lines = [json.dumps(one, separators=(",", ":")) + "\n" for one in rows]
            (directory / name).write_text("".join(lines))


def last_version(saved: LoadedCheckpoint, until: int | None) -> int:
    """Return the version at which a replay ends; ReplayError when the run did not get there."""
    if saved.version == 0:
        directory = saved.path.parents[1]
        raise ReplayError(f"{directory} has not trained a round yet: there is nothing to repeat")
    if until is not None and not 0 < until <= saved.version:
        raise ReplayError(
            f"cannot stop at round {until}: the newest checkpoint is of version {saved.version}, choose "
            f"1 to {saved.version}"
        )
    return saved.version if until is None else until


def _repeat(
    driver: Driver, pace: RecordedPace, point: StartPoint, summary: RunSummary, clock: Clock
) -> StartPoint:
    """Drive one stage of a replay; return where the next one continues."""
    attach(driver, point, summary, (), _no_control(), quiet=True)
    no_restarts = RestartPolicy(driver.spec.settings.run, None, clock)
    with OpenRun(lambda _: driver, point, no_restarts, deque(), driver.spec.directory) as run:
        pace.incarnations = {n: start.incarnation for n, start in driver.collectors.starts.items()}
        run.complete()
        snapshot = driver.saving.snapshot
        assert snapshot is not None
        return StartPoint(pace.version, {**driver.saving.capture(), "learner": snapshot.state})


def _no_control() -> RunControl:
    def refuse(_: object) -> None:
        raise ReplayError("a replay repeats what was recorded: it cannot be stopped or turned by a callback")

    return RunControl(refuse, refuse, refuse)
