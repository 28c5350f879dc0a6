"""Which network a run uses: the choice a user writes, and what it becomes for an environment. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

import gymnasium
from pydantic import Field

from offbeat.config.models import Section
from offbeat.errors import ConfigError
from offbeat.models.actions import Actions, action_head, knows_moves
from offbeat.models.observations import Normalizer, ObservationSpec, encode, observation_spec
from offbeat.ops.compiled import numba_is_wanted
from offbeat.types import Array

_log = logging.getLogger(__name__)
NetworkKind = Literal["mlp", "cnn", "gru", "lines", "board"]
Activation = Literal["tanh", "relu"]
MIN_IMAGE_SIDE = 8
BOARD_KINDS = ("lines", "board")
"""Networks that read boards and score moves."""
BOARD_SHAPE = (84,)
"""Cells of a board and the colours that come next."""


class NetworkConfig(Section):
    """The network behind policy and value. Example: ``network: {kind: gru, hidden: [64, 64]}``."""

    kind: Literal["auto", "mlp", "cnn", "gru", "lines", "board"] = Field(
        default="auto",
        description="Network: `mlp`, `cnn` for images, `gru` for memory; for moves on a board `lines`, tables"
        " of patterns (CPU only), or `board`, convolutions. `auto` takes `lines` where actions are"
        " moves, `cnn` where observations are images, else `mlp`.",
    )
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(64, 64),
        min_length=1,
        description="Units of the hidden layers; the last is the memory of a gru and the dense layer of a"
        " cnn; channels of the convolutions of a board. Default of arXiv:1707.06347.",
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

        Features ``[..., F]``; boards stay as they are; images keep their shape, and their bytes unless they
        are normalised.
        """
        if self.kind in BOARD_KINDS:
            return obs
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
    has_moves = knows_moves(action_space)
    kind: NetworkKind = config.kind if config.kind != "auto" else _default_kind(observation, has_moves)
    _check_board(kind, observation, has_moves)
    if kind == "cnn" and not _is_image(observation.shape):
        raise ConfigError(
            f"network.kind is cnn, and observations have shape {observation.shape}: no image of at least"
            f" {MIN_IMAGE_SIDE} x {MIN_IMAGE_SIDE} with channels; set network.kind to mlp or gru"
        )
    return NetworkSpec(kind, config.hidden, config.activation, observation, action_head(action_space))


def _check_board(kind: NetworkKind, observation: ObservationSpec, has_moves: bool) -> None:
    if has_moves and kind not in BOARD_KINDS:
        raise ConfigError(
            f"network.kind is {kind}, which cannot tell legal moves from others; set it to lines or board"
        )
    if kind in BOARD_KINDS and not (has_moves and observation.shape == BOARD_SHAPE):
        raise ConfigError(
            f"network.kind is {kind}, which is for moves on a board of {BOARD_SHAPE[0]} numbers, and this"
            f" environment shows observations of shape {observation.shape}; set it to auto"
        )
    if kind in BOARD_KINDS and not numba_is_wanted():
        _warn_of_slowness(kind)


@cache
def _warn_of_slowness(kind: NetworkKind) -> None:
    _log.warning(
        "network.kind %s runs in plain Python, many times slower than compiled:"
        ' pip install "offbeat[numba]", and unset OFFBEAT_NUMBA',
        kind,
    )


def device_for(spec: NetworkSpec, device: str, num_ranks: int = 1) -> str:
    """Where a network trains when ``trainer.device`` is ``device``: pattern tables on the CPU only."""
    if spec.kind != "lines" or device == "cpu":
        return device
    if device == "cuda" or num_ranks > 1:  # ranks agree on a device before they know the network
        raise ConfigError(
            f"trainer.device is {device}, and network.kind lines trains on the CPU only:"
            " set trainer.device=cpu, or algorithm.network.kind=board"
        )
    return "cpu"


def _default_kind(observation: ObservationSpec, has_moves: bool) -> NetworkKind:
    if has_moves:
        return "lines"
    return "cnn" if _is_image(observation.shape) else "mlp"


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and sorted(shape)[1] >= MIN_IMAGE_SIDE
