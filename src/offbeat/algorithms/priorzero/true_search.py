"""Search with the game itself as model, which judges a prior before there is a learned model.

The prior is at the root, and every node's value is 0: only scores that are met inside the tree count. Below
the root all valid actions are equally likely. Nothing here asks a game for its solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.priorzero.priors import Prior
from offbeat.algorithms.priorzero.prompts import Prompts, Turn
from offbeat.envs.text import Game, Scene
from offbeat.errors import ConfigError
from offbeat.search import SearchConfig, Trees, search
from offbeat.seeding import derive_seed

F32 = NDArray[np.float32]
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class TrueSearchConfig:
    """Constants of the search and of the play.

    A tree has ``slots`` for a state's valid actions. A state with more is an error, or, if ``cuts``, loses
    those the prior likes least (below the root the last ones), which is counted. The action is drawn from
    visits^(1 / temperature).
    """

    search: SearchConfig = field(default_factory=lambda: SearchConfig("puct", num_simulations=25))
    slots: int = 64
    cuts: bool = False
    temperature: float = 1.0
    prompts: Prompts = field(default_factory=Prompts)


class Player(NamedTuple):
    """A player: a prior, and a seed of its own randomness. ``searches`` False plays the prior by itself.

    ``repeats`` False, without search, leaves out what was done before in the same view, unless all was.
    """

    prior: Prior
    seed: int
    searches: bool = True
    repeats: bool = True


@dataclass(frozen=True, slots=True)
class Episode:
    """One game played: the score after each step, what could have been scored, and the steps allowed.

    ``cut`` counts valid actions that had no slot.
    """

    scores: tuple[float, ...]
    max_score: float
    limit: int
    commands: tuple[str, ...]
    cut: int = 0

    @property
    def share(self) -> float:
        """Share of the maximum at the end."""
        return (self.scores[-1] if self.scores else 0.0) / self.max_score

    @property
    def area(self) -> float:
        """Share of the maximum, mean over all allowed steps; after the end it stays."""
        rest = (self.limit - len(self.scores)) * (self.scores[-1] if self.scores else 0.0)
        return (sum(self.scores) + rest) / (self.limit * self.max_score)

    @property
    def steps_to_half(self) -> int:
        """Steps to half of the maximum; the limit where it was not reached."""
        reached = (at for at, score in enumerate(self.scores, 1) if score >= _HALF * self.max_score)
        return next(reached, self.limit)


class _Position(NamedTuple):
    """A state of the game with what the search needs of it."""

    state: bytes
    score: float
    done: bool
    actions: tuple[str, ...]


class TrueModel:
    """One game as a model: what follows an action in a state, which is asked of the game once.

    All players of a comparison share it, so that they see one table of valid actions.
    """

    def __init__(self, game: Game) -> None:
        self.game = game
        self._known: dict[tuple[bytes, str], _Position] = {}

    def start(self) -> _Position:
        """Return the position at the start."""
        return self._look(self.game.start())

    def after(self, position: _Position, action: str) -> _Position:
        """Return where an action leads to; a game that is over stays as it is."""
        if position.done:
            return position
        key = position.state, action
        if key not in self._known:
            self.game.restore(position.state)
            self._known[key] = self._look(self.game.step(action))
        return self._known[key]

    def scene(self, position: _Position) -> Scene:
        """Return the position in words."""
        self.game.restore(position.state)
        return self.game.scene()

    def _look(self, scene: Scene) -> _Position:
        actions = () if scene.done else tuple(self.game.actions())
        # A state without anything to do is an end, whatever the game says of it.
        return _Position(self.game.save(), scene.score, scene.done or not actions, actions)


class _Lane:
    """One player's game: where it is, and the positions of its tree's nodes."""

    def __init__(self, model: TrueModel, player: Player, config: TrueSearchConfig) -> None:
        self.player, self.position = player, model.start()
        self.rng = np.random.default_rng(derive_seed(player.seed, model.game.name))
        self.scene = model.scene(self.position)
        self.turns: list[Turn] = []
        self.scores: list[float] = []
        self.done_in_view: set[tuple[str, str]] = set()
        self.nodes: list[_Position] = [self.position] * config.search.num_nodes
        self.kept: list[tuple[str, ...]] = [()] * config.search.num_nodes
        self.cut = 0

    def take(self, model: TrueModel, action: str) -> None:
        self.done_in_view.add((self.scene.key, action))
        self.position = model.after(self.position, action)
        after = model.scene(self.position)
        self.turns.append(Turn(self.scene, action, after.answer))
        self.scene = after
        self.scores.append(self.position.score)


def play(game: Game, players: Sequence[Player], limit: int, config: TrueSearchConfig) -> list[Episode]:
    """Play one episode of a game for each player, at most ``limit`` steps of it.

    What a player does follows from its prior and its seed; the others do not matter.
    """
    model = TrueModel(game)
    lanes = [_Lane(model, player, config) for player in players]
    searching = [lane for lane in lanes if lane.player.searches]
    trees = Trees(config.search, max(1, len(searching)), config.slots)
    for _ in range(limit):
        running = [lane for lane in lanes if not lane.position.done]
        if not running:
            break
        priors = _ask(running, config.prompts)
        chosen = _search(model, trees, searching, priors, config) if searching else {}
        for lane in running:
            action = chosen[id(lane)] if lane.player.searches else _draw(lane, priors[id(lane)])
            lane.take(model, action)
    return [
        Episode(
            tuple(lane.scores), game.max_score, limit, tuple(turn.command for turn in lane.turns), lane.cut
        )
        for lane in lanes
    ]


def _ask(lanes: Sequence[_Lane], prompts: Prompts) -> dict[int, NDArray[np.float64]]:
    """Ask each prior once for all of its lanes; returns log-probs by lane."""
    by_prior: dict[int, list[_Lane]] = {}
    for lane in lanes:
        by_prior.setdefault(id(lane.player.prior), []).append(lane)
    found: dict[int, NDArray[np.float64]] = {}
    for own in by_prior.values():
        shown = [prompts.of(lane.scene, lane.turns) for lane in own]
        log_probs = own[0].player.prior.log_probs(shown, [lane.position.actions for lane in own])
        found |= {id(lane): one for lane, one in zip(own, log_probs, strict=True)}
    return found


def _draw(lane: _Lane, log_probs: NDArray[np.float64]) -> str:
    """Draw an action from the prior alone."""
    actions, weights = lane.position.actions, np.exp(log_probs)
    if not lane.player.repeats:
        is_new = np.array([(lane.scene.key, action) not in lane.done_in_view for action in actions])
        weights = np.where(is_new, weights, 0.0) if (weights * is_new).sum() > 0 else weights
    ends = np.cumsum(weights)
    at = int(np.searchsorted(ends, lane.rng.random() * ends[-1], side="right"))
    return actions[min(at, len(actions) - 1)]


def _search(
    model: TrueModel,
    trees: Trees,
    lanes: Sequence[_Lane],
    priors: dict[int, NDArray[np.float64]],
    config: TrueSearchConfig,
) -> dict[int, str]:
    """Search from where all lanes are; returns the action of each by lane. Ended ones search in vain."""
    logits = np.full((len(lanes), config.slots), -np.inf, np.float32)
    for row, lane in zip(logits, lanes, strict=True):
        own = priors.get(id(lane), np.zeros(1))
        lane.nodes[0] = lane.position
        lane.kept[0] = _keep(lane, lane.position.actions, own, config)
        rank = {action: at for at, action in enumerate(lane.position.actions)}
        row[: max(1, len(lane.kept[0]))] = [own[rank[action]] for action in lane.kept[0]] or [0.0]

    def step(parents: NDArray[np.int32], slots: NDArray[np.int32], node: int) -> tuple[F32, F32, F32]:
        rewards, values = np.zeros(len(lanes), np.float32), np.zeros(len(lanes), np.float32)
        below = np.full_like(logits, -np.inf)
        for at, lane in enumerate(lanes):
            above, names = lane.nodes[parents[at]], lane.kept[parents[at]]
            reached = model.after(above, names[slots[at]]) if names else above
            lane.nodes[node], rewards[at] = reached, reached.score - above.score
            lane.kept[node] = _keep(lane, reached.actions, None, config)
            below[at, : max(1, len(lane.kept[node]))] = 0.0
        return rewards, values, below

    seeds = np.array([lane.rng.integers(2**64, dtype=np.uint64) for lane in lanes], np.uint64)
    found = search(step, trees, logits, np.zeros(len(lanes), np.float32), seeds=seeds)
    chosen = found.act(config.temperature, [lane.rng for lane in lanes])
    return {
        id(lane): lane.kept[0][at] for lane, at in zip(lanes, chosen.tolist(), strict=True) if lane.kept[0]
    }


def _keep(
    lane: _Lane, actions: tuple[str, ...], log_probs: NDArray[np.float64] | None, config: TrueSearchConfig
) -> tuple[str, ...]:
    """Return the actions that have a slot: all, or an error, or those the prior likes best."""
    if len(actions) <= config.slots:
        return actions
    if not config.cuts:
        raise ConfigError(
            f"a state has {len(actions)} valid actions and a tree {config.slots} slots: raise slots to "
            f"{len(actions)} or more, or let the search cut what the prior likes least (cuts)"
        )
    lane.cut += len(actions) - config.slots
    if log_probs is None:
        return actions[: config.slots]
    best = np.argsort(-log_probs, kind="stable")[: config.slots]
    return tuple(actions[at] for at in sorted(best.tolist()))
