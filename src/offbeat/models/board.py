"""Convolutions for moves on a board: a score for each ball times each cell it may go to."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.models.lines_kernels import CELLS, COLOURS, ILLEGAL, MAX_MOVES, SIDE, pair_moves
from offbeat.models.mlp import linear
from offbeat.models.networks import (
    ACTOR_GAIN,
    CRITIC_GAIN,
    HIDDEN_GAIN,
    Evaluation,
    FeedForward,
    with_autograd,
)
from offbeat.models.spec import NetworkSpec

PLANES = 2 * COLOURS + 1
"""Per cell: which colour it has, whether it is empty, and how often each colour comes next."""
PAIR_SIZE = 16
"""Features that the two ends of a move are compared by."""


class BoardActorCritic(FeedForward):
    """Convolutions of 3 x 3 that keep the board's size, shared by policy and value; boards ``[M, 84]``.

    The policy head is factored: the score of a move is the product of features of its two cells, so that it
    needs the weights of two cells and not of 6,561 moves.
    """

    def __init__(self, spec: NetworkSpec, generator: torch.Generator) -> None:
        super().__init__()
        sizes = (PLANES, *spec.hidden)
        self.trunk = nn.ModuleList(_convolution(*pair, generator) for pair in pairwise(sizes))
        self.source = linear(sizes[-1], PAIR_SIZE + 1, HIDDEN_GAIN, generator)
        self.target = linear(sizes[-1], PAIR_SIZE + 1, ACTOR_GAIN, generator)
        self.critic = linear(sizes[-1], 1, CRITIC_GAIN, generator)

    def evaluate(self, obs: Tensor) -> Evaluation:
        """Judge boards for training."""
        cells = self._cells(obs)
        return with_autograd(self._scores(cells, obs), self._worth(cells))

    def outputs(self, obs: Tensor) -> Tensor:
        """Scores of moves ``[M, P]``."""
        return self._scores(self._cells(obs), obs)

    def values(self, obs: Tensor) -> Tensor:
        """Values ``[M]``."""
        return self._worth(self._cells(obs))

    def _cells(self, obs: Tensor) -> Tensor:
        """Features of each cell ``[M, 81, C]``."""
        board, coming = obs[:, :CELLS].long(), obs[:, CELLS:].long()
        colours = nn.functional.one_hot(board, COLOURS + 1).float()
        counts = nn.functional.one_hot(coming, COLOURS + 1).sum(1).float()[:, 1:]
        planes = torch.cat([colours, counts.unsqueeze(1).expand(-1, CELLS, -1)], dim=-1)
        features = planes.transpose(1, 2).reshape(len(obs), PLANES, SIDE, SIDE)
        for layer in self.trunk:
            features = torch.relu(layer(features))
        return features.flatten(2).transpose(1, 2)

    def _scores(self, cells: Tensor, obs: Tensor) -> Tensor:
        source, target = self.source(cells), self.target(cells)
        pairs = torch.bmm(source[..., :-1], target[..., :-1].transpose(1, 2)) / PAIR_SIZE**0.5
        pairs = pairs + source[..., -1:] * ACTOR_GAIN + target[..., -1].unsqueeze(1)
        moves = np.empty((len(obs), MAX_MOVES), np.int64)
        pair_moves(obs.cpu().numpy(), moves)
        index = torch.from_numpy(moves).to(obs.device)
        scores: Tensor = pairs.flatten(1).gather(1, index.clamp(min=0))
        return scores.masked_fill(index < 0, float(ILLEGAL))

    def _worth(self, cells: Tensor) -> Tensor:
        values: Tensor = self.critic(cells.mean(1))
        return values.squeeze(-1)


def _convolution(num_in: int, num_out: int, generator: torch.Generator) -> nn.Conv2d:
    with torch.random.fork_rng(devices=()):
        layer = nn.Conv2d(num_in, num_out, 3, padding=1)
    nn.init.orthogonal_(layer.weight, HIDDEN_GAIN, generator=generator)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer
