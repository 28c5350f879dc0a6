"""Priors over valid actions, and their controls."""

import numpy as np
import pytest

from offbeat.algorithms.priorzero.priors import (
    ContextFreePrior,
    MatchedPrior,
    ModelPrior,
    ModelScores,
    PermutedPrior,
    UniformPrior,
    match_entropy,
    permutation,
)
from offbeat.algorithms.priorzero.prompts import EMPTY, Prompts, Turn, label
from offbeat.algorithms.priorzero.quality import quality_of
from offbeat.algorithms.priorzero.transcripts import Example
from offbeat.envs.text import Scene
from offbeat.errors import ConfigError
from offbeat.llm.scoring import Scorer
from tests.unit.priorzero_fakes import ACTIONS, PROMPT, KnowingPrior, make_model, make_tokenizer

TOKENIZER = make_tokenizer()


def make_prior(seed=0, **settings):
    return ModelPrior(make_scores(seed), **settings)


def make_scores(seed=0):
    return ModelScores(make_model(TOKENIZER, seed), TOKENIZER, f"model-{seed}")


def entropy(log_probs):
    return -float((np.exp(log_probs) * log_probs).sum())


def scores_of(prompt, seed=0):
    labels = [TOKENIZER.encode(label(action)) for action in ACTIONS]
    return Scorer(make_model(TOKENIZER, seed)).score([TOKENIZER.encode(prompt)], [labels])[0]


def softmax_log(scores):
    return scores - np.logaddexp.reduce(scores)


def test_a_model_prior_sums_the_log_probs_of_labels_and_their_ends():
    (found,) = make_prior().log_probs([PROMPT], [ACTIONS])
    np.testing.assert_allclose(found, softmax_log(scores_of(PROMPT).sums))
    assert np.exp(found).sum() == pytest.approx(1)


def test_mean_divides_by_the_tokens_of_each_label():
    (found,) = make_prior(normalise="mean").log_probs([PROMPT], [ACTIONS])
    np.testing.assert_allclose(found, softmax_log(scores_of(PROMPT).means))


def test_context_free_normalisation_takes_off_what_the_label_has_without_a_state():
    (found,) = make_prior(normalise="context_free").log_probs([PROMPT], [ACTIONS])
    expected = softmax_log(scores_of(PROMPT).sums - scores_of(EMPTY).sums)
    np.testing.assert_allclose(found, expected)
    (bare,) = make_prior(normalise="context_free").log_probs([EMPTY], [ACTIONS])
    np.testing.assert_allclose(bare, np.full(len(ACTIONS), -np.log(len(ACTIONS))), atol=1e-9)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(ConfigError, match=r"prior\.normalise"):
        make_prior(normalise="median")


def test_a_context_free_prior_sees_no_state():
    prior = ContextFreePrior(make_prior())
    first, second = prior.log_probs([PROMPT, "Something else.\n>"], [ACTIONS, ACTIONS])
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, softmax_log(scores_of(EMPTY).sums))


def test_a_permuted_prior_hands_the_same_probabilities_to_other_actions():
    plain, permuted = make_prior(), PermutedPrior(make_prior())
    (own,), (found,) = plain.log_probs([PROMPT], [ACTIONS]), permuted.log_probs([PROMPT], [ACTIONS])
    np.testing.assert_allclose(np.sort(found), np.sort(own))
    assert not np.allclose(found, own)


def test_a_permutation_is_fixed_by_the_labels():
    found = permutation(ACTIONS)
    assert sorted(found.tolist()) == list(range(len(ACTIONS)))
    np.testing.assert_array_equal(found, permutation(list(ACTIONS)))
    # Actions ranked by their hashes get the probabilities in the order of the game.
    ranked = [action for _, action in sorted(zip(found, ACTIONS, strict=True))]
    again = [action for _, action in sorted(zip(permutation(ranked), ranked, strict=True))]
    assert ranked == again


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.95])
def test_matching_reaches_the_entropy(share):
    rng = np.random.default_rng(0)
    for count in (2, 7, 60):
        scores = softmax_log(rng.normal(size=count) * rng.uniform(0.01, 30))
        found = match_entropy(scores, share * np.log(count))
        assert entropy(found) == pytest.approx(share * np.log(count), abs=1e-3)
        np.testing.assert_array_equal(np.argsort(found), np.argsort(scores))


def test_matching_leaves_what_no_temperature_changes():
    uniform = np.full(5, -np.log(5))
    np.testing.assert_array_equal(match_entropy(uniform, 0.1), uniform)
    np.testing.assert_array_equal(match_entropy(np.zeros(1), 0.0), np.zeros(1))
    tied = softmax_log(np.array([0.0, 0.0, -1.0, -2.0]))
    assert entropy(match_entropy(tied, 0.1)) == pytest.approx(np.log(2), abs=1e-3)


def test_matched_priors_have_one_entropy_per_state():
    pretrained = make_prior()
    arms = [pretrained, PermutedPrior(pretrained), ContextFreePrior(pretrained), make_prior(seed=1)]
    found = [entropy(MatchedPrior(arm, 0.4).log_probs([PROMPT], [ACTIONS])[0]) for arm in arms]
    assert found == pytest.approx([0.4 * np.log(len(ACTIONS))] * len(arms), abs=1e-3)


def test_what_is_kept_belongs_to_one_version():
    scores = make_scores()
    prior = ModelPrior(scores)
    (first,) = prior.log_probs([PROMPT], [ACTIONS])
    (again,) = prior.log_probs([PROMPT], [ACTIONS])
    assert again is first
    assert (prior.num_asked, prior.num_cached, prior.hit_rate) == (2, 1, 0.5)
    before = prior.version
    scores.load("model-1", make_model(TOKENIZER, 1))
    (other,) = prior.log_probs([PROMPT], [ACTIONS])
    assert prior.version != before
    np.testing.assert_allclose(other, softmax_log(scores_of(PROMPT, seed=1).sums))


def test_only_the_last_answers_are_kept():
    prior = make_prior(max_cached=2)
    prior.log_probs([PROMPT, "a\n>", "b\n>"], [ACTIONS] * 3)
    prior.log_probs([PROMPT], [ACTIONS])
    assert prior.num_cached == 0
    prior.log_probs(["b\n>"], [ACTIONS])
    assert prior.num_cached == 1


def test_quality_of_a_prior_that_knows_and_of_one_that_does_not():
    examples = [Example(f"{at}>", "", ACTIONS, ACTIONS[at % 5]) for at in range(10)]
    knowing = quality_of(KnowingPrior(lambda prompt: ACTIONS[int(prompt[:-1]) % 5]), examples)
    assert (knowing.top_1, knowing.top_3) == (1.0, 1.0)
    assert knowing.log_prob == pytest.approx(np.log(0.9))
    chance = quality_of(UniformPrior(), examples)
    assert (chance.top_1, chance.top_3) == pytest.approx((0.2, 0.6))
    assert chance.log_prob == pytest.approx(-np.log(5)) == chance.chance_log_prob


# ---------------------------------------------------------------- prompts

SCENE = Scene("Taken.", "You are in a mill.", "You carry a rope.", "Fetch water.", 0.0, False, "key")
TURNS = [
    Turn(SCENE._replace(room="You are at home."), "go up", "You walk."),
    Turn(SCENE, "take rope", "Taken."),
]


@pytest.mark.parametrize(
    ("shows", "expected"),
    [
        ("view", "Fetch water.\nYou carry a rope.\nYou are in a mill.\n>"),
        ("view+last:1", "Fetch water.\nYou carry a rope.\nYou are in a mill.\n> take rope\nTaken.\n>"),
        (
            "view+last:2",
            "Fetch water.\nYou carry a rope.\nYou are in a mill.\n> go up\nYou walk.\n> take rope\nTaken.\n>",
        ),
        (
            "history:2",
            "You are at home.\n> go up\nYou walk.\nYou are in a mill.\n> take rope\nTaken.\n"
            "Fetch water.\nYou carry a rope.\nYou are in a mill.\n>",
        ),
    ],
)
def test_prompts_show_what_was_asked_for(shows, expected):
    assert Prompts(shows).of(SCENE, TURNS) == expected


def test_a_prompt_without_a_past_shows_the_view():
    assert Prompts("history:3").of(SCENE, []) == Prompts("view").of(SCENE, [])


@pytest.mark.parametrize("shows", ["", "views", "view+last:0", "history", "history:-1"])
def test_an_unknown_prompt_is_refused(shows):
    with pytest.raises(ConfigError, match=r"prompt\.shows"):
        Prompts(shows)
