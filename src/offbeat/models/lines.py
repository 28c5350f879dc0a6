"""Pattern tables for boards on which lines count: an n-tuple network with its backward pass written out.

What a move is worth is a sum of table entries: what the ball's colour sees from the target, with the ball
gone from where it was; what it leaves behind; what both cells mean to all colours; and how open they lie.
Tables are shared by all colours, cells and directions, and by mirror images, so that the network has every
symmetry of the game built in. N-tuple networks for board games:
https://doi.org/10.1109/CIG.2014.6932907.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.models.lines_actor import ACTOR_TABLES, Table, actor_tables, score_moves
from offbeat.models.lines_kernels import (
    COLOURS,
    MAX_MOVES,
    TABLE_SIZES,
    gather,
    grade_boards,
    judge_boards,
    spread,
)
from offbeat.models.networks import Evaluation, FeedForward

Floats = NDArray[np.float32]
CRITIC_TABLES: Mapping[str, Table] = {
    "ball": Table("pattern", 0.1),
    "empty": Table("pattern", 0.1 / COLOURS),
    "gap": Table("shape", 0.1),
    "count": Table("count", 1.0),
}
"""The critic's tables."""
_ALL_TABLES = (*ACTOR_TABLES.values(), *CRITIC_TABLES.values())


class LinesActorCritic(FeedForward):
    """Judges boards ``[M, 84]`` of int8: 81 cells and the colours that come next. On the CPU only."""

    def __init__(self) -> None:
        super().__init__()
        for name, table in ACTOR_TABLES.items():
            self.register_parameter(name, _zeros(table))
        self.critic = nn.ParameterDict({name: _zeros(table) for name, table in CRITIC_TABLES.items()})
        self.requires_grad_(False)

    def evaluate(self, obs: Tensor) -> Evaluation:
        """Judge boards for training."""
        boards = obs.numpy()
        outputs, values = np.empty((len(obs), MAX_MOVES), np.float32), np.empty(len(obs), np.float32)
        tables = [*self._actor(), *self._critic()]
        judge_boards(boards, *tables, outputs, values)

        def backward(grad_outputs: Tensor, grad_values: Tensor) -> None:
            gradients = [np.zeros_like(table) for table in tables]
            grade_boards(boards, outputs, grad_outputs.numpy(), grad_values.numpy(), *gradients)
            for parameter, table, gradient in zip(self._tables(), _ALL_TABLES, gradients, strict=True):
                assert parameter.grad is not None
                gathered = torch.from_numpy(gather(gradient, table.kind))
                parameter.grad.add_(gathered, alpha=table.scale)

        return Evaluation(torch.from_numpy(outputs), torch.from_numpy(values), backward)

    def outputs(self, obs: Tensor) -> Tensor:
        """Scores of moves ``[M, P]``."""
        return torch.from_numpy(score_moves(obs.numpy(), self._actor()))

    def values(self, obs: Tensor) -> Tensor:
        """Values ``[M]``."""
        values, no_moves = np.empty(len(obs), np.float32), np.empty((0, MAX_MOVES), np.float32)
        judge_boards(obs.numpy(), *self._actor(), *self._critic(), no_moves, values)
        return torch.from_numpy(values)

    def _tables(self) -> list[Tensor]:
        """All tables in the order of the kernels' arguments."""
        return [
            *(self.get_parameter(name) for name in ACTOR_TABLES),
            *(self.critic[n] for n in CRITIC_TABLES),
        ]

    def _actor(self) -> list[Floats]:
        return actor_tables({name: self.get_parameter(name).numpy() for name in ACTOR_TABLES})

    def _critic(self) -> list[Floats]:
        return [spread(self.critic[name].numpy(), *table) for name, table in CRITIC_TABLES.items()]


def _zeros(table: Table) -> nn.Parameter:
    return nn.Parameter(torch.zeros(TABLE_SIZES[table.kind]))
