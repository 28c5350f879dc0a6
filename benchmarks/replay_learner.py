"""What the replay costs the learner: PPO with prioritized replay against plain PPO, at equal batch.

Both learners train updates of the same size: as many segments as the recipe with replay draws, with the same
network, epochs and minibatches, and the same correction for age (decoupled, so that both judge all samples
before they train). The plain one gets its batch as it was collected; the other takes new segments in, draws
some of its batch from them and the rest from its full replay, and gives what it drew new priorities, as its
recipe says. Segments are collected beforehand, by an untrained policy, and used again and again: only `train`
is timed. The learners take turns in one process with one thread, each going first every other time. Counted
are processor seconds; medians over updates.

  Bar: the update with replay takes at most 1.1 times that of plain PPO, for CartPole with its dense network
  and for Color Lines with its pattern tables.
"""

from __future__ import annotations

import os
import sys

from common import ONE_THREAD, conclude, median, parser, say

os.environ.update(ONE_THREAD)  # before numpy and torch look

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import offbeat
from offbeat import algorithms
from offbeat.algorithms.ppo import PPOConfig
from offbeat.config.models import RunConfig
from offbeat.roles import Learner, SingleRank, WorkerContext
from offbeat.seeding import derive_seed
from offbeat.types import Batch, Segment, Ticket

BAR = 1.1
RECIPES = {"CartPole": "cartpole-ppo-per", "Color Lines": "colorlines-ppo-per"}
POOL = 6
"""Batches that are collected; each comes around again after so many updates."""


@dataclass
class Contestant:
    """A learner with the segments it is fed, and what its updates have cost."""

    learner: Learner
    segments: list[Segment]
    version: int = 0
    spent_s: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    def update(self) -> float:
        """One round; its processor seconds."""
        batch = Batch(self.version, (self.segments[self.version % len(self.segments)],), 1)
        started_s = time.process_time()
        metrics = self.learner.train(batch)
        spent_s = time.process_time() - started_s
        self.version += 1
        self.metrics = dict(metrics)
        return spent_s

    def figures(self) -> dict[str, float]:
        """Milliseconds of an update, and how much it trained."""
        steps = self.metrics["learn/gradient_steps"]
        return {"update_ms": 1e3 * median(self.spent_s), "gradient_steps": steps}


def settings_of(recipe: str) -> tuple[RunConfig, RunConfig]:
    """The recipe, and plain PPO with the same network on as many samples an update."""
    # Steps so small that policies stay as they are: segments are used again and again.
    common: dict[str, Any] = {"algorithm.lr": 1e-6, "algorithm.correction": "decoupled"}
    replayed = offbeat.load_config(recipe, common)
    written = replayed.algorithm.model_dump(mode="json")
    same = {f"algorithm.{name}": value for name, value in written.items() if name in PPOConfig.model_fields}
    plain = {**same, "algorithm.name": "ppo", "env.num_envs": written["batch_size"]}
    return replayed, offbeat.load_config(recipe, plain)


def enter(config: RunConfig) -> Contestant:
    """Make a run's learner, and collect what it will train on."""
    roles = algorithms.find(config.algorithm.name).build(config)
    learner = roles.learner(SingleRank())
    collector = roles.collect.make(WorkerContext(0, 1, 0))
    weights = learner.weights()
    tickets = [Ticket(number, 0, 0, 1, derive_seed(0, "collect", number)) for number in range(POOL)]
    return Contestant(learner, [collector.collect(ticket, weights) for ticket in tickets])


def fill(contestant: Contestant, num_updates: int) -> None:
    """Updates before any is counted: they compile, and fill the replay."""
    for _ in range(num_updates):
        contestant.update()


def compare(recipe: str, num_updates: int, warm_updates: int | None) -> dict[str, Any]:
    """Cost of an update on both sides, and their ratio."""
    replayed, plain = settings_of(recipe)
    rivals = {"with replay": enter(replayed), "plain": enter(plain)}
    settings = replayed.algorithm.model_dump()
    num_new = rivals["with replay"].segments[0].data["rewards"].shape[1]
    for contestant in rivals.values():
        fill(contestant, warm_updates or 2 + settings["buffer_capacity"] // num_new)
    for turn in range(num_updates):
        order = list(rivals.values())
        for contestant in order[:: 1 if turn % 2 else -1]:
            contestant.spent_s.append(contestant.update())
    figures: dict[str, Any] = {name: contestant.figures() for name, contestant in rivals.items()}
    figures["replay_size"] = rivals["with replay"].metrics["learn/replay_size"]
    figures |= {"batch_size": settings["batch_size"], "new_segments": num_new}
    figures["ratio"] = figures["with replay"]["update_ms"] / figures["plain"]["update_ms"]
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--updates", type=int, default=200, help="updates that are counted, each side (200)")
    options = made.parse_args(arguments)
    num_updates, warm_updates = (3, 2) if options.quick else (options.updates, None)
    games = {}
    for game, recipe in RECIPES.items():
        games[game] = found = compare(recipe, num_updates, warm_updates)
        parts = [f"{name} {found[name]['update_ms']:.2f} ms" for name in ("with replay", "plain")]
        steps = [f"{found[name]['gradient_steps']:.0f}" for name in ("with replay", "plain")]
        say(
            f"{game:12} {', '.join(parts)} an update ({' and '.join(steps)} gradient steps): "
            f"{found['ratio']:.3f} times"
        )
    worst = max(found["ratio"] for found in games.values())
    say(f"bar: {BAR} times; the dearer one takes {worst:.3f}")
    return conclude({"updates": num_updates, "games": games}, worst <= BAR, options)


if __name__ == "__main__":
    sys.exit(main())
