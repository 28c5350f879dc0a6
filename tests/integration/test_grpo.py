"""GRPO: a plain loop, and the same run on every runtime, asynchronous and repeated."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.algorithms.grpo.config import DecoderConfig, GRPOConfig, WarmupConfig
from offbeat.observe.events import read_rounds, read_schedule

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "algorithm.segments_per_round": 6,
    "algorithm.group_size": 4,
    "algorithm.lr": 1e-3,
    "algorithm.model.width": 32,
    "algorithm.model.num_layers": 2,
    "algorithm.model.num_heads": 4,
    "algorithm.model.ff_width": 48,
    "algorithm.warmup.accuracy": None,
    "eval.interval_rounds": None,
    "eval.at_end": False,
    "observe.console": "none",
    "observe.tensorboard": False,
    "run.stop_return": None,
}


def run(
    path: Path, kind: str, degree: int = 0, rounds: int = 5, recipe: str = "arithmetic-grpo", **more: Any
) -> str:
    changes = {
        **SMALL,
        "run.dir": str(path),
        "run.rounds": rounds,
        "runtime.kind": kind,
        "async_training.off_policy_degree": degree,
        "async_training.open_rounds": 0,
        **more,
    }
    offbeat.train(recipe, overrides=changes)
    return offbeat.digest(path)


def plain(rounds: int, seed: int = 0) -> str:
    spec = importlib.util.spec_from_file_location("grpo_plain", ROOT / "examples" / "grpo_plain.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = DecoderConfig(width=32, num_layers=2, num_heads=4, ff_width=48)
    config = GRPOConfig(group_size=4, lr=1e-3, model=sizes, warmup=WarmupConfig(accuracy=None))
    return str(module.train(rounds, seed, prompts=6, config=config))


@pytest.fixture(scope="module")
def expected() -> str:
    return plain(5)


@pytest.mark.parametrize(
    ("kind", "engines", "slots"),
    [("inline", 1, None), ("inline", 3, 4), ("threads", 2, None), ("processes", 2, 5)],
)
def test_zero_is_the_plain_loop(
    kind: str, engines: int, slots: int | None, expected: str, tmp_path: Path
) -> None:
    more = {"runtime.num_workers": engines, "algorithm.engine.slots": slots}
    assert run(tmp_path / "run", kind, **more) == expected


def test_plain_loop_is_short() -> None:
    text = (ROOT / "examples" / "grpo_plain.py").read_text()
    assert len(text.splitlines()) <= 100
    assert "Pipeline" not in text.replace("No pipeline", "")


@pytest.mark.parametrize("kind", ["inline", "threads", "processes"])
def test_asynchronous_run_mixes_versions_and_repeats(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"algorithm.max_new_tokens": 24, "algorithm.engine.slots": 16, "runtime.num_workers": 1}
    run(path, kind, degree=2, rounds=30, **more)
    check_mixed(path)


def check_mixed(path: Path) -> None:
    """See that a run at k = 2 mixed versions within the bound, and is repeated."""
    ages = [event["metrics"]["pace/max_sample_age"] for event in read_rounds(path / "events.jsonl")]
    assert max(ages) <= 2
    assert any(len(spans) > 1 for spans, _ in pieces_of(path)), "no response has two versions"
    assert offbeat.replay_run(path).identical


def pieces_of(path: Path) -> list[Any]:
    """Return spans and end of each response of a run."""
    lines = [line for line in read_schedule(path / "schedule.jsonl") if line["kind"] == "segment"]
    return [piece for line in lines for piece in line["pieces"]]


HEAVY = {  # untrained models end responses by chance: their lengths have a tail
    "recipe": "reverse-grpo",
    "env.kwargs": {"sigma": 1.0, "mean": 12, "limit": 160},
    "runtime.num_workers": 1,
}


@pytest.mark.parametrize("degree", [1, 2])
def test_stragglers_are_cut_counted_and_repeated(degree: int, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, "threads", degree, rounds=12, **HEAVY, **{"async_training.straggler_policy": "cut"})
    ends = Counter(end for _, end in pieces_of(path))
    assert ends["cut"] > 0
    metrics = read_rounds(path / "events.jsonl")[-1]["metrics"]
    assert metrics["rollout/ended_cut"] == ends["cut"]
    assert offbeat.replay_run(path).identical


def test_waiting_for_stragglers_trains_every_token_that_was_issued(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, "threads", 2, rounds=12, **HEAVY)
    assert {end for _, end in pieces_of(path)} <= {"eos", "length"}
    last = read_rounds(path / "events.jsonl")[-1]["metrics"]
    assert last["rollout/ended_cut"] == last["pace/dropped_samples"] == 0
    assert last["rollout/trained_length_mean"] == last["rollout/dispatched_length_mean"]
    assert last["learn/processed_samples"] == sum(
        size for spans, _ in pieces_of(path) for _, size, *_ in spans
    )
