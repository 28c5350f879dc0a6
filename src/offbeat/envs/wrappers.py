"""Thin wrappers that bring observations into the form worlds show."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces.utils import flatten, flatten_space
from numpy.typing import NDArray

from offbeat.envs.checks import box_of
from offbeat.errors import EnvError

AnyEnv = gymnasium.Env[Any, Any]
Path = tuple[str | int, ...]
"""Where a part of an observation lies in its Dict or Tuple, from the outside in."""


class OneHot(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Turns Discrete observations into one-hot float32 vectors ``[n]``."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, gymnasium.spaces.Discrete)
        self._first = int(space.start)
        self._num_classes = int(space.n)
        self.observation_space = box_of(str(env), space)

    def observation(self, observation: Any) -> NDArray[np.float32]:
        """Encode one class as a vector with a single 1."""
        index = int(observation) - self._first
        if not 0 <= index < self._num_classes:
            raise EnvError(
                f"{self.env}: the observation {observation!r} is not in its observation_space "
                f"{self.env.observation_space}; correct one of the two"
            )
        row = np.zeros(self._num_classes, np.float32)
        row[index] = 1.0
        return row


class MinAtarImages(gymnasium.Wrapper[NDArray[np.uint8], int, Any, int]):
    """Shows MinAtar's boolean ``[H, W, C]`` grids as uint8 ``[C, H, W]`` images of 0 and 1."""

    def __init__(self, env: AnyEnv) -> None:
        super().__init__(env)
        assert env.observation_space.shape is not None
        height, width, channels = env.observation_space.shape
        self.observation_space = gymnasium.spaces.Box(0, 1, (channels, height, width), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Start an episode; a seeded one forgets the sticky action of the episode before."""
        if seed is not None:
            game: Any = self.env.unwrapped
            game.game.last_action = 0
        grid, info = self.env.reset(seed=seed, options=options)
        return grid.view(np.uint8).transpose(2, 0, 1), info

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Take one action."""
        grid, reward, terminated, truncated, info = self.env.step(action)
        return grid.view(np.uint8).transpose(2, 0, 1), float(reward), terminated, truncated, info


class Flat(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Turns the numbers of Dict and Tuple observations into one float32 vector ``[n]``; leaves text out.

    Parts come in the order of the space, each as `gymnasium.spaces.flatten` writes it: a Discrete one-hot.
    ``name`` is for messages, ``note`` says what became of the parts.
    """

    def __init__(self, env: AnyEnv, name: str) -> None:
        super().__init__(env)
        self._name = name
        space = env.observation_space
        parts = list(_parts(space, ()))
        self._parts = [(path, part) for path, part in parts if not _is_text(part)]
        boxes = [_flat_box(name, path, part) for path, part in self._parts]
        if not boxes:
            raise EnvError(
                f"{name}: its observation_space {space} holds only text, which networks here cannot read; "
                "give numbers, or turn the text into numbers with a wrapper (env.wrappers)"
            )
        low, high = (np.concatenate([getattr(box, end) for box in boxes]) for end in ("low", "high"))
        self.observation_space = gymnasium.spaces.Box(low.astype(np.float32), high.astype(np.float32))
        text = ", ".join([_written(path) for path, part in parts if _is_text(part)])
        kept = ", ".join(_written(path) for path, _ in self._parts if path)
        kind = type(space).__name__
        self.note = (
            f"{name}: the {kind} observations{f' ({kept})' if kept else ''} are flattened into vectors of"
            f" {len(low)} numbers{f'; text is left out: {text}' if text else ''}"
        )

    def observation(self, observation: Any) -> NDArray[np.float32]:
        """Put the parts of one observation behind each other."""
        try:
            rows = [_row(part, _at(observation, path)) for path, part in self._parts]
        except (LookupError, TypeError, ValueError) as error:
            raise EnvError(
                f"{self._name}: the observation {observation!r} is not in its observation_space "
                f"{self.env.observation_space} ({type(error).__name__}: {error}); correct one of the two"
            ) from error
        return np.concatenate(rows, dtype=np.float32, casting="unsafe")


def _parts(space: gymnasium.Space[Any], path: Path) -> Iterator[tuple[Path, gymnasium.Space[Any]]]:
    """Yield the parts of nested Dict and Tuple spaces that are neither."""
    if isinstance(space, gymnasium.spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(part, (*path, key))
    elif isinstance(space, gymnasium.spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, (*path, index))
    else:
        yield path, space


def _is_text(space: gymnasium.Space[Any]) -> bool:
    return space.dtype is not None and space.dtype.kind in "US"


def _flat_box(name: str, path: Path, part: gymnasium.Space[Any]) -> gymnasium.spaces.Box:
    try:
        flat: gymnasium.Space[Any] = flatten_space(part)
    except NotImplementedError:
        flat = part
    if not isinstance(flat, gymnasium.spaces.Box):
        where = f"the part {_written(path)} of its observations" if path else "its observation_space"
        raise EnvError(
            f"{name}: {where} is {part}, which has no fixed number of values; "
            "turn it into a Box with a wrapper (env.wrappers)"
        )
    return flat


def _row(part: gymnasium.Space[Any], value: Any) -> Any:
    if isinstance(part, gymnasium.spaces.Discrete) and not part.contains(value):
        raise ValueError(f"{value!r} is not in {part}")
    return flatten(part, value)


def _at(observation: Any, path: Path) -> Any:
    for key in path:
        observation = observation[key]
    return observation


def _written(path: Path) -> str:
    return ".".join(map(str, path))
