"""Names that scripts of other projects use."""

from __future__ import annotations

import re

import pytest

import offbeat
from offbeat.config.foreign import FOREIGN, has_key
from offbeat.config.models import RunConfig
from offbeat.config.reference import shipped_algorithms
from offbeat.config.short import homes
from offbeat.errors import ConfigError

SECTIONS = {name: field.annotation for name, field in RunConfig.model_fields.items() if name != "algorithm"}
MODELS = [{"algorithm": model, **SECTIONS} for model in shipped_algorithms().values()]


@pytest.mark.parametrize("name", list(FOREIGN))
def test_every_key_that_is_advised_exists_for_some_algorithm(name: str) -> None:
    sections = "|".join(RunConfig.model_fields)
    keys = [key for text in FOREIGN[name] for key in re.findall(rf"\b(?:{sections})\.[a-z_.]*[a-z]", text)]
    for key in keys:
        assert any(has_key(key, models) for models in MODELS), key
    assert keys or not any("." in text.split()[0] for text in FOREIGN[name])


def problems(recipe: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as refused:
        offbeat.load_config(recipe, list(overrides))
    return {problem.key: problem.message for problem in getattr(refused.value, "problems", ())}


@pytest.mark.parametrize(
    ("recipe", "key", "advised"),
    [
        ("cartpole-unizero", "enable_async_training", "async_training.off_policy_degree: 0 takes turns"),
        ("cartpole-unizero", "max_env_step", "run.total_timesteps, in steps of an environment"),
        ("cartpole-unizero", "data_queue_size", "async_training.max_queue_size, in segments"),
        ("cartpole-unizero", "collect_num_simulations", "algorithm.search.num_simulations"),
        ("cartpole-unizero", "game_segment_length", "algorithm.num_steps"),
        ("lbf-coop-hmasd", "sync_mode", "async_training.off_policy_degree"),
        ("lbf-coop-hmasd", "batch_size", "algorithm.sync_batch_size, in samples of a round"),
        ("lbf-coop-hmasd", "algorithm.batch_size", "algorithm.sync_batch_size, in samples of a round"),
        ("lbf-coop-hmasd", "lambda_D", "algorithm.team_intrinsic_coef"),
        ("lbf-coop-hmasd", "lambda_d", "algorithm.skill_intrinsic_coef"),
        ("cartpole-ppo", "batch_size", "algorithm.minibatch_size, in samples of one optimiser step"),
        ("cartpole-ppo", "model_path", "`offbeat eval RUN`"),
        (
            "cartpole-ppo",
            "eval_only",
            "`offbeat eval RUN`; `offbeat train` and `offbeat resume` take --eval-only",
        ),
        ("cartpole-ppo", "trainer.staleness_threshold", "async_training.off_policy_degree for the bound"),
        ("cartpole-ppo", "trainer.total_epochs", "run."),
        ("cartpole-ppo", "async_training.trigger_parameter_sync_step", "async_training.weight_sync_interval"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_key_to_use(recipe: str, key: str, advised: str) -> None:
    assert problems(recipe, f"{key}=1")[key].startswith(f"unknown key; use {advised}")


def test_a_value_of_another_meaning_is_answered_with_the_meaning_here() -> None:
    found = problems("cartpole-ppo", "async_training.staleness_threshold=0.5")
    assert found["async_training.staleness_threshold"] == (
        "must be a whole number, at least 0: it sets what metrics count as stale; the bound is"
        " async_training.off_policy_degree, in versions, and verl's share of samples is"
        " async_training.preset.staleness_threshold, with the preset verl_fully_async"
    )


def test_a_section_from_elsewhere_is_answered_key_by_key() -> None:
    found = problems("cartpole-unizero", "policy.off_policy_degree=5", "policy.game_segment_length=20")
    assert found == {
        "policy.off_policy_degree": "unknown key; use async_training.off_policy_degree",
        "policy.game_segment_length": "unknown key; use algorithm.num_steps, the steps of a segment",
    }
    found = problems("cartpole-unizero", "policy.batch_sizes=5", "policy.off_policy_degree=5")
    assert found["policy.batch_sizes"] == "unknown key; did you mean algorithm.batch_size?"
    assert problems("cartpole-ppo", "policy.cuda=1")["policy"].startswith("unknown key; ")


def test_names_of_the_same_meaning_are_taken() -> None:
    given = [
        "entropy_coef=0.5",
        "value_coef=0.25",
        "clip_epsilon=0.3",
        "env_id=Acrobot-v1",
        "log_level=DEBUG",
    ]
    config = offbeat.load_config("cartpole-ppo", given)
    assert (config.env.id, config.observe.log_level) == ("Acrobot-v1", "debug")
    algorithm = config.algorithm.model_dump()
    assert (algorithm["ent_coef"], algorithm["vf_coef"], algorithm["clip_coef"]) == (0.5, 0.25, 0.3)
    assert homes("value_coef", {"algorithm": shipped_algorithms()["muzero"]}) == ["algorithm.value_coef"]


# ---------------------------------------------------------------- sources


def test_a_mapping_is_a_configuration() -> None:
    by_name = offbeat.load_config("cartpole-ppo", ["run.rounds=3", "lr=0.1"])
    mapping = {"extends": "cartpole-ppo", "run": {"rounds": 3}, "algorithm.lr": 0.1}
    assert offbeat.load_config(mapping).model_dump(exclude={"run": {"name"}}) == by_name.model_dump(
        exclude={"run": {"name"}}
    )
    assert offbeat.load_config({"algorithm": {"name": "ppo"}, "env": {"id": "CartPole-v1"}}).run.rounds == 100
    with pytest.raises(ConfigError, match=r"mapping: run\.round = 3\n    unknown key; did you mean rounds"):
        offbeat.load_config({"extends": "cartpole-ppo", "run": {"round": 3}})
    with pytest.raises(ConfigError, match=r"mapping: algorithm\.name\n    is required"):
        offbeat.load_config({})


def test_what_describes_no_run_is_refused_in_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match=r"not by a list: start from a recipe, as in offbeat\.train"
    ) as refused:
        offbeat.train([{"policy": {}}, {"env": {}}])  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
