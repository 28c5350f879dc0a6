"""TextWorld: experts reach the maximum, states are played again, the sets are apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbeat.envs.text import PARTS, SolvedGame, find_family
from offbeat.errors import EnvError
from tests.unit.text_games import needs_textworld

pytestmark = needs_textworld


@pytest.fixture(scope="module")
def game() -> SolvedGame:
    return find_family("cooking").make(8_000)


def test_the_expert_reaches_the_maximum_and_a_state_comes_back(game: SolvedGame) -> None:
    scene = game.start()
    states = [(game.save(), scene, tuple(game.actions()))]
    while (action := game.expert()) is not None:
        assert action in game.actions()
        scene = game.step(action)
        states.append((game.save(), scene, tuple(game.actions())))
    assert scene.done and scene.score == game.max_score >= 4
    for state, before, actions in reversed(states):
        game.restore(state)
        assert (game.scene(), tuple(game.actions())) == (before, actions)
    assert "Ingredients:" in scene.goal and "eat meal" in scene.goal
    assert not any(action.startswith(("look", "examine", "inventory")) for action in states[0][2])


def test_a_state_that_leads_to_another_text_is_refused(game: SolvedGame) -> None:
    scene = game.start()
    game.step(game.actions()[0])
    forged = json.loads(game.save())
    with pytest.raises(EnvError, match="says another text after the same 1 commands"):
        game.restore(json.dumps({**forged, "text": "Nothing."}).encode())
    with pytest.raises(EnvError, match="restore what it saved"):
        game.restore(b"{}")
    assert game.start() == scene


def test_a_game_is_generated_once(game: SolvedGame, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: object) -> Path:
        raise AssertionError("generated again")

    monkeypatch.setattr("offbeat.envs.text.textworld.Cooking.compile", compiled)
    again = find_family("cooking").make(8_000)
    assert again.start() == game.start()


@pytest.mark.slow
def test_the_sets_share_no_seed_and_no_game_and_held_out_food_has_names_of_its_own() -> None:
    from textworld.challenges.tw_cooking.cooking import FOODS_SPLITS

    family = find_family("cooking")
    seeds = [set(family.seeds(part)) for part in PARTS]
    assert not (seeds[0] & seeds[1] | seeds[0] & seeds[2] | seeds[1] & seeds[2])
    assert not set(FOODS_SPLITS["test"]) & {*FOODS_SPLITS["train"], *FOODS_SPLITS["valid"]}
    scenes = [[family.make(seed).start() for seed in family.seeds(part)[:6]] for part in PARTS]
    texts = [{(scene.room, scene.goal) for scene in found} for found in scenes]
    assert not (texts[0] & texts[1] | texts[0] & texts[2] | texts[1] & texts[2])
    held_out = " ".join(f"{scene.room} {scene.goal}" for scene in scenes[2])
    others = " ".join(f"{scene.room} {scene.goal}" for found in scenes[:2] for scene in found)
    new = [food for food in FOODS_SPLITS["test"] if food in held_out]
    assert new and not any(food in others for food in new)
