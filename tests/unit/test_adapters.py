"""One rule for roles, whether they are functions, objects or made in a worker; and for names of hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat import Callback, PerWorker, Pipeline, Segment
from offbeat.errors import CollectError, ConfigError
from offbeat.roles import WorkerContext
from offbeat.run.adapters import as_evaluator
from offbeat.testing import TokenLearner, TokenMachine
from offbeat.types import Batch


class Collects:
    """An object that collects plain data, and keeps no state."""

    def collect(self, ticket: Any, weights: Any) -> Any:
        return ticket.number


class WithState(Collects):
    """One that counts, and can be saved."""

    def __init__(self) -> None:
        self.count = 0

    def collect(self, ticket: Any, weights: Any) -> Any:
        self.count += 1
        return self.count

    def state_dict(self) -> Any:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


class HalfState(Collects):
    """One that gives its state and cannot take it back."""

    def state_dict(self) -> Any:
        return {}


class NoAdvance:
    """One that takes tickets and does not work on them."""

    capacity = 1

    def accept(self, ticket: Any, begun: Any = None, script: Any = ()) -> None:
        pass

    def load(self, version: int, weights: Any) -> None:
        pass


class Nothing:
    """Has no method of any role."""


class Trains:
    """An object with ``train`` and ``weights`` only."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def train(self, segments: Any) -> None:
        self.got.append(segments)

    def weights(self) -> Any:
        return 0


class Learns(Trains):
    """A whole learner."""

    def state_dict(self) -> Any:
        return {"got": len(self.got)}

    def load_state_dict(self, state: Any) -> None:
        pass


class HalfLearner(Trains):
    """One without ``load_state_dict``."""

    def state_dict(self) -> Any:
        return {}


class NoTrain:
    """Everything of a learner but what it is for."""

    def weights(self) -> Any:
        return 0

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def factory(make: Callable[[], Any]) -> PerWorker[Any]:
    return PerWorker(lambda context: make())


def pipeline(**roles: Any) -> Pipeline:
    given = {"collect": lambda ticket, weights: None, "train": lambda segments: None, "weights": lambda: 0}
    if "train" in roles:
        del given["weights"]
    return Pipeline(**{**given, **roles}, runtime="inline", num_workers=1, segments_per_round=2)


# ---------------------------------------------------------------- collectors


@pytest.mark.parametrize("kind", [Collects, WithState])
def test_plain_data_is_wrapped_whoever_made_the_collector(kind: Any) -> None:
    seen: list[list[Any]] = []
    for collect in (kind(), factory(kind), kind().collect):
        got: list[Any] = []
        pipeline(collect=collect, train=got.append, weights=lambda: 0).run(rounds=2)
        seen.append(got)
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2
    assert len(seen[0][0]) == 2


def test_segments_pass_as_they_are() -> None:
    def collect(ticket: Any, weights: Any) -> Segment:
        return Segment(ticket, 7, np.array([ticket.version]), {"env_steps": 5})

    report = pipeline(collect=factory(lambda: collect)).run(rounds=2)
    assert report.env_steps == 20


def test_collectors_made_in_a_worker_are_saved_and_restored(tmp_path: Path) -> None:
    def run(rounds: int, resume: bool) -> list[Any]:
        learner = Learns()
        roles = Pipeline(
            collect=factory(WithState),
            train=learner,
            runtime="inline",
            num_workers=1,
            run_dir=tmp_path / "run",
        )
        (roles.resume if resume else roles.run)(rounds=rounds)
        return [segment.data for batch in learner.got for segment in batch.segments]

    assert run(2, resume=False) == [1, 2]
    assert run(4, resume=True) == [3, 4]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (HalfState(), "the collector HalfState has no load_state_dict"),
        (NoAdvance(), "NoAdvance has no advance and no state_dict and no load_state_dict"),
        (Nothing(), "the collector Nothing has no collect"),
        (None, "the collector NoneType has no collect"),
    ],
)
def test_collectors_that_lack_a_method_are_refused_before_the_first_round(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pipeline(collect=made)
    got: list[Any] = []
    with pytest.raises(CollectError, match=words) as caught:
        pipeline(collect=factory(lambda: made), train=got.append, weights=lambda: 0).run(rounds=1)
    assert "Traceback" not in str(caught.value)
    assert not got


def wide(**options: Any) -> TokenMachine:
    return TokenMachine(WorkerContext(0, 1, seed=0), **options)


def without(name: str) -> Any:
    """A class of wide collectors without one method."""
    kept = {key: value for key, value in vars(TokenMachine).items() if key not in (name, "__dict__")}
    return type("Lacks", (), kept)(WorkerContext(0, 1, seed=0))


class OldAccept(TokenMachine):
    def accept(self, ticket: Any) -> None:  # type: ignore[override]
        raise AssertionError


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (without("load"), "the collector with advance Lacks has no load: it needs capacity, accept, load"),
        (without("cut"), "the wide collector Lacks has no cut: it needs cut and open_work, or neither"),
        (without("open_work"), "the wide collector Lacks has no open_work"),
        (wide(capacity=-2), "capacity of TokenMachine is -2: it is a number of tickets, 1 at least"),
        (wide(capacity=2.5), "capacity of TokenMachine is 2.5"),
        (OldAccept(WorkerContext(0, 1, 0)), r"OldAccept cannot be called as accept\(ticket, begun, script\)"),
    ],
)
def test_wide_collectors_that_cannot_work_are_refused_before_the_first_round(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pipeline(collect=made)
    with pytest.raises(CollectError, match=words):
        pipeline(collect=factory(lambda: made)).run(rounds=1)


def test_a_wide_collector_may_be_given_as_an_object_or_made_in_its_worker() -> None:
    seen = []
    for collect in (wide(slots=2), PerWorker(TokenMachine), factory(lambda: wide(slots=9))):
        report = pipeline(collect=collect, train=TokenLearner()).run(rounds=3)
        seen.append(report.digest)
    assert len(set(seen)) == 1


# ---------------------------------------------------------------- learners


def test_a_learner_gets_batches_and_an_object_without_state_what_was_collected() -> None:
    for make, kind in ((Learns, Batch), (Trains, list)):
        kept = make()
        for train in (kept, factory(lambda kept=kept: kept)):
            pipeline(train=train).run(rounds=1)
        assert [type(one) for one in kept.got] == [kind, kind]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (NoTrain(), "the learner NoTrain has no train"),
        (HalfLearner(), "the learner HalfLearner has no load_state_dict"),
        (Nothing(), "the learner Nothing has no train and no weights"),
    ],
)
def test_learners_that_lack_a_method_are_refused_by_name(made: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pipeline(train=made)
    with pytest.raises(ConfigError, match=words):
        pipeline(train=factory(lambda: made)).run(rounds=1)


def test_a_state_is_not_lost_to_a_function_of_weights() -> None:
    class NoWeights:
        train, state_dict, load_state_dict = Learns.train, Learns.state_dict, Learns.load_state_dict

    with pytest.raises(ConfigError, match="NoWeights has no weights: it needs train"):
        pipeline(train=NoWeights(), weights=lambda: 0)


def test_a_train_function_needs_weights() -> None:
    with pytest.raises(ConfigError, match="Pipeline needs weights="):
        pipeline(train=lambda segments: None)


# ---------------------------------------------------------------- evaluators


class Evaluates:
    """Returns a number."""

    def evaluate(self, weights: Any, seed: int = 0) -> float:
        return float(seed > 0)


@pytest.mark.parametrize("evaluate", [Evaluates(), factory(Evaluates), lambda weights, seed: float(seed > 0)])
def test_evaluators_get_a_seed_and_may_return_a_number(evaluate: Any) -> None:
    report = pipeline(evaluate=evaluate).run(rounds=1)
    assert report.eval_metrics["eval/return_mean"] == 1.0


def test_only_what_is_meant_for_a_seed_gets_one() -> None:
    assert as_evaluator(lambda weights, episodes=3: episodes).evaluate(None, 8) == {"eval/return_mean": 3}
    assert as_evaluator(lambda weights, *, seed: seed).evaluate(None, 8) == {"eval/return_mean": 8}


def test_what_cannot_evaluate_is_refused() -> None:
    with pytest.raises(ConfigError, match="the evaluator Nothing has no evaluate"):
        pipeline(evaluate=Nothing())


# ---------------------------------------------------------------- callbacks


class Watching(Callback):
    """Takes SB3's name for a hook."""

    def on_step(self) -> None:
        pass


class Deeper(Watching):
    """Inherits it."""


class Fine(Callback):
    """Has names of its own that are no hooks."""

    on_purpose = True

    def only_mine(self) -> None:
        pass

    def _on_step(self) -> None:
        pass


@pytest.mark.parametrize("kind", [Watching, Deeper])
def test_hooks_that_are_never_called_are_refused_when_the_run_is_made(kind: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{kind.__name__}.on_step is never called; did you mean on_start\?"
    ):
        pipeline(callbacks=[Fine(), kind()])


def test_names_that_are_no_hooks_are_left_alone() -> None:
    pipeline(callbacks=[Fine()]).run(rounds=1)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (Callback, r"give Callback\(\)"),
        (print, "an object of such a class"),
        ({}, "inherits from offbeat.Callback"),
    ],
)
def test_what_is_no_callback_is_refused(given: Any, fix: str) -> None:
    with pytest.raises(ConfigError, match=fix):
        Pipeline(collect=lambda ticket, weights: 0, train=print, weights=dict, callbacks=[given])
