"""Progress of the roles, from their reports to the phase on the display."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat import api
from offbeat.cli import waiting
from offbeat.cli.evaluate import evaluate_run
from offbeat.cli.output import Report
from offbeat.ops.jit import COMPILING
from offbeat.pacing import Coordinator, PaceConfig
from offbeat.pacing.actions import Issue, Train
from offbeat.pacing.events import CollectorUp, Event, Published, SegmentArrived
from offbeat.roles import PerWorker, SingleRank, WorkerContext, progress_to, report_progress
from offbeat.run.driver import Driver
from offbeat.run.start import make_roles
from offbeat.run.waits import Wait, Waits
from offbeat.runtime import worker
from offbeat.runtime.base import keep_progress
from offbeat.runtime.inline import InlineRuntime
from offbeat.runtime.learning import LearnerExecutor, LocalRuntime
from offbeat.runtime.spec import Assignment
from offbeat.runtime.threads import ThreadRuntime
from offbeat.types import Batch, Metrics, Segment


def test_a_report_goes_nowhere_unless_the_runtime_takes_it() -> None:
    taken: list[str] = []
    report_progress("before")
    with progress_to(taken.append):
        report_progress("episode 1 of 2")
        with progress_to(lambda text: taken.append(f"inner {text}")):
            report_progress("episode 1 of 2")
        report_progress("episode 2 of 2")
    report_progress("after")
    assert taken == ["episode 1 of 2", "inner episode 1 of 2", "episode 2 of 2"]


def test_reports_of_two_threads_are_kept_apart() -> None:
    progress: dict[str, str] = {}
    has_reported, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with keep_progress(progress, "evaluator"):
            report_progress("episode 1 of 2")
            has_reported.set()
            may_end.wait(10.0)

    thread = threading.Thread(target=work)
    with keep_progress(progress, "learner"):
        thread.start()
        assert has_reported.wait(10.0)
        report_progress("compiling")
        assert progress == {"learner": "compiling", "evaluator": "episode 1 of 2"}
    assert progress == {"evaluator": "episode 1 of 2"}
    may_end.set()
    thread.join()
    assert progress == {}


def test_progress_ends_with_work_that_raises() -> None:
    progress: dict[str, str] = {}

    def work() -> None:
        with keep_progress(progress, "learner"):
            report_progress("compiling")
            raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        work()
    assert progress == {}


# ---------------------------------------------------------------- runtimes


class Reporter:
    """A learner and an evaluator that look at the progress while they work."""

    def __init__(self) -> None:
        self.runtime: Any = None
        self.seen: list[dict[str, str]] = []

    def train(self, batch: Batch) -> Metrics:
        report_progress("minibatch 1 of 2")
        self.seen.append(dict(self.runtime.progress))
        return {}

    def evaluate(self, weights: Any, seed: int) -> Metrics:
        report_progress("episode 1 of 2")
        self.seen.append(dict(self.runtime.progress))
        return {}

    def weights(self) -> Any:
        return {}

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


def evaluator_of(role: Reporter) -> Any:
    return Assignment(PerWorker(lambda context: role), WorkerContext(0, 1, 0))


def test_a_runtime_keeps_the_reports_of_learner_and_evaluator() -> None:
    role, events = Reporter(), list[Event]()
    spec: Any = SimpleNamespace(evaluator=lambda: evaluator_of(role))
    runtime = role.runtime = InlineRuntime()
    runtime._spec = spec
    runtime._executor = LearnerExecutor(role, lambda version, weights: None, events.append)
    runtime.train(Batch(0, (), 0))
    runtime.evaluate(1, 0)
    assert role.seen == [{"learner": "minibatch 1 of 2"}, {"evaluator": "episode 1 of 2"}]
    assert runtime.progress == {}
    assert len(events) == 1
    assert len(runtime.wait(0.0)) == 1


@pytest.mark.parametrize("runtime", [InlineRuntime, ThreadRuntime])
def test_what_a_learner_does_before_the_first_round_is_reported(runtime: type[LocalRuntime]) -> None:
    """From its start on: the display asks from a thread of its own while the learner is made."""
    role = Reporter()
    role.runtime = runtime()
    assert role.runtime.progress == {}

    def weights() -> Any:
        report_progress("warm-up step 25")
        role.seen.append(dict(role.runtime.progress))
        return {}

    role.weights = weights  # type: ignore[method-assign]
    role.runtime._spec = SimpleNamespace(make_learner=lambda state: role, saves=True)
    role.state_dict = dict  # type: ignore[method-assign]
    role.runtime._make_learner(None)
    role.runtime._executor.publish(0)
    assert role.seen == 2 * [{"learner": "warm-up step 25"}]
    assert role.runtime.progress == {}


def test_an_evaluator_process_reports_at_most_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, sent = 100.0, list[tuple[Any, ...]]()
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Hurried(Reporter):
        def evaluate(self, weights: Any, seed: int) -> Metrics:
            nonlocal now_s
            for episode in range(1, 101):
                report_progress(f"episode {episode} of 100")
                now_s += 0.01
            for _ in range(3):
                report_progress("")
            return {}

    role = Hurried()
    server = worker.EvaluatorServer(SimpleNamespace(send=sent.append), evaluator_of(role))  # type: ignore[arg-type]
    monkeypatch.setattr(server, "_weights", SimpleNamespace(get=lambda address, version: (version, {})))
    server.serve(("evaluate", 5, 0, None))
    reports = [text for kind, text in sent if kind == "progress"]
    assert 10 <= len(reports) <= 11
    assert (reports[0], reports[-1]) == ("episode 1 of 100", "")
    assert [kind for kind, _ in sent].index("evaluated") == len(sent) - 1


# ---------------------------------------------------------------- phase


def row(key: str, whom: str, phase: str) -> Wait:
    return Wait(key, "round 0", whom, 10.0, "limit", lambda: None, phase)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        ({}, "evaluating version 5"),
        ({"evaluator": ""}, "evaluating version 5"),
        ({"learner": "compiling"}, "evaluating version 5"),
        ({"learner": "compiling", "evaluator": "episode 3 of 10"}, "evaluating version 5: episode 3 of 10"),
    ],
)
def test_the_phase_has_the_progress_of_what_is_waited_for(progress: Mapping[str, str], expected: str) -> None:
    pace = SimpleNamespace(warm_up=lambda: None)
    driver: Any = SimpleNamespace(waits=Waits(), pace=pace, _runtime=SimpleNamespace(progress=progress))
    assert Driver.phase(driver) == "collecting"
    driver.waits.begin(row("train", "learner", "training round 4"), 1.0)
    driver.waits.begin(row("evaluation", "evaluator", "evaluating version 5"), 2.0)
    driver.waits.begin(row("progress", "any event", ""), 3.0)
    assert Driver.phase(driver) == expected
    driver.waits.end("evaluation")
    compiling = progress.get("learner")
    assert Driver.phase(driver) == "training round 4" + (f": {compiling}" if compiling else "")


@pytest.mark.parametrize(
    ("warm_up", "progress", "expected"),
    [
        ((3, 27), {}, "warm-up: 3 of 27 segments"),
        ((3, 27), {"collector_0": COMPILING, "collector_1": ""}, f"warm-up: 3 of 27 segments: {COMPILING}"),
        (None, {"collector_0": COMPILING, "collector_1": COMPILING}, f"collecting: {COMPILING}"),
        (None, {"learner": COMPILING}, "collecting"),
    ],
)
def test_while_segments_are_collected_the_phase_says_how_many_and_what_collectors_report(
    warm_up: tuple[int, int] | None, progress: Mapping[str, str], expected: str
) -> None:
    pace = SimpleNamespace(warm_up=lambda: warm_up)
    driver: Any = SimpleNamespace(waits=Waits(), pace=pace, _runtime=SimpleNamespace(progress=progress))
    assert Driver.phase(driver) == expected


def test_a_replay_is_warming_up_until_its_first_round_starts() -> None:
    config = PaceConfig(rounds=3, segments_per_round=2, num_collectors=1, mode="replay", min_segments=3)
    pace = Coordinator(config)
    pace.start(0.0)
    pace.apply(Published(0), 0.0)
    pace.apply(CollectorUp(0, 8), 0.0)
    seen = [pace.warm_up()]
    for action in pace.decide(1.0):
        assert isinstance(action, Issue)
        pace.apply(SegmentArrived(Segment(action.ticket, None, np.array([0]))), 2.0)
        seen.append(pace.warm_up())
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert any(isinstance(action, Train) for action in pace.decide(3.0))
    assert pace.warm_up() is None
    stream = Coordinator(PaceConfig(rounds=3, segments_per_round=2, num_collectors=1))
    assert stream.warm_up() is None, "a round of a stream waits for its own segments"


# ---------------------------------------------------------------- roles


@pytest.mark.parametrize("recipe", ["cartpole-ppo", "alice-bob-mappo", "cartpole-muzero"])
def test_evaluators_report_each_episode_that_ends(recipe: str) -> None:
    overrides: dict[str, Any] = {"eval.episodes": 3, "eval.num_envs": 2}
    if recipe == "cartpole-muzero":
        overrides["algorithm.search.num_simulations"] = 2
    roles = make_roles(offbeat.load_config(recipe, overrides))
    taken: list[str] = []
    with progress_to(taken.append):
        weights = roles.learner(SingleRank()).weights()
        roles.evaluate.make(WorkerContext(0, 1, 0)).evaluate(weights, 0)
    told = [text for text in taken if text not in ("", COMPILING)]
    kinds = [""] if recipe == "cartpole-muzero" else ["", ", actions drawn"]
    assert told == [f"episode {number} of 3{kind}" for kind in kinds for number in (1, 2, 3)]


def test_the_first_call_of_a_compiled_function_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from offbeat.models.computing import compiled
    from offbeat.models.world_spec import Computing

    taken: list[str] = []

    def double(x: int) -> int:
        taken.append("called")
        return 2 * x

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    how = Computing(compiled=True)
    assert compiled(double, how, torch.device("cpu")) is double
    assert compiled(double, replace(how, compiled=False), torch.device("cuda")) is double
    fast = compiled(double, how, torch.device("cuda"))
    with progress_to(taken.append):
        assert (fast(1), fast(2)) == (2, 4)
    assert taken == ["compiling", "called", "", "called"]


def lines_of(stream: io.StringIO, text: str) -> list[str]:
    """What a stream has, once this text is in it."""
    give_up_s = time.monotonic() + 10.0
    while text not in stream.getvalue():
        assert time.monotonic() < give_up_s, stream.getvalue()
        time.sleep(0.005)
    return stream.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_evaluation_that_takes_long_says_which_episode_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = io.StringIO(), list[str]()
    monkeypatch.setattr(waiting, "INTERVAL_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)

    def evaluate(run: str, **options: Any) -> Metrics:
        lines_of(stream, "evaluating: starting, 0 s")
        report_progress("episode 2 of 3")
        report_progress("")
        seen.extend(lines_of(stream, "evaluating: episode 2 of 3, 0 s"))
        return {"eval/return_mean": 1.0}

    monkeypatch.setattr(api, "evaluate", evaluate)
    evaluate_run("x", Report())
    assert seen[0] == "evaluating: starting, 0 s"


def test_the_line_of_progress_is_gone_from_a_terminal_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(waiting, "TERMINAL_INTERVAL_S", 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    with waiting.telling_progress("evaluating"):
        lines_of(stream, "\r\x1b[Kevaluating: starting, 0 s")
    assert stream.getvalue().endswith("\r\x1b[K") and "\n" not in stream.getvalue()


def test_a_short_evaluation_says_nothing_but_its_result(capfd: pytest.CaptureFixture[str]) -> None:
    with waiting.telling_progress("evaluating"):
        report_progress("episode 1 of 1")
    assert capfd.readouterr() == ("", "")
