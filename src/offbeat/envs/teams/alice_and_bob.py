"""Alice and Bob: two agents who must open two diamonds for each other, and are paid only for the pair.

The task exists twice: `AliceAndBobEnv` is the plain version, one episode in readable Python, and
`AliceAndBobTeam` steps many at once. From the same start cells both go the same way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
from gymnasium.envs.registration import registry
from numpy.typing import NDArray

from offbeat.envs.teams.team import Bools, Floats, TeamStep, View
from offbeat.envs.world import env_seed
from offbeat.errors import EnvError
from offbeat.types import Array, StateTree

ENV_ID = "offbeat/AliceAndBob-v0"
NUM_AGENTS = 2
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
"""Steps (rows, columns) of the actions stay, up, down, left, right."""
RED, BLUE = 0, 1
RENDER_MODES = ["ansi", "rgb_array"]
FORMAT = 1
"""Version of the layout of a team's state."""

ObservationName = Literal["onehot", "xy"]
Cell = tuple[int, int]
"""A row, from the top, and a column."""
Info = dict[str, Any]
Ints = NDArray[np.int64]


def register_alice_and_bob() -> None:
    """Make the task known to Gymnasium as ``offbeat/AliceAndBob-v0``; a second call changes nothing."""
    if ENV_ID not in registry:
        gymnasium.register(ENV_ID, entry_point="offbeat.envs.teams.alice_and_bob:AliceAndBobEnv")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a task; `AliceAndBobEnv` says what they mean."""

    observation: ObservationName = "onehot"
    see_other: bool = False
    blocking: bool = False
    max_steps: int = 100
    size: int = 8

    def __post_init__(self) -> None:
        if self.observation not in get_args(ObservationName):
            names = " or ".join(get_args(ObservationName))
            raise EnvError(f"{ENV_ID}: observation must be {names}, not {self.observation!r}")
        if self.size < 2 or self.max_steps < 1:
            raise EnvError(
                f"{ENV_ID}: size must be at least 2 and max_steps at least 1, "
                f"they are {self.size} and {self.max_steps}"
            )

    @property
    def buttons(self) -> tuple[Cell, Cell]:
        """Where the red and the blue button lie: top right and top left."""
        return (0, self.size - 1), (0, 0)

    @property
    def diamonds(self) -> tuple[Cell, Cell]:
        """Where the red and the blue diamond lie: bottom left and bottom right."""
        return (self.size - 1, 0), (self.size - 1, self.size - 1)

    @property
    def place_size(self) -> int:
        """Features that tell where an agent is."""
        return 2 * self.size if self.observation == "onehot" else 2

    @property
    def obs_size(self) -> int:
        """Features that an agent sees."""
        return self.place_size * (2 if self.see_other else 1) + 2

    @property
    def state_size(self) -> int:
        """Features that tell the whole task."""
        return 2 * self.place_size + 2

    def place(self, cell: Cell) -> Floats:
        """Where a cell is: its row and its column one-hot, or ``(x, y)`` within -1 and 1."""
        row, column = cell
        if self.observation == "xy":
            return np.array([column, row], np.float32) * np.float32(2 / (self.size - 1)) - np.float32(1)
        features = np.zeros(2 * self.size, np.float32)
        features[row] = features[self.size + column] = 1.0
        return features


class AliceAndBobEnv(gymnasium.Env[tuple[Floats, ...], tuple[int, ...]]):
    """Alice and Bob, one episode at a time.

    In a room of ``size`` x ``size`` cells lie a blue button (top left), a red button (top right), a red
    diamond (bottom left) and a blue diamond (bottom right). Two agents start in different cells, drawn at
    random, and stay or go up, down, left or right, both at once; walls hold them. A step that leaves one
    agent on a diamond and the other on the button of its colour collects the diamond. The team gets 1 when
    the second one is collected, which ends the episode, and 0 before. Episodes are cut off after
    ``max_steps`` steps.

    An agent sees where it is, two flags (red, blue) that are 1 for a collected diamond and, with
    ``see_other``, where the other one is; which of the two it is it does not see. Pressed buttons are not
    shown apart: they follow from where the agents are. `state` is Alice's place, the flags, Bob's place.
    ``observation`` says how places are written, see `Rules.place`. With ``blocking``, agents that would meet
    in a cell or change places stay where they are.

    ``reset(options={"cells": [(row, column), (row, column)]})`` starts Alice and Bob in these cells. Infos
    hold ``is_success``.
    """

    metadata = {"render_modes": RENDER_MODES, "render_fps": 8}  # noqa: RUF012

    def __init__(
        self,
        observation: ObservationName = "onehot",
        see_other: bool = False,
        blocking: bool = False,
        max_steps: int = 100,
        size: int = 8,
        render_mode: str | None = None,
    ) -> None:
        self._rules = rules = Rules(observation, see_other, blocking, max_steps, size)
        lowest = -1.0 if observation == "xy" else 0.0
        seen = gymnasium.spaces.Box(lowest, 1.0, (rules.obs_size,), np.float32)
        self.observation_space = gymnasium.spaces.Tuple((seen, seen))
        moves: gymnasium.Space[Any] = gymnasium.spaces.Discrete(len(MOVES))
        self.action_space = gymnasium.spaces.Tuple((moves, moves))
        self.render_mode = render_mode
        self._cells: list[Cell] = list(rules.diamonds)
        self._is_collected = [False, False]
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[tuple[Floats, ...], Info]:
        """Start an episode, in cells drawn at random or in those of ``options``."""
        super().reset(seed=seed)
        cells = (options or {}).get("cells")
        self._cells = self._drawn_cells() if cells is None else self._given_cells(cells)
        self._is_collected = [False, False]
        self._num_steps = 0
        return self._observe(), {"is_success": False}

    def step(self, action: tuple[int, ...]) -> tuple[tuple[Floats, ...], float, bool, bool, Info]:
        """Move both agents, one action each."""
        if len(action) != NUM_AGENTS or not all(0 <= move < len(MOVES) for move in action):
            raise EnvError(f"{action} are no actions of {ENV_ID}; give two of 0 to {len(MOVES) - 1}")
        targets = [
            self._target(cell, MOVES[int(move)]) for cell, move in zip(self._cells, action, strict=True)
        ]
        if not (self._rules.blocking and self._is_blocked(targets)):
            self._cells = targets
        for colour in (RED, BLUE):
            if self._rules.diamonds[colour] in self._cells and self._rules.buttons[colour] in self._cells:
                self._is_collected[colour] = True
        self._num_steps += 1
        is_solved = all(self._is_collected)
        is_cut_off = not is_solved and self._num_steps >= self._rules.max_steps
        return self._observe(), float(is_solved), is_solved, is_cut_off, {"is_success": is_solved}

    def state(self) -> Floats:
        """What only training may know ``[S]``: Alice's place, what is collected, Bob's place."""
        return self._seen_from(0, with_other=True)

    def render(self) -> Any:
        """The room as text ("ansi") or as a picture of bytes ``[H, W, 3]`` ("rgb_array")."""
        from offbeat.envs.teams import rendering  # most episodes are played unseen

        if self.render_mode == "ansi":
            return rendering.text(self._rules, self._cells, self._is_collected, self._num_steps)
        if self.render_mode == "rgb_array":
            return rendering.picture(self._rules, self._cells, self._is_collected)
        gymnasium.logger.warn(f"render() needs a render_mode: make the task with one of {RENDER_MODES}")
        return None

    def _target(self, cell: Cell, move: Cell) -> Cell:
        last = self._rules.size - 1
        return min(max(cell[0] + move[0], 0), last), min(max(cell[1] + move[1], 0), last)

    def _is_blocked(self, targets: list[Cell]) -> bool:
        return targets[0] == targets[1] or targets == self._cells[::-1]

    def _drawn_cells(self) -> list[Cell]:
        size = self._rules.size
        first, second = self.np_random.choice(size * size, NUM_AGENTS, replace=False).tolist()
        return [divmod(first, size), divmod(second, size)]

    def _given_cells(self, cells: Any) -> list[Cell]:
        given = [(int(row), int(column)) for row, column in cells]
        size = self._rules.size
        is_inside = all(0 <= place < size for cell in given for place in cell)
        if len(given) != NUM_AGENTS or given[0] == given[1] or not is_inside:
            raise EnvError(
                f"{ENV_ID}: cells must be two different (row, column) of 0 to {size - 1}, not {cells}"
            )
        return given

    def _observe(self) -> tuple[Floats, ...]:
        return tuple(self._seen_from(agent, self._rules.see_other) for agent in range(NUM_AGENTS))

    def _seen_from(self, agent: int, with_other: bool) -> Floats:
        parts = [self._rules.place(self._cells[agent]), np.array(self._is_collected, np.float32)]
        if with_other:
            parts.append(self._rules.place(self._cells[1 - agent]))
        return np.concatenate(parts)


class AliceAndBobTeam:
    """Alice and Bob, N episodes at a time; see `AliceAndBobEnv` for the rules and the options.

    A cell is a number, row by row. Every cell has a mark: 1 for the red button, 2 for the blue one, 4 for the
    red diamond, 8 for the blue one. The marks of the cells of both agents, taken together as ``m``, collect
    ``m & (m >> 2)``, which is 1 for red and 2 for blue.
    """

    def __init__(
        self,
        num_envs: int,
        observation: ObservationName = "onehot",
        see_other: bool = False,
        blocking: bool = False,
        max_steps: int = 100,
        size: int = 8,
    ) -> None:
        self._rules = rules = Rules(observation, see_other, blocking, max_steps, size)
        self.num_envs = num_envs
        self.num_agents = NUM_AGENTS
        self.obs_size = rules.obs_size
        self.state_size = rules.state_size
        self.single_action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(len(MOVES))
        self.has_legal = False
        self._moved = _moves_table(size)
        self._marks = _marks_table(rules)
        self._seen = _seen_table(rules)
        self._num_cells = size * size
        self.reset(0)

    def reset(self, seed: int) -> View:
        """Start a new episode everywhere."""
        self._rng = np.random.Generator(np.random.SFC64(env_seed(seed, 0)))
        self._cells = self._drawn_cells(self.num_envs)
        self._flags = np.zeros(self.num_envs, np.int64)
        self._steps = np.zeros(self.num_envs, np.int64)
        return self._view()

    def step(self, actions: Array, active: Bools | None = None) -> TeamStep:
        """Move all agents ``[N, 2]``; environments that are not ``active`` ``[N]`` stand still."""
        if actions.shape != self._cells.shape:
            raise EnvError(f"{ENV_ID}: actions must be {self._cells.shape}, these are {actions.shape}")
        self._move(actions, active)
        solved = self._flags == 3
        late = self._steps >= self._rules.max_steps
        obs, state = self._observe(self._cells, self._flags)
        view_obs, view_state = obs.copy(), state.copy()
        ended = np.flatnonzero(solved | late)
        if ended.size:
            self._cells[ended] = self._drawn_cells(ended.size)
            self._flags[ended] = self._steps[ended] = 0
            view_obs[ended], view_state[ended] = self._observe(self._cells[ended], self._flags[ended])
        return TeamStep(
            view=View(view_obs, view_state, None, self._alive()),
            next_obs=obs,
            next_state=state,
            rewards=solved.astype(np.float64),
            terminated=solved,
            truncated=late & ~solved,
            success=solved.copy(),
        )

    def state_dict(self) -> StateTree:
        """Cells, what is collected, steps taken and the random generator."""
        bits: Any = self._rng.bit_generator.state
        return {
            "format": FORMAT,
            "env": ENV_ID,
            "rules": asdict(self._rules),
            "cells": self._cells.copy(),
            "flags": self._flags.copy(),
            "steps": self._steps.copy(),
            "rng": bits["state"]["state"].copy(),
            "rng_rest": [bits["has_uint32"], bits["uinteger"]],
        }

    def load_state_dict(self, state: StateTree) -> View:
        """Go on from a state of as many environments with the same rules."""
        here = {"format": FORMAT, "env": ENV_ID, "rules": asdict(self._rules), "num_envs": self.num_envs}
        there = {key: state.get(key) for key in ("format", "env", "rules")}
        there["num_envs"] = len(state.get("cells", ()))
        if there != here:
            raise EnvError(
                f"the saved environments are {there}, this run has {here}; "
                "go on with the configuration that made the checkpoint, or start a new run"
            )
        self._cells, self._flags, self._steps = (
            np.array(state[name], np.int64) for name in ("cells", "flags", "steps")
        )
        bits: Any = self._rng.bit_generator.state
        bits["state"]["state"] = np.array(state["rng"], np.uint64)
        bits["has_uint32"], bits["uinteger"] = state["rng_rest"]
        self._rng.bit_generator.state = bits
        return self._view()

    def close(self) -> None:
        """There is nothing to free."""

    def _move(self, actions: Array, active: Bools | None) -> None:
        cells = self._moved[self._cells, actions]
        if self._rules.blocking:
            is_swap = (cells == self._cells[:, ::-1]).all(axis=1)
            blocked = is_swap | (cells[:, 0] == cells[:, 1])
            cells = np.where(blocked[:, None], self._cells, cells)
        marks = self._marks[cells]
        together = marks[:, 0] | marks[:, 1]
        collected = together & (together >> 2)
        if active is None:
            self._cells = cells
            self._steps += 1
        else:
            self._cells = np.where(active[:, None], cells, self._cells)
            self._steps += active
            collected *= active
        self._flags |= collected

    def _drawn_cells(self, count: int) -> Ints:
        """Pairs ``[count, 2]`` of different cells, all pairs equally likely."""
        pairs = self._rng.integers(self._num_cells * (self._num_cells - 1), size=count)
        first, second = np.divmod(pairs, self._num_cells - 1)
        return np.stack((first, second + (second >= first)), axis=1)

    def _observe(self, cells: Ints, flags: Ints) -> tuple[Floats, Floats]:
        seen = self._seen[cells + (flags * self._num_cells)[:, None]]
        places = seen[:, ::-1, : self._rules.place_size]
        if not self._rules.see_other:
            return seen, np.concatenate((seen[:, 0], places[:, 0]), axis=1)
        seen = np.concatenate((seen, places), axis=2)
        return seen, seen[:, 0].copy()

    def _view(self) -> View:
        obs, state = self._observe(self._cells, self._flags)
        return View(obs, state, None, self._alive())

    def _alive(self) -> Bools:
        return np.ones((self.num_envs, NUM_AGENTS), np.bool_)


def _moves_table(size: int) -> Ints:
    """The cell ``[size * size, 5]`` that each action leads to from each cell."""
    rows, columns = np.divmod(np.arange(size * size)[:, None], size)
    steps = np.array(MOVES)
    rows = np.clip(rows + steps[:, 0], 0, size - 1)
    columns = np.clip(columns + steps[:, 1], 0, size - 1)
    table: Ints = rows * size + columns
    return table


def _marks_table(rules: Rules) -> Ints:
    marks = np.zeros((rules.size, rules.size), np.int64)
    for bit, cell in enumerate((*rules.buttons, *rules.diamonds)):
        marks[cell] = 1 << bit
    return marks.ravel()


def _seen_table(rules: Rules) -> Floats:
    """What an agent sees of itself and the flags ``[4 * size * size, place + 2]``, by flags and cell."""
    cells = [(row, column) for row in range(rules.size) for column in range(rules.size)]
    rows = [
        np.concatenate((rules.place(cell), np.array([flags & 1, flags >> 1], np.float32)))
        for flags in range(4)
        for cell in cells
    ]
    return np.stack(rows)
