"""Responses of a round as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.llm.model import Packing
from offbeat.llm.packing import micro_batches
from offbeat.ops.group_advantages import group_advantages, overlong_penalty, token_gae, whiten
from offbeat.ops.statistics import Floats
from offbeat.ops.token_losses import kl_estimate
from offbeat.types import Array, Segment

_WHOLE = ("", "eos", "stop")


@dataclass(frozen=True, slots=True)
class Part:
    """A micro-batch of whole responses: their tokens, and those that the policy drew.

    ``tokens`` ``[T]`` are prompts and responses, ``places`` ``[M]`` the drawn ones among them, ``rows``
    ``[M]`` the response of each, and ``index`` ``[M]`` its place among those of the round.
    """

    packing: Packing
    tokens: Tensor
    places: Tensor
    rows: Tensor
    index: Tensor


class Samples:
    """Rewarded responses of a round, one behind the other in ticket order.

    ``own`` holds arrays ``[N]`` over all tokens that the policy drew: ``behaviour`` and ``versions``, the
    log-prob and the version that each was drawn with, then what the learner adds. ``sizes`` ``[R]`` counts
    them by response, ``in_loss`` ``[R]`` tells which responses are trained.
    """

    def __init__(self, segments: Sequence[Segment], config: GRPOConfig, *, longest: int) -> None:
        self._config = config
        tokens, is_own, behaviour, versions, groups, rewards, ends = [], [], [], [], [], [], []
        for group, segment in enumerate(sorted(segments, key=lambda one: one.ticket.number)):
            data, at = segment.data, 0
            gaps = np.zeros(len(data["prompt"]), np.bool_)
            for size, reward, piece in zip(
                data["sizes"].tolist(), data["rewards"].tolist(), segment.pieces, strict=True
            ):
                drawn = data["is_own"][at : at + size]
                if np.isfinite(reward) and drawn.any():
                    tokens.append(np.concatenate([data["prompt"], data["tokens"][at : at + size]]))
                    is_own.append(np.concatenate([gaps, drawn]))
                    behaviour.append(data["log_probs"][at : at + size][drawn])
                    versions.append(np.repeat(*np.array(piece.spans)[:, :2].T))
                    groups.append(group)
                    rewards.append(reward)
                    ends.append(piece.end)
                at += size
        self._tokens, self._is_own = tokens, is_own
        self._num_groups, self._groups = len(segments), np.array(groups, np.int64)
        self.lengths = [len(one) for one in tokens]
        self.sizes = np.array([len(one) for one in behaviour], np.int64)
        self._starts = np.concatenate([[0], self.sizes.cumsum()])
        self.own = {
            "behaviour": np.concatenate([np.empty(0, np.float32), *behaviour]),
            "versions": np.concatenate([np.empty(0, np.int64), *versions]),
        }
        shaping = config.overlong
        late = overlong_penalty(self.sizes, longest=longest, buffer=shaping.buffer, penalty=shaping.penalty)
        self._rewards = np.array(rewards, np.float64) + late
        is_whole = np.array([end in _WHOLE for end in ends], np.bool_)
        self.in_loss = is_whole if config.mask_truncated else np.ones(len(ends), np.bool_)
        if config.choices.advantage != "gae":
            counts = np.bincount(self._groups, minlength=1)
            self.in_loss &= counts[self._groups] >= 2

    # ------------------------------------------------------------ advantages

    def set_advantages(self) -> None:
        """Compute the advantage of each token, and with values its target."""
        config, parts = self._config, self._config.choices
        penalties = self._kl_penalties()
        if parts.advantage == "gae":
            rewards = -penalties
            rewards[self._starts[1:] - 1] += self._rewards
            settings = {"gamma": config.value.gamma, "gae_lambda": config.value.gae_lambda}
            found, self.own["targets"] = token_gae(rewards, self.own["values"], self.sizes, **settings)
        else:
            totals = np.add.reduceat(penalties, self._starts[:-1]) if len(penalties) else penalties
            each = np.zeros(len(self.sizes), np.float32)
            for group in np.unique(self._groups):
                members = self._groups == group
                each[members] = group_advantages(
                    self._rewards[members] - totals[members], baseline=parts.advantage, norm=parts.norm_adv
                )
            found = np.repeat(each, self.sizes)
        if parts.norm_adv == "batch":
            trained = np.repeat(self.in_loss, self.sizes)
            whitened = np.zeros_like(found)
            whitened[trained] = whiten(found[trained])
            found = whitened
        self.own["advantages"] = found

    def _kl_penalties(self) -> Floats:
        """Return the penalty that the reference model takes off each token's reward."""
        kl = self._config.kl
        if kl.coef == 0 or kl.place == "loss":
            return np.zeros(len(self.own["behaviour"]), np.float32)
        policy = self.own.get("proximal", self.own["behaviour"])
        pair = (torch.from_numpy(policy), torch.from_numpy(self.own["reference"]))
        return np.asarray(kl.coef * kl_estimate(*pair, kl.estimator).numpy(), np.float32)

    # ------------------------------------------------------------ parts

    def minibatches(self) -> list[Array]:
        """Divide the groups evenly, in ticket order; return the trained responses of each part with any."""
        parts = np.array_split(np.arange(self._num_groups), self._config.num_minibatches)
        members = [np.flatnonzero(np.isin(self._groups, part) & self.in_loss) for part in parts]
        return [one for one in members if len(one)]

    def parts(self, responses: Array) -> Iterator[Part]:
        """Pack responses into micro-batches."""
        lengths = [self.lengths[one] for one in responses.tolist()]
        for chosen in micro_batches(lengths, self._config.tokens_per_batch):
            yield self._part(responses[chosen])

    def _part(self, responses: Array) -> Part:
        indices = responses.tolist()
        is_own = torch.from_numpy(np.concatenate([self._is_own[one] for one in indices]))
        tokens = np.concatenate([self._tokens[one] for one in indices]).astype(np.int64)
        index = np.concatenate([np.arange(*self._starts[one : one + 2]) for one in indices])
        return Part(
            Packing.of([self.lengths[one] for one in indices]),
            torch.from_numpy(tokens),
            is_own.nonzero()[:, 0],
            torch.from_numpy(np.repeat(np.arange(len(indices)), self.sizes[responses])),
            torch.from_numpy(index),
        )

    def at(self, name: str, part: Part) -> Tensor:
        """Return an array of the round at the tokens of a micro-batch."""
        return torch.from_numpy(self.own[name])[part.index]

    def add(self, names: Iterable[str]) -> None:
        """Add arrays of the round, 0 for all tokens."""
        self.own |= {name: np.zeros(len(self.own["behaviour"]), np.float32) for name in names}

    def store(self, name: str, part: Part, values: Tensor) -> None:
        """Keep values ``[M]`` for the tokens of a micro-batch."""
        self.own[name][part.index.numpy()] = values.numpy()
