"""Search with the game itself as model."""

import numpy as np
import pytest

from offbeat.algorithms.priorzero.priors import UniformPrior
from offbeat.algorithms.priorzero.prompts import Prompts
from offbeat.algorithms.priorzero.transcripts import Play, expert_length, transcripts
from offbeat.algorithms.priorzero.true_search import Episode, Player, TrueModel, TrueSearchConfig, play
from offbeat.envs.text import find_family
from offbeat.errors import ConfigError
from offbeat.search import SearchConfig
from tests.unit.priorzero_fakes import CountingGame, KnowingPrior

GREEDY = TrueSearchConfig(SearchConfig("puct", num_simulations=8), slots=8, temperature=0.0)


def test_a_search_finds_a_score_that_is_one_action_away():
    (found,) = play(CountingGame(), [Player(UniformPrior(), 0)], 10, GREEDY)
    assert found.commands == ("plus",) * 4
    assert (found.share, found.scores) == (1.0, (1.0, 2.0, 3.0, 4.0))


def test_a_perfect_prior_solves_a_tiny_game():
    family = find_family("tiny")
    seed = family.seeds("held_out")[0]
    limit = 4 * expert_length(family, seed)
    path = transcripts(family, "held_out", [seed], Play(random_moves=0.0), Prompts())
    answers = {one.prompt: one.label for one in path}
    config = TrueSearchConfig(SearchConfig("puct", num_simulations=25), slots=96, temperature=0.0)
    players = [Player(KnowingPrior(answers.get), 0), Player(UniformPrior(), 0)]
    perfect, uniform = play(family.make(seed), players, limit, config)
    assert perfect.share == 1.0
    assert perfect.commands == tuple(one.label for one in path)
    assert uniform.share < perfect.share


def test_nobody_asks_for_the_solution_and_no_leaf_has_a_value(monkeypatch):
    from offbeat.algorithms.priorzero import true_search

    seen, real = [], true_search.search

    def watched(step, trees, logits, values, **others):
        def watched_step(*asked):
            rewards, leaves, below = step(*asked)
            seen.extend(leaves)
            return rewards, leaves, below

        seen.extend(values)
        return real(watched_step, trees, logits, values, **others)

    monkeypatch.setattr(true_search, "search", watched)
    play(CountingGame(), [Player(UniformPrior(), 0)], 3, GREEDY)  # its expert raises
    assert len(seen) == 3 * 9
    assert not np.any(seen)


def test_an_episode_follows_from_the_seed_and_not_from_the_others():
    config = TrueSearchConfig(SearchConfig("puct", num_simulations=2), slots=8, temperature=1.0)

    def run(seeds):
        players = [Player(UniformPrior(), seed) for seed in seeds]
        return [one.commands for one in play(CountingGame(6), players, 12, config)]

    first = run([0, 1, 2])
    assert run([0, 1, 2]) == first
    assert run([2]) == first[2:]
    assert len(set(first)) > 1


def test_too_many_actions_are_an_error_or_counted():
    game = CountingGame(length=2, num_others=9)
    with pytest.raises(ConfigError, match="10 valid actions and a tree 8 slots"):
        play(game, [Player(UniformPrior(), 0)], 2, GREEDY)
    cuts = TrueSearchConfig(GREEDY.search, slots=8, cuts=True, temperature=0.0)
    liked = KnowingPrior(lambda prompt: "plus")
    (found,) = play(game, [Player(liked, 0)], 2, cuts)
    assert found.commands == ("plus", "plus")  # listed last, kept because the prior likes it
    assert found.cut > 0


def test_a_step_is_asked_of_the_game_once():
    game = CountingGame(length=3)
    play(game, [Player(UniformPrior(), seed) for seed in range(4)], 6, GREEDY)
    assert game.num_steps == 3 * 4  # three states with four actions each


def test_a_game_that_is_over_stays_as_it_is():
    model = TrueModel(CountingGame(length=1))
    after = model.after(model.start(), "plus")
    assert after.done
    assert model.after(after, "plus") is after


def test_a_prior_plays_without_search():
    knowing = KnowingPrior(lambda prompt: "plus", 1 - 1e-9)
    (found,) = play(CountingGame(), [Player(knowing, 0, searches=False)], 10, GREEDY)
    assert found.commands == ("plus",) * 4


def test_a_player_without_repeats_tries_each_action_of_a_view_once():
    wrong = KnowingPrior(lambda prompt: "reset 0", 1 - 1e-9)
    players = [Player(wrong, 0, searches=False, repeats=repeats) for repeats in (True, False)]
    stuck, tries = play(CountingGame(length=1), players, 6, GREEDY)
    assert set(stuck.commands) == {"reset 0"}
    assert tries.share == 1.0
    assert len(set(tries.commands)) == len(tries.commands)


def test_figures_of_an_episode():
    found = Episode((0.0, 1.0, 1.0, 2.0), 4.0, 8, ("a",) * 4)
    assert found.share == 0.5
    assert found.area == pytest.approx((0 + 1 + 1 + 2 + 4 * 2) / (8 * 4))
    assert found.steps_to_half == 4
    assert Episode((1.0,), 4.0, 8, ("a",)).steps_to_half == 8
    assert Episode((), 4.0, 8, ()).share == 0.0
