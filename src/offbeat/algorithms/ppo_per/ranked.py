"""One replay for all ranks of a learner, which has to train all of them on the same draws."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from offbeat.errors import PromiseBroken, TrainError
from offbeat.replay import Handles, Replay, Sample
from offbeat.roles import Ranks
from offbeat.types import Array, StateTree

AnswerT = TypeVar("AnswerT")


class RankedReplay:
    """The replay as one rank sees it: rank 0 asks, and passes the answer on to the others.

    All ranks make the same calls in the same order, as they do with gradients, and wait for each other in
    ``Ranks.sum_`` only: what rank 0 is refused, all are refused; a rank that is lost ends the wait of all.
    """

    def __init__(self, replay: Replay | None, capacity: int, ranks: Ranks, device: torch.device) -> None:
        """``replay`` is rank 0's, None in the others; ``device`` is where ranks exchange tensors."""
        self.capacity = capacity
        self._replay = replay
        self._ranks = ranks
        self._device = device
        self._number = 0

    def __len__(self) -> int:
        return self._ask(len)

    def add(
        self, items: Mapping[str, Array], versions: ArrayLike, priorities: ArrayLike | None = None
    ) -> Handles:
        """Write items over the oldest ones."""
        return self._ask(lambda replay: replay.add(items, versions, priorities))

    def update(self, handles: Handles, priorities: ArrayLike) -> int:
        """Give items new priorities; how many were still there."""
        return self._ask(lambda replay: replay.update(handles, priorities))

    def expire(self, before_version: int) -> int:
        """Let go of items with an older version; how many those were."""
        return self._ask(lambda replay: replay.expire(before_version))

    def sample(self, rng: np.random.Generator, batch_size: int, *, beta: float) -> Sample:
        """Draw items by priority."""
        return self._draw(rng, lambda replay: replay.sample(rng, batch_size, beta=beta))

    def sample_uniform(self, rng: np.random.Generator, batch_size: int) -> Sample:
        """Draw items with equal chances."""
        return self._draw(rng, lambda replay: replay.sample_uniform(rng, batch_size))

    def state_dict(self) -> StateTree:
        """All that a checkpoint needs; only rank 0 saves, the others know nothing of it."""
        assert self._replay is not None, "rank 0 saves the learner"
        return self._replay.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave: rank 0 does, for all."""
        self._ask(lambda replay: replay.load_state_dict(state))

    def _draw(self, rng: np.random.Generator, draw: Callable[[Replay], Sample]) -> Sample:
        """Draw with rank 0's generator; those of the others go on where it stands."""
        sample, state = self._ask(lambda replay: (draw(replay), rng.bit_generator.state))
        rng.bit_generator.state = state
        return sample

    # ------------------------------------------------------------ between ranks

    def _ask(self, question: Callable[[Replay], AnswerT]) -> AnswerT:
        """The answer of rank 0's replay, or its refusal, in every rank."""
        packed, error = b"", None
        if self._replay is not None:
            try:
                answer = question(self._replay)
                packed = pickle.dumps((answer, None))
            except Exception as raised:
                error = raised
                packed = pickle.dumps((None, _portable(raised)))
        told = self._pass_on(packed)
        if error is not None:
            raise error
        if self._replay is not None:
            return answer
        found, refusal = pickle.loads(told)
        if refusal is not None:
            raise refusal
        received: AnswerT = found
        return received

    def _pass_on(self, packed: bytes) -> bytes:
        """Rank 0's bytes in every rank: the sum of them and of nothing."""
        self._number += 1
        header = torch.tensor([len(packed), self._number], dtype=torch.int64, device=self._device)
        self._ranks.sum_(header)
        size, numbers = header.tolist()
        if numbers != self._number * self._ranks.size:
            raise PromiseBroken(
                f"the ranks ask different things of the replay, here for number {self._number}"
            )
        body = torch.zeros(size, dtype=torch.uint8, device=self._device)
        if packed:
            body.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
        self._ranks.sum_(body)
        return b"" if packed else body.cpu().numpy().tobytes()


def agreed(ranks: Ranks, choice: bool, device: torch.device) -> bool:
    """What rank 0 chooses, in every rank."""
    if ranks.size == 1:
        return choice
    told: Any = torch.tensor([int(choice and ranks.rank == 0)], device=device)
    ranks.sum_(told)
    return bool(told.item())


def _portable(error: Exception) -> Exception:
    """The error itself where it can be sent, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return TrainError(str(error))
    return error
