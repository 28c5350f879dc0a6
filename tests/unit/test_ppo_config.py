"""PPO's settings: what is resolved, what is refused."""

import pytest
from pydantic import ValidationError

from offbeat.algorithms.ppo import PPOConfig
from offbeat.algorithms.ppo.config import ppo_config
from offbeat.config.models import AlgorithmConfig, AsyncTrainingConfig, EnvConfig, RunConfig, RunSection
from offbeat.errors import ConfigError


def run_config(algorithm, degree=0, rounds=40):
    return RunConfig(
        algorithm=algorithm,
        env=EnvConfig(id="CartPole-v1"),
        async_training=AsyncTrainingConfig(off_policy_degree=degree),
        run=RunSection(rounds=rounds),
    )


@pytest.mark.parametrize(
    ("written", "degree", "resolved"),
    [
        ("auto", 0, "gae"),
        ("auto", 4, "decoupled"),
        ("auto", -1, "decoupled"),
        ("vtrace", 0, "vtrace"),
        ("gae", 4, "gae"),
    ],
)
def test_correction_follows_the_dial(written, degree, resolved):
    assert ppo_config(run_config(PPOConfig(correction=written), degree)).correction == resolved


def test_schedules_take_the_run_unless_told():
    config = ppo_config(run_config(PPOConfig(lr=0.1, ent_coef=0.2, ent_schedule="linear")))
    assert config.schedule_rounds == 40
    assert config.lr_at(10) == pytest.approx(0.075)
    assert config.ent_coef_at(20) == pytest.approx(0.1)
    assert config.lr_at(100) == 0.0
    short = ppo_config(run_config(PPOConfig(lr=0.1, schedule_rounds=10, lr_schedule="constant")))
    assert short.lr_at(9) == 0.1
    assert ppo_config(run_config(short)) == short


@pytest.mark.parametrize(("kind", "usual"), [("lines", 5e-2), ("mlp", 2.5e-4), ("board", 2.5e-4)])
def test_the_learning_rate_follows_the_network_unless_it_is_chosen(kind, usual):
    assert PPOConfig(lr_schedule="constant").for_network(kind).lr_at(0) == usual
    assert PPOConfig(lr=0.1).for_network(kind).lr == 0.1
    assert PPOConfig().lr_remark(kind) is None
    assert PPOConfig(lr=usual * 29).lr_remark(kind) is None
    assert f"is far above {usual:g}, the default for network.kind {kind}" in PPOConfig(
        lr=usual * 31
    ).lr_remark(kind)
    assert f"set algorithm.lr to {usual:g} or null" in PPOConfig(lr=usual / 31).lr_remark(kind)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"c_bar": 2.0}, "c_bar"),
        ({"network": {"kind": "gru"}, "minibatch_size": 64, "num_steps": 128}, "minibatch_size"),
        ({"grad_accumulation": 300}, "grad_accumulation"),
    ],
)
def test_contradictions_are_named(options, key):
    algorithm = PPOConfig(**options)
    assert [name for name, _ in algorithm.problems(run_config(algorithm))] == [key]


def test_defaults_have_no_problems():
    algorithm = PPOConfig()
    assert algorithm.problems(run_config(algorithm)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"gamma": 1.5},
        {"network": {"hidden": ()}},
        {"network": {"hidden": (0,)}},
        {"leraning": 1},
    ],
)
def test_impossible_values_are_refused(options):
    with pytest.raises(ValidationError):
        PPOConfig(**options)


def test_every_field_is_described():
    assert all(field.description for field in PPOConfig.model_fields.values())


def test_other_settings_are_refused():
    with pytest.raises(ConfigError, match="other"):
        ppo_config(run_config(AlgorithmConfig(name="other")))
