"""Runs of language models with tools and rewards: k = 0, replays that call nothing, answers.jsonl."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.errors import ConfigError, ReplayError, TaskError
from offbeat.observe.events import read_answers, read_events, read_rounds, read_schedule
from tests.integration.test_grpo import SMALL
from tests.unit.talk_fakes import CALLS, Steady

TASKS = "tests.unit.talk_fakes"


def run(path: Path, task: str, kind: str, degree: int = 0, rounds: int = 6, **more: Any) -> Any:
    changes = {
        **SMALL,
        "env.id": f"{TASKS}:{task}",
        "env.kwargs": {},
        "run.dir": str(path),
        "run.rounds": rounds,
        "runtime.kind": kind,
        "runtime.num_workers": 1,
        "algorithm.engine.slots": 12,
        "async_training.off_policy_degree": degree,
        "async_training.open_rounds": 0,
        **more,
    }
    return offbeat.train("calculator-grpo", overrides=changes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An asynchronous run whose tools and rewards are random, and fail or come late now and then."""
    path = tmp_path_factory.mktemp("runs") / "run"
    more = {"env.kwargs": {"fail": 0.05, "hang": 0.02}, "algorithm.tool.timeout_s": 0.3}
    run(path, "Waits", "threads", degree=2, rounds=25, **more, **{"algorithm.reward.timeout_s": 0.3})
    return path


@pytest.fixture
def copied(recorded: Path, tmp_path: Path) -> Path:
    shutil.copytree(recorded, tmp_path / "run")
    return tmp_path / "run"


def test_zero_does_not_depend_on_the_time_of_tools_and_rewards(tmp_path: Path) -> None:
    digests = set()
    cases: list[tuple[str, int, int | None, float]] = [
        ("inline", 1, None, 0.0),
        ("inline", 2, 4, 0.02),
        ("threads", 2, 7, 0.02),
        ("processes", 2, 12, 0.01),
    ]
    for number, (kind, workers, slots, wait_s) in enumerate(cases):
        path = tmp_path / f"run{number}"
        more = {"runtime.num_workers": workers, "algorithm.engine.slots": slots}
        run(path, "Steady", kind, rounds=4, **more, **{"env.kwargs": {"wait_s": wait_s}})
        digests.add(offbeat.digest(path))
        metrics = read_rounds(path / "events.jsonl")[-1]["metrics"]
        assert "pace/lockstep_until" not in metrics
        assert (metrics["rollout/answers_failed"], metrics["rollout/answers_timeout"]) == (0, 0)
    assert len(digests) == 1


def test_asynchronous_run_repeats_without_a_call(recorded: Path) -> None:
    lines = [line for line in read_schedule(recorded / "schedule.jsonl") if line["kind"] == "segment"]
    ends = [end for line in lines for _, end in line["pieces"]]
    assert {"eos", "timeout", "error"} <= set(ends)
    assert any(len(spans) > 1 for line in lines for spans, _ in line["pieces"])
    answers = read_answers(recorded)
    assert sum(sum(line["answers"]) for line in lines) == len(answers)
    assert {"text", "number", "error"} <= {name for answer in answers for name in answer}
    before = CALLS.copy()
    for kind in ("inline", "processes"):
        assert offbeat.replay_run(recorded, runtime=kind).identical  # type: ignore[arg-type]
    assert before == CALLS
    metrics = read_rounds(recorded / "events.jsonl")[-1]["metrics"]
    assert metrics["rollout/answers_failed"] > 0
    assert metrics["rollout/answers_timeout"] > 0
    assert metrics["rollout/ended_timeout"] > 0
    found = [record["metrics"] for record in read_rounds(recorded / "events.jsonl")]
    for name in ("rollout/waiting_for_tool", "rollout/waiting_for_reward"):
        assert any(one.get(name, 0.0) > 0.0 for one in found)


def test_a_replay_up_to_a_round_leaves_the_answers(copied: Path) -> None:
    report = offbeat.replay_run(copied, until=10)
    assert report.identical
    left = copied.with_name("run-to-10")
    whole = {json.dumps(one) for one in read_answers(copied)}
    part = [json.dumps(one) for one in read_answers(left)]
    assert part
    assert whole >= set(part)
    assert offbeat.replay_run(left).identical


def test_calling_again_names_the_first_other_answer(recorded: Path, tmp_path: Path) -> None:
    report = offbeat.replay_run(recorded, call=True)
    assert report.identical is False
    assert report.changed is not None
    assert "was answered" in str(report.changed)
    path = tmp_path / "run"
    run(path, "Steady", "threads", degree=2)
    before = CALLS["reward"]
    again = offbeat.replay_run(path, call=True)
    assert (again.identical, again.changed) == (True, None)
    assert CALLS["reward"] > before


def edit(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    lines = (path / "answers.jsonl").read_text().splitlines()
    (path / "answers.jsonl").write_text("".join(f"{line}\n" for line in change(lines)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:-5], "answers.jsonl has"),
        (lambda lines: [*lines[:3], *lines[4:]], "answers.jsonl"),
        (lambda lines: [*lines, '{"ticket":"1","response":0,"turn":0,"number":1.0}'], "damaged"),
        (lambda lines: [*lines, '{"ticket":1,"response":-1,"turn":0,"number":1.0}'], "damaged"),
        (lambda lines: [*lines, '{"ticket":1,"response":0,"turn":0,"number":NaN}'], "damaged"),
        (lambda lines: [*lines, '{"ticket":1,"response":0,"turn":0,"number":[1]}'], "damaged"),
        (lambda lines: [*lines, '{"ticket":1,"response":0,"turn":0,"text":7}'], "damaged"),
        (lambda lines: [*lines, '{"ticket":1,"response":0,"turn":0}'], "damaged"),
        (lambda lines: [*lines, '{"kind":"gap"}'], "answers.jsonl has a gap"),
        (lambda lines: [], "answers.jsonl has 0 of"),
    ],
)
def test_damaged_answers_are_refused(
    change: Callable[[list[str]], list[str]], message: str, copied: Path
) -> None:
    edit(copied, change)
    with pytest.raises(ReplayError, match=message):
        offbeat.replay_run(copied)
    before = CALLS["step"]
    offbeat.replay_run(copied, call=True)  # it can still be asked again
    assert CALLS["step"] > before


def test_other_answers_come_to_other_weights(copied: Path) -> None:
    old, new = '"response":0,"turn":0,"number":0.', '"response":0,"turn":0,"number":1.'
    edit(copied, lambda lines: [line.replace(old, new) for line in lines])
    report = offbeat.replay_run(copied)
    assert report.identical is False
    assert report.difference is not None


def test_resumed_run_cuts_its_answers_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"checkpoint.interval_rounds": 5, "checkpoint.interval_s": None}
    run(path, "Waits", "threads", degree=2, rounds=10, **more)
    with (path / "answers.jsonl").open("a") as file:
        file.write('{"ticket":999,"response":0,"turn":0,"number":1.0}\n{"ticket":9')
    offbeat.resume(path, overrides={"run.rounds": 20, "observe.console": "none"})
    assert all(answer["ticket"] != 999 for answer in read_answers(path))
    assert offbeat.replay_run(path).identical
    (path / "answers.jsonl").write_bytes(b"")
    with pytest.raises(offbeat.errors.CheckpointError, match=r"answers\.jsonl"):
        offbeat.resume(path, overrides={"run.rounds": 22, "observe.console": "none"})


def test_a_limit_of_time_at_zero_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"env.kwargs": {"hang": 0.1}, "algorithm.reward.timeout_s": 0.1, "algorithm.tool.timeout_s": 0.1}
    result = run(path, "Waits", "threads", rounds=3, **more)
    assert result.metrics["pace/lockstep_until"] >= 0
    notices = [event["text"] for event in read_events(path / "events.jsonl") if event["kind"] == "notice"]
    assert sum("a time limit ended something" in text for text in notices) == 1
    from offbeat.cli.summary import summary_rows

    assert "a time limit ended something" in summary_rows(result)["lockstep"]
    assert offbeat.replay_run(path).identical


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_rewards_that_always_fail_end_the_run(kind: str, tmp_path: Path) -> None:
    more = {"env.kwargs": {"fail": 1.0}, "algorithm.reward.max_failures": 20}
    with pytest.raises(TaskError, match=r"20 .* in a row have failed"):
        run(tmp_path / "run", "Waits", kind, degree=1, **more)


def test_what_is_learnt_answers_in_turns_and_is_not_played(tmp_path: Path) -> None:
    path = tmp_path / "run"
    result = run(path, "Steady", "inline", rounds=1)
    with pytest.raises(ConfigError, match="offbeat eval"):
        offbeat.play(path)
    task, policy = Steady(), result.policy
    prompt = np.array(task.tokenizer.encode(task.problem("train", 0).prompt))
    turns = [policy.act(prompt, deterministic=False).tolist() for _ in range(20)]
    assert any(turn[-1] == task.stop_ids[1] for turn in turns)
    assert not any(set(turn[:-1]) & set(task.stop_ids) for turn in turns)


def test_groups_without_two_rewards_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"env.kwargs": {"fail": 0.4}, "algorithm.reward.max_failures": 1000}
    result = run(path, "Waits", "threads", degree=1, **more)
    drops = [line for line in read_schedule(path / "schedule.jsonl") if line["kind"] == "drop"]
    assert {line["reason"] for line in drops} == {"reward_failed"}
    assert result.metrics["pace/dropped_samples"] > 0
    assert offbeat.replay_run(path).identical


@pytest.mark.parametrize("degree", [0, 2])
def test_episodes_train_and_repeat(degree: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, "Episodes", "threads", degree=degree)
    before = CALLS["episode"]
    assert offbeat.replay_run(path).identical
    assert CALLS["episode"] == before
