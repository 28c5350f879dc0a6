"""GRPO's learner: one call of ``train`` is one round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.metrics import by_age, own_ages, round_metrics
from offbeat.algorithms.grpo.warmup import warm_up
from offbeat.errors import DivergedError
from offbeat.llm.model import Decoder, Packing
from offbeat.llm.packing import micro_batches
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Task
from offbeat.ops.group_advantages import group_advantages
from offbeat.ops.statistics import approx_kl, effective_sample_size
from offbeat.ops.token_losses import clipped_token_loss
from offbeat.seeding import derive_seed
from offbeat.types import Array, Batch, Metrics, Segment, StateTree


class Samples:
    """Responses of a round as arrays, one behind the other in ticket order.

    ``tokens`` are prompt and response of each; ``is_own`` marks what was drawn, ``behaviour`` its log-probs
    then, ``advantages`` repeat that of the response at each token.
    """

    def __init__(self, segments: Sequence[Segment], config: GRPOConfig) -> None:
        tokens, is_own, behaviour, advantages = [], [], [], []
        for segment in segments:
            data, at = segment.data, 0
            prompt, gaps = data["prompt"], np.zeros(len(data["prompt"]))
            has_reward = np.isfinite(data["rewards"])
            each = np.full(len(has_reward), np.nan)
            each[has_reward] = group_advantages(data["rewards"][has_reward], norm=config.norm_adv)
            for size, advantage in zip(data["sizes"].tolist(), each, strict=True):
                part = slice(at, at + size)
                at += size
                if np.isnan(advantage):  # it has no reward
                    continue
                tokens.append(np.concatenate([prompt, data["tokens"][part]]).astype(np.int64))
                is_own.append(np.concatenate([gaps > 0, data["is_own"][part]]))
                behaviour.append(np.concatenate([gaps, data["log_probs"][part]]).astype(np.float32))
                advantages.append(np.full(len(tokens[-1]), advantage, np.float32))
        self.lengths = [len(one) for one in tokens]
        self.tokens, self.is_own, self.behaviour, self.advantages = tokens, is_own, behaviour, advantages
        self.num_own = max(1, sum(int(one.sum()) for one in is_own))

    def of(self, indices: Sequence[int]) -> tuple[Packing, Tensor, Tensor, Tensor, Tensor]:
        """Pack some responses: packing, tokens, places of own tokens, their log-probs and advantages."""
        tokens, is_own, behaviour, advantages = (
            torch.from_numpy(np.concatenate([whole[index] for index in indices]))
            for whole in (self.tokens, self.is_own, self.behaviour, self.advantages)
        )
        own = is_own.nonzero()[:, 0]
        return (
            Packing.of([self.lengths[index] for index in indices]),
            tokens,
            own,
            behaviour[own],
            advantages[own],
        )


class GRPOLearner:
    """Owns the language model and its optimizer. New weights come from (run seed, "init")."""

    def __init__(self, config: GRPOConfig, task: Task, shape: Shape, *, seed: int) -> None:
        self._config, self._task, self._seed = config, task, seed
        if config.model.folder is None:
            self._model = Decoder(shape).initialize(derive_seed(seed, "init"))
        else:
            self._model = Decoder.read(config.model.folder)
        self._optimizer = make_optimizer(self._model, config)
        self._is_warm = config.warmup.accuracy is None

    def _warm_up(self) -> None:
        """Train on answers first; a learner that continues has done so."""
        if not self._is_warm:
            self._is_warm = True
            warm_up(self._model, self._task, self._config.warmup, self._seed)

    def train(self, batch: Batch) -> Metrics:
        """Take one optimizer step on the round's responses; return its metrics."""
        self._warm_up()
        found = round_metrics(batch.segments, time.time())
        samples = Samples(batch.segments, self._config)
        ages = [
            one
            for segment in batch.segments
            for one, reward in zip(own_ages(segment, batch.version), segment.data["rewards"], strict=True)
            if np.isfinite(reward)
        ]
        losses, log_ratios, entropies, ages_seen = [], [], [], []
        for indices in micro_batches(samples.lengths, self._config.tokens_per_batch):
            packing, tokens, own, behaviour, advantages = samples.of(indices)
            log_probs, entropy = own_log_probs(self._model, packing, tokens, own, self._config.temperature)
            bounds = {"clip_low": self._config.clip_low, "clip_high": self._config.clip_high}
            loss = clipped_token_loss(log_probs, behaviour, advantages, **bounds).sum() / samples.num_own
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            log_ratios.append((log_probs.detach() - behaviour).numpy())
            entropies.append(entropy)
            ages_seen += [ages[index] for index in indices]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
        loss_value = float(torch.stack(losses).sum())
        if not (np.isfinite(loss_value) and bool(norm.isfinite())):
            raise DivergedError(
                f"round {batch.version} has a loss of {loss_value:g} and a gradient of {float(norm):g}: "
                "lower algorithm.lr"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        ratios = np.concatenate(log_ratios)
        outside = (ratios < np.log1p(-self._config.clip_low)) | (ratios > np.log1p(self._config.clip_high))
        return {
            **found,
            **by_age(ratios, np.concatenate(ages_seen)),
            "learn/loss": loss_value,
            "learn/grad_norm": float(norm),
            "learn/learning_rate": self._config.lr,
            "learn/entropy": float(np.concatenate(entropies).mean()),
            "learn/clip_fraction": float(outside.mean()),
            "learn/ess": effective_sample_size(ratios),
            "learn/behaviour_kl": approx_kl(ratios),
            "learn/gradient_steps": 1.0,
        }

    def weights(self) -> dict[str, Array]:
        """Return copies of the weights."""
        self._warm_up()
        return {name: weight.numpy().copy() for name, weight in self._model.weights().items()}

    def state_dict(self) -> StateTree:
        """Return weights and optimizer."""
        self._warm_up()
        return {"weights": self._model.weights(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a saved state."""
        self._is_warm = True
        self._model.set_weights({name: torch.as_tensor(one) for name, one in state["weights"].items()})
        self._optimizer.load_state_dict(state["optimizer"])


def make_optimizer(model: Decoder, config: GRPOConfig) -> torch.optim.AdamW:
    """Make the optimizer of a run."""
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    return torch.optim.AdamW(model.parameters(), lr=config.lr, **settings)


def own_log_probs(
    model: Decoder, packing: Packing, tokens: Tensor, own: Tensor, temperature: float
) -> tuple[Tensor, Array]:
    """Return log-probs ``[M]`` of the tokens at places ``own`` ``[M]``, and entropies ``[M]`` there."""
    hidden = model(tokens, packing)[own - 1]
    log_probs = (model.logits(hidden) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, tokens[own, None])[:, 0], entropy.numpy()
