"""The tiny family: its solver against a search through all states, its sets apart from each other."""

from __future__ import annotations

import random
from collections import deque
from statistics import mean

import pytest

from offbeat.envs.text import Game, SolvedGame, find_family
from offbeat.envs.text.families import PARTS, Family
from offbeat.envs.text.tiny import Size, TinyGame, make_world, score_times, value
from offbeat.envs.text.tiny.words import NUM_SETS, names_of
from offbeat.errors import ConfigError, EnvError

SMALL = Size(rooms=3, extra_ways=1, tools_per_room=1, trinkets_per_room=0, closed=4, errands=2)


def tiny(seed: int) -> TinyGame:
    game = find_family("tiny").make(seed)
    assert isinstance(game, TinyGame)
    return game


def wander(game: TinyGame, seed: int, steps: int) -> None:
    """Play partly at random and partly well, so that states from everywhere come up."""
    rng = random.Random(seed)
    scene = game.start()
    for _ in range(steps):
        if scene.done:
            return
        scene = game.step(rng.choice(game.actions()) if rng.random() < 0.4 else game.expert() or "")


@pytest.mark.parametrize("start", range(0, 10_000, 2_500))
def test_the_expert_reaches_the_maximum_when_the_solver_says(start: int) -> None:
    for seed in range(start, start + 250):
        game = tiny(seed)
        scene = game.start()
        expected = score_times(game)
        points = []
        for count in range(1, expected[-1] + 1):
            before, action = scene.score, game.expert()
            assert action in game.actions()
            scene = game.step(action)
            points += [count] if scene.score > before else []
        assert scene.done
        assert scene.score == game.max_score == len(expected)
        assert tuple(points) == expected
        assert game.expert() is None and not game.actions()


def all_states(game: TinyGame) -> dict[bytes, list[tuple[float, bytes]]]:
    """Every state that can be reached, without its answer, and what each action scores and leads to."""
    game.start()
    numbers = game.save().split(b"\n")[0] + b"\n"
    found: dict[bytes, list[tuple[float, bytes]]] = {}
    queue = deque([numbers])
    while queue:
        if (state := queue.popleft()) in found:
            continue
        found[state] = []
        game.restore(state)
        before = game.scene().score
        for action in game.actions():
            game.restore(state)
            reward = game.step(action).score - before
            after = game.save().split(b"\n")[0] + b"\n"
            found[state].append((reward, after))
            queue.append(after)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_value_is_that_of_value_iteration_over_all_states(seed: int) -> None:
    game, discount = TinyGame("small", make_world(seed, 0, SMALL)), 0.9
    states = all_states(game)
    assert len(states) > 200
    values = dict.fromkeys(states, 0.0)
    for _ in range(120):
        values = {
            state: max((reward + discount * values[after] for reward, after in moves), default=0.0)
            for state, moves in states.items()
        }
    for state, expected in values.items():
        game.restore(state)
        assert value(game, discount) == pytest.approx(expected, abs=1e-5)


def test_equal_keys_have_equal_actions_and_unknown_commands_change_nothing() -> None:
    game, seen = tiny(9_000), dict[str, tuple[str, ...]]()
    rng, scene = random.Random(0), game.start()
    for _ in range(400):
        assert seen.setdefault(scene.key, tuple(game.actions())) == game.actions()
        state = game.state
        assert game.step("xyzzy").answer == "That is not possible here."
        assert game.state == state
        scene = game.step(rng.choice(game.actions()) if rng.random() < 0.6 else game.expert() or "")
        if scene.done:
            scene = game.start()
    assert len(seen) > 50


def test_a_saved_state_goes_on_in_another_game_of_the_same_seed() -> None:
    first, second = tiny(8_001), tiny(8_001)
    wander(first, seed=3, steps=17)
    second.restore(first.save())
    assert second.scene() == first.scene()
    assert second.actions() == first.actions()
    assert second.step(first.expert() or "") == first.step(first.expert() or "")


@pytest.mark.parametrize(
    "state", [b"", b"1 2\nx", b"0 0 0 0", b"9 0 0 0\n", b"0 99 0 0\n", b"0 0 -1 0\n", b"a b c d\n"]
)
def test_a_foreign_state_is_refused(state: bytes) -> None:
    game = tiny(1)
    with pytest.raises(EnvError, match="tiny:1"):
        game.restore(state)


def test_it_is_a_solved_game_of_10_000() -> None:
    family = find_family("tiny")
    assert isinstance(tiny(0), SolvedGame) and isinstance(tiny(0), Game)
    assert sum(len(family.seeds(part)) for part in PARTS) == 10_000
    assert tiny(7).name == "tiny:7"
    with pytest.raises(ConfigError, match="0 to 9999"):
        family.make(10_000)
    with pytest.raises(ConfigError, match="choose one of"):
        find_family("tinny")


def fingerprints(family: Family, part: int, seeds: list[int]) -> set[object]:
    """What must not come up in two sets: seeds, maps, texts, and invented names."""
    found: set[object] = set(seeds)
    for seed in seeds:
        game = family.maker(f"tiny:{seed}", seed, part)
        assert isinstance(game, TinyGame)
        world = game.world
        found |= {(world.rooms, world.exits)}
        found |= {world.host, *world.owners, *(thing.name for thing in world.things if not thing.noun)}
        found |= {one.name.split()[0] for one in world.closed}
        scene = game.start()
        while not scene.done:
            found |= {scene.room, scene.goal}
            scene = game.step(game.expert() or "")
        found -= {"All is done."}
    return found


def overlap(sets: list[set[object]]) -> set[object]:
    return {one for i, a in enumerate(sets) for b in sets[i + 1 :] for one in a & b}


def test_the_sets_share_no_seed_map_text_or_name() -> None:
    family = find_family("tiny")
    sets = [fingerprints(family, at, list(family.seeds(part))[:120]) for at, part in enumerate(PARTS)]
    assert all(len(found) > 3_000 for found in sets)
    assert not overlap(sets)
    # A seed, a map or a name in the wrong set is noticed.
    leaked = list(family.seeds("pretrain"))[5:6]
    assert overlap([sets[0], fingerprints(family, 0, leaked)])
    moved = overlap([sets[0], {one for one in fingerprints(family, 2, leaked) if not isinstance(one, int)}])
    assert moved and all(isinstance(one, tuple) for one in moved), "the same map under other names"
    assert overlap([sets[2], fingerprints(family, 2, list(family.seeds("train"))[:1])])


def test_names_are_of_one_set_and_their_syllables_of_all() -> None:
    names = [names_of(part) for part in range(NUM_SETS)]
    assert len(set(names[0] + names[1] + names[2])) == sum(map(len, names))
    assert all(len(found) > 400 for found in names)


def test_it_is_hard_enough_to_say_no() -> None:
    lengths, counts = [], []
    for seed in find_family("tiny").seeds("held_out")[:40]:
        game = tiny(seed)
        scene, rng = game.start(), random.Random(seed)
        lengths.append(score_times(game)[-1])
        for _ in range(2 * lengths[-1]):
            if scene.done:
                break
            actions = game.actions()
            counts.append(len(actions))
            scene = game.step(rng.choice(actions) if rng.random() < 0.4 else game.expert() or "")
    assert min(lengths) >= 10
    assert mean(counts) >= 8.0
