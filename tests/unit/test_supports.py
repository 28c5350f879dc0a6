"""Values as distributions: there and back, and what is lost in between."""

import numpy as np
import pytest
import torch

from offbeat.ops.supports import Support, squash, unsquash


def test_the_transform_by_hand():
    assert squash(torch.tensor([0.0, 3.0, -3.0, 99.0])) == pytest.approx(
        [0.0, 1.003, -1.003, 9.099], abs=1e-6
    )


def test_the_transform_can_be_undone():
    values = torch.tensor(
        [-500.0, -20.0, -1.0, -0.01, 0.0, 0.3, 1.0, 7.0, 200.0, 3000.0], dtype=torch.float64
    )
    np.testing.assert_allclose(unsquash(squash(values)), values, rtol=1e-9, atol=1e-9)


def test_two_neighbours_share_a_value():
    found = Support(3).two_hot(torch.tensor([0.0, 3.0, -100.0, 100.0]))
    assert found.sum(-1) == pytest.approx([1.0] * 4)
    assert found[0].tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert found[1].numpy() == pytest.approx([0, 0, 0, 0, 0.997, 0.003, 0], abs=1e-6)
    assert found[2, 0] == 1 and found[3, 6] == 1


def test_the_mean_of_a_distribution_is_its_value():
    support, values = Support(50), torch.linspace(-800, 800, 301)
    logits = support.two_hot(values).clamp(min=1e-12).log()
    np.testing.assert_allclose(support.mean(logits), values, rtol=2e-3, atol=1e-3)


def test_the_loss_is_least_at_the_target():
    support, values = Support(10), torch.tensor([2.5, -4.0])
    targets = support.two_hot(values)
    logits = targets.clamp(min=1e-9).log()
    entropy = -(targets * targets.clamp(min=1e-9).log()).sum(-1)
    assert support.loss(logits, values) == pytest.approx(entropy.numpy(), abs=1e-5)
    assert (support.loss(torch.zeros(2, 21), values) > support.loss(logits, values)).all()
    smoothed = support.loss(torch.zeros(2, 21), values, smoothing=0.1)
    assert smoothed == pytest.approx([np.log(21)] * 2, abs=1e-5)


def test_losses_are_exact_whatever_the_logits_are_in():
    logits = torch.randn(64, 21, generator=torch.manual_seed(1)).to(torch.bfloat16)
    values = torch.linspace(-20, 20, 64)
    found = Support(10).loss(logits, values)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, Support(10).loss(logits.float(), values))
