"""GRPO on Ray does what it does everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

import offbeat
from offbeat.observe.events import read_answers, read_schedule
from tests.integration.test_grpo import check_mixed, plain, run


@pytest.mark.parametrize(("engines", "slots"), [(1, 5), (2, None), (3, 4)])
def test_zero_is_the_plain_loop(engines: int, slots: int | None, shared_ray: None, tmp_path: Path) -> None:
    more = {"runtime.num_workers": engines, "algorithm.engine.slots": slots}
    assert run(tmp_path / "run", "ray", rounds=3, **more) == plain(3)


def test_asynchronous_run_mixes_versions_and_repeats(shared_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"algorithm.max_new_tokens": 24, "algorithm.engine.slots": 16, "runtime.num_workers": 1}
    run(path, "ray", degree=2, rounds=30, **more)
    check_mixed(path)


def test_tools_are_called_in_actors(shared_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"recipe": "calculator-grpo", "env.kwargs.latency_s": 0.02, "algorithm.engine.slots": 16}
    run(path, "ray", degree=1, rounds=4, **more)
    answers, lines = read_answers(path), read_schedule(path / "schedule.jsonl")
    assert any("text" in answer for answer in answers)
    assert len(answers) == sum(sum(line["answers"]) for line in lines if line["kind"] == "segment")
    assert offbeat.replay_run(path).identical
