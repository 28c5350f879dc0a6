"""The learner of language models: rounds of made-up responses under all its settings."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import offbeat
from offbeat.algorithms.grpo import learner as learner_module
from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.learner import GRPOLearner
from offbeat.algorithms.grpo.losses import LOSSES
from offbeat.algorithms.grpo.samples import Samples
from offbeat.config.plan import plan
from offbeat.errors import ConfigError
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import make_task
from offbeat.ops.token_losses import TokenBatch
from offbeat.types import Batch, Piece, Segment, Span, Ticket

TASK = make_task("arithmetic", {})
SHAPE = Shape("LlamaForCausalLM", TASK.tokenizer.vocab_size, 16, 1, 2, 1, 8, 16, tied=True, eos_ids=(1,))
LONGEST = 6


def segment(number: int, rewards: Sequence[float], ends: Sequence[str] | None = None) -> Segment:
    """A group of responses of 1 to 6 tokens, the third of each a given one where there is one."""
    draw = np.random.default_rng(number)
    sizes = draw.integers(1, LONGEST + 1, len(rewards))
    total = int(sizes.sum())
    is_own = np.concatenate([np.arange(size) != 2 for size in sizes])
    data = {
        "prompt": draw.integers(2, 12, 4).astype(np.int32),
        "sizes": sizes,
        "tokens": draw.integers(2, 12, total).astype(np.int32),
        "log_probs": draw.uniform(-3.5, -1.5, total).astype(np.float32),
        "is_own": is_own,
        "rewards": np.array(rewards, np.float64),
        "made_s": np.zeros(total),
        "load": np.ones(6),
    }
    owns = [int(one.sum()) for one in np.split(is_own, sizes.cumsum()[:-1])]
    ends = ends or ["eos"] * len(rewards)
    pieces = tuple(Piece((Span(0, size),), end) for size, end in zip(owns, ends, strict=True))  # type: ignore[arg-type]
    return Segment(Ticket(number, 0, 0, 0, number), data, np.zeros(sum(owns), np.int64), pieces=pieces)


GROUPS = (
    segment(0, [1.0, 0.0, 0.0]),
    segment(1, [0.0, 1.0, 1.0]),
    segment(2, [0.5, 0.0, 1.0]),
    segment(3, [0.0, 0.0, 1.0]),
)


def learner(**settings: Any) -> GRPOLearner:
    own = {"warmup": {"accuracy": None}, "lr": 1e-3, "max_new_tokens": LONGEST, **settings}
    return GRPOLearner(GRPOConfig(**own), TASK, SHAPE, seed=3)


def round_of(made: GRPOLearner, groups: Sequence[Segment] = GROUPS, version: int = 0) -> dict[str, float]:
    return made.train(Batch(version, tuple(groups), 0))


def weights_after(groups: Sequence[Segment] = GROUPS, **settings: Any) -> dict[str, Any]:
    made = learner(**settings)
    round_of(made, groups)
    return made.weights()


def equal(first: dict[str, Any], second: dict[str, Any], atol: float = 0.0) -> bool:
    return all(np.allclose(first[name], second[name], rtol=0, atol=atol) for name in first)


DECOUPLED = {"proximal": "round_start", "weight": "token"}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"loss": name} for name in LOSSES},
    "decoupled": {"correction": DECOUPLED, "num_minibatches": 2, "num_epochs": 2},
    "sequence weights": {"correction": {**DECOUPLED, "weight": "sequence"}},
    "masked": {"correction": {"mask_low": 0.5, "mask_high": 2.0}, "loss": "grpo"},
    "kl in loss": {"kl": {"coef": 0.1}, "loss": "grpo", "num_epochs": 2},
    "kl in reward": {"kl": {"coef": 0.1, "place": "reward", "estimator": "k1"}, "loss": "ppo"},
    "kl in rewards of groups": {"kl": {"coef": 0.1, "place": "reward"}, "correction": DECOUPLED},
    "batch": {"norm_adv": "batch", "num_minibatches": 4},
    "overlong": {"overlong": {"buffer": 3}, "mask_truncated": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_micro_batches_do_not_change_the_step(name: str) -> None:
    """Denominators are those of the round: in one piece or one response at a time, the step is the same."""
    whole = weights_after(**VARIANTS[name], lr=1e-4)
    parts = weights_after(**VARIANTS[name], lr=1e-4, tokens_per_batch=1)
    assert not equal(whole, learner().weights())
    assert equal(whole, parts, atol=2e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_state_is_all_there_is(name: str) -> None:
    first, second = learner(**VARIANTS[name]), learner(**VARIANTS[name])
    round_of(first)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for made in (first, second):
        round_of(made, version=1)
    assert equal(first.weights(), second.weights())
    assert set(first.weights()) == set(learner().weights()), "no head is published"


def test_order_of_arrival_does_not_matter() -> None:
    settings = {"num_minibatches": 2, "num_epochs": 2, "loss": "ppo"}
    assert equal(weights_after(**settings), weights_after(GROUPS[::-1], **settings))
    assert not equal(weights_after(**settings), weights_after(**{**settings, "num_minibatches": 1}))


def test_minibatches_are_rounds_of_their_own_at_the_first_epoch() -> None:
    one, two = learner(), learner(num_minibatches=2)
    round_of(one, GROUPS[:2]), round_of(one, GROUPS[2:])
    found = round_of(two)
    assert equal(one.weights(), two.weights())
    assert found["learn/gradient_steps"] == 2.0


def test_responses_without_reward_are_as_if_they_were_not_there() -> None:
    """Neither in means of rewards, nor in a denominator, nor in the loss."""
    nan = float("nan")
    kept = segment(0, [1.0, 0.0, 0.0])
    for loss in ("dapo", "grpo", "dr_grpo", "ppo"):
        with_failed = segment(0, [1.0, 0.0, 0.0])
        # The same group with a fourth response, whose reward failed.
        extra = {name: kept.data[name][:2] for name in ("tokens", "log_probs", "is_own", "made_s")}
        data = {name: np.concatenate([kept.data[name], one]) for name, one in extra.items()}
        data |= {"prompt": kept.data["prompt"], "sizes": np.append(kept.data["sizes"], 2)}
        data |= {"rewards": np.append(kept.data["rewards"], nan), "load": kept.data["load"]}
        pieces = (*kept.pieces, Piece((Span(0, 2),), "error"))
        with_failed = Segment(kept.ticket, data, kept.versions, pieces=pieces)
        assert equal(weights_after([kept], loss=loss), weights_after([with_failed], loss=loss))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "ppo"},
        {"kl": {"coef": 0.1, "place": "reward"}},
        {"correction": {"proximal": "round_start"}, "norm_adv": "batch"},
    ],
)
def test_round_without_anything_to_train_leaves_the_weights(settings: dict[str, Any]) -> None:
    made = learner(num_minibatches=2, **settings)
    found = round_of(made, [segment(0, [float("nan")] * 2), segment(1, [float("inf"), float("nan")])])
    assert found["learn/gradient_steps"] == 0.0
    assert all(np.isfinite(one) for name, one in found.items() if name != "learn/explained_variance")
    assert equal(made.weights(), learner().weights())


def test_truncated_responses_are_in_the_baseline_and_not_in_the_loss() -> None:
    group = segment(5, [1.0, 0.0, 0.0], ["eos", "length", "eos"])
    config = GRPOConfig(mask_truncated=True, norm_adv="none", overlong={"buffer": LONGEST})  # type: ignore[arg-type]
    samples = Samples([group], config, longest=LONGEST)
    samples.set_advantages()
    assert samples.in_loss.tolist() == [True, False, True]
    rewards = np.array([1.0, 0.0, 0.0]) - samples.sizes / LONGEST
    expected = np.repeat(rewards - rewards.mean(), samples.sizes)
    assert samples.own["advantages"] == pytest.approx(expected, abs=1e-6)
    (trained,) = samples.minibatches()
    assert trained.tolist() == [0, 2]


def test_a_learner_is_warmed_up_once_and_not_before_a_saved_state_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warmed = list[int]()
    monkeypatch.setattr(learner_module, "warm_up", lambda model, task, config, seed: warmed.append(seed))
    made = GRPOLearner(GRPOConfig(), TASK, SHAPE, seed=7)
    early = copy.deepcopy(made.state_dict())
    assert warmed == []
    made.weights()
    made.weights()
    assert warmed == [7]
    continued = GRPOLearner(GRPOConfig(), TASK, SHAPE, seed=8)
    continued.state_dict()
    continued.load_state_dict(copy.deepcopy(made.state_dict()))
    continued.weights()
    assert warmed == [7]
    continued.load_state_dict(early)
    continued.weights()
    assert warmed == [7, 8]


def test_reference_is_what_the_warm_up_made_or_a_folder(tmp_path: Any) -> None:
    made = learner(kl={"coef": 0.5})
    begun = made.weights()
    assert round_of(made)["learn/reference_kl"] == 0.0
    assert round_of(made, version=1)["learn/reference_kl"] > 0.0
    assert equal({name: one.numpy() for name, one in made.state_dict()["reference"].items()}, begun)
    folder = tmp_path / "reference"
    made._model.write(folder)  # type: ignore[attr-defined]
    other = learner(kl={"coef": 0.5, "reference": str(folder)})
    assert round_of(other)["learn/reference_kl"] > 0.0
    assert "reference" not in other.state_dict()


def test_value_head_learns_what_responses_are_worth() -> None:
    made = learner(loss="ppo", value={"lr": 0.05, "coef": 1.0, "clip": None})
    losses = [round_of(made, version=version)["learn/value_loss"] for version in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_learning_rate_rises_and_falls() -> None:
    config = GRPOConfig(lr=1.0, lr_warmup_rounds=3, lr_schedule="linear", schedule_rounds=10)
    rates = [config.lr_at(version) for version in (0, 1, 3, 5, 10, 99)]
    assert rates == pytest.approx([0.25, 0.9 * 0.5, 0.7, 0.5, 0.0, 0.0])
    cosine = config.model_copy(update={"lr_schedule": "cosine", "lr_warmup_rounds": 0})
    assert [cosine.lr_at(version) for version in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    assert GRPOConfig().lr_at(7) == GRPOConfig().lr


# ---------------------------------------------------------------- losses of users


@offbeat.token_loss
def minus_log_likelihood(batch: TokenBatch, scale: float = 1.0) -> Tensor:
    return -scale * batch.advantages * batch.log_probs


@offbeat.token_loss
def one_number(batch: TokenBatch) -> Tensor:
    return batch.log_probs.sum()


def not_declared(batch: TokenBatch) -> Tensor:
    return batch.log_probs


def test_own_loss_by_name_and_by_module() -> None:
    """At ratio 1 the gradient of a clipped loss is that of the likelihood."""
    by_name = weights_after(loss="minus_log_likelihood", loss_kwargs={"scale": 2.0}, max_grad_norm=1e9)
    by_module = weights_after(loss=f"{__name__}:minus_log_likelihood", loss_kwargs={"scale": 2.0})
    assert equal(by_name, by_module, atol=1e-2)
    config = GRPOConfig(loss="minus_log_likelihood")
    assert (config.choices.advantage, config.choices.aggregation) == ("group", "token_mean")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": f"{__name__}:not_declared"}, "put @offbeat.token_loss above it"),
        ({"loss": f"{__name__}:nothing"}, "cannot be imported"),
        ({"loss": "os:system"}, "a module of Python itself"),
        ({"loss": "numpy:array"}, "put @offbeat.token_loss above it"),
        ({"loss": "minus_log_likelihood", "loss_kwargs": {"scales": 2}}, "loss_kwargs does not fit"),
    ],
)
def test_own_loss_that_cannot_be_used_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        learner(**settings)


def test_own_loss_has_to_be_one_of_each_token() -> None:
    with pytest.raises(ConfigError, match="a loss for each of the"):
        round_of(learner(loss="one_number"))


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"loss": "ppo", "advantage": "group"}, "advantage", "set it to gae"),
        ({"loss": "ppo", "norm_adv": "group"}, "norm_adv", "batch or none"),
        ({"group_size": 1}, "group_size", "2 or more"),
        ({"group_size": 1, "loss": "ppo", "dynamic_sampling": True}, "dynamic_sampling", "no spread"),
        ({"num_minibatches": 17}, "num_minibatches", "16 or less"),
        ({"loss": "dapoo"}, "loss", "did you mean dapo"),
        ({"loss": "cispo", "dual_clip": 3.0}, "dual_clip", "clip_high"),
        ({"loss_kwargs": {"scale": 1}}, "loss_kwargs", "remove them"),
        ({"loss": "minus_log_likelihood", "clip_low": 0.1}, "clip_low", "use loss_kwargs"),
        ({"correction.weight": "token"}, "correction.weight", "round_start"),
        ({"correction.mask_low": 2.0, "correction.mask_high": 1.5}, "correction.mask_low", "below"),
        ({"kl.coef": 0.1, "kl.estimator": "k1"}, "kl.estimator", "k2 or k3"),
        ({"kl.reference": "folder"}, "kl.reference", "kl.coef above 0"),
        ({"top_k": 50}, "top_k", "by temperature alone"),
        ({"loss_agg_mode": "token-mean"}, "loss_agg_mode", "algorithm.aggregation"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], key: str, words: str
) -> None:
    changes = {f"algorithm.{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError, match=words) as error:
        offbeat.load_config("arithmetic-grpo", changes)
    assert f"algorithm.{key}" in str(error.value)


def test_plan_says_how_many_problems_are_evaluated() -> None:
    config = offbeat.load_config("calculator-grpo", {"eval.at_start": True})
    told = "at the start, every 50 rounds (training pauses for it) and at the end: 500 held-out problems"
    assert plan(config)["evaluation"] == told


def test_plan_says_how_many_steps_old_a_token_may_be() -> None:
    changes = {"algorithm.num_minibatches": 2, "algorithm.num_epochs": 2}
    config = offbeat.load_config("arithmetic-grpo", changes)
    expected = "one version = 4 optimizer steps; oldest token at most 2 versions = 8 steps"
    assert config.algorithm.update(config) == expected


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_resolved_settings_say_what_the_loss_is_made_of(name: str) -> None:
    resolved = offbeat.load_config("arithmetic-grpo", {"algorithm.loss": name}).resolved().algorithm
    assert isinstance(resolved, GRPOConfig)
    assert resolved.choices == LOSSES[name]
    assert resolved.aggregation == LOSSES[name].aggregation


def test_table_of_the_docs_is_the_table_of_losses() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| \[([\d.]+)\]\S+ \| (.*) \|$", page, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(LOSSES)
    assert f"| `{GRPOConfig().loss}` (default) |" in page
    for name, paper, rest in rows:
        parts = LOSSES[name]
        clipped = {"clip": "loss", "detached": "weight"}[parts.surrogate]
        bounds = ", ".join(f"{one:.4f}".rstrip("0").rstrip(".") for one in (parts.clip_low, parts.clip_high))
        expected = [parts.advantage, parts.norm_adv, parts.ratio, clipped, bounds, parts.aggregation]
        assert [paper, *rest.replace("`", "").split(" | ")] == [parts.paper, *expected]


METRICS = {
    "loss",
    "grad_norm",
    "learning_rate",
    "gradient_steps",
    "entropy",
    "ess",
    "behaviour_kl",
    "clip_fraction",
}


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, set()),
        ({"loss": "ppo"}, {"value_loss", "explained_variance"}),
        ({"kl": {"coef": 0.1}}, {"reference_kl"}),
        ({"correction": {"mask_high": 2.0}}, {"masked_fraction"}),
    ],
)
def test_names_of_metrics(settings: dict[str, Any], more: set[str]) -> None:
    expected = {f"learn/{name}" for name in METRICS | more}
    assert expected <= set(round_of(learner(**settings)))


def test_versions_of_tokens_are_those_of_their_spans() -> None:
    """A response of versions 3, 3 and 4, with a given token, and one of version 5."""
    data = {
        "prompt": np.array([2, 3], np.int32),
        "sizes": np.array([4, 1]),
        "tokens": np.zeros(5, np.int32),
        "log_probs": np.arange(5, dtype=np.float32),
        "is_own": np.array([True, False, True, True, True]),
        "rewards": np.array([1.0, 0.0]),
    }
    pieces = (Piece((Span(3, 2), Span(4, 1)), "eos"), Piece((Span(5, 1),), "eos"))
    segment = Segment(Ticket(0, 0, 3, 5, 0), data, np.array([3, 3, 4, 5]), pieces=pieces)
    samples = Samples([segment], GRPOConfig(), longest=LONGEST)
    assert samples.own["versions"].tolist() == [3, 3, 4, 5]
    assert samples.own["behaviour"].tolist() == [0.0, 2.0, 3.0, 4.0]
