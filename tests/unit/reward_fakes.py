"""Reward functions as people have them, for tests to name in a configuration."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    assert isinstance(extra_info, dict)
    return {"score": float(solution_str == ground_truth) + len(data_source)}


def simple_score(data_source, solution_str, ground_truth):  # type: ignore[no-untyped-def]
    return solution_str == ground_truth


def exact(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    assert set(columns) == {"level"}
    return [float(one == right) for one, right in zip(completions, answer, strict=True)]


async def lengths(completions: list[str], level: list[int]) -> list[float | None]:
    return [None if level[0] == 0 else float(len(completions[0]))]


def ours(problem: Any, response: str) -> float:
    return float(response == problem.answer)


async def turns(problem: Any, response: str, dialogue: Any) -> float:
    return float(len(dialogue.turns))


def anything(command: str) -> int:
    raise AssertionError("a function that is no reward is never called")


class Clever:
    """No function."""

    def __call__(self, problem: Any, response: str) -> float:
        return 1.0
