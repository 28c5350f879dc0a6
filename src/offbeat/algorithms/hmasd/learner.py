"""HMASD's learner: skills, actions and discriminators, all trained in one round."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from offbeat.algorithms.hmasd.choosing import evenness, shares_of
from offbeat.algorithms.hmasd.config import HMASDConfig, hmasd_config
from offbeat.algorithms.hmasd.store import Choices, Lessons, RoundStore, contributions, lessons_of
from offbeat.algorithms.mappo.config import envs_per_round
from offbeat.algorithms.mappo.learner import TeamLearner
from offbeat.algorithms.mappo.rounds import TeamRound
from offbeat.algorithms.progress import Progress, Terms
from offbeat.config.models import RunConfig
from offbeat.errors import TrainError
from offbeat.models.coordinator import SkillCoordinator
from offbeat.models.discriminators import Discriminators
from offbeat.models.team_spec import TeamSpec
from offbeat.models.trainee import Trainee
from offbeat.ops.losses import huber
from offbeat.ops.skills import Reason, mixed_rewards, period_advantages
from offbeat.ops.statistics import approx_kl, explained_variance
from offbeat.ops.value_norm import ValueNorm
from offbeat.types import Array, Batch, Metrics, StateTree

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class HighTargets:
    """What the losses of the choosing level compare with, each ``[M, 1 + A]``; weights None: 1."""

    advantages: Floats
    values: Floats
    old_values: Floats
    old_logp: Floats
    weights: Floats | None


@dataclass(frozen=True, slots=True)
class HighJudgement:
    """What the coordinator says of choices before they are trained, each ``[M, 1 + A]``.

    ``prox_logp`` of the choices, ``values`` where they were made and ``next_values`` where they led to, all
    as the networks give them.
    """

    prox_logp: Floats
    values: Floats
    next_values: Floats


class HMASDLearner(TeamLearner):
    """Owns the coordinator and the discriminators beside actor and critic.

    All levels train in the same round, so that one version counts for all of them; records say which version
    chose, acted and judged.
    """

    def __init__(
        self, config: HMASDConfig, spec: TeamSpec, *, seed: int, num_envs: int, device: str = "cpu"
    ) -> None:
        super().__init__(config, spec, seed=seed, num_envs=num_envs, device=device)
        self._skills_config = config
        self._coordinator = SkillCoordinator(spec, self._generator).to(self._device)
        self._discriminators = Discriminators(spec, self._generator).to(self._device)
        self._trainees["coordinator"] = Trainee("coordinator", self._coordinator, eps=config.adam_eps)
        self._trainees["discriminators"] = Trainee(
            "discriminators", self._discriminators, eps=config.adam_eps
        )
        self._high_norm = ValueNorm()
        self._store = RoundStore()
        kept = config.discriminator.data == "kept"
        self._lessons = Lessons(config.discriminator.capacity if kept else None)

    # ------------------------------------------------------------ a round

    def _collected(self, batch: Batch) -> TeamRound:
        """Take the segments in, refusing what is too old."""
        for segment in batch.segments:
            self._store.add(segment, batch.version)
        data = self._store.take()
        if data is None:
            raise TrainError(
                f"round {batch.version} has nothing to train on: all its segments are past their deadline"
            )
        return data

    def _learn(self, data: TeamRound, batch: Batch, order: np.random.Generator) -> Metrics:
        """Train both levels, then the discriminators, whose verdict is part of this round's rewards."""
        version = batch.version
        choices = self._store.choices(data, version)
        judged, seen = self._judge(data), self._judge_choices(choices)
        self._is_fresh &= bool((choices.version == version).all())
        high_deviation = self._checked_ratio(seen.prox_logp - choices.logp, version)
        low_deviation = self._checked_ratio(judged.behaviour_log_ratios(data), version)
        high = self._learn_high(choices, seen, version)
        low = self._learn_low(data, judged, self._agent_rewards(data), version, order)
        told_apart = self._learn_discriminators(data, version, order)
        ages = np.where(data["stamps"] >= 0, version - data["stamps"], 0)[data.valid]
        return {
            **low,
            **high,
            **told_apart,
            **contributions(choices, data.valid.shape[1]),
            "learn/first_ratio_max_dev": max(high_deviation, low_deviation),
            "learn/high_first_ratio_max_dev": high_deviation,
            "learn/max_age_high": float(np.max(version - choices.version, initial=0)),
            "learn/max_age_low": float(ages[:, 1].max(initial=0)),
            "learn/max_age_discriminators": float(ages[:, 2].max(initial=0)),
            "learn/refused_samples": float(self._store.refused),
            "learn/refused_choices": float(self._store.refused_choices),
        }

    # ------------------------------------------------------------ what the hierarchy changes below

    def _agent_rewards(self, data: TeamRound) -> Floats:
        config = self._skills_config
        if config.intrinsic == "stamped":
            team, skill = data["log_q_team"], data["log_q_skill"]
        else:
            team, skill = self._log_q(data)
        return mixed_rewards(
            data["rewards"],
            team,
            skill,
            extrinsic_coef=config.extrinsic_coef,
            team_coef=config.team_intrinsic_coef,
            skill_coef=config.skill_intrinsic_coef,
            num_team_skills=config.num_team_skills,
            num_skills=config.num_skills,
            with_baseline=config.intrinsic_baseline,
        )

    def _resets(self, data: TeamRound) -> Bools:
        starts: Bools = data["starts"]
        return starts | data["selected"] if self._skills_config.reset_memory == "skill" else starts

    @torch.inference_mode()
    def _log_q(self, data: TeamRound) -> tuple[Floats, Floats]:
        """What the learner's own discriminators say of the skills in force, ``[T, B]`` and ``[T, B, A]``."""
        lead = data.valid.shape
        rows = lead[0] * lead[1]
        sample = {
            "state": data["next_state"].reshape(rows, -1),
            "obs": data["next_obs"].reshape(rows, self._spec.num_agents, -1),
            "skills": data["skills"].reshape(rows, -1),
        }
        team, skill = self._verdict(sample)
        return team.cpu().numpy().reshape(lead), skill.cpu().numpy().reshape(*lead, -1)

    # ------------------------------------------------------------ the choosing level

    def _learn_high(self, choices: Choices, seen: HighJudgement, version: int) -> Metrics:
        if not len(choices):
            return {}
        behaviour = seen.prox_logp - choices.logp
        targets, values = self._high_targets(choices, seen)
        progress = self._optimise_high(choices, targets, version)
        return {
            **progress.metrics(self._config.clip_coef, "learn/high_"),
            "learn/high_explained_variance": explained_variance(
                self._high_out_of_units(values).ravel(), targets.values.ravel()
            ),
            "learn/high_behaviour_kl": approx_kl(behaviour.ravel()),
            "learn/period_reward_mean": float(choices.rewards.mean()),
            **usage(choices.skills, self._skills_config),
        }

    @torch.inference_mode()
    def _judge_choices(self, choices: Choices) -> HighJudgement:
        """Look at all choices with the coordinator as it is."""
        if not len(choices):
            return HighJudgement(choices.logp, choices.logp, choices.logp)
        state, obs, skills = self._tensors(choices.state, choices.obs, choices.skills)
        team, own, values = self._coordinator.evaluate(state, obs, skills)
        logp = choice_log_probs(team, own, skills)
        after = self._coordinator.values(*self._tensors(choices.next_state, choices.next_obs))
        return HighJudgement(logp.cpu().numpy(), values.cpu().numpy(), after.cpu().numpy())

    def _high_targets(self, choices: Choices, seen: HighJudgement) -> tuple[HighTargets, Floats]:
        config, prox_logp = self._skills_config, seen.prox_logp
        values, next_values = self._high_in_units(seen.values), self._high_in_units(seen.next_values)
        if config.ends_at_time_limit:
            was_cut = choices.periods.reason == Reason.TRUNCATED
            next_values = np.where(was_cut[:, None], np.float32(0), next_values)
        old_logp, weights, joint = choices.logp, None, None
        if self._corrects:
            log_ratio = prox_logp - choices.logp
            weights = np.minimum(np.exp(log_ratio), np.float32(config.behaviour_cap))
            joint, old_logp = np.exp(log_ratio.sum(axis=1)), prox_logp
        advantages, targets = period_advantages(
            choices.periods,
            choices.rewards,
            values,
            next_values,
            gamma=config.high_gamma,
            gae_lambda=config.high_gae_lambda,
            ratios=joint,
            c_bar=config.c_bar,
        )
        if config.value_norm:
            self._high_norm = self._high_norm.updated(targets.ravel())
        if config.norm_adv:
            spread = max(float(advantages.std()), config.high_adv_floor)
            advantages = (advantages - advantages.mean()) / np.float32(spread)
        return HighTargets(
            advantages, self._high_out_of_units(targets), seen.values, old_logp, weights
        ), values

    def _optimise_high(self, choices: Choices, targets: HighTargets, version: int) -> Progress:
        config, trainee, progress = self._skills_config, self._trainees["coordinator"], Progress()
        whole: dict[str, Array] = {
            "state": choices.state,
            "obs": choices.obs,
            "skills": choices.skills,
            "advantages": targets.advantages,
            "values": targets.values,
            "old_values": targets.old_values,
            "old_logp": targets.old_logp,
        }
        if targets.weights is not None:
            whole["weights"] = targets.weights
        samples = {name: self._tensors(array)[0] for name, array in whole.items()}
        for _ in range(config.high_num_epochs or config.num_epochs):
            trainee.zero()
            terms = self._high_losses(samples)
            loss = terms.policy + config.vf_coef * terms.value - config.high_ent_coef * terms.entropy
            loss.backward()  # type: ignore[no-untyped-call]
            progress.grad_norms.append(trainee.step(config.lr_at(version), config.max_grad_norm))
            progress.add(terms)
        return progress

    def _high_losses(self, samples: dict[str, Tensor]) -> Terms:
        """Policy loss, value loss and entropy, summed over the 1 + A choices, averaged over periods."""
        config, skills = self._skills_config, samples["skills"]
        team, own, values = self._coordinator.evaluate(samples["state"], samples["obs"], skills)
        log_ratio = choice_log_probs(team, own, skills) - samples["old_logp"]
        ratio, advantages = log_ratio.exp(), samples["advantages"]
        clipped = ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        if "weights" in samples:
            surrogate = surrogate * samples["weights"]
        errors = huber(values - samples["values"], config.huber_delta)
        if config.clip_vloss:
            old = samples["old_values"]
            near = old + (values - old).clamp(-config.clip_coef, config.clip_coef)
            errors = torch.maximum(errors, huber(near - samples["values"], config.huber_delta))
        entropy = entropy_of(team) + entropy_of(own).sum(-1)
        return Terms(-surrogate.sum(-1).mean(), errors.sum(-1).mean(), entropy.mean(), log_ratio)

    # ------------------------------------------------------------ the discriminators

    def _learn_discriminators(self, data: TeamRound, version: int, order: np.random.Generator) -> Metrics:
        config, trainee = self._skills_config.discriminator, self._trainees["discriminators"]
        fresh = lessons_of(data)
        metrics = self._accuracy(fresh)
        self._lessons.add(fresh)
        lr, losses = config.lr or self._config.lr_at(version), []
        size = min(config.batch_size, len(self._lessons))
        for _ in range(config.num_updates):
            index = (
                order.choice(len(self._lessons), size, replace=False) if size < len(self._lessons) else None
            )
            sample = self._lessons.pick(np.arange(size) if index is None else index)
            trainee.zero()
            team, skill = self._verdict(sample)
            alive = torch.from_numpy(sample["alive"]).to(self._device)
            loss = -(team.mean() + (skill * alive).sum() / alive.sum().clamp(min=1))
            loss.backward()  # type: ignore[no-untyped-call]
            trainee.step(lr, self._config.max_grad_norm, config.weight_decay)
            losses.append(loss.item())
        if config.data == "cleared":
            self._lessons.clear()
        return {**metrics, "learn/discriminator_loss": float(np.mean(losses))}

    def _verdict(self, sample: dict[str, Array]) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the true skills: the team's ``[M]`` and those of agents ``[M, A]``."""
        team, own, skills = self._logits(sample)
        whole = choice_log_probs(team, own, skills)
        return whole[:, 0], whole[:, 1:]

    def _logits(self, sample: dict[str, Array]) -> tuple[Tensor, Tensor, Tensor]:
        state, obs, skills = self._tensors(sample["state"], sample["obs"], sample["skills"])
        num_agents = obs.shape[1]
        team = self._discriminators.team(state)
        rows = skills[:, 0].repeat_interleave(num_agents)
        own = self._discriminators.individual(obs.reshape(len(rows), -1), rows)
        return team, own.view(len(obs), num_agents, -1), skills

    @torch.inference_mode()
    def _accuracy(self, sample: dict[str, Array]) -> Metrics:
        team, own, skills = self._logits(sample)
        whole, alive = choice_log_probs(team, own, skills), torch.from_numpy(sample["alive"]).to(self._device)
        return {
            "learn/team_accuracy": float((team.argmax(-1) == skills[:, 0]).float().mean()),
            "learn/skill_accuracy": float((own.argmax(-1) == skills[:, 1:])[alive].float().mean()),
            "learn/log_q_team": float(whole[:, 0].mean()),
            "learn/log_q_skill": float(whole[:, 1:][alive].mean()),
        }

    # ------------------------------------------------------------ help

    def _tensors(self, *arrays: Array) -> list[Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(self._device) for array in arrays]

    def _high_in_units(self, raw: Floats) -> Floats:
        return self._high_norm.denormalise(raw) if self._config.value_norm else raw

    def _high_out_of_units(self, values: Floats) -> Floats:
        return self._high_norm.normalise(values) if self._config.value_norm else values

    # ------------------------------------------------------------ weights and state

    def weights(self) -> dict[str, Array]:
        """What collectors need, by name: actor, critic, coordinator, discriminators."""
        extra = (self._trainees[name].arrays(name) for name in ("coordinator", "discriminators"))
        whole = super().weights()
        for part in extra:
            whole |= part
        return whole

    def state_dict(self) -> StateTree:
        """Everything the next round depends on."""
        return {
            **super().state_dict(),
            "high_norm": self._high_norm.state_dict(),
            "lessons": self._lessons.state_dict(),
            "refused": [self._store.refused, self._store.refused_choices],
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._high_norm = ValueNorm.from_state(state["high_norm"])
        self._lessons.load_state_dict(state["lessons"])
        self._store.refused, self._store.refused_choices = (int(count) for count in state["refused"])


def choice_log_probs(team: Tensor, own: Tensor, skills: Tensor) -> Tensor:
    """Log-probabilities ``[M, 1 + A]`` of skills under logits ``[M, nZ]`` and ``[M, A, nz]``."""
    first = functional.log_softmax(team, -1).gather(-1, skills[:, :1])
    rest = functional.log_softmax(own, -1).gather(-1, skills[:, 1:, None]).squeeze(-1)
    return torch.cat([first, rest], dim=1)


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy ``[...]`` of the softmax of logits ``[..., P]``."""
    log_probs = functional.log_softmax(logits, -1)
    return -(log_probs.exp() * log_probs).sum(-1)


def usage(skills: Array, config: HMASDConfig) -> Metrics:
    """Share of the choices that each skill got, and how even they are."""
    metrics: Metrics = {}
    kinds = (
        ("learn/team_skill", skills[:, 0], config.num_team_skills),
        ("learn/skill", skills[:, 1:], config.num_skills),
    )
    for name, chosen, count in kinds:
        counts = np.bincount(chosen.ravel(), minlength=count).astype(np.float64)
        metrics |= {**shares_of(name, counts), f"{name}_evenness": evenness(counts)}
    return metrics


def make_learner(config: RunConfig, spec: TeamSpec) -> HMASDLearner:
    """Make the learner of a run in the calling process."""
    torch.set_num_threads(config.runtime.torch_threads)
    return HMASDLearner(
        hmasd_config(config),
        spec,
        seed=config.run.seed,
        num_envs=envs_per_round(config),
        device=config.trainer.device,
    )
