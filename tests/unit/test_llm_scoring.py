"""Scores of labels, against one forward pass over prompt and label each."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.llm.model import Decoder, Packing
from offbeat.llm.scoring import Scorer
from tests.unit.llm_fakes import stories, tiny


def drawn(vocab_size: int, count: int, seed: int = 0) -> tuple[list[list[int]], list[list[list[int]]]]:
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return [draw.randrange(3, vocab_size) for _ in range(draw.randint(least, most))]

    prompts = [tokens(1, 70) for _ in range(count)]
    return prompts, [[tokens(1, 8) for _ in range(draw.randint(1, 20))] for _ in range(count)]


def one_by_one(model: Decoder, prompt: list[int], label: list[int]) -> float:
    tokens = torch.tensor([*prompt, *label])
    with torch.no_grad():
        return float(model.log_probs(tokens, Packing.of([len(tokens)]))[len(prompt) :].sum())


@pytest.mark.parametrize("is_real", [False, True])
def test_scores_are_those_of_whole_sequences(is_real: bool) -> None:
    model = stories() if is_real else tiny()
    prompts, labels = drawn(model.shape.vocab_size, 6)
    for prompt, own, scores in zip(prompts, labels, Scorer(model).score(prompts, labels), strict=True):
        expected = [one_by_one(model, prompt, label) for label in own]
        assert np.abs(scores.sums - expected).max() <= 1e-4
        assert scores.counts.tolist() == [len(label) for label in own]
        means = np.array(expected) / scores.counts
        assert np.abs(scores.means - means).max() <= (1e-5 if is_real else 1e-4)


def test_scores_do_not_depend_on_the_other_prompts() -> None:
    model = tiny()
    prompts, labels = drawn(64, 12, seed=1)
    together = Scorer(model).score(prompts, labels)
    for prompt, own, scores in zip(prompts, labels, together, strict=True):
        (alone,) = Scorer(model).score([prompt], [own])
        assert alone.sums.tobytes() == scores.sums.tobytes()


def test_logits_in_parts_are_those_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, labels = drawn(64, 5, seed=2)
    whole = Scorer(tiny()).score(prompts, labels)
    monkeypatch.setattr("offbeat.llm.scoring._MOST_LOGITS", 16)
    parts = Scorer(tiny()).score(prompts, labels)
    assert [one.sums.tobytes() for one in parts] == [one.sums.tobytes() for one in whole]


def test_scores_are_kept_by_version_and_prompt() -> None:
    old, new = tiny(0), tiny(1)
    scorer = Scorer(old, max_cached=2)
    prompts, labels = drawn(64, 3)
    first = scorer.score(prompts[:1], labels[:1])[0]
    assert scorer.score(prompts[:1], labels[:1])[0] is first
    assert (scorer.num_asked, scorer.num_cached) == (2, 1)
    scorer.load(0, new.weights())  # the version that it has
    assert scorer.score(prompts[:1], labels[:1])[0] is first
    scorer.load(1, new.weights())
    other = scorer.score(prompts[:1], labels[:1])[0]
    assert np.abs(other.sums - Scorer(new).score(prompts[:1], labels[:1])[0].sums).max() == 0.0
    assert np.abs(other.sums - first.sums).max() > 1e-3
    scorer.score(prompts[1:], labels[1:])
    assert scorer.score(prompts[:1], labels[:1])[0] is not other, "three prompts are kept where two may be"


@pytest.mark.parametrize(
    ("prompt", "labels", "text"),
    [
        ([], [[3]], "one token"),
        ([3], [], "one token"),
        ([3], [[]], "one token"),
        ([64], [[3]], "tokenizer"),
        ([3] * 511, [[3, 4]], "shorten"),
    ],
)
def test_what_cannot_be_scored_is_refused(prompt: list[int], labels: list[list[int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Scorer(tiny()).score([prompt], [labels])


def test_each_prompt_needs_labels() -> None:
    with pytest.raises(ConfigError, match="there are 1 prompts and labels for 2"):
        Scorer(tiny()).score([[3]], [[[4]], [[5]]])
