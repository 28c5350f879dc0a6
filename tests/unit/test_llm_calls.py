"""Calls beside the engine: coroutines and plain functions, limits, hanging ones, loops that are blocked."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from offbeat.errors import TaskError
from offbeat.llm import calls as module
from offbeat.llm.calls import Calls, Outcome, Question
from offbeat.types import TIMEOUT

LIMIT_S = 20.0


def taken(calls: Calls, count: int) -> dict[Any, Outcome]:
    """Return so many outcomes by key, as soon as they are there."""
    found: dict[Any, Outcome] = {}
    give_up_s = time.monotonic() + LIMIT_S
    while len(found) < count:
        assert time.monotonic() < give_up_s, f"only {sorted(found)} have ended"
        for one in calls.take():
            assert isinstance(one, Outcome)
            found[one.key] = one
        time.sleep(0.002)
    return found


async def doubled(number: int) -> int:
    await asyncio.sleep(0.001)
    return 2 * number


class Callable_:
    async def __call__(self, number: int) -> int:
        return 2 * number


@pytest.mark.parametrize(
    "function",
    [
        doubled,
        lambda number: 2 * number,
        lambda number: doubled(number),  # a plain function that returns a coroutine
        functools.partial(doubled),
        Callable_(),
    ],
)
def test_functions_of_all_kinds_are_called(function: Callable[..., Any]) -> None:
    woken = threading.Event()
    calls = Calls(woken.set, threads=3)
    for number in range(50):
        calls.call(number, function, number, limit_s=10.0)
    assert woken.wait(LIMIT_S)
    assert {key: one.value for key, one in taken(calls, 50).items()} == {n: 2 * n for n in range(50)}
    assert calls.num_open == 0
    calls.close()


def test_one_that_raises_says_what() -> None:
    calls = Calls(lambda: None)

    async def wrong() -> None:
        raise ValueError("no such word")

    calls.call("async", wrong, limit_s=10.0)
    calls.call("plain", lambda: 1 / 0, limit_s=10.0)
    calls.call("exit", exit, limit_s=10.0)
    calls.call("arguments", doubled, limit_s=10.0)
    found = taken(calls, 4)
    assert found["async"].error == "ValueError: no such word"
    assert found["plain"].error == "ZeroDivisionError: division by zero"
    assert "in wrong" in found["async"].details
    assert found["exit"].error.startswith("SystemExit")
    assert "missing 1 required positional argument" in found["arguments"].error
    calls.close()


def test_what_takes_too_long_is_given_up_and_holds_nothing_up() -> None:
    calls, release = Calls(lambda: None, threads=2), threading.Event()
    for number in range(4):
        calls.call(("hangs", number), release.wait, limit_s=0.05)
        calls.call(("sleeps", number), asyncio.sleep, 60.0, limit_s=0.05)
    calls.call("last", lambda: "here", limit_s=10.0)
    found = taken(calls, 9)
    assert {one.error for key, one in found.items() if key != "last"} == {TIMEOUT}
    assert found["last"].value == "here"
    release.set()
    calls.close()


def test_too_many_threads_that_hang_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_HANGING", 3)
    calls, release = Calls(lambda: None, threads=2), threading.Event()
    for number in range(8):
        calls.call(number, release.wait, limit_s=0.01)
    with pytest.raises(TaskError, match=r"3 threads hang in .*async def"):
        taken(calls, 8)
    release.set()
    calls.close()


def test_a_coroutine_that_blocks_the_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    calls, release = Calls(lambda: None), threading.Event()

    async def blocks() -> None:
        release.wait()

    calls.call("blocks", blocks, limit_s=0.05)
    assert taken(calls, 1)["blocks"].error == TIMEOUT
    calls.call("after", doubled, 4, limit_s=10.0)
    calls.call("thread", time.sleep, 60.0, limit_s=0.05)  # its limit is watched by the new loop
    found = taken(calls, 2)
    assert (found["after"].value, found["thread"].error) == (8, TIMEOUT)
    release.set()
    calls.close()


def test_a_blocked_loop_costs_no_call_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that wait for a thread, nor coroutines of the new loop when one in a thread hangs."""
    monkeypatch.setattr(module, "_GRACE_S", 0.05)
    calls, release, come = Calls(lambda: None, threads=1), threading.Event(), threading.Event()

    async def blocks() -> None:
        release.wait()

    calls.call("blocks", blocks, limit_s=0.05)
    calls.call("hangs", come.wait, limit_s=0.5)  # its limit is watched by the blocked loop
    calls.call("waits for a thread", lambda: "here", limit_s=10.0)
    assert taken(calls, 1)["blocks"].error == TIMEOUT
    calls.call("sleeps", asyncio.sleep, 1.0, "well", limit_s=10.0)
    found = taken(calls, 3)
    assert found["hangs"].error == TIMEOUT
    assert (found["waits for a thread"].value, found["sleeps"].value) == ("here", "well")
    release.set()
    come.set()
    calls.close()


def test_loops_that_are_blocked_count_as_threads_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_S", 0.02)
    monkeypatch.setattr(module, "_MOST_HANGING", 3)
    calls, release = Calls(lambda: None), threading.Event()

    async def blocks() -> None:
        release.wait()

    for number in range(2):
        calls.call(number, blocks, limit_s=0.01)
        taken(calls, 1)
    calls.call("third", blocks, limit_s=0.01)
    with pytest.raises(TaskError, match=r"3 threads hang in .*calls that block"):
        taken(calls, 1)
    release.set()
    calls.close()


@pytest.mark.parametrize("pause_s", [3.0, 100.0])
def test_time_in_which_nobody_looked_blocks_no_loop(pause_s: float) -> None:
    """What has ended and was not taken is not late, and a suspended process gives its loop time first."""
    now = [0.0]
    calls = Calls(lambda: None, clock=lambda: now[0])
    calls.call("quick", doubled, 1, limit_s=1.0)
    calls.call("slow", asyncio.sleep, 0.3, "well", limit_s=2.0 * LIMIT_S if pause_s < 5.0 else 1.0)
    time.sleep(0.05)
    now[0] += pause_s
    found = taken(calls, 2)
    assert (found["quick"].value, found["slow"].value) == (2, "well")
    calls.close()


def test_an_ended_call_that_is_forgotten_costs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_HANGING", 3)
    woken = threading.Event()
    calls = Calls(woken.set, threads=1)
    for number in range(60):
        woken.clear()
        calls.call(number, lambda: "here", limit_s=10.0)
        assert woken.wait(LIMIT_S)
        calls.forget(number)
        assert calls.take() == []
    calls.close()


def test_the_limit_runs_again_when_a_coroutine_gives_a_question_up() -> None:
    calls = Calls(lambda: None)

    async def impatient() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(calls.ask("talk", "first"), 0.01)
        await asyncio.sleep(60.0)

    calls.call("talk", impatient, limit_s=0.1)
    give_up_s, found = time.monotonic() + LIMIT_S, list[Any]()
    while len(found) < 2:
        assert time.monotonic() < give_up_s
        found += calls.take()
        time.sleep(0.002)
    assert found[1].error == TIMEOUT
    calls.close()


def test_forgotten_calls_have_no_outcome() -> None:
    calls, release, cancelled = Calls(lambda: None, threads=1), threading.Event(), threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            cancelled.set()

    calls.call("waits", waits, limit_s=60.0)
    calls.call("hangs", release.wait, limit_s=60.0)
    time.sleep(0.05)
    calls.forget("waits")
    calls.forget("hangs")
    assert cancelled.wait(LIMIT_S)
    calls.call("next", doubled, 1, limit_s=10.0)
    calls.call("thread", lambda: 3, limit_s=10.0)
    assert set(taken(calls, 2)) == {"next", "thread"}
    release.set()
    calls.close()


def test_a_coroutine_asks_and_its_limit_does_not_run_meanwhile() -> None:
    calls = Calls(lambda: None)

    async def episode() -> list[str]:
        return [await calls.ask("talk", "first"), await calls.ask("talk", "second")]

    calls.call("talk", episode, limit_s=0.2)
    for text in ("first", "second"):
        give_up_s = time.monotonic() + LIMIT_S
        while not (found := calls.take()):
            assert time.monotonic() < give_up_s
            time.sleep(0.002)
        (question,) = found
        assert isinstance(question, Question)
        assert (question.key, question.value) == ("talk", text)
        time.sleep(0.25)
        calls.reply(question, text.upper())
    assert taken(calls, 1)["talk"].value == ["FIRST", "SECOND"]
    calls.close()


def test_threads_end_with_what_made_them() -> None:
    before = threading.active_count()
    calls = Calls(lambda: None, threads=4)
    calls.call(0, doubled, 1, limit_s=10.0)
    calls.call(1, lambda: 1, limit_s=10.0)
    taken(calls, 2)
    assert threading.active_count() > before
    del calls
    gc.collect()
    give_up_s = time.monotonic() + LIMIT_S
    while threading.active_count() > before:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def test_hundreds_that_wait_need_no_processor() -> None:
    calls, process = Calls(lambda: None), psutil.Process()
    for number in range(200):
        calls.call(number, asyncio.sleep, 60.0, limit_s=60.0)
    time.sleep(0.2)
    before = sum(process.cpu_times()[:2])
    for _ in range(10):
        calls.take()
        time.sleep(0.05)
    assert sum(process.cpu_times()[:2]) - before < 0.1
    calls.close()
