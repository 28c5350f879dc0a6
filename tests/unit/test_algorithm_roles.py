"""Roles of all algorithms."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.algorithms.base import Algorithm, Roles
from offbeat.cli.main import main
from offbeat.config.models import AlgorithmConfig, RunConfig
from offbeat.errors import ConfigError
from offbeat.roles import PerWorker
from offbeat.run.start import make_roles

RECIPES = [
    *("cartpole-ppo", "cartpole-ppo-per", "cartpole-muzero", "cartpole-unizero"),
    *("alice-bob-mappo", "alice-bob-hmasd"),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_roles_are_pickled_without_cloudpickle(recipe: str) -> None:
    roles = make_roles(offbeat.load_config(recipe))
    pickle.loads(pickle.dumps(roles))


class Still:
    """A learner that learns nothing."""

    def train(self, batch: Any) -> dict[str, float]:
        return {}

    def weights(self) -> Any:
        return {}

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


class NoTrain:
    """A learner that cannot train."""

    weights = state_dict = load_state_dict = Still.weights


def bare_roles(config: RunConfig, learner: Any) -> Roles:
    """Only what a run cannot do without."""
    return Roles(
        collect=PerWorker(lambda context: lambda ticket, weights: None),
        learner=lambda ranks: learner(),
        policy=lambda weights: None,  # type: ignore[arg-type,return-value]
        mode="stream",
        segments_per_round=1,
    )


BARE = Algorithm("bare", AlgorithmConfig, lambda config: bare_roles(config, Still))
BROKEN = Algorithm("broken", AlgorithmConfig, lambda config: bare_roles(config, NoTrain))


def settings(directory: Path, name: str) -> dict[str, object]:
    return {
        "algorithm.name": f"tests.unit.test_algorithm_roles:{name}",
        "run.dir": str(directory),
        "runtime.kind": "inline",
        "runtime.num_workers": 1,
        "observe.console": "none",
        "observe.tensorboard": False,
    }


def test_runs_without_an_evaluator_train_and_say_that_they_cannot_be_evaluated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    result = offbeat.train("cartpole-ppo", rounds=2, overrides=settings(run, "BARE"))
    assert result.eval_return is None and not result.has_evaluator
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(run)])
    assert ended.value.code == 2
    note, said = capfd.readouterr().err.strip().splitlines()
    assert note.startswith("note: this runs code of tests.unit.test_algorithm_roles")
    assert said.startswith("error: the algorithm 'tests.unit.test_algorithm_roles:BARE' has no evaluator")
    assert len(said.splitlines()) == 1


def test_learner_without_train_is_refused_when_it_is_built(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the algorithm's learner NoTrain has no train: it needs train"):
        offbeat.train("cartpole-ppo", rounds=2, overrides=settings(tmp_path / "run", "BROKEN"))
    assert not (tmp_path / "run").exists()


def test_algorithms_may_use_the_older_names_of_what_they_give() -> None:
    given = {"facts": lambda config: {}, "look": lambda env: None, "show": lambda env, mode: None}
    older = Algorithm("older", AlgorithmConfig, BARE.build, **given)  # type: ignore[arg-type]
    found = (older.startup_notes, older.probe_env, older.make_render_env)
    assert found == tuple(given.values())
    assert tuple(getattr(older, name) for name in given) == found
    assert replace(older, name="newer").probe_env is given["look"]
    with pytest.raises(TypeError, match="fact"):
        Algorithm("wrong", AlgorithmConfig, BARE.build, fact=None)  # type: ignore[call-arg]
