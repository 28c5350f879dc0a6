"""PPO's learner: one call of ``train`` is one round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from offbeat.algorithms.ppo.augment import Augment, make_augment
from offbeat.algorithms.ppo.config import PPOConfig, ppo_config
from offbeat.algorithms.ppo.minibatches import Loader, Minibatch, Samples, judge, make_loader
from offbeat.algorithms.ppo.policy import environment_spec
from offbeat.algorithms.ppo.rounds import Floats, Round, Shares, Targets, compute_targets
from offbeat.algorithms.progress import Progress, Terms
from offbeat.config.models import RunConfig
from offbeat.errors import DivergedError, TrainError
from offbeat.models.flat import FlatAdam, FlatParameters
from offbeat.models.likelihood import likelihood
from offbeat.models.networks import CRITIC_PREFIX, Evaluation, make_network
from offbeat.models.observations import Normalizer, encode
from offbeat.models.ranks import choose_device
from offbeat.models.spec import NetworkSpec, device_for
from offbeat.ops.losses import clipped_policy_loss, value_loss
from offbeat.ops.statistics import Moments, approx_kl, effective_sample_size, explained_variance
from offbeat.roles import Ranks, SingleRank
from offbeat.seeding import derive_seed
from offbeat.types import Array, Batch, Metrics, StateTree

_SINGLE_RANK = SingleRank()
REWARD_CLIP = np.float32(10.0)
"""Normalised rewards are clipped to this, as in OpenAI baselines."""


@dataclass(slots=True)
class PPOProgress(Progress):
    """Whole losses and passes over the round, too."""

    losses: list[float] = field(default_factory=list)
    num_epochs: int = 0

    def metrics(self, clip_coef: float, prefix: str = "learn/") -> Metrics:
        """Means over the round."""
        return {
            **Progress.metrics(self, clip_coef, prefix),
            f"{prefix}loss": float(np.mean(self.losses)),
            f"{prefix}num_epochs": float(self.num_epochs),
        }


@dataclass(frozen=True, slots=True)
class Lesson:
    """One update of the learner: samples, its values ``[T + 1, B]`` before, targets, progress.

    ``behaviour_log_ratios`` ``[T, B]`` are those of the policy before to the one that acted, where
    ``is_judged``; without that the first minibatch tells, for then the network is still that policy.
    """

    data: Round
    values: Floats
    targets: Targets
    behaviour_log_ratios: Floats
    is_judged: bool
    progress: PPOProgress

    @property
    def first(self) -> Floats:
        """Log-ratios ``[M]`` of the first minibatch before any step."""
        first: Floats = self.progress.log_ratios[0].cpu().numpy()
        return first


class PPOLearner:
    """Owns actor, critic, optimizer and normalisers.

    Randomness: parameters from (run seed, "init"), minibatch order from (run seed, "learn", version).
    As one of several ranks it differentiates its share of each minibatch; gradients, losses and log-ratios
    are then added up, so that all ranks take the same steps and report the same.
    """

    def __init__(
        self,
        config: PPOConfig,
        spec: NetworkSpec,
        *,
        seed: int,
        device: str = "cpu",
        ranks: Ranks = _SINGLE_RANK,
        augment: Augment | None = None,
    ) -> None:
        self._config = config.for_network(spec.kind)
        self._augment = augment
        self._spec = spec
        self._seed = seed
        self._ranks = ranks
        self._device = choose_device(device_for(spec, device, ranks.size), ranks.rank)
        generator = torch.Generator().manual_seed(derive_seed(seed, "init"))
        self._network = make_network(spec, generator).to(self._device)
        self._parameters = FlatParameters(self._network, num_extra=3 if ranks.size > 1 else 0)
        self._optimizer = FlatAdam(self._parameters, eps=config.adam_eps)
        self._obs_moments = Moments.empty((spec.observation.num_features,))
        self._return_moments = Moments.empty()
        self._version = 0

    # ------------------------------------------------------------ a round

    def train(self, batch: Batch) -> Metrics:
        """Train on the batch's segments; return the round's metrics."""
        raw = Round.of(batch.segments)
        refuse_non_finite(raw, batch.version)
        self._measure_returns(raw)
        order = np.random.default_rng(derive_seed(self._seed, "learn", batch.version))
        lesson = self._learn(raw, batch.version, order, is_stale=any(batch.staleness()))
        self._measure_observations(raw)
        self._version = batch.version + 1
        log_ratios = lesson.behaviour_log_ratios[lesson.data.valid] if lesson.is_judged else lesson.first
        return {**self._lesson_metrics(lesson, batch.version), **staleness_metrics(log_ratios)}

    def _learn(
        self,
        raw: Round,
        version: int,
        order: np.random.Generator,
        *,
        is_stale: bool,
        shares: Shares | None = None,
    ) -> Lesson:
        """Compute targets with the network as it is, then take ``num_epochs`` passes over the samples."""
        if self._augment is not None:
            raw = self._augment(raw, order)
        config, data = self._config, self._prepare(raw)
        needs_prox = config.correction != "gae" or is_stale
        values, outputs = judge(self._network, data, self._device, with_outputs=needs_prox)
        prox_logp = data.logp if outputs is None else self._spec.actions.log_prob(outputs, data.actions)
        targets = compute_targets(config, data, values, prox_logp, shares, is_stale=is_stale)
        loader = make_loader(config, self._network, data, targets, self._device, self._ranks)
        progress = self._optimise(loader, version, order)
        return Lesson(data, values, targets, prox_logp - data.logp, needs_prox, progress)

    def _prepare(self, raw: Round) -> Round:
        """Encode observations as the collectors did, and scale rewards."""
        rewards = raw.rewards
        if self._config.normalize_reward:
            rewards = np.clip(rewards * self._return_moments.scale(), -REWARD_CLIP, REWARD_CLIP)
        return replace(raw, obs=self._spec.encode(raw.obs, self._normalizer()), rewards=rewards)

    def _measure_returns(self, raw: Round) -> None:
        """Take fresh samples into the scale of rewards: before they are trained on."""
        if raw.discounted_returns is not None:
            stream = raw.discounted_returns[raw.valid]
            self._return_moments = self._return_moments.merge(Moments.of(stream))

    def _measure_observations(self, raw: Round) -> None:
        """Take fresh samples into the scale of observations.

        After training: a round is trained with the statistics its fresh samples were collected with.
        """
        if self._config.normalize_obs:
            features = encode(raw.obs[:-1][raw.valid], self._spec.observation)
            self._obs_moments = self._obs_moments.merge(Moments.of(features))

    def _lesson_metrics(self, lesson: Lesson, version: int) -> Metrics:
        valid = lesson.data.valid
        return {
            **lesson.progress.metrics(self._config.clip_coef),
            "learn/learning_rate": self._config.lr_at(version),
            "learn/explained_variance": explained_variance(
                lesson.values[:-1][valid], lesson.targets.values[valid]
            ),
        }

    def _optimise(self, loader: Loader, version: int, order: np.random.Generator) -> PPOProgress:
        config, progress = self._config, PPOProgress()
        for _ in range(config.num_epochs):
            first = len(progress.log_ratios)
            for minibatch in loader.epoch(order):
                self._update(loader, minibatch, version, progress)
            if self._ranks.size > 1:
                self._complete(progress.log_ratios, first)
            progress.num_epochs += 1
            if config.target_kl is not None and _kl(progress.log_ratios[first:]) > config.target_kl:
                break
        return progress

    def _update(self, loader: Loader, minibatch: Minibatch, version: int, progress: PPOProgress) -> None:
        """One optimiser step on a minibatch."""
        ent_coef = self._config.ent_coef_at(version)
        loss, grad = 0.0, self._parameters.grad
        self._parameters.sums.zero_()
        if self._ranks.size == 1:
            for samples in minibatch.parts:
                share = len(samples) / minibatch.num_samples
                terms = self._backward(loader.evaluate(samples), samples, ent_coef, share)
                progress.add(terms)
                loss += share * self._loss(terms, ent_coef)
        else:
            terms = self._backward_with_others(loader, minibatch, ent_coef)
            progress.add(terms)
            loss = self._loss(terms, ent_coef)
        norm = torch.linalg.vector_norm(grad).item()
        if not math.isfinite(loss + norm):
            raise DivergedError(
                f"round {version} diverged: loss {loss:g}, gradient norm {norm:g}; the step was not applied."
                " Lower algorithm.lr or algorithm.max_grad_norm"
            )
        if norm > self._config.max_grad_norm:
            grad.mul_(self._config.max_grad_norm / norm)
        self._optimizer.step(self._config.lr_at(version))
        progress.losses.append(loss)
        progress.grad_norms.append(norm)

    @torch.no_grad()
    def _backward(self, network: Evaluation, samples: Samples, ent_coef: float, share: float) -> Terms:
        """Add ``share`` of the gradient of the samples' mean loss; return the terms of that loss."""
        config = self._config
        policy = likelihood(self._spec.actions, network.outputs, samples.actions)
        policy_loss, by_logp, log_ratio = clipped_policy_loss(
            policy.logp,
            samples.old_logp,
            samples.advantages,
            clip_coef=config.clip_coef,
            weights=samples.weights,
            bounds=samples.bounds,
        )
        critic_loss, by_values = value_loss(
            network.values,
            samples.targets,
            old_values=samples.old_values,
            clip_coef=config.clip_coef,
            weights=samples.critic_share,
        )
        entropy, by_entropy = policy.entropy, -ent_coef * share / len(samples)
        if samples.policy_share is not None:
            entropy = entropy * samples.policy_share
        by_outputs = policy.backward(
            by_logp.mul_(share),
            by_entropy if samples.policy_share is None else by_entropy * samples.policy_share,
        )
        network.backward(by_outputs, by_values.mul_(share * config.vf_coef))
        return Terms(policy_loss, critic_loss, entropy.mean(), log_ratio)

    def _loss(self, terms: Terms, ent_coef: float) -> float:
        return (terms.policy + self._config.vf_coef * terms.value - ent_coef * terms.entropy).item()

    # ------------------------------------------------------------ with other ranks

    def _backward_with_others(self, loader: Loader, minibatch: Minibatch, ent_coef: float) -> Terms:
        """Differentiate this rank's samples and add up with the other ranks, in one exchange.

        The gradient and the terms returned are then those of the whole minibatch, but for the log-ratios:
        those of other ranks are still 0.
        """
        extra = self._parameters.extra
        log_ratio = extra.new_zeros(minibatch.num_samples)
        begin = minibatch.first
        for samples in minibatch.parts:
            share = len(samples) / minibatch.num_samples
            terms = self._backward(loader.evaluate(samples), samples, ent_coef, share)
            extra.add_(torch.stack((terms.policy, terms.value, terms.entropy)), alpha=share)
            log_ratio[begin : begin + len(samples)] = terms.log_ratio
            begin += len(samples)
        self._ranks.sum_(self._parameters.sums)
        policy, value, entropy = extra.clone().unbind()
        return Terms(policy, value, entropy, log_ratio)

    def _complete(self, log_ratios: list[Tensor], first: int) -> None:
        """Put the other ranks' log-ratios into those of an epoch, which begin at ``first``."""
        sizes = [len(part) for part in log_ratios[first:]]
        whole = torch.cat(log_ratios[first:])
        self._ranks.sum_(whole)
        log_ratios[first:] = whole.split_with_sizes(sizes)

    def checksum(self) -> int:
        """A number that tells the parameters of ranks apart when a single bit differs."""
        return int(self._parameters.flat.detach().view(torch.int32).sum(dtype=torch.int64))

    # ------------------------------------------------------------ weights and state

    def weights(self) -> dict[str, Array]:
        """The actor and its normaliser, by name; the critic stays here."""
        arrays = self._parameters.arrays()
        actor = {name: array for name, array in arrays.items() if not name.startswith(CRITIC_PREFIX)}
        normalizer = self._normalizer()
        return actor if normalizer is None else actor | normalizer.to_weights()

    def state_dict(self) -> StateTree:
        """Everything the next round depends on."""
        return {
            "version": self._version,
            "parameters": self._parameters.arrays(),
            "adam": self._optimizer.state_dict(),
            "obs_moments": self._obs_moments.state_dict(),
            "return_moments": self._return_moments.state_dict(),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._version = int(state["version"])
        self._parameters.load(state["parameters"])
        self._optimizer.load_state_dict(state["adam"])
        self._obs_moments = Moments.from_state(state["obs_moments"])
        self._return_moments = Moments.from_state(state["return_moments"])

    def _normalizer(self) -> Normalizer | None:
        if not self._config.normalize_obs:
            return None
        return Normalizer(self._obs_moments.mean.astype(np.float32), self._obs_moments.scale())


def make_learner(config: RunConfig, ranks: Ranks = _SINGLE_RANK) -> PPOLearner:
    """Make the learner of a run, or one of its ranks, in the calling process."""
    # Before the parameters are drawn: their orthogonal bases must not depend on the number of threads.
    torch.set_num_threads(config.runtime.torch_threads)
    return PPOLearner(
        ppo_config(config),
        environment_spec(config),
        seed=config.run.seed,
        device=config.trainer.device,
        ranks=ranks,
        augment=make_augment(config),
    )


def refuse_non_finite(data: Round, version: int) -> None:
    """Raise when samples hold what would ruin the network."""
    if names := data.non_finite():
        raise TrainError(
            f"round {version} was not trained: its segments hold NaN or infinity in {', '.join(names)};"
            " check the environment"
        )


def staleness_metrics(log_ratios: Floats) -> Metrics:
    """Compute the cost of stale samples from ``[M]`` log-ratios of proximal to behaviour policy."""
    return {
        "learn/ess": effective_sample_size(log_ratios),
        "learn/behaviour_kl": approx_kl(log_ratios),
        "learn/first_ratio_max_dev": float(np.abs(np.expm1(log_ratios)).max(initial=0.0)),
    }


def _kl(log_ratios: list[Tensor]) -> float:
    return approx_kl(torch.cat(log_ratios).cpu().numpy())
