"""Settings of PPO with prioritized replay: what is resolved, what is refused, what is told beforehand."""

import subprocess
import sys

import cloudpickle
import numpy as np
import psutil
import pytest
from pydantic import ValidationError

import offbeat
from offbeat import algorithms
from offbeat.algorithms.ppo import PPOConfig
from offbeat.algorithms.ppo_per import ALGORITHM, PPOPERConfig
from offbeat.algorithms.ppo_per.build import make_explore, replay_bytes
from offbeat.algorithms.ppo_per.config import per_config
from offbeat.config.models import EnvConfig, RunConfig, RunSection
from offbeat.errors import ConfigError
from offbeat.models.spec import NetworkConfig, network_spec
from tests.unit.ppo_per_fakes import run_config
from tests.unit.test_ppo_collector import CASES

RECIPE = "cartpole-ppo-per"


def resolved(degree=0, num_workers=1, num_envs=4, rounds=40, **options):
    return per_config(
        run_config(PPOPERConfig(**options), degree, rounds, num_envs=num_envs, num_workers=num_workers)
    )


@pytest.mark.parametrize(
    ("written", "resolution"), [("auto", "decoupled"), ("vtrace", "vtrace"), ("decoupled", "decoupled")]
)
@pytest.mark.parametrize("degree", [0, 3])
def test_replayed_samples_are_corrected_at_any_dial(written, resolution, degree):
    assert resolved(degree, correction=written).correction == resolution


def test_what_is_left_open_follows_the_run():
    config = resolved(num_workers=4, num_envs=8, batch_size=64)
    assert config.replay_ratio == 0.25
    assert config.min_buffer_size == 64
    assert config.schedule_rounds == 40
    written = resolved(replay_ratio=2.5, min_buffer_size=200, schedule_rounds=7)
    assert (written.replay_ratio, written.min_buffer_size, written.schedule_rounds) == (2.5, 200, 7)
    assert resolved(replay_ratio=None).replay_ratio is None
    assert per_config(run_config(config, num_workers=4, num_envs=8)) == config


def test_segments_of_workers_that_fill_the_first_batches():
    config = PPOPERConfig(min_buffer_size=100)
    assert config.min_segments(run_config(config, num_envs=64, num_workers=2)) == 4
    assert config.min_segments(run_config(config, num_envs=100)) == 1
    assert PPOPERConfig(batch_size=65).min_segments(run_config(config, num_envs=64)) == 2


@pytest.mark.parametrize(("num_workers", "least", "needed"), [(2, 100, 4), (2, 32, 2), (8, 32, 8)])
def test_segments_that_the_first_round_waits_for(num_workers, least, needed):
    """Those of a whole round, or more where the replay is to be filled first."""
    run = run_config(PPOPERConfig(min_buffer_size=least), num_envs=64, num_workers=num_workers)
    if num_workers == 2:
        assert run.segments_per_round == 2
    assert run.algorithm.needed_segments(run) == needed


def test_exploration_fades_unless_told_otherwise():
    config = resolved(rounds=10, explore_epsilon=0.5)
    assert [config.epsilon_at(version) for version in (0, 5, 10, 99)] == [0.5, 0.25, 0.0, 0.0]
    assert resolved(explore_epsilon=0.5, explore_schedule="constant").epsilon_at(30) == 0.5


@pytest.mark.parametrize(
    ("options", "run", "key", "fix"),
    [
        ({"batch_size": 200, "buffer_capacity": 100}, {}, "buffer_capacity", "waits for 200"),
        ({"min_buffer_size": 9000}, {}, "buffer_capacity", "waits for 9000"),
        (
            {"buffer_capacity": 200},
            {"num_envs": 300, "num_workers": 2},
            "buffer_capacity",
            "cannot hold the 300 segments of one round",
        ),
        ({"replay_ratio": 0.0}, {}, "replay_ratio", "above 0"),
        ({"replay_ratio": -1.0}, {}, "replay_ratio", "above 0"),
        ({"correction": "gae"}, {}, "correction", "use decoupled or vtrace"),
        ({"shared_buffer": True}, {}, "shared_buffer", "runtime.kind=ray"),
        ({"max_age": 2}, {"degree": 2}, "max_age", "less than the 3 versions"),
        ({"max_age": 1}, {"weight_sync_interval": 3}, "max_age", "less than the 2 versions"),
        ({"max_age": 3}, {"degree": 1, "weight_sync_interval": 3}, "max_age", "less than the 4 versions"),
        ({"c_bar": 2.0}, {}, "c_bar", "at most rho_bar"),
        ({"network": {"kind": "gru"}, "minibatch_size": 16}, {}, "minibatch_size", "whole segments"),
    ],
)
def test_contradictions_are_named(options, run, key, fix):
    algorithm = PPOPERConfig(**options)
    ((name, message),) = algorithm.problems(run_config(algorithm, **run))
    assert name == key
    assert fix in message


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_age": 0},
        {"batch_size": 2},
        {"replay_ratio": None},
        {"replay_ratio": "auto"},
        {"batch_size": 128, "buffer_capacity": 128},
        {"per_alpha": 0.0, "per_beta_start": 1.0, "fresh_fraction": 1.0},
    ],
)
def test_settings_on_the_edge_have_no_problems(options):
    algorithm = PPOPERConfig(**options)
    assert algorithm.problems(run_config(algorithm)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"per_alpha": 1.1},
        {"per_beta_start": -0.1},
        {"per_eta": 2.0},
        {"per_for": "actor"},
        {"fresh_fraction": 1.5},
        {"explore_epsilon": 1.0},
        {"explore_temperature": 0.0},
        {"batch_size": 0},
        {"batch_size": 1},
        {"updates_per_round": 0},
        {"max_age": -1},
        {"replay_ratio": "fast"},
        {"num_steps": 1},
        {"beta": 0.5},
    ],
)
def test_impossible_values_are_refused(options):
    with pytest.raises(ValidationError):
        PPOPERConfig(**options)


def test_every_field_is_described():
    assert all(field.description for field in PPOPERConfig.model_fields.values())


def test_settings_of_another_algorithm_are_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.name is 'ppo'; .*ppo_per"):
        per_config(run_config(PPOConfig()))


def test_it_is_found_by_name():
    assert algorithms.find("ppo_per").config_model is PPOPERConfig
    assert PPOPERConfig.mode == "replay"
    assert PPOConfig.mode == "stream"


def test_weights_may_be_published_rarely_in_replay_only():
    settings = {"async_training.off_policy_degree": 0, "async_training.weight_sync_interval": 3}
    assert offbeat.load_config(RECIPE, settings).async_training.weight_sync_interval == 3
    with pytest.raises(ConfigError, match=r"(?s)weight_sync_interval = 3.*every k \+ 1 rounds"):
        offbeat.load_config("cartpole-ppo", settings)


# ---------------------------------------------------------------- roles


def test_roles_pace_the_replay():
    config = offbeat.load_config(RECIPE, {"algorithm.min_buffer_size": 200, "algorithm.warmup_seconds": 1.5})
    roles = ALGORITHM.build(config)
    assert (roles.mode, roles.replay_ratio, roles.min_segments, roles.warmup_s) == ("replay", 1.0, 4, 1.5)
    assert roles.data_parallel
    cloudpickle.loads(cloudpickle.dumps((roles.collect, roles.learner, roles.evaluate, roles.policy)))


def test_memory_is_told_before_the_run_and_refused_if_there_is_not_enough(monkeypatch):
    config = offbeat.load_config(RECIPE, {"algorithm.buffer_capacity": 1000, "algorithm.batch_size": 8})
    # 33 observations of 4 floats; 32 actions of 8 bytes, two floats and three flags each; a version.
    least = 1000 * (33 * 16 + 32 * (8 + 8 + 3) + 8)
    assert least < replay_bytes(config) < 1.2 * least
    ALGORITHM.check(config)
    tight = psutil.virtual_memory()._replace(available=replay_bytes(config) - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: tight)
    with pytest.raises(ConfigError, match=r"the replay needs 1.* MB.*lower algorithm\.buffer_capacity"):
        ALGORITHM.check(config)


@pytest.mark.parametrize("case", ["gaussian", "mlp", "multi"])
def test_exploration_is_for_discrete_actions(case):
    _, observation_space, action_space = CASES[case]
    spec = network_spec(NetworkConfig(), observation_space, action_space)
    assert make_explore(PPOPERConfig(), spec) is None, "nothing stands between policy and actions"
    config = PPOPERConfig(explore_temperature=2.0)
    if case == "gaussian":
        with pytest.raises(ConfigError, match="for discrete actions: leave them at 0 and 1"):
            make_explore(config, spec)
        return
    outputs = np.random.default_rng(0).normal(size=(3, spec.actions.num_outputs)).astype(np.float32)
    flatter = make_explore(config, spec)(outputs, 0)
    assert flatter.shape == outputs.shape
    assert np.ptp(flatter) < np.ptp(outputs)


def test_exploration_that_cannot_be_is_refused_before_the_run():
    config = RunConfig(
        algorithm=PPOPERConfig(explore_epsilon=0.1),
        env=EnvConfig(id="Pendulum-v1", num_envs=2),
        run=RunSection(rounds=2),
    )
    with pytest.raises(ConfigError, match="for discrete actions"):
        ALGORITHM.check(config)


def test_settings_and_roles_need_neither_torch_nor_numba():
    code = (
        "import sys, offbeat\n"
        f"from offbeat.algorithms.ppo_per import ALGORITHM\n"
        f"ALGORITHM.build(offbeat.load_config({RECIPE!r}))\n"
        "print([name for name in ('torch', 'numba') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
