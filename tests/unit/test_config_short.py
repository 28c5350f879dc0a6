"""Settings without their section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

import offbeat
from offbeat.algorithms.ppo import PPOConfig
from offbeat.config import short
from offbeat.config.errors import ConfigProblems, Problem
from offbeat.config.layers import parse_value
from offbeat.config.loader import dump_yaml, load_config
from offbeat.config.models import AlgorithmConfig, EnvConfig, RunConfig, Section
from offbeat.errors import ConfigError


class Network(Section):
    hidden: int = 8


class Learner(AlgorithmConfig):
    lr: float = Field(default=1e-3, gt=0)
    batch_size: int = 32
    network: Network = Network()


class Searcher(AlgorithmConfig):
    depth: int = 3


def model(name: str) -> type[AlgorithmConfig]:
    models: dict[str, type[AlgorithmConfig]] = {"learner": Learner, "searcher": Searcher}
    if name not in models:
        raise ConfigError("there is no algorithm of this name")
    return models[name]


FULL = "algorithm:\n  name: learner\nenv:\n  id: CartPole-v1\n"
Overrides = Mapping[str, object] | Sequence[str]


class Files:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, text: str, name: str = "run.yaml") -> Path:
        path = self.directory / name
        path.write_text(text)
        return path

    def load(self, text: str, overrides: Overrides = ()) -> RunConfig:
        return load_config(self.write(text), overrides, algorithm_model=model)

    def problems(self, text: str, overrides: Overrides = ()) -> tuple[Problem, ...]:
        with pytest.raises(ConfigProblems) as caught:
            self.load(text, overrides)
        return caught.value.problems


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_the_keys_of_a_flat_script_work_on_the_command_line(files: Files) -> None:
    given = ["num_workers=4", "lr=1e-2", "batch_size=64", "num_iterations=500", "eval_interval=5"]
    more = ["save_interval=7", "off_policy_degree=2", "weight_sync_interval=3", "use_wandb=true", "seed=9"]
    config = files.load(FULL, given + more)
    assert isinstance(config.algorithm, Learner)
    assert (config.runtime.num_workers, config.algorithm.lr, config.algorithm.batch_size) == (4, 1e-2, 64)
    assert (config.run.rounds, config.eval.interval_rounds, config.checkpoint.interval_rounds) == (500, 5, 7)
    assert config.async_training.off_policy_degree == 2
    assert config.async_training.weight_sync_interval == 3
    assert (config.observe.use_wandb, config.run.seed) == (True, 9)


def test_they_work_at_the_top_of_a_file_and_as_a_mapping(files: Files) -> None:
    assert files.load(FULL + "lr: 0.5\nnum_iterations: 7\n") == files.load(
        FULL, {"algorithm.lr": 0.5, "run.rounds": 7}
    )
    assert files.load(FULL, {"lr": 0.5, "num_iterations": 7}) == files.load(FULL, ["lr=0.5", "rounds=7"])


def test_what_a_run_writes_has_full_keys(files: Files) -> None:
    written = dump_yaml(files.load(FULL, ["lr=0.5", "num_iterations=7"]))
    assert "num_iterations" not in written
    assert files.load(written).run.rounds == 7


def test_wrong_values_name_the_line_and_the_full_key(files: Files) -> None:
    path = files.directory / "run.yaml"
    assert files.problems(FULL + "lr: fast\nkwargs:\n  - 1\n") == (
        Problem(f"{path}:5", "algorithm.lr", "'fast'", "must be a number, above 0"),
        Problem(f"{path}:6", "env.kwargs", "[1]", "must be a mapping"),
    )
    (problem,) = files.problems(FULL, ["num_iterations=0"])
    assert (problem.where, problem.key) == ("command line", "run.rounds")


def test_conflicts_are_found_at_the_short_name(files: Files) -> None:
    (problem,) = files.problems(FULL + "num_workers: 3\n")
    assert problem.where.endswith("run.yaml:5")
    assert problem.key == "runtime.num_workers"


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("num_envs", "env.num_envs or eval.num_envs"),
        ("name", "algorithm.name or run.name"),
        ("nnodes", "trainer.nnodes or rollout.nnodes"),
    ],
)
def test_a_name_with_several_homes_is_refused(files: Files, name: str, homes: str) -> None:
    (problem,) = files.problems(FULL, [f"{name}=4"])
    assert problem.key == name
    assert problem.message.startswith(f"could be {homes}: write it")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("num_worker=4", "did you mean runtime.num_workers?"),
        ("num-workers=4", "did you mean runtime.num_workers?"),
        ("num_iteration=4", "did you mean num_iterations (run.rounds)?"),
        ("num_envz=4", "did you mean env.num_envs or eval.num_envs?"),
        ("depht=4", None),
        ("evaal.episodes=4", "did you mean eval?"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(files: Files, override: str, hint: str | None) -> None:
    (problem,) = files.problems(FULL, [override])
    assert problem.message.startswith("unknown key; ")
    assert hint is None or problem.message == f"unknown key; {hint}"
    assert hint is not None or "depth" not in problem.message


def test_a_section_within_a_section_can_be_written_without_it(files: Files) -> None:
    assert files.load(FULL, ["network.hidden=4"]).algorithm.network.hidden == 4
    assert files.load(FULL + "network:\n  hidden: 5\n").algorithm.network.hidden == 5
    (problem,) = files.problems(FULL, ["network.hidden=4", "algorithm.network.hidden=5"])
    assert "stands for algorithm.network" in problem.message


def test_an_alias_of_a_field_that_the_algorithm_lacks_is_unknown(files: Files) -> None:
    assert files.load(FULL, ["learning_rate=0.5"]).algorithm.lr == 0.5
    (problem,) = files.problems(FULL.replace("learner", "searcher"), ["learning_rate=0.5"])
    assert problem.message.startswith("unknown key")


def test_a_key_of_another_algorithm_is_said_to_be_one(files: Files) -> None:
    path = files.write(FULL)
    for override in ("depth=4", "algorithm.depth=4"):
        with pytest.raises(ConfigProblems) as caught:
            load_config(path, [override], algorithm_model=model, algorithms=("learner", "searcher"))
        (problem,) = caught.value.problems
        assert problem.message.startswith("belongs to the algorithm searcher: set algorithm.name")


def test_keys_of_nested_sections_have_no_short_name(files: Files) -> None:
    (problem,) = files.problems(FULL, ["hidden=4"])
    assert problem.message.startswith("unknown key")


@pytest.mark.parametrize(
    ("text", "overrides", "key", "line"),
    [
        ("  lr: 1.0\nlr: 2.0\n", [], "lr", ", in line 5"),
        ("", ["algorithm.lr=1", "lr=2"], "lr", ""),
        ("", ["lr=1", "algorithm.lr=2"], "lr", ""),
    ],
)
def test_written_both_ways(files: Files, text: str, overrides: list[str], key: str, line: str) -> None:
    start = "env:\n  id: CartPole-v1\nalgorithm:\n  name: learner\n"
    (problem,) = files.problems(start + text, overrides)
    assert problem.key == key
    assert problem.message == f"stands for algorithm.lr, which is written too{line}; keep one of them"


def test_an_alias_and_its_field_in_one_layer(files: Files) -> None:
    (problem,) = files.problems(FULL, ["num_iterations=3", "rounds=4"])
    assert "stands for run.rounds" in problem.message


def test_layers_win_over_each_other_however_they_are_written(files: Files) -> None:
    files.write(FULL + "lr: 0.1\nrun:\n  rounds: 5\n", "base.yaml")
    config = files.load("extends: base.yaml\nalgorithm:\n  lr: 0.2\nnum_iterations: 6\n", ["lr=0.3"])
    assert isinstance(config.algorithm, Learner)
    assert (config.algorithm.lr, config.run.rounds) == (0.3, 6)


def test_each_layer_is_read_with_its_own_algorithm(files: Files) -> None:
    files.write(FULL + "lr: 0.1\n", "base.yaml")
    config = files.load("extends: base.yaml\nalgorithm:\n  name: searcher\ndepth: 9\n")
    assert isinstance(config.algorithm, Searcher)
    assert config.algorithm.depth == 9
    assert "lr" in files.problems("extends: base.yaml\nalgorithm:\n  name: searcher\nlr: 1\n")[0].key


def test_the_algorithm_may_be_named_in_a_later_layer(files: Files) -> None:
    config = files.load("env:\n  id: CartPole-v1\nlr: 0.1\n", ["algorithm.name=learner"])
    assert isinstance(config.algorithm, Learner)
    assert config.algorithm.lr == 0.1


@pytest.mark.parametrize("text", ["algorithm:\n  name: lerner\nenv:\n  id: X\n", "env:\n  id: X\n"])
def test_short_names_of_an_unknown_algorithm_are_not_blamed(files: Files, text: str) -> None:
    (problem,) = files.problems(text + "lr: 0.1\n")
    assert problem.key == "algorithm.name"


def test_parts_of_a_mapping_merge(files: Files) -> None:
    config = files.load(FULL + "kwargs: {gravity: 1.0, mass: 2.0}\n", ["kwargs.gravity=5"])
    assert config.env.kwargs == {"gravity": 5, "mass": 2.0}


def test_a_section_that_is_none_is_the_one_mistake(files: Files) -> None:
    (problem,) = files.problems(FULL, ["run=3", "rounds=4"])
    assert problem.key == "run"


def test_every_alias_leads_to_a_field_that_has_another_name() -> None:
    for name, full in short.ALIASES.items():
        section, field = full.split(".")
        model = PPOConfig if section == "algorithm" else RunConfig.model_fields[section].annotation
        assert isinstance(model, type)
        assert issubclass(model, Section)
        assert field in model.model_fields
        assert name not in model.model_fields


SCRIPT = """\
num_workers=2 batch_size=64 min_buffer_size=128 weight_sync_interval=2 buffer_capacity=512 per_alpha=0.5
per_beta_start=0.3 num_iterations=20 eval_interval=5 save_interval=10 num_epochs=3 warmup_seconds=1.0 lr=1e-3
use_wandb=true"""


def test_the_keys_of_a_replay_script_each_have_one_home() -> None:
    names = [text.partition("=")[0] for text in SCRIPT.split()]
    base = offbeat.load_config("cartpole-ppo-per")
    full = short.full_keys(names, base)
    assert len(full) == len(names) == 14
    values = offbeat.load_config("cartpole-ppo-per", SCRIPT.split()).model_dump()
    for key, text in zip(full, SCRIPT.split(), strict=True):
        section, field = key.split(".")
        assert values[section][field] == parse_value(text.partition("=")[2]), key


def test_full_keys_leaves_out_what_loading_refuses() -> None:
    config = RunConfig(algorithm=Learner(name="learner"), env=EnvConfig(id="x"))
    keys = ["lr", "num_iterations", "num_envs", "what", "eval", "env.kwargs.g", "run.roundz", "rum.rounds"]
    assert short.full_keys(keys, config) == ["algorithm.lr", "run.rounds", "eval", "env.kwargs.g"]


# ---------------------------------------------------------------- resuming


def test_resume_takes_short_names_and_refuses_what_cannot_change(small_run: Callable[..., Any]) -> None:
    run = small_run({"run.rounds": 2, "runtime.kind": "inline", "run.stop_return": None}).run_dir
    with pytest.raises(ConfigError, match=r"algorithm\.lr cannot change"):
        offbeat.resume(run, overrides=["lr=1e-3"])
    with pytest.raises(ConfigError, match=r"could be env\.num_envs or eval\.num_envs"):
        offbeat.resume(run, overrides=["num_envs=4"])
    with pytest.raises(ConfigError, match=r"did you mean num_iterations"):
        offbeat.resume(run, overrides=["num_iteration=4"])
    for unknown in ("run.roundz=9", "algorithm.network.knd=gru"):
        with pytest.raises(ConfigError, match=r"unknown key; did you mean (rounds|kind)\?"):
            offbeat.resume(run, overrides=[unknown])
    with pytest.raises(ConfigError, match=r"env\.kwargs\.gravity cannot change when a run is resumed"):
        offbeat.resume(run, overrides=["env.kwargs.gravity=1"])
    with pytest.raises(ConfigError, match=r"algorithm\.lr cannot change when a run is evaluated: leave"):
        offbeat.evaluate(run, overrides=["lr=abc"])
    assert offbeat.resume(run, overrides=["num_iterations=3"]).rounds == 3
    assert offbeat.load_config(run / "config.yaml").run.rounds == 3
