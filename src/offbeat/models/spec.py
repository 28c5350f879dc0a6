"""Which network a run uses: the choice a user writes, and what it becomes for an environment. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import gymnasium
from pydantic import Field

from offbeat.config.models import Section
from offbeat.errors import ConfigError
from offbeat.models.actions import Actions, action_head
from offbeat.models.observations import Normalizer, ObservationSpec, encode, observation_spec
from offbeat.types import Array

NetworkKind = Literal["mlp", "cnn", "gru"]
Activation = Literal["tanh", "relu"]
MIN_IMAGE_SIDE = 8


class NetworkConfig(Section):
    """The network behind policy and value. Example: ``network: {kind: gru, hidden: [64, 64]}``."""

    kind: Literal["auto", "mlp", "cnn", "gru"] = Field(
        default="auto",
        description="Network: `mlp`, `cnn` for images, `gru` for memory; `auto` takes `cnn` where"
        " observations are images, else `mlp`.",
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64),
        min_length=1,
        description="Units of the hidden layers; the last is the memory of a gru and the dense layer of a"
        " cnn. Default of arXiv:1707.06347.",
    )
    activation: Activation = Field(
        default="tanh",
        description="Activation of mlps and gru encoders; a cnn always uses relu. Default of"
        " arXiv:1707.06347.",
    )


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """A network for one environment: everything actor and learner need to build the same one."""

    kind: NetworkKind
    hidden: tuple[int, ...]
    activation: Activation
    observation: ObservationSpec
    actions: Actions

    @property
    def memory_size(self) -> int:
        """Units carried from step to step: 0 unless the network is recurrent."""
        return self.hidden[-1] if self.kind == "gru" else 0

    def encode(self, obs: Array, normalizer: Normalizer | None) -> Array:
        """What the network reads of stored observations ``[..., *shape]``.

        Features ``[..., F]``; images keep their shape, and their bytes unless they are normalised.
        """
        if self.kind != "cnn":
            return encode(obs, self.observation, normalizer)
        if normalizer is None:
            return obs
        return encode(obs, self.observation, normalizer).reshape(obs.shape)


def network_spec(
    config: NetworkConfig, observation_space: gymnasium.spaces.Box, action_space: gymnasium.Space[Any]
) -> NetworkSpec:
    """Fit the configured network to an environment's spaces."""
    observation = observation_spec(observation_space)
    kind: NetworkKind = config.kind if config.kind != "auto" else _default_kind(observation)
    if kind == "cnn" and not _is_image(observation.shape):
        raise ConfigError(
            f"network.kind is cnn, and observations have shape {observation.shape}: no image of at least"
            f" {MIN_IMAGE_SIDE} x {MIN_IMAGE_SIDE} with channels; set network.kind to mlp or gru"
        )
    return NetworkSpec(kind, config.hidden, config.activation, observation, action_head(action_space))


def _default_kind(observation: ObservationSpec) -> NetworkKind:
    return "cnn" if _is_image(observation.shape) else "mlp"


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and sorted(shape)[1] >= MIN_IMAGE_SIDE
