"""Replay of recorded runs: identical, or ended at the first round that differs, and to go on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.errors import ConfigError, OffbeatError, ReplayError
from offbeat.observe.events import read_schedule
from offbeat.replay import StreamStore
from offbeat.types import Segment
from tests.conftest import SMALL

Run = Callable[..., Any]
ROUNDS = 8


def train(directory: Path, degree: int, kind: str) -> Any:
    settings = {**SMALL, "run.rounds": ROUNDS, "run.dir": str(directory), "runtime.kind": kind}
    settings |= {"checkpoint.interval_rounds": 2, "checkpoint.keep": ROUNDS}
    return offbeat.train("cartpole-ppo", overrides=settings, off_policy_degree=degree)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An asynchronous run."""
    return train(tmp_path_factory.mktemp("recorded") / "run", degree=2, kind="processes")


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run at k = 0, which is the same whenever it is trained."""
    return train(tmp_path_factory.mktemp("synchronous") / "run", degree=0, kind="inline")


@pytest.fixture
def schedule(recorded: Any) -> Any:
    """Replaces the lines of the schedule; they are put back after the test."""
    path = recorded.run_dir / "schedule.jsonl"
    before = path.read_bytes()

    def write(records: Sequence[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    yield write
    path.write_bytes(before)


def rounds_of(result: Any) -> list[dict[str, Any]]:
    return [one for one in read_schedule(result.run_dir / "schedule.jsonl") if one["kind"] == "round"]


def change_a_byte(monkeypatch: pytest.MonkeyPatch, ticket: int) -> list[int]:
    """Let the learner get one byte of this ticket's segment otherwise; return the tickets that it got so."""
    changed: list[int] = []
    hand_over = StreamStore.next

    def changing(store: StreamStore, tickets: Sequence[int]) -> tuple[Segment, ...]:
        return tuple(change(one) if one.ticket.number == ticket else one for one in hand_over(store, tickets))

    def change(segment: Segment) -> Segment:
        data = {**segment.data, "obs": np.array(segment.data["obs"])}
        step, env = np.argwhere(data["valid"])[0]  # a step that is trained
        data["obs"][step, env].view(np.uint8)[2] ^= 0x40  # in the mantissa of its first number
        changed.append(segment.ticket.number)
        return replace(segment, data=data)

    monkeypatch.setattr(StreamStore, "next", changing)
    return changed


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_asynchronous_run_is_repeated_identically_by_every_runtime(kind: str, recorded: Any) -> None:
    told: list[tuple[int, int]] = []
    report = offbeat.replay_run(recorded.run_dir, lambda *round_: told.append(round_), runtime=kind)  # type: ignore[arg-type]
    assert report.identical and report.difference is None
    assert report.digest == report.recorded_digest == recorded.digest
    assert report.rounds == ROUNDS
    assert told == [(version, ROUNDS) for version in range(1, ROUNDS + 1)]


def test_every_round_records_a_checksum_of_published_weights(recorded: Any) -> None:
    published = [record["weights"][0] for record in rounds_of(recorded)]
    assert published == sorted(published)
    assert all(version >= record["version"] - 2 for version, record in zip(published, rounds_of(recorded)))
    assert len({record["weights"][1] for record in rounds_of(recorded)}) == len(set(published))


@pytest.mark.parametrize("kind", ["inline", "processes"])
@pytest.mark.parametrize("round_", [0, 3])
def test_one_byte_of_the_learners_input_names_the_first_round_that_differs(
    kind: str, round_: int, recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = rounds_of(recorded)[round_]["tickets"][-1]
    changed = change_a_byte(monkeypatch, ticket)
    report = offbeat.replay_run(recorded.run_dir, runtime=kind)  # type: ignore[arg-type]
    assert changed == [ticket]
    assert not report.identical
    assert report.difference is not None
    assert report.difference.round == round_
    assert ticket in report.difference.tickets
    assert report.rounds == round_ + 1, "it ends there"
    assert str(report.difference).startswith(f"round {round_} (tickets ")


def test_difference_in_the_last_round_is_found_by_the_digest(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule has the checksums of weights that a later round could have used."""
    last = rounds_of(recorded)[-1]["tickets"]
    change_a_byte(monkeypatch, last[0])
    report = offbeat.replay_run(recorded.run_dir)
    assert not report.identical
    assert report.difference is not None
    assert report.difference.round <= report.difference.last == ROUNDS - 1
    assert set(last) <= set(report.difference.tickets)
    assert report.rounds == ROUNDS
    assert report.digest != report.recorded_digest == recorded.digest


def test_difference_in_the_last_round_is_named_alone_at_k_0(
    synchronous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = rounds_of(synchronous)[-1]["tickets"]
    change_a_byte(monkeypatch, tickets[0])
    report = offbeat.replay_run(synchronous.run_dir)
    assert str(report.difference).startswith(f"round {ROUNDS - 1} (tickets {tickets[0]}, ")


def without_checksums(result: Any) -> list[dict[str, Any]]:
    records = read_schedule(result.run_dir / "schedule.jsonl")
    return [{key: value for key, value in one.items() if key != "weights"} for one in records]


def test_schedule_without_checksums_is_compared_by_digest(
    recorded: Any, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = rounds_of(recorded)[3]["tickets"][0]
    schedule(without_checksums(recorded))
    assert offbeat.replay_run(recorded.run_dir).identical
    change_a_byte(monkeypatch, ticket)
    report = offbeat.replay_run(recorded.run_dir)
    assert (report.identical, report.difference, report.rounds) == (False, None, ROUNDS)
    assert report.digest != report.recorded_digest


def test_replay_that_stops_early_compares_what_there_is(
    recorded: Any, schedule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = rounds_of(recorded)[0]["tickets"][0]
    schedule(without_checksums(recorded))
    verdicts = [
        offbeat.replay_run(recorded.run_dir, until=n, out=tmp_path / str(n)).identical for n in (3, 4)
    ]
    assert verdicts == [None, True], "there is no checkpoint of version 3"
    change_a_byte(monkeypatch, ticket)
    assert offbeat.replay_run(recorded.run_dir, until=4, out=tmp_path / "changed").identical is False


def drop_first(kind: str, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    index = next(index for index, record in enumerate(records) if record["kind"] == kind)
    return records[:index] + records[index + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda records: drop_first("round", records),
        lambda records: drop_first("segment", records),
        lambda records: records[: len(records) // 2],
        lambda records: [*records, {"kind": "gap"}],
        lambda records: [{"kind": "segment", "ticket": 0}, *records],
        lambda records: [{"version": 0}, *records],
        lambda records: [],
    ],
    ids=["no round 0", "no first segment", "cut", "gap", "half a segment", "no kind", "empty"],
)
def test_damaged_schedule_is_an_error_that_says_so(damage: Any, recorded: Any, schedule: Any) -> None:
    schedule(damage(read_schedule(recorded.run_dir / "schedule.jsonl")))
    with pytest.raises(ReplayError, match="schedule"):
        offbeat.replay_run(recorded.run_dir)


def test_schedule_that_is_no_json_is_an_error_that_names_the_line(recorded: Any, schedule: Any) -> None:
    schedule([])
    (recorded.run_dir / "schedule.jsonl").write_text("not json\n")
    with pytest.raises(OffbeatError, match=r"schedule\.jsonl:1"):
        offbeat.replay_run(recorded.run_dir)


@pytest.mark.parametrize("until", [0, -1, ROUNDS + 1])
def test_replay_cannot_stop_where_the_run_was_never(until: int, recorded: Any, tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=f"choose 1 to {ROUNDS}"):
        offbeat.replay_run(recorded.run_dir, until=until, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_version_is_refused(recorded: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--to"):
        offbeat.replay_run(recorded.run_dir, out=tmp_path / "out")


@pytest.mark.parametrize("kind", ["inline", "processes"])
@pytest.mark.parametrize("until", [1, 5, ROUNDS])
def test_replay_that_stops_early_leaves_a_run_that_can_be_resumed(
    kind: str, until: int, synchronous: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = offbeat.replay_run(synchronous.run_dir, runtime=kind, until=until, out=out)  # type: ignore[arg-type]
    assert (report.identical, report.rounds) == (True, until)
    assert offbeat.digest(out) == report.digest
    rounds = [record for record in read_schedule(out / "schedule.jsonl") if record["kind"] == "round"]
    assert [record["version"] for record in rounds] == list(range(until))
    finished = offbeat.resume(out)
    assert (finished.rounds, finished.digest) == (ROUNDS, synchronous.digest)
    assert offbeat.replay_run(out).identical
    assert offbeat.digest(synchronous.run_dir) == synchronous.digest, "the recorded run is as it was"


def test_asynchronous_run_can_be_taken_up_at_an_earlier_version(recorded: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = offbeat.replay_run(recorded.run_dir, until=4, out=out)
    assert (report.identical, report.rounds) == (True, 4)
    assert report.recorded_digest == report.digest, "there is a checkpoint of this version"
    assert offbeat.evaluate(out, episodes=1)["eval/version"] == 4
    finished = offbeat.resume(out)
    assert finished.rounds == ROUNDS
    assert finished.max_staleness <= 2
    again = offbeat.replay_run(out)
    assert again.identical and again.digest == finished.digest
