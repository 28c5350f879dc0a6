"""Are text games right, what do they cost, and is the tiny family hard enough to say no?

Story files: Jericho's walkthroughs and the finder of valid actions against them, then play at random among
valid actions through a table of known ones, in a child process. Families: their experts, and the same play.
Then children are killed, one at each step. Last, a prior that knows words only: the action of the nearest
states of other games by bag of words, on held-out games.

Bars: walkthroughs reach 350, 30 and 34; experts the maximum; the finder at least 75 of the first 80 steps
of zork1; a constant key is caught; no step is lost to 200 kills; in the tiny family at least 8 valid actions,
10 steps at least, and top-1 of the nearest neighbours at most 0.5.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from common import conclude, parser, say

from offbeat.envs.text import ActionTable, RemoteGame, Scene, SolvedGame, ValidActions, find_family
from offbeat.envs.text.measuring import follow, measure
from offbeat.envs.text.story import StoryGame, walkthrough

GAMES = Path(__file__).parents[2] / "shared" / "data" / "games"
WALKS = {
    # Jericho's name, seed, score; steps for the finder and at random, fewer where finding takes long.
    "zork1-r119.z3": ("zork1", 12, 350, 80, 500),
    "library.z5": ("library", 1, 30, 80, 100),
    "yomomma.z8": ("yomomma", 1, 34, 12, 25),
    "zork2-r63.z3": (None, 1, None, 0, 500),
    "zork3-r25.z3": (None, 1, None, 0, 500),
}
FAMILIES = {"tiny:8000": 500, "cooking:8000": 100}
NEIGHBOURS = (1, 5, 20)


def check_story(name: str, options: Any) -> dict[str, Any]:
    known, seed, score, steps, _ = WALKS[name]
    if known is None:
        return {"walkthrough": "none fits"}
    game = StoryGame(options.games / name, seed)
    steps = min(steps, 5) if options.quick else steps
    walk = follow(game, walkthrough(known), steps)
    poisoned = follow(game, walkthrough(known), min(steps, 40), key_of=lambda scene: "constant")
    return {
        "score": walk.score,
        "expected": score,
        "reached": walk.num_reached,
        "of": walk.num_steps,
        "missed": list(walk.missed),
        "conflicts": walk.num_conflicts,
        "conflicts_of_a_constant_key": poisoned.num_conflicts,
    }


def measure_game(what: str, steps: int) -> dict[str, Any]:
    valid = ValidActions(ActionTable())
    started_s = time.perf_counter()
    game = RemoteGame(what)
    seconds = time.perf_counter() - started_s
    try:
        figures = measure(game, valid, steps, random.Random(0))
        return {**figures.values(), "start_s": seconds}
    finally:
        game.close()


def check_experts(family: str, count: int) -> dict[str, Any]:
    found = find_family(family)
    lengths, solved = [], 0
    parts = [found.seeds(part) for part in ("pretrain", "train", "held_out")]
    for number in range(count):
        game = found.make(parts[number % 3][number // 3])
        scene, length = game.start(), 0
        while (action := game.expert()) is not None:
            scene, length = game.step(action), length + 1
        solved += scene.score == game.max_score
        lengths.append(length)
        game.close()
    return {"games": count, "solved": solved, "length_mean": mean(lengths), "length_min": min(lengths)}


def kill_children(what: str, count: int) -> dict[str, Any]:
    """Play the same game twice, once with a child killed at each step, and compare all scenes."""
    whole, killed = RemoteGame(what), RemoteGame(what)
    rng, equal, steps = random.Random(0), True, 0
    try:
        scenes = whole.start(), killed.start()
        while killed.num_deaths < count:
            if scenes[0].done:
                scenes = whole.start(), killed.start()
            action = rng.choice(whole.actions())
            assert killed.pid is not None
            os.kill(killed.pid, signal.SIGKILL)
            scenes, steps = (whole.step(action), killed.step(action)), steps + 1
            equal &= scenes[0] == scenes[1]
        return {"killed": killed.num_deaths, "steps": steps, "equal": equal}
    finally:
        whole.close()
        killed.close()


# ---------------------------------------------------------------- a prior that knows words only

State = tuple[Scene, Sequence[str], str]


def transcripts(part: str, count: int) -> list[State]:
    """States of play with 40 % random moves, each with its valid actions and the expert's."""
    family, found = find_family("tiny"), []
    for seed in family.seeds(part)[:count]:
        game: SolvedGame = family.make(seed)
        scene, rng = game.start(), random.Random(seed)
        for _ in range(60):
            expert = game.expert()
            if expert is None:
                break
            actions = game.actions()
            found.append((scene, actions, expert))
            scene = game.step(rng.choice(actions) if rng.random() < 0.4 else expert)
    return found


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def top_1(scores: Sequence[float], actions: Sequence[str], expert: str) -> float:
    """Chance that the best action is the expert's, ties broken at random."""
    best = [action for action, score in zip(actions, scores, strict=True) if score == max(scores)]
    return (expert in best) / len(best)


def similarity(a: str, b: str) -> float:
    first, second = set(words(a)), set(words(b))
    return len(first & second) / len(first | second)


def judge_words(num_games: int, num_states: int) -> dict[str, Any]:
    """Top-1 on held-out games of: nearest states' experts by TF-IDF, words shared with the goal, chance."""
    known, asked = transcripts("pretrain", num_games), transcripts("held_out", 40)
    asked = random.Random(0).sample(asked, min(num_states, len(asked)))
    counts = Counter(word for scene, _, _ in known for word in set(words(scene.view)))
    place = {word: (at, np.log(len(known) / count)) for at, (word, count) in enumerate(counts.items())}

    def vector(scene: Scene) -> Any:
        found = np.zeros(len(place), np.float32)
        for word in words(scene.view):
            if word in place:
                at, weight = place[word]
                found[at] += weight
        return found / max(float(np.linalg.norm(found)), 1e-6)

    table = np.stack([vector(scene) for scene, _, _ in known])
    hits: dict[str, list[float]] = {}
    for scene, actions, expert in asked:
        order = np.argsort(-(table @ vector(scene)))
        for near in NEIGHBOURS:
            experts = [known[at][2] for at in order[:near]]
            scores = [sum(similarity(action, one) for one in experts) for action in actions]
            hits.setdefault(f"nearest_{near}", []).append(top_1(scores, actions, expert))
        shared = [len(set(words(action)) & set(words(scene.goal))) for action in actions]
        hits.setdefault("goal_words", []).append(top_1(shared, actions, expert))
        hits.setdefault("chance", []).append(1 / len(actions))
    valid = mean(len(actions) for _, actions, _ in asked)
    return {"states": len(asked), "valid_mean": valid, **{name: mean(found) for name, found in hits.items()}}


# ---------------------------------------------------------------- output


def show_table(rows: Mapping[str, Mapping[str, Any]]) -> None:
    names = "steps, views, finding in ms, most, valid, most, hit rate, checked, different, steps/CPU-s"
    say(f"| game | {names.replace(', ', ' | ')} |\n|" + "---|" * 11)
    for name, row in rows.items():
        cells = [
            name,
            row["steps"],
            row["views"],
            f"{1e3 * row['find_s']:.1f}",
            f"{1e3 * row['find_max_s']:.1f}",
        ]
        cells += [f"{row['valid_mean']:.1f}", row["valid_max"]]
        cells += ["-" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}"]
        cells += [row["num_checked"], row["num_different"], f"{row['steps_per_s']:,.0f}"]
        say(f"| {' | '.join(map(str, cells))} |")


def holds(figures: Mapping[str, Any], num_killed: int) -> bool:
    stories, experts, prior = figures["stories"], figures["experts"], figures["words"]
    walked = [row for row in stories.values() if "score" in row]
    return (
        all(row["score"] == row["expected"] for row in walked)
        and all(row["conflicts_of_a_constant_key"] > row["conflicts"] for row in walked)
        and stories["zork1-r119.z3"]["reached"] >= min(75, stories["zork1-r119.z3"]["of"])
        and all(row["solved"] == row["games"] for row in experts.values())
        and all(row["equal"] for row in figures["kills"].values())
        and figures["kills"]["tiny:8000"]["killed"] >= num_killed
        and experts["tiny"]["length_min"] >= 10
        and prior["valid_mean"] >= 8
        and max(prior[f"nearest_{near}"] for near in NEIGHBOURS) <= 0.5
    )


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--games", type=Path, default=GAMES, help="the folder of the five story files")
    given = options.parse_args()
    scale = 20 if given.quick else 1
    figures: dict[str, Any] = {"stories": {}, "games": {}, "experts": {}, "kills": {}}
    for name in WALKS:
        figures["stories"][name] = found = check_story(name, given)
        say(f"{name}: {found}")
    for name, (*_, steps) in WALKS.items():
        figures["games"][name] = measure_game(str(given.games / name), max(10, steps // scale))
    for name, steps in FAMILIES.items():
        figures["games"][name] = measure_game(name, max(10, steps // scale))
    show_table(figures["games"])
    for family, count in (("tiny", 1000), ("cooking", 50)):
        figures["experts"][family] = found = check_experts(family, max(3, count // scale))
        say(f"expert of {family}: {found}")
    figures["words"] = judge_words(200 // scale, 500 // scale)
    say(f"words only: {figures['words']}")
    num_killed = 200 // scale
    for what, count in (("tiny:8000", num_killed), (str(given.games / "zork1-r119.z3"), num_killed // 10)):
        figures["kills"][Path(what).name] = found = kill_children(what, count)
        say(f"killed at each step: {what}: {found}")
    return conclude(figures, holds(figures, num_killed), given)


if __name__ == "__main__":
    sys.exit(main())
