"""Draws follow the softmax, depend on nothing but request and position, and layouts of slots hold."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.llm.layout import FREE, HELD, groups_of, last_positions, length_classes, moves
from offbeat.llm.sampling import draw, inverse, uniforms


def chi_square_p(statistic: float, degrees: int) -> float:
    """Upper tail of the chi-square distribution, by Wilson and Hilferty's cube root."""
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize("vocab_size", [64, 49_152])
def test_a_million_draws_follow_the_softmax(vocab_size: int) -> None:
    generator, total = torch.Generator().manual_seed(vocab_size), 1_000_000 // 20
    for state in range(20):
        logits = 3.0 * torch.randn(1, vocab_size, generator=generator)
        probs = logits.double().softmax(-1).numpy()[0]
        uniform = torch.from_numpy(uniforms(7, state, total))
        drawn = inverse(logits.log_softmax(-1).exp(), uniform[None])[0].numpy()
        expected, counts = total * probs, np.bincount(drawn, minlength=vocab_size)
        is_large = expected >= 10
        seen = np.append(counts[is_large], counts[~is_large].sum())
        wanted = np.append(expected[is_large], expected[~is_large].sum())
        if wanted[-1] < 10:
            seen, wanted = seen[:-1], wanted[:-1]
        statistic = float(((seen - wanted) ** 2 / wanted).sum())
        assert chi_square_p(statistic, len(wanted) - 1) > 0.001, f"state {state}"
        tokens, log_probs = draw(logits.expand(100, -1), torch.ones(100), uniform[:100])
        assert tokens.tolist() == drawn[:100].tolist()
        assert np.abs(log_probs.numpy() - np.log(probs[drawn[:100]])).max() < 1e-5


def test_the_test_of_draws_sees_a_wrong_distribution() -> None:
    """Draws at another temperature are not the softmax."""
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    uniform = torch.from_numpy(uniforms(1, 0, 50_000))
    tokens, _ = draw(logits.expand(50_000, -1), torch.full((50_000,), 1.05), uniform)
    expected = 50_000 * logits.double().softmax(-1).numpy()
    counts = np.bincount(tokens.numpy(), minlength=64)
    assert chi_square_p(float(((counts - expected) ** 2 / expected).sum()), 63) < 0.001


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.full((3, 8), -200.0)
    logits[:, 3] = 0.0
    uniform = torch.tensor([2.0**-49, 0.5, 1.0 - 2.0**-49], dtype=torch.float64)
    tokens, log_probs = draw(logits, torch.ones(3), uniform)
    assert tokens.tolist() == [3, 3, 3]
    assert log_probs.tolist() == [0.0, 0.0, 0.0]


def test_temperature_zero_takes_the_most_likely_and_filters_cut() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.4, 0.2, 0.3]])).expand(4000, -1)
    uniform = torch.from_numpy(uniforms(0, 0, 4000))
    greedy, log_probs = draw(logits, torch.zeros(4000), uniform)
    assert set(greedy.tolist()) == {1}
    assert log_probs[0].item() == pytest.approx(math.log(0.4))
    ones = torch.ones(4000)
    top_k, _ = draw(logits, ones, uniform, (2 * ones).long(), ones)
    assert set(top_k.tolist()) == {1, 3}
    top_p, kept = draw(logits, ones, uniform, (9 * ones).long(), 0.75 * ones)
    assert set(top_p.tolist()) == {1, 2, 3}
    assert (top_p == 3).float().mean().item() == pytest.approx(0.3 / 0.9, abs=0.03)
    assert kept[top_p == 3][0].item() == pytest.approx(math.log(0.3))


def test_uniforms_belong_to_a_request_a_sample_and_a_position() -> None:
    assert uniforms(3, 1, 10).tolist() == uniforms(3, 1, 50)[:10].tolist()
    assert len({tuple(uniforms(seed, sample, 4)) for seed in (3, 4, 1 << 70) for sample in (0, 1)}) == 6
    assert 0.0 < uniforms(0, 0, 1000).min() < uniforms(0, 0, 1000).max() < 1.0


# ---------------------------------------------------------------- the order of slots


@given(st.lists(st.integers(FREE, 4), min_size=1, max_size=40))
def test_moves_bring_rows_to_the_front_and_lose_none(classes: list[int]) -> None:
    before = np.array(classes)
    names = np.arange(len(before))
    after, moved = before.copy(), names.copy()
    sources, targets = moves(before)
    gone = np.setdiff1d(sources, targets)
    after[targets], moved[targets] = before[sources], names[sources]
    after[gone] = FREE
    assert after.tolist() == sorted(classes, reverse=True)
    used = np.flatnonzero(after != FREE)
    assert sorted(moved[used]) == np.flatnonzero(before != FREE).tolist()
    assert (before[moved[used]] == after[used]).all()


@given(st.lists(st.integers(0, 500), min_size=1, max_size=48), st.sampled_from([32, 64, 448]))
def test_groups_cover_all_rows_with_room_for_each(positions: list[int], bucket: int) -> None:
    rows = np.array(sorted(positions, reverse=True))
    classes = length_classes(rows, bucket)
    assert (rows <= last_positions(classes, bucket)).all()
    ends = [*(np.flatnonzero(np.diff(classes)) + 1), len(rows)]
    begins = [0, *ends[:-1]]
    regions = [
        (int(end), -(-(int(rows[begin]) + 1) // bucket) * bucket)
        for begin, end in zip(begins, ends, strict=True)
    ]
    groups = groups_of(regions, 48)
    assert groups[0].begin == 0
    assert groups[-1].end >= len(rows)
    assert len(groups) <= 3
    for one, following in pairwise(groups):
        assert one.end == following.begin
        assert one.length >= following.length
    for group in groups:
        assert group.begin % 8 == group.end % 8 == 0
        assert (rows[group.begin : group.end] < group.length).all()


def test_held_slots_come_behind_rows() -> None:
    sources, targets = moves(np.array([HELD, 0, FREE, 2]))
    assert dict(zip(sources.tolist(), targets.tolist(), strict=True)) == {3: 0, 0: 2}
