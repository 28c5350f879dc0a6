"""Measuring a game and its finder along random play: views, seconds, valid actions, hit rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean

from offbeat.envs.text.game import Scene
from offbeat.envs.text.remote import RemoteGame
from offbeat.envs.text.story import StoryGame
from offbeat.envs.text.table import ValidActions


@dataclass(slots=True)
class Measured:
    """Figures of some steps; seconds are processor time of the game's process."""

    steps: int
    episodes: int = 1
    best_score: float = 0.0
    find_s: list[float] = field(default_factory=list)
    step_s: float = 0.0
    counts: list[int] = field(default_factory=list)
    views: set[str] = field(default_factory=set)
    hit_rate: float | None = None
    num_checked: int = 0
    num_different: int = 0
    num_cut: int = 0
    num_left: int = 0

    def values(self) -> Mapping[str, object]:
        """Return the figures for programs."""
        return {
            "steps": self.steps,
            "episodes": self.episodes,
            "best_score": self.best_score,
            "views": len(self.views),
            "find_s": mean(self.find_s) if self.find_s else 0.0,
            "find_max_s": max(self.find_s, default=0.0),
            "steps_per_s": self.steps / self.step_s if self.step_s else None,
            "valid_mean": mean(self.counts),
            "valid_max": max(self.counts),
            "hit_rate": self.hit_rate,
            "num_checked": self.num_checked,
            "num_different": self.num_different,
            "num_cut": self.num_cut,
            "num_left": self.num_left,
        }

    def rows(self) -> Mapping[str, str]:
        """Return the figures in words."""
        mean_ms, most_ms = (1e3 * found(self.find_s or [0.0]) for found in (mean, max))
        rate = f"{self.steps / self.step_s:,.0f} steps per CPU-second" if self.step_s else "-"
        return {
            "steps": f"{self.steps} in {self.episodes} episodes, best score {self.best_score:g}",
            "views": f"{len(self.views)}",
            "finding": f"{mean_ms:.1f} ms of processor time, at most {most_ms:.1f} ms",
            "stepping": rate,
            "valid actions": f"{mean(self.counts):.1f}, at most {max(self.counts)}",
            "hit rate": "the game knows its actions" if self.hit_rate is None else f"{self.hit_rate:.2f}",
            "checked again": f"{self.num_checked}, {self.num_different} different",
            "not offered": f"{self.num_cut} cut, {self.num_left} candidates beyond the budget",
        }


def measure(game: RemoteGame, valid: ValidActions, steps: int, rng: random.Random) -> Measured:
    """Play at random among valid actions and measure; games that end are begun again."""
    found = Measured(steps)
    scene = game.start()
    for _ in range(steps):
        num_hits = valid.counts.num_hits
        actions = valid.of(game, scene)
        if valid.counts.num_hits == num_hits:
            found.find_s.append(game.cpu_s)
        found.counts.append(len(actions))
        found.views.add(scene.key)
        scene = game.step(rng.choice(actions) if actions else "wait")
        found.step_s += game.cpu_s
        found.best_score = max(found.best_score, scene.score)
        if scene.done:
            scene, found.episodes = game.start(), found.episodes + 1
    counts = valid.counts
    found.hit_rate = counts.hit_rate if counts.num_asked else None
    found.num_checked, found.num_different = counts.num_checked, counts.num_different
    found.num_cut, found.num_left = counts.num_cut, counts.num_left
    return found


@dataclass(frozen=True, slots=True)
class Walk:
    """A walkthrough against the finder: how it ends, and what the found actions reach.

    ``num_reached`` counts steps whose list has an action that does what the walkthrough does there.
    ``num_conflicts`` counts steps where the list of an earlier state with the same key has none, although
    the state's own list has one: the key leaves something out.
    """

    score: float
    is_done: bool
    num_steps: int
    num_reached: int
    num_conflicts: int
    missed: tuple[str, ...]


def follow(
    game: StoryGame,
    commands: Sequence[str],
    limit: int | None = None,
    key_of: Callable[[Scene], str] | None = None,
) -> Walk:
    """Play a walkthrough, and look for the valid actions of its first ``limit`` states."""
    scene = game.start()
    first: dict[str, tuple[str, ...]] = {}
    missed: list[str] = []
    num_steps = num_conflicts = 0
    for command in commands:
        if not scene.done and (limit is None or num_steps < limit):
            labels, num_steps = game.find().labels, num_steps + 1
            known = first.setdefault(scene.key if key_of is None else key_of(scene), labels)
            if not game.reaches(labels, command):
                missed.append(command)
            elif not game.reaches(known, command):
                num_conflicts += 1
        scene = game.step(command)
    return Walk(scene.score, scene.done, num_steps, num_steps - len(missed), num_conflicts, tuple(missed))
