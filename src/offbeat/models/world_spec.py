"""What a learned model of an environment looks like: all that collectors and learner need. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import gymnasium

from offbeat.errors import ConfigError
from offbeat.models.observations import ObservationSpec

WorldKind = Literal["mlp", "conv"]
Precision = Literal["float32", "tf32", "bfloat16"]
MAX_TOKENS = 1024
"""Tokens on the longest way from the beginning of a transformer's context to the end of a search."""


@dataclass(frozen=True, slots=True)
class Computing:
    """Numeric precision, and whether functions are compiled on a GPU."""

    precision: Precision = "float32"
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """A world model for one environment.

    ``num_actions`` counts discrete actions; 0 where actions are ``action_size`` numbers within -1 and 1.
    ``latent`` is the size of what stands for an observation: features, or channels of planes as large as the
    observation. Values and rewards are distributions over ``-value_support`` to ``value_support``, and so on.
    """

    observation: ObservationSpec
    num_actions: int
    action_size: int = 0
    kind: WorldKind = "mlp"
    latent: int = 64
    hidden: int = 128
    blocks: int = 1
    value_support: int = 50
    reward_support: int = 50
    projection: int = 0

    @property
    def num_outputs(self) -> int:
        """Numbers that a policy consists of: logits, or means and deviations."""
        return self.num_actions or 2 * self.action_size

    @property
    def is_channel_first(self) -> bool:
        """Whether planes are ``[channels, height, width]``: the axis of channels is the shortest."""
        shape = self.observation.shape
        return len(shape) != 3 or shape[0] < shape[-1]

    @property
    def planes(self) -> tuple[int, int, int]:
        """Channels, height and width of observations."""
        first, second, third = self.observation.shape
        return (first, second, third) if self.is_channel_first else (third, first, second)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of what stands for an observation."""
        return (self.latent, *self.planes[1:]) if self.kind == "conv" else (self.latent,)


def action_sizes(name: str, space: gymnasium.Space[object]) -> tuple[int, int]:
    """Number of discrete actions and size of continuous ones, one of them 0."""
    if isinstance(space, gymnasium.spaces.Discrete) and int(space.start) == 0:
        return int(space.n), 0
    if isinstance(space, gymnasium.spaces.Box) and len(space.shape) == 1 and space.is_bounded():
        return 0, int(space.shape[0])
    raise ConfigError(
        f"{name}: a search needs Discrete actions that start at 0, or a bounded Box of one axis; "
        f"its action_space is {space}: wrap the environment so that it takes one of these"
    )


def choose_kind(observation: gymnasium.spaces.Box, wanted: Literal["auto", "mlp", "conv"]) -> WorldKind:
    """Convolutions for observations with two axes of places and one of channels, else dense layers."""
    has_planes = len(observation.shape) == 3
    if wanted == "conv" and not has_planes:
        raise ConfigError(
            "network.kind conv reads planes, channels first or last, not observations of shape "
            f"{observation.shape}: choose mlp"
        )
    if wanted != "auto":
        return wanted
    return "conv" if has_planes else "mlp"
