from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, ValidationError

import offbeat
from offbeat import algorithms
from offbeat.algorithms.ppo.config import PPOConfig
from offbeat.config.errors import ConfigProblems, Problem, did_you_mean
from offbeat.config.fields import allowed
from offbeat.config.layers import parse_value
from offbeat.config.loader import dump_yaml, load_config
from offbeat.config.models import (
    AlgorithmConfig,
    EnvConfig,
    ObserveConfig,
    RunConfig,
    Section,
    TensorBoardConfig,
)
from offbeat.config.plan import describe, plan, remarks, size_remarks, staleness_bound
from offbeat.config.recipes import RecipeBook
from offbeat.config.reference import render, shipped_algorithms
from offbeat.errors import ConfigError


class Network(Section):
    hidden: tuple[int, ...] = (64, 64)
    activation: str | None = None


class Learner(AlgorithmConfig):
    num_steps: int = Field(default=32, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    total: int | None = None
    network: Network | None = Network()

    def resolved(self, config: RunConfig) -> Self:
        return self.model_copy(update={"total": self.total or config.run.rounds * config.segments_per_round})

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        too_slow = self.lr > 1 and config.run.rounds > 10
        return [("lr", "too high for so many rounds; lower it to 1")] if too_slow else []


class Searcher(AlgorithmConfig):
    depth: int = 3


class Replayer(AlgorithmConfig):
    mode: ClassVar[Literal["stream", "replay"]] = "replay"
    batch_size: int = 10
    max_age: int | None = None
    replay_ratio: float | None = None

    def needed_segments(self, config: RunConfig) -> int:
        return max(config.segments_per_round, 320 // config.envs_per_worker)


class Hoarder(AlgorithmConfig):
    """A replay that says nothing about ages."""

    mode: ClassVar[Literal["stream", "replay"]] = "replay"


MODELS: dict[str, type[AlgorithmConfig]] = {
    "learner": Learner,
    "searcher": Searcher,
    "replayer": Replayer,
    "hoarder": Hoarder,
}


def model(name: str) -> type[AlgorithmConfig]:
    if name not in MODELS:
        raise ConfigError(f"there is no algorithm of this name; {did_you_mean(name, MODELS)}")
    return MODELS[name]


BASE = """\
# A pole to balance.
algorithm:
  name: learner
  lr: 1e-2
  network:
    hidden: [32, 32]
env:
  id: CartPole-v1
  num_envs: 64
  kwargs: {gravity: 9.8, names: [a, b]}
"""


@pytest.fixture
def book(tmp_path: Path) -> RecipeBook:
    directory = tmp_path / "recipes"
    directory.mkdir()
    (directory / "pole-learner.yaml").write_text(BASE)
    return RecipeBook(directory)


class Files:
    """Writes configuration files and loads them."""

    def __init__(self, directory: Path, book: RecipeBook) -> None:
        self.directory = directory
        self.book = book

    def write(self, text: str, name: str = "run.yaml") -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def load(self, text: str, overrides: Mapping[str, object] | Sequence[str] = ()) -> RunConfig:
        return load_config(self.write(text), overrides, algorithm_model=model, recipes=self.book)

    def recipe(self, *overrides: str) -> RunConfig:
        return load_config("pole-learner", overrides, algorithm_model=model, recipes=self.book)

    def problems(
        self, text: str, overrides: Mapping[str, object] | Sequence[str] = ()
    ) -> tuple[Problem, ...]:
        with pytest.raises(ConfigProblems) as caught:
            self.load(text, overrides)
        return caught.value.problems

    def refused(self, *overrides: str) -> tuple[Problem, ...]:
        with pytest.raises(ConfigProblems) as caught:
            self.recipe(*overrides)
        return caught.value.problems


@pytest.fixture
def files(tmp_path: Path, book: RecipeBook) -> Files:
    return Files(tmp_path, book)


EXTENDS = "extends: pole-learner\n"

# ---------------------------------------------------------------- error messages


def test_every_mistake_names_file_line_key_value_and_fix(files: Files) -> None:
    text = EXTENDS + "env:\n  num_env: 8\nalgorithm:\n  lr: fast\n"
    path = files.directory / "run.yaml"
    assert files.problems(text) == (
        Problem(f"{path}:3", "env.num_env", "8", "unknown key; did you mean num_envs?"),
        Problem(f"{path}:5", "algorithm.lr", "'fast'", "must be a number, above 0"),
    )


def test_message_lists_all_problems(files: Files) -> None:
    with pytest.raises(ConfigError) as caught:
        files.load(EXTENDS + "env:\n  num_env: 8\nalgorithm:\n  lr: fast\n")
    message = str(caught.value)
    assert message.startswith("2 problems in the configuration:")
    assert "run.yaml:3: env.num_env = 8\n    unknown key; did you mean num_envs?" in message
    assert "run.yaml:5: algorithm.lr = 'fast'\n    must be a number, above 0" in message


def test_problems_come_in_the_order_of_the_lines(files: Files) -> None:
    text = EXTENDS + "zzz: 1\nrun:\n  rounds: 0\nalgorithm:\n  lr: 0\nenv:\n  num_envs: -1\n"
    assert [problem.where.rpartition(":")[2] for problem in files.problems(text)] == ["2", "4", "6", "8"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.num_envs=eight", "must be a whole number, at least 1"),
        ("env.num_envs=true", "must be a whole number, at least 1"),
        ("env.num_envs='8'", "must be a whole number, at least 1"),
        ("env.num_envs=8.5", "must be a whole number, at least 1"),
        ("env.num_envs=null", "must be a whole number, at least 1"),
        ("env.max_episode_steps=0", "must be a whole number, at least 1, or null"),
        ("env.vectorize=fast", "must be one of auto, vector, loop"),
        ("env.kwargs=3", "must be a mapping"),
        ("env.id=3", "must be text, not empty"),
        ("run.stop_return=.inf", "must be a number or null, finite"),
        ("run.stop_return=true", "must be a number or null"),
        ("eval.at_end=1", "must be true or false"),
        ("checkpoint.keep=1", "must be a whole number, at least 2"),
        ("async_training.off_policy_degree=-2", "must be a whole number, at least -1"),
        ("algorithm.network=3", "must be a mapping with hidden, activation or null"),
        ("algorithm.network.hidden=[64, wide]", "must be a list of whole numbers"),
        ("algorithm.network.hiden=[64]", "unknown key; did you mean hidden?"),
        ("algorithm.activation=relu", "unknown key; did you mean algorithm.network.activation?"),
        ("algorithm.qqq=1", "unknown key; known: lr, name, network, num_steps, segments_per_round, total"),
        ("env=CartPole-v1", "must be a section: indented `key: value` lines"),
        ("algorithm=learner", "must be a section: indented `key: value` lines"),
        ("algorithm.name=lerner", "there is no algorithm of this name; did you mean learner?"),
        ("algorithm.name=3", "is required: the name of an algorithm (`offbeat list`)"),
        ("runtime.kind=process", "must be one of inline, threads, processes, ray"),
        ("off_policy_degre=1", "unknown key; did you mean async_training.off_policy_degree?"),
        (
            "observe.tensorboard=yes",
            "must be true or false or null, or a mapping with enabled, serve, port",
        ),
        ("observe.tensorboard.enabled=yes", "must be true or false or null"),
        ("observe.tensorboard.port=0", "must be a whole number, at least 1, at most 65535, or null"),
        ("observe.tensorboard.serv=true", "unknown key; did you mean serve?"),
        ("extends=pole-learner", None),
    ],
)
def test_one_wrong_override_gives_one_clear_problem(files: Files, override: str, message: str | None) -> None:
    (problem,) = files.refused(override)
    assert problem.where == "command line"
    assert problem.message == message or message is None
    assert override.startswith(problem.key)


def test_dotted_key_in_a_file_is_explained(files: Files) -> None:
    (problem,) = files.problems(EXTENDS + "env.num_envs: 8\n")
    assert problem.message == "unknown key; a dot does not nest in a file: write num_envs under env:"


def test_missing_keys_point_at_their_section_or_file(files: Files) -> None:
    path = files.directory / "run.yaml"
    assert files.problems("# nothing yet\nenv:\n  num_envs: 8\n") == (
        Problem(
            f"{path}:2", "algorithm.name", None, "is required: the name of an algorithm (`offbeat list`)"
        ),
        Problem(f"{path}:2", "env.id", None, "is required: text, not empty"),
    )


def test_problem_inside_an_extended_file_names_that_file(files: Files) -> None:
    base = files.write("extends: pole-learner\nrun:\n  round: 3\n", "base.yaml")
    (problem,) = files.problems("extends: base.yaml\nrun:\n  seed: 1\n")
    assert problem.where == f"{base}:3"
    assert problem.message == "unknown key; did you mean rounds?"


def test_replaced_list_does_not_keep_the_old_places(files: Files) -> None:
    (problem,) = files.problems(EXTENDS + "algorithm:\n  network:\n    hidden:\n      - 8\n      - x\n")
    assert problem.where.endswith("run.yaml:4")


def test_values_that_cannot_be_written_down_are_refused(files: Files) -> None:
    (problem,) = files.problems(EXTENDS, {"env.kwargs": {"render": object()}})
    assert problem.where == "overrides"
    assert problem.message.startswith("must hold plain values")


# ---------------------------------------------------------------- files that cannot be read


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("env:\n  id: [1,\nrun: 2\n", 2, "not valid YAML: a [ that is not closed"),
        ("env:\n  id: a: b\n", 2, "not valid YAML: mapping values are not allowed here"),
        ("env: {id: a\nrun:\n  rounds: 2\n", 1, "not valid YAML: a { that is not closed"),
        ("run:\n  rounds: 2\nenv: {id: a", 3, "not valid YAML: a { that is not closed"),
        ("env:\n\tid: a\n", 2, "not valid YAML: a tab; YAML is indented with spaces"),
        ("env:\n  id: *nobody\n", 2, "not valid YAML: found undefined alias"),
        ("run: {}\n---\nrun: {}\n", 2, "not valid YAML: expected a single document"),
        ("env:\n  id: a\x01\n", 2, "not valid YAML: a character that YAML does not allow"),
        ("\n- a\n- b\n", 2, "expected sections"),
    ],
)
def test_broken_yaml_names_the_line(files: Files, text: str, line: int, message: str) -> None:
    (problem,) = files.problems(text)
    assert problem.where.endswith(f"run.yaml:{line}")
    assert problem.message.startswith(message)


@pytest.mark.parametrize("text", ["", "# only a comment\n"])
def test_empty_file(files: Files, text: str) -> None:
    (problem,) = files.problems(text)
    assert "the file is empty" in problem.message


@pytest.mark.parametrize(
    ("text", "line", "key", "message"),
    [
        (
            "run:\n  seed: 1\n  rounds: 2\n  seed: 3\n",
            5,
            "run.seed",
            "written twice, first in line 3; keep one",
        ),
        ("run: {seed: 1}\nrun: {seed: 2}\n", 3, "run", "written twice, first in line 2; keep one"),
        ("env:\n  kwargs:\n    1: a\n", 4, "env.kwargs.1", "a key must be text; put it in quotes"),
        ("env:\n  kwargs:\n    ? [1, 2]\n    : a\n", 4, "env.kwargs", "a key must be text, not a list"),
        (f"run:\n  seed: 0x{'f' * 5000}\n", 3, "run.seed", "cannot be read: Exceeds the limit"),
        ("env:\n  kwargs: &a\n    b: *a\n", 3, "env.kwargs.b", "the alias contains itself"),
        (
            "env:\n  kwargs:\n    a: !!python/name:os.system x\n",
            4,
            "env.kwargs.a",
            "cannot be read: could not",
        ),
    ],
)
def test_mistakes_in_the_yaml_itself(files: Files, text: str, line: int, key: str, message: str) -> None:
    problem = files.problems(EXTENDS + text)[0]
    assert problem.where.endswith(f"run.yaml:{line}")
    assert problem.key == key
    assert problem.message.startswith(message)


def test_yaml_mistakes_and_wrong_values_are_reported_together(files: Files) -> None:
    found = files.problems(EXTENDS + "run:\n  seed: 1\n  seed: 2\n  rounds: many\n", ["nonsense"])
    assert {problem.key for problem in found} == {"run.seed", "run.rounds", ""}


def test_text_that_is_not_utf8(files: Files) -> None:
    path = files.directory / "run.yaml"
    path.write_bytes(b"env:\n  id: \xff\xfe\n")
    with pytest.raises(ConfigProblems, match="cannot be read: it is not UTF-8 text"):
        load_config(path, algorithm_model=model, recipes=files.book)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("pole-lerner", "did you mean the recipe pole-learner?"),
        ("pole-learner.yaml", "did you mean the recipe pole-learner?"),
        ("xyz", "recipes: pole-learner"),
        (Path("pole-learner"), "did you mean the recipe pole-learner?"),
        ("/", "is a directory"),
        ("x" * 5000, "cannot be read"),
    ],
)
def test_source_that_is_not_there(files: Files, source: str | Path, message: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        load_config(source, algorithm_model=model, recipes=files.book)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("extends", "message"),
    [
        ("pole-lerner", "did you mean the recipe pole-learner?"),
        ("other.yaml", "there is no file and no recipe of this name"),
        ("run.yaml", "the files extend each other in a circle"),
        ("[a, b]", "must be the name of a recipe or a file"),
    ],
)
def test_extends_that_leads_nowhere(files: Files, extends: str, message: str) -> None:
    (problem,) = files.problems(f"run: {{seed: 1}}\nextends: {extends}\n")
    assert problem.where.endswith("run.yaml:2")
    assert problem.key == "extends"
    assert message in problem.message


def test_longer_circle_is_found(files: Files) -> None:
    files.write("extends: run.yaml\n", "b.yaml")
    (problem,) = files.problems("extends: b.yaml\n")
    assert problem.where.endswith("b.yaml:1")
    assert "circle" in problem.message


# ---------------------------------------------------------------- layers


def test_later_layers_win_and_mappings_merge(files: Files) -> None:
    (files.directory / "sub").mkdir()
    files.write(
        "extends: pole-learner\nrun: {rounds: 7, seed: 7}\nenv: {kwargs: {length: 1}}\n", "sub/base.yaml"
    )
    text = "extends: sub/base.yaml\nrun:\n  seed: 8\n  name: mine\nalgorithm: {network: {hidden: [4]}}\n"
    config = files.load(text, ["run.name=yours", "env.kwargs.gravity=1"])
    assert (config.run.rounds, config.run.seed, config.run.name) == (7, 8, "yours")
    assert config.env.kwargs == {"gravity": 1, "names": ["a", "b"], "length": 1}
    assert config.env.id == "CartPole-v1"
    assert config.algorithm.model_dump()["network"]["hidden"] == (4,)
    assert config.runtime.num_workers == 2


def test_empty_section_changes_nothing(files: Files) -> None:
    assert files.load(EXTENDS + "env:\nrun:\n").env == files.recipe().env


def test_null_drops_inherited_kwargs(files: Files) -> None:
    assert files.recipe("env.kwargs=null").env.kwargs == {}


def test_naming_another_environment_drops_its_kwargs(files: Files) -> None:
    config = files.recipe("env.id=Acrobot-v1")
    assert config.env.kwargs == {}
    assert config.env.num_envs == 64
    assert files.recipe("env.id=CartPole-v1").env.kwargs == files.recipe().env.kwargs


def test_naming_another_algorithm_starts_its_section_afresh(files: Files) -> None:
    config = files.recipe("algorithm.name=searcher", "algorithm.depth=5")
    assert config.algorithm == Searcher(name="searcher", depth=5)


def test_later_override_wins_and_nested_mappings_are_taken(files: Files) -> None:
    given: dict[str, object] = {"run": {"seed": 1}, "run.rounds": 5}
    config = files.load(EXTENDS, given)
    assert (config.run.seed, config.run.rounds) == (1, 5)
    assert given == {"run": {"seed": 1}, "run.rounds": 5}
    assert files.recipe("run.seed=1", "run.seed=2").run.seed == 2


@pytest.mark.parametrize("text", ["nonsense", "=3", ""])
def test_override_without_key_or_value(files: Files, text: str) -> None:
    (problem,) = files.refused(text)
    assert problem.where == "command line"
    assert problem.message == f"{text!r} is not of the form key=value"


def test_override_that_is_not_yaml(files: Files) -> None:
    (problem,) = files.refused("env.kwargs={a: [1}")
    assert (problem.key, problem.given) == ("env.kwargs", "{a: [1}")
    assert problem.message.startswith("not valid YAML")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1e6", 1e6),
        ("no", "no"),
        ("true", True),
        ("null", None),
        ("", None),
        ("-1", -1),
        ("[1, b]", [1, "b"]),
        ("{a: 1}", {"a": 1}),
        ("2026-01-02", "2026-01-02"),
        ("'8'", "8"),
        ("a=b", "a=b"),
    ],
)
def test_values_are_yaml_1_2(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_whole_numbers_may_be_written_with_an_exponent(files: Files) -> None:
    config = files.recipe("run.rounds=1e3", "algorithm.total=2e3")
    assert (config.run.rounds, type(config.run.rounds)) == (1000, int)
    assert config.algorithm.model_dump()["total"] == 2000


def test_run_is_named_after_its_recipe_or_file(files: Files) -> None:
    assert files.recipe().run.name == "pole-learner"
    assert files.load(EXTENDS).run.name == "run"
    assert files.load(EXTENDS, ["run.name=other"]).run.name == "other"


def test_config_made_in_python_is_checked_and_overridden(files: Files) -> None:
    class Unregistered(AlgorithmConfig):
        sizes: tuple[int, ...] = (1, 2)

    config = RunConfig(algorithm=Unregistered(name="mine"), env=EnvConfig(id="CartPole-v1"))
    loaded = load_config(config, {"run.seed": 4, "algorithm.sizes": [3]}, algorithm_model=model)
    assert loaded.algorithm == Unregistered(name="mine", sizes=(3,))
    assert loaded.run.seed == 4
    with pytest.raises(ConfigProblems) as caught:
        load_config(config, {"runtime.num_workers": 3}, algorithm_model=model)
    assert caught.value.problems[0].where == "overrides"


# ---------------------------------------------------------------- checks over several fields


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["runtime.num_workers=3"], "runtime.num_workers", "set env.num_envs to 63 or 66"),
        (["env.num_envs=2", "runtime.num_workers=3"], "env.num_envs", "set env.num_envs to 3,"),
        (
            ["async_training.weight_sync_interval=2"],
            "async_training.weight_sync_interval",
            "set weight_sync_interval to at most 1, or off_policy_degree to 1 or more",
        ),
        (
            ["async_training.weight_sync_interval=4", "async_training.off_policy_degree=2"],
            "async_training.weight_sync_interval",
            "set weight_sync_interval to at most 3",
        ),
        (
            ["async_training.weight_sync_interval=2", "async_training.off_policy_degree=-1"],
            "async_training.weight_sync_interval",
            "set weight_sync_interval to at most 1",
        ),
        (
            ["async_training.off_policy_degree=3", "async_training.max_staleness_allowed=2"],
            "async_training.off_policy_degree",
            "lower it to 2",
        ),
        (
            ["async_training.off_policy_degree=-1", "async_training.max_staleness_allowed=7"],
            "async_training.max_staleness_allowed",
            "auto_max 8 is above max_staleness_allowed 7",
        ),
        (["async_training.max_queue_size=1"], "async_training.max_queue_size", "to 2 or more"),
        (
            ["algorithm.segments_per_round=5", "async_training.max_queue_size=4"],
            "async_training.max_queue_size",
            "to 5 or more",
        ),
        (["async_training.min_batch_count=3"], "async_training.min_batch_count", "set it to 2 or less"),
        (
            ["async_training.min_batch_count=5", "async_training.off_policy_degree=1"],
            "async_training.min_batch_count",
            "set it to 4 or less",
        ),
        (
            [
                "async_training.min_batch_count=4",
                "async_training.off_policy_degree=1",
                "async_training.max_queue_size=3",
            ],
            "async_training.min_batch_count",
            "set it to 3 or less",
        ),
        (["algorithm.lr=2"], "algorithm.lr", "too high for so many rounds"),
        (
            ["observe.tensorboard.enabled=false", "observe.tensorboard.serve=true"],
            "observe.tensorboard.serve",
            "set enabled to true, or serve to false",
        ),
    ],
)
def test_combinations_that_cannot_run(files: Files, overrides: list[str], key: str, fix: str) -> None:
    (problem,) = files.refused(*overrides)
    assert problem.where == "command line"
    assert problem.key == key
    assert fix in problem.message


@pytest.mark.parametrize(
    "overrides",
    [
        ["async_training.weight_sync_interval=3", "async_training.off_policy_degree=2"],
        ["async_training.max_staleness_allowed=2", "async_training.off_policy_degree=2"],
        ["async_training.max_staleness_allowed=0"],
        ["async_training.max_staleness_allowed=8", "async_training.off_policy_degree=-1"],
        ["async_training.max_queue_size=2"],
        ["async_training.min_batch_count=4", "async_training.off_policy_degree=1"],
        ["async_training.min_batch_count=18", "async_training.off_policy_degree=-1"],
        ["env.num_envs=3", "runtime.num_workers=3"],
        ["algorithm.lr=2", "run.rounds=10"],
    ],
)
def test_combinations_on_the_edge_can_run(files: Files, overrides: list[str]) -> None:
    files.recipe(*overrides)


@pytest.mark.parametrize("value", [True, False, None])
def test_a_bare_value_stands_for_the_whole_section_of_tensorboard(files: Files, value: bool | None) -> None:
    text = {True: "true", False: "false", None: "null"}[value]
    meant = TensorBoardConfig(enabled=value)
    assert files.recipe(f"observe.tensorboard={text}").observe.tensorboard == meant
    assert files.recipe(f"tensorboard={text}").observe.tensorboard == meant
    assert files.load(EXTENDS + f"observe:\n  tensorboard: {text}\n").observe.tensorboard == meant
    assert files.load(EXTENDS + f"tensorboard: {text}\n").observe.tensorboard == meant
    made = load_config(files.recipe(), {"observe.tensorboard": value}, algorithm_model=model)
    assert made.observe.tensorboard == meant
    assert ObserveConfig.model_validate({"tensorboard": value}).tensorboard == meant


def test_what_is_written_later_about_tensorboard_wins(files: Files) -> None:
    served = EXTENDS + "observe:\n  tensorboard:\n    serve: true\n    port: 6006\n"
    assert files.load(served).observe.tensorboard == TensorBoardConfig(serve=True, port=6006)
    assert files.load(served, ["tensorboard=false"]).observe.tensorboard == TensorBoardConfig(enabled=False)
    assert files.load(served, ["observe.tensorboard.port=7007"]).observe.tensorboard.serve
    refused = EXTENDS + "observe:\n  tensorboard: false\n"
    found = files.load(refused, ["observe.tensorboard.serve=true"]).observe.tensorboard
    assert found == TensorBoardConfig(serve=True)


def test_conflict_is_reported_where_the_user_wrote_last(files: Files) -> None:
    (problem,) = files.problems(EXTENDS + "runtime:\n  num_workers: 3\n")
    assert problem.where.endswith("run.yaml:3")
    (problem,) = files.problems(EXTENDS + "runtime:\n  num_workers: 3\n", ["env.num_envs=16"])
    assert (problem.where, problem.key, problem.given) == ("command line", "env.num_envs", "16")


def test_conflicts_and_wrong_values_are_reported_together(files: Files) -> None:
    found = files.refused("run.seed=x", "runtime.num_workers=3", "algorithm.lr=2")
    assert {problem.key for problem in found} == {"run.seed", "runtime.num_workers"}


def test_broken_section_raises_no_false_conflict(files: Files) -> None:
    (problem,) = files.refused("env.num_envs=many", "runtime.num_workers=3")
    assert problem.key == "env.num_envs"


def test_algorithm_fills_in_what_depends_on_the_run(files: Files) -> None:
    assert files.recipe("run.rounds=7").resolved().algorithm.model_dump()["total"] == 14


# ---------------------------------------------------------------- writing, describing

short_text = st.text(max_size=20)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | short_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_text, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(
    kwargs=st.dictionaries(short_text, plain_values, max_size=4),
    name=st.text(min_size=1, max_size=100),
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(min_value=0),
)
def test_dump_and_load_give_the_same_config(
    tmp_path_factory: pytest.TempPathFactory, kwargs: dict[str, Any], name: str, lr: float, seed: int
) -> None:
    made = RunConfig(algorithm=Learner(name="learner", lr=lr), env=EnvConfig(id="Pole", kwargs=kwargs))
    config = load_config(made, {"run.name": name, "run.seed": seed, "run.rounds": 3}, algorithm_model=model)
    path = tmp_path_factory.mktemp("dump") / "resolved.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(path, algorithm_model=model) == config


def test_plan_counts_samples_segments_and_memory(files: Files) -> None:
    config = files.recipe("async_training.off_policy_degree=1", "run.rounds=50")
    rows = plan(config, step_bytes=40)
    assert rows["round"] == "2 segments of 1,024 samples = 2,048 samples"
    assert rows["run"].startswith("50 rounds = 102,400 samples, seed 0, in runs/pole-learner-")
    assert rows["memory"].startswith("at most 4 segments")
    kept = "; a copy of the learner is kept for checkpoints"
    assert rows["memory"].endswith(f"about 41 KB each: 164 KB{kept}")
    assert rows["collectors"].startswith(
        "2 in processes of their own, each with 32 environments of CartPole-v1"
    )
    bound = "at most 1 version: collectors run up to 1 round ahead of the learner"
    assert rows["staleness"] == f"{bound}, one more every 3 rounds at the start"
    at_once = files.recipe("async_training.off_policy_degree=1", "async_training.open_rounds=0")
    assert plan(at_once)["staleness"] == bound


def test_the_plan_comes_first_and_what_differs_from_the_defaults_is_marked(files: Files) -> None:
    config = files.recipe(
        "async_training.off_policy_degree=1", "algorithm.network.hidden=[8, 8]", "eval.at_end=false"
    )
    text = describe(config, 40)
    assert text.startswith("plan:\n  collectors ")
    above, _, below = text.partition("\nconfiguration:\n")
    assert "the newest 2 and the best are kept" in above
    marked = [line.strip() for line in below.splitlines() if "# default:" in line]
    assert marked == [
        "lr: 0.01  # default: 0.001",
        "hidden:  # default: [64, 64]",
        "num_envs: 64  # default: 8",
        "kwargs:  # default: {}",
        "off_policy_degree: 1  # default: 0",
        "name: pole-learner  # default: null",
        "at_end: false  # default: true",
    ]
    assert files.load(below) == config.resolved()


def test_plan_of_an_algorithm_that_does_not_know_its_samples(files: Files) -> None:
    rows = plan(files.recipe("algorithm.name=searcher"), step_bytes=40)
    assert rows["round"] == "2 segments"
    most = "at most 2 segments collected or collecting at once"
    assert rows["memory"] == f"{most}; a copy of the learner is kept for checkpoints"
    assert plan(files.recipe("algorithm.name=searcher", "checkpoint.enabled=false"))["memory"] == most


def test_queue_size_caps_outstanding_segments(files: Files) -> None:
    dial = "async_training.off_policy_degree=3"
    assert files.recipe(dial).max_outstanding_segments == 8
    assert files.recipe(dial, "async_training.max_queue_size=5").max_outstanding_segments == 5


@pytest.mark.parametrize(
    ("degree", "words"), [(0, "strictly on-policy"), (3, "at most 3 versions"), (-1, "tuned")]
)
def test_staleness_in_words(files: Files, degree: int, words: str) -> None:
    assert words in staleness_bound(files.recipe(f"async_training.off_policy_degree={degree}"))


REPLAYER = "algorithm.name=replayer"


@pytest.mark.parametrize(
    ("degree", "words"),
    [
        (0, "collectors and learner take turns"),
        (1, "collectors run up to 1 round ahead of the learner"),
        (-1, "collectors run ahead of the learner by at most 8 rounds, tuned while running"),
    ],
)
def test_with_replay_the_dial_bounds_the_distance_and_not_the_age(
    files: Files, degree: int, words: str
) -> None:
    dial = f"async_training.off_policy_degree={degree}"
    shown = staleness_bound(files.recipe(REPLAYER, dial))
    assert shown == (
        f"{words}; what is drawn from the replay may be of any age: pace/max_replayed_age reports it,"
        " algorithm.max_age bounds it"
    )
    bounded = staleness_bound(files.recipe(REPLAYER, dial, "algorithm.max_age=3"))
    assert bounded == f"{words}; what is drawn from the replay is at most 3 versions old (algorithm.max_age)"
    plain = staleness_bound(files.recipe("algorithm.name=hoarder", dial))
    assert (
        plain == f"{words}; what is drawn from the replay may be of any age: pace/max_replayed_age reports it"
    )


def test_outstanding_segments_of_a_replay_count_what_fills_it(files: Files) -> None:
    kept = "; a copy of the learner with its replay is kept for checkpoints"
    assert (
        plan(files.recipe(REPLAYER))["memory"] == f"about 10 segments collected or collecting at once{kept}"
    )
    dial = "async_training.off_policy_degree=3"
    assert files.recipe(REPLAYER, dial).max_outstanding_segments == 16
    assert files.recipe(REPLAYER, dial, "algorithm.replay_ratio=0.25").max_outstanding_segments == 10 + 3 * 4
    assert files.recipe(dial, "algorithm.name=learner").max_outstanding_segments == 8
    assert files.recipe(REPLAYER, "async_training.min_batch_count=12").max_outstanding_segments == 12
    assert files.recipe(REPLAYER, dial, "async_training.max_queue_size=11").max_outstanding_segments == 11


def test_a_queue_that_the_first_round_of_a_replay_does_not_fit_in(files: Files) -> None:
    (problem,) = files.refused(REPLAYER, "async_training.max_queue_size=9")
    assert (problem.key, problem.where) == ("async_training.max_queue_size", "command line")
    assert problem.message == (
        "the first round waits for 10 segments, so with max_queue_size 9 it could never start:"
        " set max_queue_size to 10 or more, or change algorithm.batch_size or algorithm.replay_ratio"
    )
    (problem,) = files.refused(
        REPLAYER, "async_training.max_queue_size=11", "async_training.min_batch_count=12"
    )
    assert "set max_queue_size to 12 or more" in problem.message
    assert "async_training.min_batch_count" in problem.message
    assert files.recipe(REPLAYER, "async_training.max_queue_size=10").max_outstanding_segments == 10
    (problem,) = files.refused(REPLAYER, "async_training.max_queue_size=19", "algorithm.replay_ratio=0.05")
    assert "set max_queue_size to 20 or more" in problem.message


def test_a_worker_without_an_environment_is_the_only_complaint(files: Files) -> None:
    (problem,) = files.refused(
        REPLAYER, "env.num_envs=2", "runtime.num_workers=3", "async_training.max_queue_size=3"
    )
    assert "set env.num_envs to 3" in problem.message


def test_plan_of_a_run_on_ray(files: Files) -> None:
    rows = plan(files.recipe("runtime.kind=ray"))
    assert rows["collectors"].startswith("2 in Ray actors, each with 32 environments")
    assert rows["learner"] == "in a Ray actor, 1 torch thread"
    several = files.recipe("runtime.kind=ray", "learner.num_ranks=2")
    assert plan(several)["learner"] == "2 ranks in Ray actors, 1 torch thread each"
    here = files.recipe("learner.num_ranks=2")
    assert plan(here)["learner"] == "2 ranks in this process and others, 1 torch thread each"
    assert plan(files.recipe())["learner"] == "in this process, 1 torch thread"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["async_training.enable_async_eval=true"], "enable_async_eval has nothing to do"),
        (["eval.at_end=false"], "nothing is ever evaluated"),
        (["runtime.kind=inline", "async_training.off_policy_degree=1"], "saves no time"),
        (["async_training.batch_timeout=60"], "before a hung collector is replaced"),
        (["checkpoint.enabled=false"], "cannot be resumed"),
    ],
)
def test_remarks_on_settings_that_do_little(files: Files, overrides: list[str], words: str) -> None:
    (remark,) = remarks(files.recipe(*overrides))
    assert words in remark
    assert f"note: {remark}" in describe(files.recipe(*overrides))


def test_sizes_far_from_what_fits_are_remarked_on(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.config.checks.usable_cores", lambda: 4)
    assert size_remarks(files.recipe("runtime.num_workers=8", "async_training.off_policy_degree=100")) == []
    crowd, unbounded = size_remarks(
        files.recipe("runtime.num_workers=16", "run.rounds=9", "async_training.off_policy_degree=10")
    )
    assert crowd.startswith("16 collectors share 4 cores with the learner")
    assert "runtime.num_workers=3 to 8" in crowd
    assert unbounded == "off_policy_degree 10 is above run.rounds 9: it bounds nothing"
    assert size_remarks(files.recipe("runtime.num_workers=16", "runtime.kind=ray")) == []


@pytest.mark.parametrize(
    ("workers", "kind", "is_told"), [(5000, "processes", True), (5000, "ray", False), (5, "threads", False)]
)
def test_workers_without_environments_are_told_of_the_cores_too(
    files: Files, monkeypatch: pytest.MonkeyPatch, workers: int, kind: str, is_told: bool
) -> None:
    monkeypatch.setattr("offbeat.config.checks.usable_cores", lambda: 3)
    with pytest.raises(ConfigError, match=f"16 environments do not divide by {workers} workers") as caught:
        files.recipe("env.num_envs=16", f"runtime.num_workers={workers}", f"runtime.kind={kind}")
    told = "; 5,000 collectors share 3 cores with the learner"
    assert (told in str(caught.value)) == is_told
    assert ("runtime.num_workers=2 to 6 is as fast" in str(caught.value)) == is_told


def test_sound_config_has_no_remarks(files: Files) -> None:
    assert remarks(files.recipe()) == []


# ---------------------------------------------------------------- models


def sections() -> dict[str, type[Section]]:
    found = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    return {
        name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)
    }


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["runtime.heartbeat_interval_s=8.0"], "heartbeat_interval_s to at most 4"),
        (["trainer.n_gpus_per_node=2"], "set trainer.device to cuda"),
        (["rollout.device=cuda", "runtime.kind=ray"], "set rollout.n_gpus_per_node to 1 or more"),
        (["rollout.n_gpus_per_node=1"], "set runtime.kind to ray"),
        (["rollout.n_gpus_per_node=1", "runtime.kind=ray"], "set rollout.device to cuda"),
        (["rollout.device=cuda"], "collectors of ppo act on the CPU: set rollout.device to cpu"),
    ],
)
def test_machines_that_cannot_mean_what_they_say_are_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        offbeat.load_config("cartpole-ppo", overrides)


def test_fixed_keys_exist() -> None:
    assert list(sections()) == [
        "algorithm", "env", "async_training", "runtime", "learner", "trainer", "rollout", "run", "eval",
        "checkpoint", "observe",
    ]  # fmt: skip
    fixed = {
        "run": {"dir", "rounds", "seed"},
        "runtime": {"kind", "num_workers"},
        "env": {"id", "num_envs"},
        "async_training": {
            "off_policy_degree", "enable_async_eval", "weight_sync_interval", "staleness_threshold",
            "max_staleness_allowed", "max_queue_size", "min_batch_count", "batch_timeout",
            "generation_timeout", "batch_generation_interval", "max_sync_retries", "sync_timeout",
            "sync_retry_delay", "enable_async_debug_log",
        },
    }  # fmt: skip
    for name, keys in fixed.items():
        assert keys <= set(sections()[name].model_fields)


@pytest.mark.parametrize("name", list(sections()))
def test_every_field_is_described(name: str) -> None:
    for key, field in sections()[name].model_fields.items():
        assert field.description, key
        assert field.description.endswith("."), key


def test_models_are_frozen_and_strict() -> None:
    env = EnvConfig(id="Pole")
    with pytest.raises(ValidationError):
        env.num_envs = 3
    with pytest.raises(ValidationError):
        EnvConfig.model_validate({"id": "Pole", "num_env": 3})


def test_nested_optional_lists_read_well() -> None:
    class Sample(Section):
        sizes: list[float] | None = None
        pair: tuple[int, str] = (1, "a")
        anything: Any = None

    said = {name: allowed(field) for name, field in Sample.model_fields.items()}
    assert said == {
        "sizes": "a list of numbers or null",
        "pair": "a list of 2 values: a whole number, text",
        "anything": "any value",
    }


# ---------------------------------------------------------------- recipes and registry


def test_recipes_are_listed_with_their_first_sentence(book: RecipeBook) -> None:
    (book.directory / "another.yaml").write_text("env: {id: x}\n")
    (book.directory / "long.yaml").write_text("# Two poles,\n# one cart. And more.\nenv: {id: x}\n# End.\n")
    assert book.names() == ["another", "long", "pole-learner"]
    assert book.description("long") == "Two poles, one cart."
    assert book.description("pole-learner") == "A pole to balance."
    assert book.description("another") == ""


@pytest.mark.parametrize("name", RecipeBook().names())
def test_shipped_recipes_load_and_say_what_they_are(name: str) -> None:
    assert RecipeBook().description(name).endswith(".")
    config = offbeat.load_config(name)
    assert not any("has nothing to do" in text for text in remarks(config))
    assert config.run.name == name
    assert config.algorithm.name in algorithms.BUILTIN


def test_shipped_recipe_reports_both_mistakes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("extends: cartpole-ppo\nenv:\n  num_env: 8\nalgorithm:\n  lr: fast\n")
    with pytest.raises(ConfigProblems) as caught:
        offbeat.load_config(path)
    first, second = caught.value.problems
    assert (first.where, first.message) == (f"{path}:3", "unknown key; did you mean num_envs?")
    assert (second.where, second.message) == (f"{path}:5", "must be a number, above 0, or null")


def test_builtin_algorithms_are_found() -> None:
    for name in algorithms.BUILTIN:
        assert algorithms.find(name).name == name
        assert name in algorithms.names()


def test_unknown_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean ppo"):
        algorithms.find("pppo")


def plug_in(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    point = importlib.metadata.EntryPoint("mine", target, algorithms.GROUP)

    def installed(group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [point] if group == algorithms.GROUP and name in (None, "mine") else []

    monkeypatch.setattr(algorithms, "entry_points", installed)


def test_plugin_is_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, algorithms.BUILTIN["ppo"])
    assert algorithms.names() == sorted({"mine", *algorithms.BUILTIN})
    assert algorithms.find("mine") is algorithms.find("ppo")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:ALGORITHM", "cannot be imported: ModuleNotFoundError"),
        ("offbeat.errors:NOTHING", "cannot be imported: AttributeError"),
        ("offbeat.errors:OffbeatError", "which is no Algorithm"),
    ],
)
def test_broken_plugin_is_a_visible_error(monkeypatch: pytest.MonkeyPatch, target: str, message: str) -> None:
    plug_in(monkeypatch, target)
    with pytest.raises(ConfigError, match=message):
        algorithms.find("mine")


def test_algorithm_is_found_as_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_algorithm.py").write_text(
        "from offbeat.algorithms.ppo import ALGORITHM as MINE\nOTHER = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert algorithms.find("my_algorithm:MINE") is algorithms.find("ppo")
    for name, message in (
        ("my_algorithm:OTHER", "is no Algorithm"),
        ("my_algorithm:NONE", "AttributeError"),
        ("no_such_module:MINE", r"cannot be imported: ModuleNotFoundError.*it is module:NAME"),
        ("antigravity:MINE", "antigravity is a module of Python itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            algorithms.find(name)


def test_registered_algorithm_is_known_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "_REGISTERED", {})
    mine = replace(algorithms.find("ppo"), name="mine")
    assert offbeat.register(mine) is mine
    assert algorithms.find("mine") is mine
    assert "mine" in algorithms.names()
    for name in ("ppo", "a:b"):
        with pytest.raises(ConfigError, match="choose a name"):
            offbeat.register(replace(mine, name=name))
    with pytest.raises(ConfigError, match="no Algorithm"):
        offbeat.register(PPOConfig)  # type: ignore[arg-type]


def test_reference_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    written = page.read_text(encoding="utf-8")
    assert written == render(shipped_algorithms()), "run `python -m offbeat.config.reference`"
