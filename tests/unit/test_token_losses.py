"""Losses over tokens, their weights and advantages, against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.losses import LOSSES
from offbeat.algorithms.grpo.objective import correction_weights, make_token_loss
from offbeat.ops.aggregation import aggregation_weights
from offbeat.ops.corrections import importance_weights, sequence_mask
from offbeat.ops.group_advantages import group_advantages, overlong_penalty, token_gae, whiten
from offbeat.ops.token_losses import (
    TokenBatch,
    clipped_loss,
    clipped_value_loss,
    detached_loss,
    kl_estimate,
    mean_by_row,
    sequence_ratios,
    token_ratios,
)

ROWS = torch.tensor([0, 0, 1])
NAN = float("nan")


def logs(*probabilities: float) -> Tensor:
    return torch.log(torch.tensor(probabilities)).requires_grad_()


def gradient(loss: Tensor, by: Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss.sum(), by)
    return [round(one, 6) for one in found.tolist()]


# ---------------------------------------------------------------- losses


def test_clipped_loss_by_hand() -> None:
    """Ratios 1, 2 and 1/2 with either sign of the advantage; clipped at 0.8 and 1.28."""
    log_probs = logs(0.5, 0.5, 0.5, 0.5, 0.25, 0.25)
    proximal = logs(0.5, 0.5, 0.25, 0.25, 0.5, 0.5).detach()
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, -2.0])
    loss = clipped_loss(token_ratios(log_probs, proximal), advantages, clip_low=0.2, clip_high=0.28)
    assert loss.tolist() == pytest.approx([-2.0, 2.0, -2.56, 4.0, -1.0, 1.6])
    # At ratio 1 the gradient is -A; where the clipped term is the smaller one there is none.
    assert gradient(loss, log_probs) == [-2.0, 2.0, 0.0, 4.0, -1.0, 0.0]


def test_dual_clip_by_hand() -> None:
    """Ratios of 4 and 2: the loss of bad ones ends at 3 |A|, that of good ones is clipped as ever."""
    log_probs, proximal = logs(0.8, 0.8, 0.4), logs(0.2, 0.2, 0.2).detach()
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    ratios = token_ratios(log_probs, proximal)
    loss = clipped_loss(ratios, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert loss.tolist() == pytest.approx([3.0, -1.2, 2.0])
    assert gradient(loss, log_probs) == [0.0, 0.0, 2.0]


def test_detached_loss_by_hand() -> None:
    """Ratios 1, 8 (held at 5) and 1/2: the weight of the gradient is the bounded ratio."""
    log_probs, proximal = logs(0.5, 0.8, 0.25), logs(0.5, 0.1, 0.5).detach()
    advantages = torch.tensor([2.0, -1.0, 3.0])
    ratios = token_ratios(log_probs, proximal)
    loss = detached_loss(ratios, log_probs, advantages, clip_low=1.0, clip_high=4.0)
    assert loss.tolist() == pytest.approx([-2 * math.log(0.5), 5 * math.log(0.8), -1.5 * math.log(0.25)])
    assert gradient(loss, log_probs) == [-2.0, 5.0, -1.5]


def test_sequence_ratios_by_hand() -> None:
    """Ratios 4 and 1 have the geometric mean 2 in the first response; the second has one of 1/2."""
    log_probs, proximal = logs(0.8, 0.3, 0.2), logs(0.2, 0.3, 0.4).detach()
    ratios = sequence_ratios(log_probs, proximal, ROWS)
    assert ratios.tolist() == pytest.approx([2.0, 2.0, 0.5])
    # Two tokens with the ratio s of their response, each with a gradient of s / 2 by either.
    assert gradient(ratios, log_probs) == pytest.approx([2.0, 2.0, 0.5])


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_at_ratio_one_every_loss_has_the_gradient_minus_a(name: str) -> None:
    log_probs, advantages = logs(0.1, 0.7, 0.4), torch.tensor([1.5, 1.5, -0.5])
    before = log_probs.detach()
    loss = make_token_loss(GRPOConfig(loss=name))
    losses = loss(TokenBatch(log_probs, before, before, advantages, ROWS))
    assert gradient(losses, log_probs) == [-1.5, -1.5, 0.5]


def test_ratios_of_far_policies_are_finite() -> None:
    far = torch.tensor([-300.0, 300.0])
    assert token_ratios(far, torch.zeros(2)).isfinite().all()
    assert kl_estimate(far, torch.zeros(2), "k3").isfinite().all()


def test_kl_estimates_by_hand() -> None:
    log_probs, reference = logs(0.5, 0.25), logs(0.25, 0.5).detach()
    two = math.log(2)
    found = {name: kl_estimate(log_probs, reference, name) for name in ("k1", "k2", "k3")}
    assert found["k1"].tolist() == pytest.approx([two, -two])
    assert found["k2"].tolist() == pytest.approx([two**2 / 2] * 2)
    assert found["k3"].tolist() == pytest.approx([0.5 + two - 1, 2 - two - 1])
    assert gradient(found["k1"], log_probs) == [1.0, 1.0]
    assert gradient(found["k2"], log_probs) == pytest.approx([two, -two], abs=1e-6)
    assert gradient(found["k3"], log_probs) == [0.5, -1.0]  # 1 - reference / policy


def test_value_loss_by_hand() -> None:
    """Errors 1 and 1; the second value has moved by 0.6, and would have an error of 1.1 after 0.5."""
    values = torch.tensor([1.0, 0.6], requires_grad=True)
    old, targets = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.6])
    assert clipped_value_loss(values, old, targets, None).tolist() == pytest.approx([0.5, 0.5])
    loss = clipped_value_loss(values, old, targets, 0.5)
    assert loss.tolist() == pytest.approx([0.5, 0.5 * 1.1**2])
    assert gradient(loss, values) == [1.0, 0.0]


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 4] * 4),
        ("sequence_mean", [1 / 6] * 3 + [1 / 2]),
        ("constant", [1 / 20] * 4),
    ],
)
def test_aggregation_by_hand(kind: str, expected: list[float]) -> None:
    """Responses of three, no and one tokens, of ten that could be."""
    weights = aggregation_weights(np.array([3, 0, 1]), kind, longest=10)  # type: ignore[arg-type]
    assert weights.tolist() == pytest.approx(expected)


def test_importance_weights_by_hand() -> None:
    """Ratios 3, 1/2 and 4."""
    log_ratios = torch.log(torch.tensor([3.0, 0.5, 4.0]))
    by_token = importance_weights(log_ratios, ROWS, level="token", cap=2.0)
    by_response = importance_weights(log_ratios, ROWS, level="sequence", cap=2.0)
    assert by_token.tolist() == pytest.approx([2.0, 0.5, 2.0])
    assert by_response.tolist() == pytest.approx([1.5, 1.5, 2.0])


def test_sequence_mask_by_hand() -> None:
    """Geometric means 2 and 1/2."""
    log_ratios = torch.log(torch.tensor([4.0, 1.0, 0.5]))
    assert mean_by_row(log_ratios, ROWS).exp().tolist() == pytest.approx([2.0, 0.5])
    for low, high, kept in ((None, 1.9, [0, 0, 1]), (0.6, None, [1, 1, 0]), (0.4, 2.1, [1, 1, 1])):
        assert sequence_mask(log_ratios, ROWS, low=low, high=high).tolist() == kept


def test_corrections_take_the_policy_that_there_is() -> None:
    """Bypass masks by the trained policy, decoupled ones weigh and mask by the proximal one."""
    trained, proximal = torch.log(torch.tensor([0.4, 0.4, 0.4])), torch.log(torch.tensor([0.3, 0.3, 0.1]))
    batch = TokenBatch(trained, proximal, torch.log(torch.tensor([0.2, 0.1, 0.2])), torch.ones(3), ROWS)
    assert correction_weights(GRPOConfig(), batch) is None
    bypass = GRPOConfig(correction={"mask_high": 2.5})  # type: ignore[arg-type]
    decoupled = {"proximal": "round_start", "weight": "token", "weight_cap": 2.0, "mask_low": 0.6}
    found = (bypass, GRPOConfig(correction=decoupled))  # type: ignore[arg-type]
    weights = [correction_weights(config, batch) for config in found]
    assert [one.tolist() for one in weights if one is not None] == [[0, 0, 1], pytest.approx([1.5, 2.0, 0])]


# ---------------------------------------------------------------- advantages


def test_group_advantages_by_hand() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    deviation = math.sqrt(4 * 0.25 / 3)
    expected = np.array([0.5, -0.5, -0.5, 0.5])
    assert group_advantages(rewards, norm="none").tolist() == expected.tolist()
    assert group_advantages(rewards, eps=0.0) == pytest.approx(expected / deviation)
    assert group_advantages(np.ones(4)).tolist() == [0.0] * 4
    others = group_advantages(rewards, baseline="leave_one_out", norm="none")
    assert others == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])


def test_failed_rewards_are_in_no_mean() -> None:
    known = group_advantages(np.array([1.0, 0.0]))
    found = group_advantages(np.array([1.0, NAN, 0.0]))
    assert found[[0, 2]].tolist() == known.tolist()
    assert np.isnan(found[1])
    assert np.isnan(group_advantages(np.array([NAN, 1.0]))).all()


def test_whitened_values_have_mean_zero_and_deviation_one() -> None:
    found = whiten(np.array([1.0, 2.0, 6.0], np.float32))
    assert (found.mean(), found.std(ddof=1)) == pytest.approx((0.0, 1.0), abs=1e-6)
    assert whiten(np.array([3.0], np.float32)).tolist() == [0.0]


def test_gae_over_tokens_by_hand() -> None:
    """A response of two tokens with reward 1 at its end, and one of a single token with reward -1."""
    rewards, values = np.array([0, 1, -1], np.float32), np.array([0.5, 0.25, 0.5], np.float32)
    settings = {"gamma": 1.0, "gae_lambda": 0.5}
    advantages, targets = token_gae(rewards, values, np.array([2, 1]), **settings)
    assert advantages.tolist() == pytest.approx([-0.25 + 0.5 * 0.75, 0.75, -1.5])
    assert targets.tolist() == pytest.approx([0.625, 1.0, -1.0])


def test_overlong_penalty_by_hand() -> None:
    found = overlong_penalty(np.array([5, 8, 9, 12, 13]), longest=12, buffer=4, penalty=2.0)
    assert found.tolist() == [0.0, 0.0, -0.5, -2.0, -2.0]
    assert not overlong_penalty(np.array([12]), longest=12, buffer=0, penalty=2.0).any()
