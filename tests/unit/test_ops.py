"""Losses, statistics and schedules."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.ops.losses import clipped_policy_loss, value_loss
from offbeat.ops.schedules import linear_schedule
from offbeat.ops.statistics import (
    Moments,
    approx_kl,
    effective_sample_size,
    explained_variance,
    masked_mean,
    masked_normalise,
)

CLIP = 0.2


def random_tensors(count, num=64):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(num, generator=generator, dtype=torch.float64) for _ in range(count)]


def test_policy_loss_by_hand():
    ratios = torch.tensor([1.5, 1.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, 2.0])
    loss, gradient, log_ratio = clipped_policy_loss(ratios.log(), torch.zeros(4), advantages, clip_coef=CLIP)
    # min(1.5, 1.2), min(-1.5, -1.2), min(.5, .8), min(2.2, 2.2)
    assert loss.item() == pytest.approx(-(1.2 - 1.5 + 0.5 + 2.2) / 4)
    np.testing.assert_allclose(gradient, [0, 1.5 / 4, -0.5 / 4, -2.2 / 4], rtol=1e-6)
    np.testing.assert_allclose(log_ratio.exp(), ratios, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_policy_gradient_is_that_of_autograd(weighted):
    logp, old_logp, advantages, weights = random_tensors(4)
    weights = weights.exp() if weighted else None
    logp.requires_grad_()
    ratio = (logp - old_logp).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    expected = -(surrogate * (weights if weighted else 1)).mean()
    expected.backward()
    loss, gradient, _ = clipped_policy_loss(
        logp.detach(), old_logp, advantages, clip_coef=CLIP, weights=weights
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, logp.grad)


def test_samples_with_bounds_of_their_own_by_hand():
    ratios = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    low = torch.tensor([0.8, 0.8, 1.2, 1.2, 0.8])
    high = torch.tensor(
        [0.7, 0.7, 1.2, 1.2, 1.2]
    )  # the first two are too likely already, the next too unlikely
    loss, gradient, _ = clipped_policy_loss(
        ratios.log(), torch.zeros(5), advantages, clip_coef=CLIP, bounds=(low, high)
    )
    assert loss.item() == pytest.approx(-(1.4 - 2 + 2 - 2.4 + 1.1) / 5)
    np.testing.assert_allclose(gradient, [0, 2 / 5, -2 / 5, 0, -1.1 / 5], rtol=1e-6)


def test_bounds_of_the_clip_are_the_clip():
    logp, old_logp, advantages, weights = random_tensors(4)
    ones = torch.ones_like(logp)
    bounds = (ones * (1 - CLIP), ones * (1 + CLIP))
    plain, bounded = (
        clipped_policy_loss(logp, old_logp, advantages, clip_coef=CLIP, weights=weights.exp(), bounds=given)
        for given in (None, bounds)
    )
    for one, other in zip(plain, bounded, strict=True):
        torch.testing.assert_close(one, other)


def test_decoupled_loss_is_a_clip_around_the_proximal_policy():
    """b min(r A, clip(r) A) = min(q A, clip(q, b - be, b + be) A) with q = theta / mu, b = prox / mu."""
    logp, prox, behaviour, advantages = random_tensors(4)
    bound = (prox - behaviour).exp()
    loss, _, _ = clipped_policy_loss(logp, prox, advantages, clip_coef=CLIP, weights=bound)
    ratio = (logp - behaviour).exp()
    clipped = torch.clamp(ratio, bound * (1 - CLIP), bound * (1 + CLIP))
    expected = -torch.minimum(ratio * advantages, clipped * advantages).mean()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_gradient_is_that_of_autograd(clipped, weighted):
    values, targets, old_values, weights = random_tensors(4)
    weights = weights.exp() if weighted else None
    values.requires_grad_()
    errors = (values - targets).square()
    if clipped:
        bounded = old_values + (values - old_values).clamp(-CLIP, CLIP)
        errors = torch.maximum(errors, (bounded - targets).square())
    expected = 0.5 * (errors * (weights if weighted else 1)).mean()
    expected.backward()
    loss, gradient = value_loss(
        values.detach(),
        targets,
        old_values=old_values if clipped else None,
        clip_coef=CLIP,
        weights=weights,
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, values.grad)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("delta", [0.3, 1.0, 100.0])
def test_huber_gradient_is_that_of_autograd(clipped, weighted, delta):
    values, targets, old_values, weights = random_tensors(4)
    weights = weights.exp() if weighted else None
    values.requires_grad_()

    def huber(estimates):
        return torch.nn.functional.huber_loss(estimates, targets, reduction="none", delta=delta)

    errors = huber(values)
    if clipped:
        errors = torch.maximum(errors, huber(old_values + (values - old_values).clamp(-CLIP, CLIP)))
    expected = (errors * (weights if weighted else 1)).mean()
    expected.backward()
    loss, gradient = value_loss(
        values.detach(),
        targets,
        old_values=old_values if clipped else None,
        clip_coef=CLIP,
        weights=weights,
        huber_delta=delta,
    )
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, values.grad)


def test_huber_by_hand():
    values, targets = torch.tensor([0.0, 3.0, -5.0]), torch.tensor([1.0, 0.0, 0.0])
    loss, gradient = value_loss(values, targets, huber_delta=2.0)
    # 1 / 2;  2 (3 - 1);  2 (5 - 1)
    assert loss.item() == pytest.approx((0.5 + 4 + 8) / 3)
    np.testing.assert_allclose(gradient.numpy(), np.array([-1, 2, -2]) / 3, rtol=1e-6)


def test_small_errors_do_not_notice_the_delta():
    values, targets, old_values, weights = random_tensors(4)
    given = {"old_values": old_values, "clip_coef": CLIP, "weights": weights.exp()}
    plain = value_loss(values, targets, **given)
    huber = value_loss(values, targets, **given, huber_delta=1e6)
    assert torch.equal(plain[0], huber[0]) and torch.equal(plain[1], huber[1])


def test_effective_sample_size():
    assert effective_sample_size(np.full(10, 3.0, np.float32)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([90, 0, 0, 0], np.float32)) == pytest.approx(0.25)
    # weights 1 and 3: 16 / (2 * 10)
    assert effective_sample_size(np.log(np.array([1, 3], np.float32))) == pytest.approx(0.8)
    assert effective_sample_size(np.array([], np.float32)) == 1.0


def test_approx_kl_estimates_the_divergence():
    p, q = np.array([0.7, 0.3]), np.array([0.5, 0.5])
    exact = float((p * np.log(p / q)).sum())
    draws = np.random.default_rng(0).choice(2, size=200_000, p=p)
    estimate = approx_kl(np.log(q / p).astype(np.float32)[draws])
    assert estimate == pytest.approx(exact, abs=0.005)
    assert approx_kl(np.zeros(5, np.float32)) == 0.0
    assert approx_kl(np.array([math.log(2)], np.float32)) == pytest.approx(1 - math.log(2), rel=1e-5)


def test_explained_variance():
    targets = np.array([1, 2, 3], np.float32)
    assert explained_variance(targets, targets) == 1.0
    assert explained_variance(np.full(3, 2, np.float32), targets) == 0.0
    assert explained_variance(targets, np.full(3, 2, np.float32)) == 0.0


def test_masked_mean_and_normalise():
    values = np.array([[1, 100], [3, 5]], np.float32)
    mask = np.array([[True, False], [True, True]])
    assert masked_mean(values, mask) == pytest.approx(3.0)
    assert masked_mean(values, np.zeros((2, 2), bool)) == 0.0
    deviation = math.sqrt(8 / 3)
    expected = np.array([[-2, 0], [0, 2]]) / deviation
    np.testing.assert_allclose(masked_normalise(values, mask), expected, rtol=1e-6)
    assert values[0, 0] == 1


def test_weighted_normalisation_is_that_of_repeated_values():
    """A weight of 3 counts as three equal values, one of 0 as none; all get shifted and scaled alike."""
    values = np.array([1, 2, 6, 100], np.float32)
    mask, weights = np.array([True, True, True, False]), np.array([3, 1, 0, 5], np.float32)
    found = masked_normalise(values, mask, weights=weights)
    repeated = np.array([1, 1, 1, 2], np.float32)
    expected = (values - repeated.mean()) / repeated.std() * mask
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    even = masked_normalise(values, mask, weights=np.full(4, 0.3, np.float32))
    np.testing.assert_allclose(even, masked_normalise(values, mask), rtol=1e-5)


def test_normalisation_without_any_weight_stays_finite():
    values = np.array([1, 2], np.float32)
    found = masked_normalise(values, np.array([True, True]), weights=np.zeros(2, np.float32))
    assert np.isfinite(found).all()


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_merged_moments_are_those_of_all_samples(first, second, seed):
    rng = np.random.default_rng(seed)
    left, right = rng.normal(5, 2, (first, 3)), rng.normal(-1, 9, (second, 3))
    merged = Moments.empty((3,)).merge(Moments.of(left)).merge(Moments.of(right))
    whole = np.concatenate([left, right])
    assert merged.count == first + second
    np.testing.assert_allclose(merged.mean, whole.mean(0), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(merged.var, whole.var(0), rtol=1e-9, atol=1e-9)


def test_empty_moments_change_nothing():
    empty, some = Moments.empty((2,)), Moments.of(np.array([[1.0, 2.0], [3.0, 2.0]]))
    assert some.merge(empty) is some
    assert empty.merge(some) is some
    np.testing.assert_allclose(empty.scale(), [1, 1])
    again = Moments.from_state(some.state_dict())
    np.testing.assert_array_equal(again.var, some.var)
    assert again.count == 2


@pytest.mark.parametrize(("step", "value"), [(-1, 2.0), (0, 2.0), (25, 1.75), (100, 1.0), (500, 1.0)])
def test_linear_schedule(step, value):
    assert linear_schedule(2.0, 1.0, step=step, num_steps=100) == pytest.approx(value)
