"""Advice is given once, when it is due, and names the setting."""

from __future__ import annotations

import pytest

from offbeat.observe.advice import Advisor, action_dependence
from offbeat.pacing.config import AUTO
from offbeat.pacing.events import DialTurned, EvalDone, RoundTrained, Signals
from offbeat.types import Batch

FAR = Signals(behaviour_kl=0.3, ess=0.8)
NEAR = Signals(behaviour_kl=0.02, ess=0.95)


class Run:
    """Tells an advisor what happens, and keeps its advice."""

    def __init__(self, dial: int = 4) -> None:
        self.advice: list[str] = []
        self.version = 0
        self.handlers = Advisor(dial, self.advice.append).handlers()

    def tell(self, event: RoundTrained | EvalDone | DialTurned) -> None:
        self.handlers[type(event)](event, 0.0)

    def train(self, *rounds: Signals, degree: int = 4) -> Run:
        for signals in rounds:
            self.version += 1
            self.tell(RoundTrained(self.version, Batch(self.version - 1, (), degree), signals=signals))
        return self

    def evaluate(self, likely: float, drawn: float | None, std: float = 30.0, episodes: int = 10) -> Run:
        metrics = {"eval/return_mean": likely, "eval/return_std": 0.0, "eval/episodes": float(episodes)}
        if drawn is not None:
            metrics |= {"eval/return_mean_sampled": drawn, "eval/return_std_sampled": std}
        self.tell(EvalDone(self.version, metrics))
        return self


@pytest.mark.parametrize(
    ("signals", "found"),
    [
        (FAR, "mean of 5 rounds until 5: KL to the policy that acted is 0.300, above 0.1: at k = 4 "),
        (Signals(ess=0.3), "effective sample size is 0.30, below 0.5"),
        (Signals(behaviour_kl=0.2), "KL to the policy that acted is 0.200"),
        (Signals(search_kl=0.7), "KL of searches to the network is 0.700, above 0.5"),
    ],
)
def test_samples_of_another_policy_are_told_once(signals: Signals, found: str) -> None:
    assert Run().train(*[signals] * 4).advice == []
    (advice,) = Run().train(*[signals] * 20).advice
    assert "Lower async_training.off_policy_degree" in advice
    assert found in advice


def test_the_mean_of_several_rounds_at_one_k_decides() -> None:
    assert Run().train(FAR, NEAR, NEAR, NEAR, NEAR, FAR, NEAR).advice == []
    assert Run().train(*[Signals()] * 9).advice == []
    run = Run()
    for degree in (1, 2, 3):
        run.train(FAR, FAR, FAR, degree=degree)
    assert run.advice == []


def test_where_k_is_0_or_tuned_there_is_nothing_to_lower() -> None:
    assert Run(0).train(*[FAR] * 9, degree=0).advice == []
    assert Run(AUTO).train(*[FAR] * 9).advice == []
    run = Run()
    run.tell(DialTurned(AUTO))
    assert run.train(*[FAR] * 9).advice == []
    run.tell(DialTurned(4))
    assert len(run.train(*[FAR] * 9).advice) == 1


def test_an_evaluation_that_depends_on_how_actions_are_chosen_is_told_once() -> None:
    (advice,) = Run().evaluate(-500.0, -136.7).evaluate(-500.0, -130.0).advice
    assert "return -500.0 with the most likely actions, but -136.7 with drawn ones" in advice
    assert "eval.deterministic=false" in advice
    assert advice.startswith("evaluation of version 0: return ")


@pytest.mark.parametrize(
    ("likely", "drawn", "std"),
    [(-85.0, -95.0, 10.0), (9.4, 22.0, 11.0), (500.0, 490.0, 1.0), (300.0, None, 0.0), (0.0, 0.0, 0.0)],
)
def test_other_evaluations_are_left_alone(likely: float, drawn: float | None, std: float) -> None:
    run = Run()
    run.tell(EvalDone(0, None, error="no episode ended"))
    assert run.evaluate(likely, drawn, std).advice == []
    assert Run().evaluate(-500.0, -136.7, episodes=2).advice == []
    assert action_dependence({}) is None


@pytest.mark.parametrize("degree", [0, 2])
def test_what_a_larger_k_could_gain_is_told_once(degree: int) -> None:
    first = Signals(round_s=9.0, collect_s=1.0, train_s=8.0)  # the first round compiles
    later = Signals(round_s=2.0, collect_s=1.6, train_s=0.4)
    assert Run(degree).train(*[first] * 5, *[later] * 19, degree=degree).advice == []
    (advice,) = Run(degree).train(*[first] * 5, *[later] * 60, degree=degree).advice
    assert advice.startswith(
        "mean of 20 rounds until 25: collecting takes 1.6 s and training 0.4 s of rounds"
    )
    assert f"collecting is the bottleneck. At k = {degree}, a larger k could make rounds 25% faster" in advice
    assert "add collectors" in advice
    other = later._replace(collect_s=0.5, train_s=2.0)
    (advice,) = Run(degree).train(*[other] * 30, degree=degree).advice
    assert "training is the bottleneck" in advice
    assert " 0% faster" in advice


def test_short_rounds_changing_k_and_runs_without_parallel_work_say_nothing_of_time() -> None:
    slow = Signals(round_s=2.0, collect_s=1.0, train_s=1.0)
    assert Run().train(*[slow._replace(round_s=0.05)] * 60).advice == []
    assert Run(AUTO).train(*[slow] * 60).advice == []
    run = Run()
    for degree in (1, 2, 3):
        run.train(*[slow] * 20, degree=degree)
    assert run.advice == []
    run.handlers = Advisor(0, run.advice.append, is_parallel=False).handlers()
    assert run.train(*[slow] * 60, degree=0).advice == []
