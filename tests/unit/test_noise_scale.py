"""The noise of gradients, estimated from parts of batches."""

import json
import math

import numpy as np
import pytest

from offbeat.ops.noise_scale import DECAY, NoiseScale


def test_nothing_is_known_at_first():
    assert NoiseScale().value is None


def test_exact_expectations_give_the_exact_scale():
    """With the expected squared lengths |G|^2 + tr(S) / B for both sizes of batch."""
    gradient, noise = 0.5, 40.0
    parts = [(count, gradient + noise / count) for count in (10, 10, 20)]
    scale = NoiseScale().updated(parts, 40, gradient + noise / 40)
    assert scale.value == pytest.approx(noise / gradient)
    again = scale.updated(parts, 40, gradient + noise / 40)
    assert again.value == pytest.approx(noise / gradient)
    assert again.noise == pytest.approx((1 - DECAY**2) * noise)


def test_two_parts_by_hand():
    # Gradients (3, 0) and (1, 0) of 1 sample each, (2, 0) of both: noise (5 - 4) / (1 - 1/2) = 2, |G|^2 = 3.
    scale = NoiseScale().updated([(1, 9.0), (1, 1.0)], 2, 4.0)
    assert scale.value == pytest.approx(2 / 3)


def test_means_approach_the_truth():
    rng = np.random.default_rng(0)
    dim, deviation, count, num_parts = 20, 2.0, 8, 4
    truth = np.full(dim, 0.5)
    scale, seen = NoiseScale(), []
    for _ in range(1500):
        parts = truth + deviation / math.sqrt(count) * rng.normal(size=(num_parts, dim))
        squares = [(count, float(np.square(part).sum())) for part in parts]
        scale = scale.updated(squares, count * num_parts, float(np.square(parts.mean(0)).sum()))
        seen.append((scale.gradient, scale.noise))
    gradient, noise = np.mean(seen[200:], axis=0)
    assert gradient == pytest.approx(dim * 0.25, rel=0.1)
    assert noise == pytest.approx(dim * deviation**2, rel=0.1)


def test_a_gradient_lost_in_noise_asks_for_as_much_as_there_is():
    scale = NoiseScale().updated([(1, 4.0), (1, 4.0)], 2, 1.0)
    assert scale.gradient < 0
    assert scale.value == pytest.approx(1e9)
    assert math.isfinite(scale.value)


def test_parts_that_agree_leave_no_noise():
    assert NoiseScale().updated([(4, 2.0), (4, 2.0)], 8, 2.0).value == 0
    assert NoiseScale().updated([(4, 1.0), (4, 1.0)], 8, 2.0).value == 0


@pytest.mark.parametrize("parts", [[], [(8, 3.0)], [(0, 0.0)], [(0, 0.0), (8, 3.0)]])
def test_what_cannot_tell_anything_changes_nothing(parts):
    scale = NoiseScale().updated([(1, 9.0), (1, 1.0)], 2, 4.0)
    assert scale.updated(parts, 8, 3.0) == scale
    assert scale.updated([(1, 1.0)], 0, 0.0) == scale


def test_state_survives_being_saved():
    scale = NoiseScale().updated([(1, 9.0), (2, 1.0)], 3, 4.0)
    restored = NoiseScale.from_state(json.loads(json.dumps(scale.state_dict())))
    assert restored == scale and restored.value == scale.value
    assert NoiseScale.from_state(NoiseScale().state_dict()).value is None
