"""Overcooked: two cooks who must share a kitchen, from the package overcooked-ai.

Give ``offbeat.envs.teams.overcooked:make`` as ``env.id``. overcooked-ai 1.1.0 does not run with numpy 2, so
it needs a virtual environment of its own, with ``pip install overcooked-ai==1.1.0 "numpy<2" scipy``.
"""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
import numpy as np

from offbeat.config.code import env_factory
from offbeat.envs.teams.team import Floats
from offbeat.errors import EnvError

NUM_COOKS = 2
Info = dict[str, Any]


@env_factory
def make(
    layout: str = "cramped_room",
    horizon: int = 400,
    shaping: float = 0.0,
    render_mode: str | None = None,
) -> OvercookedEnv:
    """Make a kitchen by the name of its layout; see `OvercookedEnv`."""
    return OvercookedEnv(layout, horizon, shaping, render_mode)


class OvercookedEnv(gymnasium.Env[tuple[Floats, ...], tuple[int, ...]]):
    """A kitchen of overcooked-ai, one episode at a time.

    The cooks go north, south, east or west, stay, or interact with what lies before them. The team gets 20
    for a soup that is delivered, and ``shaping`` times what the package pays for steps on the way there.
    Episodes have ``horizon`` steps and start as the layout says, so that a seed changes nothing.

    A cook sees the package's lossless encoding of the whole kitchen ``[W, H, 26]``, itself before the other,
    as flat features; `state` is what the first cook sees.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 8}  # noqa: RUF012

    def __init__(
        self,
        layout: str = "cramped_room",
        horizon: int = 400,
        shaping: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        package = _import()
        try:
            self._kitchen = package.OvercookedGridworld.from_layout_name(layout)
        except FileNotFoundError as error:
            raise EnvError(
                f"overcooked-ai has no layout {layout!r}; cramped_room is one ({error})"
            ) from error
        if self._kitchen.num_players != NUM_COOKS:
            raise EnvError(f"the layout {layout!r} has {self._kitchen.num_players} cooks; take one with two")
        self._read_state = package.OvercookedState.from_dict
        self._actions = importlib.import_module("overcooked_ai_py.mdp.actions").Action.INDEX_TO_ACTION
        self._horizon = horizon
        self._shaping = shaping
        self._state = self._kitchen.get_standard_start_state()
        size = int(np.prod(self._kitchen.get_lossless_state_encoding_shape()))
        seen = gymnasium.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.observation_space = gymnasium.spaces.Tuple((seen, seen))
        acted: gymnasium.Space[Any] = gymnasium.spaces.Discrete(len(self._actions))
        self.action_space = gymnasium.spaces.Tuple((acted, acted))
        self.render_mode = render_mode
        self._seen: tuple[Floats, ...] = ()

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[tuple[Floats, ...], Info]:
        """Start an episode as the layout says."""
        super().reset(seed=seed)
        self._state = self._kitchen.get_standard_start_state()
        return self._observe(), {}

    def step(self, action: tuple[int, ...]) -> tuple[tuple[Floats, ...], float, bool, bool, Info]:
        """Let both cooks act."""
        joint = tuple(self._actions[index] for index in action)
        self._state, found = self._kitchen.get_state_transition(self._state, joint)
        reward = float(sum(found["sparse_reward_by_agent"]))
        if self._shaping:
            reward += self._shaping * float(sum(found["shaped_reward_by_agent"]))
        is_over = bool(self._kitchen.is_terminal(self._state))
        is_late = self._state.timestep >= self._horizon
        return self._observe(), reward, is_over, is_late and not is_over, {}

    def state(self) -> Floats:
        """What only training may know ``[S]``: the kitchen as the first cook sees it."""
        return self._seen[0]

    def render(self) -> Any:
        """The kitchen as text."""
        return self._kitchen.state_string(self._state) if self.render_mode == "ansi" else None

    def get_state(self) -> Info:
        """Everything the next steps depend on, as plain values."""
        state: Info = self._state.to_dict()
        return state

    def set_state(self, state: Info) -> None:
        """Go on from a state taken earlier."""
        self._state = self._read_state(state)
        self._observe()

    def _observe(self) -> tuple[Floats, ...]:
        grids = self._kitchen.lossless_state_encoding(self._state, self._horizon)
        self._seen = tuple(np.asarray(grid, np.float32).ravel() for grid in grids)
        return self._seen


def _import() -> Any:
    try:
        return importlib.import_module("overcooked_ai_py.mdp.overcooked_mdp")
    except (ImportError, AttributeError) as error:
        raise EnvError(
            f"Overcooked cannot be imported ({error}); in a virtual environment of its own: "
            'pip install overcooked-ai==1.1.0 "numpy<2" scipy'
        ) from error
