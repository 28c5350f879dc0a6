"""Collectors that hold many tickets, in whole runs: equal at k = 0, mixed above, killed, repeated."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offbeat import Callback, PerWorker, Pipeline
from offbeat.checkpoint import CheckpointManager
from offbeat.errors import ReplayError
from offbeat.observe.callbacks import CheckpointInfo, RoundInfo
from offbeat.observe.events import read_schedule
from offbeat.pacing.events import SegmentArrived
from offbeat.testing import TokenLearner, TokenMachine
from offbeat.testing.token_model import CALL
from offbeat.types import Progress
from tests.integration.test_members import ROUNDS, Members
from tests.integration.token_runs import KILLED, Log, pipeline, run

KINDS = ("inline", "threads", "processes")  # Ray: test_ray_wide.py
ROOT = Path(__file__).parents[2]


def check_replay(made: Pipeline, runtime: str = "inline") -> None:
    report = made.replay(runtime=runtime)  # type: ignore[arg-type]
    assert report.difference is None, str(report.difference)
    assert report.identical


# ---------------------------------------------------------------- k = 0


def digest_at_zero() -> str:
    """Return the digest of the weights after 8 rounds of 6 tickets at k = 0."""
    report, log = run(pipeline("inline", slots=64), 8)
    assert log.trained == list(range(48))
    assert report.digest is not None
    return report.digest


@pytest.fixture(scope="module")
def digest() -> str:
    return digest_at_zero()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_collectors", "slots"), [(1, 2), (2, 8), (3, 1)])
def test_at_zero_weights_do_not_depend_on_collectors_slots_or_runtime(
    kind: str, num_collectors: int, slots: int, digest: str
) -> None:
    report, log = run(pipeline(kind, num_collectors, slots=slots, capacity=1), 8)
    assert report.digest == digest
    assert log.most_outstanding == 6, "more tickets than slots, and than the collectors ask for"
    assert set(log.ages) == {0}
    assert log.most_versions() == 1


# ---------------------------------------------------------------- k = 2


@pytest.mark.parametrize("kind", KINDS)
def test_above_zero_segments_mix_versions_and_come_in_any_order(kind: str) -> None:
    _, log = run(pipeline(kind, 2, degree=2, slots=8, step_s=0.001), 20)
    assert_mixed(log)


def assert_mixed(log: Log) -> None:
    assert log.most_versions() > 1
    assert log.most_outstanding > 6, "more than one round is open at once"
    assert log.arrived != sorted(log.arrived)
    assert sorted(log.trained) == list(range(120))
    assert 0 < max(log.ages) <= 2


# ---------------------------------------------------------------- losses


class KillsCollector(Log):
    """Kills a collector once, when it holds at least 200 tickets and some segments have come."""

    has_killed = False

    def on_arrived(self, event: SegmentArrived, now_s: float) -> None:
        super().on_arrived(event, now_s)
        index = max(self.held, key=lambda index: len(self.held[index]))
        if not self.has_killed and len(self.arrived) >= 30 and len(self.held[index]) >= 200:
            self.has_killed = True
            os.kill(self.pids()[f"worker_{index}"], signal.SIGKILL)


def check_killed_collector(kind: str, run_dir: Path) -> None:
    made = pipeline(kind, 2, degree=4, size=100, run_dir=run_dir, slots=100, capacity=400, step_s=0.01)
    report, log = run(made, 10, KillsCollector())
    (lost,) = log.lost
    assert len(lost) >= 200
    counts = Counter(log.issued)
    assert {number for number, count in counts.items() if count > 1} == lost
    assert set(counts.values()) == {1, 2}
    assert sorted(log.trained) == list(range(1000)), "each once"
    assert len(report.losses) == 1
    check_replay(made)


@pytest.mark.slow
def test_all_tickets_of_a_killed_collector_are_issued_again_and_trained_once(tmp_path: Path) -> None:
    check_killed_collector("processes", tmp_path / "run")


def check_killed_run(kind: str, run_dir: Path, *address: str) -> None:
    """Kill a run with many open tickets; resume it, and follow each ticket and its begun work."""
    command = [sys.executable, "-m", "tests.integration.token_runs", kind, str(run_dir), *address]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert int(killed.stdout) >= 100
    saved = CheckpointManager(run_dir / "checkpoints").load()
    work, rounds = saved.parts["work"], saved.version + 12
    made = pipeline(kind, run_dir=run_dir, **KILLED)  # type: ignore[arg-type]
    _, log = run(made, rounds, resumed=True)
    schedule = [row for row in read_schedule(run_dir / "schedule.jsonl") if row["kind"] == "round"]
    by_version = {row["version"]: row["tickets"] for row in schedule}  # later lines replace what was lost
    trained = [number for version in sorted(by_version) for number in by_version[version]]
    assert len(trained) == rounds * 40
    assert len(set(trained)) == len(trained), "no ticket is trained twice"
    outstanding = set(range(max(log.issued) + 1)) - set(trained)
    assert len(outstanding) <= 8 * 40, "no ticket is lost: the rest is within the dial"
    kept = open_before = 0
    ahead = saved.parts.get("work_ahead", ())  # cut back, or begun anew
    for number, begun in work.items():
        if number in log.tokens and number not in ahead:
            tokens = begun["0"]["tokens"].tolist()
            assert log.tokens[number][: len(tokens)] == tokens
            kept += len(tokens)
            open_before += len(log.tokens[number])
            (piece,) = log.pieces[number]
            assert begun["0"]["end"] or [span.rebuilt for span in piece.spans].count(True) == 1
    assert kept > 0 or len(ahead) == len(work), "all begun work may be of versions after the checkpoint's"
    check_replay(made)
    num_ahead = f"{len(ahead)} of {len(work)} tickets had work of later versions"
    print(f"\n{kind}: {kept} of the {open_before} tokens of open tickets were kept; {num_ahead}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_killed_run_goes_on_with_every_ticket_and_what_was_begun(kind: str, tmp_path: Path) -> None:
    check_killed_run(kind, tmp_path / "run")


# ---------------------------------------------------------------- waiting


class HangsInTool(TokenMachine):
    """Collector 1 calls a tool in `advance`, which it must not, and gets its answer after a checkpoint."""

    def __init__(self, context: Any, directory: Path, **options: Any) -> None:
        super().__init__(context, **options)
        self._directory = directory
        self._is_faulty = context.collector == 1

    def advance(self) -> Progress:
        if self._is_faulty and (self._directory / "hang").exists():
            self._is_faulty = False
            (self._directory / "hanging").touch()
            wait_for(self._directory / "saved")
        return super().advance()


def wait_for(path: Path, limit_s: float = 60.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < give_up_s, f"{path.name} did not come"
        time.sleep(0.005)


class HangsAtFive(Callback):
    """Has collector 1 hang when round 5 is over, until its checkpoint is saved."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_round(self, info: RoundInfo) -> None:
        if info.version == 5:
            (self.directory / "hang").touch()
            wait_for(self.directory / "hanging")

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        if info.version == 5:
            (self.directory / "saved").touch()


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_collector_that_hangs_in_a_tool_does_not_delay_a_checkpoint(kind: str, tmp_path: Path) -> None:
    made = pipeline(
        kind,
        2,
        degree=2,
        run_dir=tmp_path / "run",
        callbacks=(HangsAtFive(tmp_path),),
        checkpoint_every=5,
        machine=HangsInTool,  # type: ignore[arg-type]
        directory=tmp_path,
        step_s=0.005,
    )
    _, log = run(made, 8)
    assert len(log.trained) == 48
    (text,) = [text for text in log.notices if "begun work" in text]
    assert "checkpoint 5 has no new begun work of collector_1" in text


class Counted(TokenMachine):
    """Notes in each segment how often `advance` was called, and the CPU time of its thread since then."""

    calls, began_s = 0, 0.0

    def advance(self) -> Progress:
        self.began_s = self.began_s or time.thread_time()
        self.calls += 1
        progress = super().advance()
        for segment in progress.segments:
            segment.data["calls"] = self.calls
            segment.data["cpu_s"] = time.thread_time() - self.began_s
        return progress


def slow_tool(seed: int, place: int) -> int:
    time.sleep(2.0)
    return 2


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_two_hundred_tickets_that_wait_cost_next_to_nothing(kind: str) -> None:
    seen: list[Any] = []

    class Learner(TokenLearner):
        def train(self, batch: Any) -> Any:
            seen.extend((segment.data["calls"], segment.data["cpu_s"]) for segment in batch.segments)
            return super().train(batch)

    began_s = time.monotonic()
    Pipeline(
        collect=PerWorker(partial(Counted, slots=200, tool=slow_tool, max_tokens=2)),
        train=Learner(bias={CALL: 50.0}),
        off_policy_degree=0,
        runtime=kind,  # type: ignore[arg-type]
        segments_per_round=200,
    ).run(rounds=1)
    assert len(seen) == 200
    assert time.monotonic() - began_s >= 2.0
    calls, cpu_s = min(seen)
    print(f"\n{kind}: {calls} calls of advance took {cpu_s:.3f} CPU-s while 200 tickets waited for 2 s")
    # Tickets come in several batches; then only the clock, once a second, and the tools have it advance.
    assert calls <= 250


# ---------------------------------------------------------------- repeating


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_segments_mix_versions_is_repeated_bit_for_bit(kind: str, tmp_path: Path) -> None:
    made = pipeline(kind, 2, degree=2, run_dir=tmp_path / "run", slots=8, step_s=0.001)
    _, log = run(made, 20)
    assert_mixed(log)
    check_replay(made)


@pytest.mark.parametrize("runtime", ["threads", "processes"])
def test_a_replay_may_run_anywhere(runtime: str, tmp_path: Path) -> None:
    made = pipeline("inline", 2, degree=2, run_dir=tmp_path / "run", slots=8, group=2)
    _, log = run(made, 20)
    assert_mixed(log)
    check_replay(made, runtime)


def tool(seed: int, place: int) -> int:
    time.sleep(0.002)
    return 2 + (seed + place) % 30


@pytest.mark.parametrize("kind", KINDS)
def test_tools_groups_and_drops_are_repeated(kind: str, tmp_path: Path) -> None:
    made = pipeline(
        kind, 2, degree=2, run_dir=tmp_path / "run", slots=8, group=2, tool=tool, needs_spread=True
    )
    report, log = run(made, 10)
    assert report.counts.dropped > 0
    check_replay(made)


def test_drops_at_zero_leave_the_same_tickets_with_any_number_of_collectors(tmp_path: Path) -> None:
    seen = []
    for num_collectors, kind in enumerate(("inline", "threads", "processes"), start=1):
        made = pipeline(kind, num_collectors, slots=5, group=2, needs_spread=True)
        report, log = run(made, 5)
        seen.append((report.digest, log.trained))
    assert seen[0][1] != list(range(30)), "some were dropped"
    assert all(one == seen[0] for one in seen)


def test_a_run_that_was_resumed_with_other_settings_is_repeated_up_to_there(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_round(self, info: RoundInfo) -> None:
            if info.version == 6:
                made.stop()

    options: dict[str, Any] = {"degree": 2, "run_dir": tmp_path / "run", "slots": 8, "step_s": 0.001}
    made = pipeline("threads", 2, callbacks=(Stop(),), **options)
    version = made.run(rounds=15).version
    again = pipeline("threads", 2, **options)
    again.resume(rounds=15)
    later = [(version, again.spec())]
    with pytest.raises(
        ReplayError, match=f"were begun before version {version}, at which the run was resumed"
    ):
        made.replay(later=later)
    assert made.replay(later=later, until=version).difference is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_stragglers_that_are_cut_is_repeated(kind: str, tmp_path: Path) -> None:
    class Straggles(TokenMachine):
        """Makes the tokens of every ninth ticket in a thousand steps: only `cut` ends it in time."""

        def _make_token(self, one: Any) -> None:
            if self._turn(one) % 200 == 0 or one.plan is not None:
                super()._make_token(one)

        def _turn(self, one: Any) -> int:
            turns = self.__dict__.setdefault("turns", {})
            turns[id(one)] = turns.get(id(one), -1) + 1
            return 0 if one.seed % 9 else turns[id(one)]

    made = pipeline(
        kind,
        2,
        degree=2,
        run_dir=tmp_path / "run",
        dial={"straggler_policy": "cut"},
        machine=Straggles,  # type: ignore[arg-type]
        slots=16,
    )
    report, log = run(made, 15)
    ends = Counter(piece.end for group in log.pieces.values() for piece in group)
    assert ends["cut"] > 0
    assert report.metrics["rollout/ended_cut"] == ends["cut"]
    check_replay(made)


class DiesWhileJoining(TokenMachine):
    """The third collector is killed when it is made for the first time."""

    def __init__(self, context: Any, killed: Path, **options: Any) -> None:
        if context.collector == 2 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(context, **options)


@pytest.mark.parametrize("kind", ["inline", "threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_wide_collectors_that_join_and_leave_are_repeated(kind: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    if kind in ("inline", "threads"):  # it would kill this process
        killed.touch()
    members = Members()
    options = {"slots": 4, "step_s": 0.001, "machine": DiesWhileJoining, "killed": killed}
    made = pipeline(kind, 2, degree=2, run_dir=tmp_path / "run", callbacks=(members,), **options)
    members.pipeline = made
    report, log = run(made, ROUNDS)
    assert report.stopped
    assert max(log.ages) <= 2
    assert set(log.by_collector) == {0, 1, 2, 3}
    assert set(log.by_collector[-6:]) <= {1, 2}, "those that left collect no longer"
    assert len(report.losses) == (0 if kind in ("inline", "threads") else 1)
    check_replay(made)
