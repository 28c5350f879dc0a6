"""What actor and critic train on: a round, what the networks said of it, and the chunks it is cut into."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.algorithms.mappo.rounds import Chunks, TeamRound
from offbeat.models.team_spec import TeamSpec
from offbeat.types import Array

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the networks say of a round before it is trained.

    ``prox_logp`` ``[T, B, A]`` of the actions, ``values`` and ``next_values`` ``[T, B]`` in the units of
    rewards, ``raw_values`` ``[T, B]`` as the critic gives them, and the memories after each step.
    """

    prox_logp: Floats
    values: Floats
    next_values: Floats
    raw_values: Floats
    memories: Floats
    critic_memories: Floats

    def behaviour_log_ratios(self, data: TeamRound) -> Floats:
        """Log-ratios ``[M]`` of the policy before the round to the one that acted."""
        log_ratios: Floats = (self.prox_logp - data["logp"])[data.acted]
        return log_ratios


@dataclass(frozen=True, slots=True)
class LowTargets:
    """What the losses of the acting level compare with, each ``[T, B, A]``; ``weights`` None stands for 1."""

    advantages: Floats
    values: Floats
    old_logp: Floats
    weights: Floats | None


@dataclass(frozen=True, slots=True)
class LowSamples:
    """Some chunks as tensors: c of them, L steps each, A agents.

    ``inputs`` ``[L, c A, F]``, ``memory`` ``[c A, H]``, ``resets`` and ``acted`` ``[L, c A]``, ``legal``
    ``[L, c A, K]``; for the critic ``[L, c, F]``, ``[c, H]``, ``[L, c]`` and ``critic_acted`` ``[L, c, A]``.
    The rest is ``[M]``, in the order of the True entries of ``acted``; ``targets`` and ``old_values`` in that
    of ``critic_acted``, which is the same.
    """

    inputs: Tensor
    memory: Tensor
    resets: Tensor
    legal: Tensor | None
    acted: Tensor
    critic_inputs: Tensor
    critic_memory: Tensor
    critic_resets: Tensor
    critic_acted: Tensor
    actions: Tensor
    old_logp: Tensor
    advantages: Tensor
    weights: Tensor | None
    targets: Tensor
    old_values: Tensor

    @property
    def count(self) -> int:
        """M, the actions that count."""
        return len(self.old_logp)


@dataclass(frozen=True, slots=True)
class LowLesson:
    """A round cut into chunks: columns of L steps of one environment, with all its agents."""

    arrays: dict[str, Array]
    num_agents: int
    counts: Array
    whole: list[LowSamples] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        spec: TeamSpec,
        data: TeamRound,
        judged: Judgement,
        targets: LowTargets,
        resets: Bools,
        length: int,
    ) -> LowLesson:
        """Cut a round; where there is no memory, chunks are single steps."""
        num_steps, num_envs, num_agents = data["alive"].shape
        chunks = Chunks(num_steps, num_envs, min(length, num_steps) if spec.recurrent else 1)
        skills = data.get("skills")
        team, own = (None, None) if skills is None else (skills[..., 0], skills[..., 1:])
        steps = {
            "inputs": spec.actor_inputs(data["obs"], own),
            "critic_inputs": spec.critic_inputs(data["state"], team),
            "resets": resets,
            "acted": data.acted,
            "actions": data["actions"],
            "old_logp": targets.old_logp,
            "advantages": targets.advantages,
            "targets": targets.values,
            "old_values": judged.raw_values,
        }
        if targets.weights is not None:
            steps["weights"] = targets.weights
        if spec.has_legal:
            steps["legal"] = data["legal"]
        arrays = {name: chunks.cut(array) for name, array in steps.items()}
        if spec.recurrent:
            memories = judged.memories.reshape(num_steps, num_envs, num_agents, -1)
            arrays["memory"] = chunks.beginnings(data["memory"], memories)
            arrays["critic_memory"] = chunks.beginnings(data["critic_memory"], judged.critic_memories)
        else:
            arrays["memory"] = np.zeros((chunks.num_columns, num_agents, 0), np.float32)
            arrays["critic_memory"] = np.zeros((chunks.num_columns, 0), np.float32)
        counts = np.count_nonzero(arrays["acted"], axis=(0, 2))
        return cls(arrays, num_agents, counts)

    @property
    def num_columns(self) -> int:
        """Chunks to train on."""
        return len(self.counts)

    def take(self, columns: Array, device: torch.device) -> LowSamples:
        """Some chunks as tensors; all of them are made once, in order, for every pass."""
        if len(columns) < self.num_columns:
            return self._take(columns, device)
        if not self.whole:
            self.whole.append(self._take(np.arange(self.num_columns), device))
        return self.whole[0]

    def _take(self, columns: Array, device: torch.device) -> LowSamples:
        arrays, num_agents = self.arrays, self.num_agents
        acted = arrays["acted"][:, columns]
        length, width = acted.shape[:2]
        rows = width * num_agents

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        def by_agent(name: str) -> Tensor:
            picked = arrays[name][:, columns]
            return tensor(picked.reshape(length, rows, *picked.shape[3:]))

        def samples(name: str) -> Tensor:
            return tensor(arrays[name][:, columns][acted])

        old_values = np.broadcast_to(arrays["old_values"][:, columns, None], acted.shape)
        return LowSamples(
            inputs=by_agent("inputs"),
            memory=tensor(arrays["memory"][columns].reshape(rows, -1)),
            resets=tensor(np.repeat(arrays["resets"][:, columns], num_agents, axis=1)),
            legal=by_agent("legal") if "legal" in arrays else None,
            acted=by_agent("acted"),
            critic_inputs=tensor(arrays["critic_inputs"][:, columns]),
            critic_memory=tensor(arrays["critic_memory"][columns]),
            critic_resets=tensor(arrays["resets"][:, columns]),
            critic_acted=tensor(acted),
            actions=samples("actions"),
            old_logp=samples("old_logp"),
            advantages=samples("advantages"),
            weights=samples("weights") if "weights" in arrays else None,
            targets=samples("targets"),
            old_values=tensor(old_values[acted]),
        )
