"""The learner of language models: one call of ``train`` is one round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.metrics import by_age, round_metrics
from offbeat.algorithms.grpo.objective import make_token_loss, policy_loss, ratios_of
from offbeat.algorithms.grpo.samples import Part, Samples
from offbeat.algorithms.grpo.warmup import warm_up
from offbeat.errors import DivergedError
from offbeat.llm.model import Decoder
from offbeat.llm.shape import Shape
from offbeat.llm.tasks import Task
from offbeat.ops.aggregation import aggregation_weights
from offbeat.ops.statistics import approx_kl, effective_sample_size, explained_variance
from offbeat.ops.token_losses import TokenBatch, clipped_value_loss, kl_estimate
from offbeat.seeding import derive_seed
from offbeat.types import Array, Batch, Metrics, StateTree


class GRPOLearner:
    """Owns the language model, its optimizer, and what some losses need: value head, reference model.

    New weights come from (run seed, "init"). They are warmed up when they are asked for first.
    """

    def __init__(self, config: GRPOConfig, task: Task, shape: Shape, *, seed: int) -> None:
        self._config, self._task, self._seed = config, task, seed
        if config.model.folder is None:
            self._model = Decoder(shape).initialize(derive_seed(seed, "init"))
        else:
            self._model = Decoder.read(config.model.folder)
        self._longest = config.max_new_tokens or task.max_new_tokens
        self._head = make_value_head(shape) if config.choices.advantage == "gae" else None
        self._optimizer = make_optimizer(self._model, config, self._head)
        self._token_loss = make_token_loss(config)
        self._reference = self._read_reference(shape)
        self._is_warm = False

    def _read_reference(self, shape: Shape) -> Decoder | None:
        kl = self._config.kl
        if kl.coef == 0:
            return None
        reference = Decoder(shape)
        if kl.reference is not None:
            reference.set_weights(Decoder.read(Path(kl.reference)).weights())
        return reference

    def _warm_up(self) -> None:
        """Train on answers first; a learner that continues has done so."""
        if self._is_warm:
            return
        self._is_warm = True
        if self._config.warmup.accuracy is not None:
            warm_up(self._model, self._task, self._config.warmup, self._seed)
        if self._reference is not None and self._config.kl.reference is None:
            self._reference.set_weights(self._model.weights())

    # ------------------------------------------------------------ a round

    def train(self, batch: Batch) -> Metrics:
        """Take the optimizer steps of a round; return its metrics."""
        self._warm_up()
        config, of_round = self._config, round_metrics(batch.segments, time.time())
        samples = Samples(batch.segments, config, longest=self._longest)
        self._look(samples)
        samples.set_advantages()
        found, steps = list[Mapping[str, Array]](), list[Metrics]()
        for epoch in range(config.num_epochs):
            for responses in samples.minibatches():
                by_token, by_step = self._step(samples, responses, batch.version)
                steps.append(by_step)
                if epoch == 0:
                    found += by_token
        metrics = {name: float(np.mean([one[name] for one in steps])) for name in (steps[0] if steps else ())}
        return {
            **of_round,
            **metrics,
            **self._metrics_of_tokens(found, batch.version),
            **self._metrics_of_values(samples),
            "learn/learning_rate": config.lr_at(batch.version),
            "learn/gradient_steps": float(len(steps)),
        }

    @torch.no_grad()
    def _look(self, samples: Samples) -> None:
        """Compute what losses need from before the first step: log-probs and values of this round's start."""
        config = self._config
        is_decoupled = config.correction.proximal == "round_start"
        taxes = config.kl.coef > 0 and config.kl.place == "reward"
        needs_proximal = is_decoupled and (config.gradient_steps > 1 or taxes)
        wanted = {
            "proximal": needs_proximal,
            "values": self._head is not None,
            "reference": self._reference is not None,
        }
        samples.add(name for name, is_wanted in wanted.items() if is_wanted)
        if not any(wanted.values()):
            return
        for part in samples.parts(np.arange(len(samples.sizes))):
            if self._head is not None or needs_proximal:
                log_probs, _, values = self._forward(self._model, part)
                if needs_proximal:
                    samples.store("proximal", part, log_probs)
                if values is not None:
                    samples.store("values", part, values)
            if self._reference is not None:
                samples.store("reference", part, self._forward(self._reference, part)[0])

    def _step(
        self, samples: Samples, responses: Array, version: int
    ) -> tuple[list[dict[str, Array]], Metrics]:
        """Take one optimizer step on some responses; return statistics of tokens, and of the step."""
        sizes = samples.sizes[responses]
        weights = aggregation_weights(sizes, self._config.choices.aggregation, longest=self._longest)
        samples.add(["weights"])
        samples.own["weights"][np.repeat(_is_among(responses, len(samples.sizes)), samples.sizes)] = weights
        found, losses = [], []
        for part in samples.parts(responses):
            loss, statistics = self._loss(samples, part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            found.append(statistics)
        norm = nn.utils.clip_grad_norm_(self._parameters(), self._config.max_grad_norm)
        loss_value = float(torch.stack(losses).sum())
        if not (np.isfinite(loss_value) and bool(norm.isfinite())):
            raise DivergedError(
                f"round {version} has a loss of {loss_value:g} and a gradient of {float(norm):g}: "
                "lower algorithm.lr"
            )
        self._set_lr(version)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return found, {"learn/loss": loss_value, "learn/grad_norm": float(norm)}

    def _loss(self, samples: Samples, part: Part) -> tuple[Tensor, dict[str, Array]]:
        """Return a micro-batch's share of the loss, and statistics of its tokens."""
        config, weights = self._config, samples.at("weights", part)
        log_probs, entropy, values = self._forward(self._model, part)
        behaviour, proximal = samples.at("behaviour", part), log_probs.detach()
        if config.correction.proximal == "behaviour":
            proximal = behaviour
        elif "proximal" in samples.own:
            proximal = samples.at("proximal", part)
        batch = TokenBatch(log_probs, proximal, behaviour, samples.at("advantages", part), part.rows)
        loss, corrections = policy_loss(config, self._token_loss, batch, weights)
        found = {"log_ratios": log_probs.detach() - behaviour, "entropy": entropy}
        found["versions"] = samples.at("versions", part)
        if corrections is not None:
            found["masked"] = (corrections == 0).float()
        if config.choices.clip_low is not None:
            found["ratios"] = ratios_of(config, batch).detach()
        if values is not None:
            pair = (samples.at("values", part), samples.at("targets", part))
            found["value_loss"] = clipped_value_loss(values, *pair, config.value.clip)
            loss = loss + config.value.coef * (found["value_loss"] * weights).sum()
        if self._reference is not None:
            found["kl"] = kl_estimate(log_probs, samples.at("reference", part), config.kl.estimator)
            if config.kl.place == "loss":
                loss = loss + config.kl.coef * (found["kl"] * weights).sum()
        return loss, {name: one.detach().numpy() for name, one in found.items()}

    def _forward(self, model: Decoder, part: Part) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return log-probs ``[M]`` of the drawn tokens, entropies there, and values before them."""
        hidden = model(part.tokens, part.packing)[part.places - 1]
        log_probs = (model.logits(hidden) / self._config.temperature).log_softmax(-1)
        with torch.no_grad():
            entropy = -(log_probs.exp() * log_probs).sum(-1)
        values = None if self._head is None else self._head(hidden)[:, 0]
        return log_probs.gather(-1, part.tokens[part.places, None])[:, 0], entropy, values

    # ------------------------------------------------------------ metrics

    def _metrics_of_tokens(self, found: Sequence[Mapping[str, Array]], version: int) -> Metrics:
        names = list(found[0]) if found else []
        whole = {name: np.concatenate([one[name] for one in found]) for name in names}
        log_ratios = whole.get("log_ratios", np.zeros(0, np.float32))
        metrics = {
            "learn/entropy": float(whole["entropy"].mean()) if found else 0.0,
            "learn/ess": effective_sample_size(log_ratios),
            "learn/behaviour_kl": approx_kl(log_ratios),
            **(by_age(log_ratios, version - whole["versions"]) if found else {}),
        }
        parts = self._config.choices
        if parts.clip_low is not None and parts.clip_high is not None:
            ratios = whole.get("ratios", np.ones(1, np.float32))
            outside = (ratios < 1.0 - parts.clip_low) | (ratios > 1.0 + parts.clip_high)
            metrics["learn/clip_fraction"] = float(outside.mean())
        others = {"masked": "masked_fraction", "value_loss": "value_loss", "kl": "reference_kl"}
        metrics |= {f"learn/{others[name]}": float(whole[name].mean()) for name in others if name in whole}
        return metrics

    def _metrics_of_values(self, samples: Samples) -> Metrics:
        if self._head is None:
            return {}
        return {"learn/explained_variance": explained_variance(samples.own["values"], samples.own["targets"])}

    # ------------------------------------------------------------ weights and state

    def _parameters(self) -> list[nn.Parameter]:
        return [*self._model.parameters(), *([] if self._head is None else self._head.parameters())]

    def _set_lr(self, version: int) -> None:
        """Set the learning rate of this round; that of the value head falls and rises alike."""
        lr = self._config.lr_at(version)
        self._optimizer.param_groups[0]["lr"] = lr
        for group in self._optimizer.param_groups[1:]:
            group["lr"] = self._config.value.lr * (lr / self._config.lr)

    def weights(self) -> dict[str, Array]:
        """Return copies of the language model's weights; a value head stays here."""
        self._warm_up()
        return {name: weight.numpy().copy() for name, weight in self._model.weights().items()}

    def state_dict(self) -> StateTree:
        """Return weights and optimizer, and those of value head and reference model.

        It warms nothing up: it is asked for before a saved state is loaded, too.
        """
        state: dict[str, Any] = {
            "weights": self._model.weights(),
            "optimizer": self._optimizer.state_dict(),
            "is_warm": self._is_warm,
        }
        if self._head is not None:
            state["value_head"] = dict(self._head.state_dict())
        if self._reference is not None and self._config.kl.reference is None:
            state["reference"] = self._reference.weights()
        return state

    def load_state_dict(self, state: StateTree) -> None:
        """Continue from a saved state."""
        self._is_warm = state.get("is_warm", True)
        self._model.set_weights(_tensors(state["weights"]))
        self._optimizer.load_state_dict(state["optimizer"])
        if self._head is not None:
            self._head.load_state_dict(_tensors(state["value_head"]))
        if self._reference is not None and self._config.kl.reference is None:
            self._reference.set_weights(_tensors(state["reference"]))


def _tensors(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(one) for name, one in tree.items()}


def _is_among(members: Array, count: int) -> Array:
    found = np.zeros(count, np.bool_)
    found[members] = True
    return found


def make_value_head(shape: Shape) -> nn.Linear:
    """Make a value head that is 0 everywhere."""
    head = nn.Linear(shape.width, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def make_optimizer(model: Decoder, config: GRPOConfig, head: nn.Linear | None = None) -> torch.optim.AdamW:
    """Make the optimizer of a run; a value head has a learning rate of its own."""
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "lr": config.lr}]
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": config.value.lr})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay)
