"""How a network reads a round: as loose rows, or as sequences of one environment each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.ppo.config import PPOConfig
from offbeat.algorithms.ppo.rounds import Floats, Round, Targets
from offbeat.models.networks import ActorCritic, Evaluation, FeedForward, GRUActorCritic, with_autograd
from offbeat.roles import Ranks
from offbeat.types import Array

CHUNK_ROWS = 4096
"""Rows that one forward pass without gradients takes at most: bounds its memory."""


def judge(
    network: ActorCritic, data: Round, device: torch.device, *, with_outputs: bool
) -> tuple[Floats, Floats | None]:
    """Values ``[T + 1, B]`` of a round, and outputs ``[T, B, P]`` where asked for; no gradients.

    ``data.obs`` is already encoded for the network.
    """
    with torch.inference_mode():
        if isinstance(network, GRUActorCritic):
            return _judge_sequences(network, data, device)
        num_steps, num_envs = data.valid.shape
        values = _in_chunks(network.values, data.obs, device).reshape(num_steps + 1, num_envs)
        if not with_outputs:
            return values, None
        return values, _in_chunks(network.outputs, data.obs[:-1], device).reshape(num_steps, num_envs, -1)


@dataclass(frozen=True, slots=True)
class Samples:
    """M valid samples as tensors: what the network reads, and what its losses compare it with.

    All ``[M]`` but ``obs`` and ``actions`` ``[M, ...]``. For sequences ``obs`` is ``[T, b, F]``, ``memory``
    ``[b, H]`` and ``valid`` ``[T, b]``, the rest in the order of the True entries of ``valid``.
    """

    obs: Tensor
    actions: Tensor
    old_logp: Tensor
    advantages: Tensor
    targets: Tensor
    weights: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    policy_share: Tensor | None = None
    critic_share: Tensor | None = None
    old_values: Tensor | None = None
    memory: Tensor | None = None
    valid: Tensor | None = None

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def bounds(self) -> tuple[Tensor, Tensor] | None:
        """The samples' own bounds on the ratio to ``old_logp``."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def rows(self, index: Tensor | slice) -> Samples:
        """Some of the samples; not for sequences."""
        chosen: dict[str, Any] = {}
        for field in fields(self):
            whole = getattr(self, field.name)
            chosen[field.name] = None if whole is None else whole[index]
        return Samples(**chosen)


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The samples of one optimiser step that one rank of the learner differentiates, in parts.

    ``num_samples`` counts those of all ranks; this rank's begin at ``first`` of them. A rank may have none.
    """

    parts: list[Samples]
    num_samples: int
    first: int = 0


class Loader(Protocol):
    """A round cut into minibatches for one kind of network."""

    def epoch(self, order: np.random.Generator) -> Iterator[Minibatch]:
        """All samples once, in random order: minibatches in ``grad_accumulation`` parts each."""
        ...

    def evaluate(self, samples: Samples) -> Evaluation:
        """The network's view of the samples, ready to be differentiated."""
        ...


def make_loader(
    config: PPOConfig,
    network: ActorCritic,
    data: Round,
    targets: Targets,
    device: torch.device,
    ranks: Ranks,
) -> Loader:
    """The loader that fits the network; ``data.obs`` is already encoded for it."""
    cut = Cut(ranks.rank, ranks.size, config.grad_accumulation)
    if isinstance(network, GRUActorCritic):
        return SequenceLoader(config, network, data, targets, device, cut)
    return RowLoader(config, network, data, targets, device, cut)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a minibatch a rank of the learner takes, and in how many pieces."""

    rank: int
    num_ranks: int
    grad_accumulation: int

    def share(self, start: int, end: int) -> tuple[int, int]:
        """This rank's part of ``start .. end``; empty when there are fewer items than ranks."""
        size, ranks = end - start, self.num_ranks
        return start + size * self.rank // ranks, start + size * (self.rank + 1) // ranks

    def pieces(self, start: int, end: int) -> list[tuple[int, int]]:
        """A rank's part in pieces no larger than those of a learner of one rank."""
        return _ranges(start, end, -(-self.grad_accumulation // self.num_ranks)) if start < end else []


class RowLoader:
    """Valid samples in any order, for networks without memory."""

    def __init__(
        self,
        config: PPOConfig,
        network: FeedForward,
        data: Round,
        targets: Targets,
        device: torch.device,
        cut: Cut,
    ) -> None:
        self._config = config
        self._cut = cut
        self._network = network
        chosen = np.flatnonzero(data.valid)
        obs = _tensor(_as_rows(data.obs[:-1])[chosen], device)
        self._samples = _samples(config, obs, data, targets, chosen, device)

    def epoch(self, order: np.random.Generator) -> Iterator[Minibatch]:
        """Shuffle the rows once, then slice them."""
        index = torch.from_numpy(order.permutation(len(self._samples)))
        shuffled = self._samples.rows(index.to(self._samples.obs.device))
        num_minibatches = _num_minibatches(len(index), self._config.minibatch_size)
        for start, end in _ranges(0, len(index), num_minibatches):
            own = self._cut.share(start, end)
            parts = [shuffled.rows(slice(*piece)) for piece in self._cut.pieces(*own)]
            yield Minibatch(parts, end - start, own[0] - start)

    def evaluate(self, samples: Samples) -> Evaluation:
        """One pass over the rows."""
        return self._network.evaluate(samples.obs)


class SequenceLoader:
    """Whole segments of some environments at a time, for networks with memory."""

    def __init__(
        self,
        config: PPOConfig,
        network: GRUActorCritic,
        data: Round,
        targets: Targets,
        device: torch.device,
        cut: Cut,
    ) -> None:
        self._config = config
        self._cut = cut
        self._network = network
        self._data = data
        self._targets = targets
        self._device = device
        self._counts = np.count_nonzero(data.valid, axis=0)

    def epoch(self, order: np.random.Generator) -> Iterator[Minibatch]:
        """Shuffle the environments, then take some at a time."""
        num_envs = self._data.valid.shape[1]
        index = order.permutation(num_envs)
        wanted = _num_minibatches(self._data.valid.size, self._config.minibatch_size)
        for start, end in _ranges(0, num_envs, min(wanted, num_envs)):
            own = self._cut.share(start, end)
            parts = [self._columns(index[slice(*piece)]) for piece in self._cut.pieces(*own)]
            counts = self._counts[index[start:end]]
            yield Minibatch(parts, int(counts.sum()), int(counts[: own[0] - start].sum()))

    def evaluate(self, samples: Samples) -> Evaluation:
        """Unroll the memory over the segment; keep what belongs to valid samples."""
        assert samples.memory is not None
        assert samples.valid is not None
        outputs, values = self._network.forward(samples.obs, samples.memory, samples.valid)
        return with_autograd(outputs[samples.valid], values[samples.valid])

    def _columns(self, columns: Array) -> Samples:
        data = self._data
        assert data.memory is not None
        num_envs = data.valid.shape[1]
        steps, picked = np.nonzero(data.valid[:, columns])
        chosen = steps * num_envs + columns[picked]
        return _samples(
            self._config,
            _tensor(data.obs[:-1, columns], self._device),
            data,
            self._targets,
            chosen,
            self._device,
            memory=_tensor(data.memory[columns], self._device),
            valid=_tensor(data.valid[:, columns], self._device),
        )


def _samples(
    config: PPOConfig,
    obs: Tensor,
    data: Round,
    targets: Targets,
    chosen: Array,
    device: torch.device,
    *,
    memory: Tensor | None = None,
    valid: Tensor | None = None,
) -> Samples:
    """Tensors of the samples at the flat positions ``chosen`` ``[M]`` of ``[T, B]``."""

    def pick(array: Array) -> Tensor:
        return _tensor(_as_rows(array)[chosen], device)

    def pick_if(array: Array | None) -> Tensor | None:
        return None if array is None else pick(array)

    return Samples(
        obs=obs,
        actions=pick(data.actions),
        old_logp=pick(targets.old_logp),
        advantages=pick(targets.advantages),
        targets=pick(targets.values),
        weights=pick_if(targets.weights),
        low=pick_if(targets.low),
        high=pick_if(targets.high),
        policy_share=pick_if(targets.policy_share),
        critic_share=pick_if(targets.critic_share),
        old_values=pick(targets.old_values) if config.clip_vloss else None,
        memory=memory,
        valid=valid,
    )


def _judge_sequences(network: GRUActorCritic, data: Round, device: torch.device) -> tuple[Floats, Floats]:
    assert data.memory is not None
    # The bootstrap observation follows the last step, so its own validity does not matter.
    valid = np.concatenate([data.valid, np.ones_like(data.valid[:1])])
    inputs = (_tensor(array, device) for array in (data.obs, data.memory, valid))
    outputs, values = network.forward(*inputs)
    return values.cpu().numpy(), outputs[:-1].cpu().numpy()


def _in_chunks(function: Callable[[Tensor], Tensor], obs: Array, device: torch.device) -> Floats:
    rows = _as_rows(obs)
    starts = range(0, len(rows), CHUNK_ROWS)
    chunks = [function(_tensor(rows[start : start + CHUNK_ROWS], device)).cpu().numpy() for start in starts]
    return np.concatenate(chunks)


def _as_rows(array: Array) -> Array:
    """``[T, B, ...]`` to ``[T B, ...]``."""
    return array.reshape(-1, *array.shape[2:])


def _tensor(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _num_minibatches(num_samples: int, minibatch_size: int) -> int:
    return max(1, round(num_samples / minibatch_size))


def _ranges(start: int, end: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut ``start .. end`` into parts as even as can be, none of them empty."""
    num_parts = max(1, min(num_parts, end - start))
    return list(pairwise(start + (end - start) * part // num_parts for part in range(num_parts + 1)))
