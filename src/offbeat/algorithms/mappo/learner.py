"""Multi-agent PPO's learner: one call of ``train`` is one round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.algorithms.mappo.collector import BATCH_SIZE
from offbeat.algorithms.mappo.config import MAPPOConfig, envs_per_round, mappo_config
from offbeat.algorithms.mappo.lessons import Judgement, LowLesson, LowSamples, LowTargets
from offbeat.algorithms.mappo.rounds import TeamRound
from offbeat.algorithms.progress import Progress, Terms
from offbeat.config.models import RunConfig
from offbeat.errors import TrainError
from offbeat.models.likelihood import likelihood
from offbeat.models.ranks import choose_device
from offbeat.models.recurrent import Recurrent
from offbeat.models.team_spec import TeamSpec
from offbeat.models.trainee import Trainee
from offbeat.ops.advantages import gae_to_next
from offbeat.ops.exploration import IMPOSSIBLE
from offbeat.ops.losses import clipped_policy_loss, value_loss
from offbeat.ops.noise_scale import NoiseScale
from offbeat.ops.schedules import linear_schedule
from offbeat.ops.statistics import approx_kl, effective_sample_size, explained_variance, masked_normalise
from offbeat.ops.value_norm import ValueNorm
from offbeat.seeding import derive_seed
from offbeat.types import Array, Batch, Metrics, StateTree

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
CHUNK_TOLERANCE = 100.0
"""How much larger the first ratios of a pass in single precision may be than ``max_first_ratio_dev``."""
ACTOR_GAIN = 0.01
CRITIC_GAIN = 1.0


@dataclass(slots=True)
class LowProgress(Progress):
    """Reports of the acting level, whose critic takes steps of its own."""

    critic_norms: list[float] = field(default_factory=list)


class TeamLearner:
    """Owns actor, critic, their optimizers and the scale of values.

    Randomness: parameters from (run seed, "init"), minibatch order from (run seed, "learn", version).
    """

    def __init__(
        self, config: MAPPOConfig, spec: TeamSpec, *, seed: int, num_envs: int, device: str = "cpu"
    ) -> None:
        self._config = config
        self._spec = spec
        self._seed = seed
        self._num_envs = num_envs
        self._device = choose_device(device, 0)
        generator = torch.Generator().manual_seed(derive_seed(seed, "init"))
        outputs = spec.actions.num_outputs
        actor = Recurrent(spec.num_actor_inputs, outputs, spec, generator, last_gain=ACTOR_GAIN)
        critic = Recurrent(spec.num_critic_inputs, 1, spec, generator, last_gain=CRITIC_GAIN)
        self._actor, self._critic = actor.to(self._device), critic.to(self._device)
        self._trainees = {
            "actor": Trainee("actor", self._actor, eps=config.adam_eps),
            "critic": Trainee("critic", self._critic, eps=config.adam_eps),
        }
        self._value_norm = ValueNorm()
        self._noise = NoiseScale()
        self._is_fresh = True
        self._version = 0
        self._generator = generator

    # ------------------------------------------------------------ a round

    def train(self, batch: Batch) -> Metrics:
        """Train on the batch's segments; return the round's metrics."""
        data = self._collected(batch)
        if names := data.non_finite():
            raise TrainError(
                f"round {batch.version} was not trained: its segments hold NaN or infinity in"
                f" {', '.join(names)}; check the environment"
            )
        if not data.acted.any():
            raise TrainError(f"round {batch.version} was not trained: nobody acted in any of its steps")
        order = np.random.default_rng(derive_seed(self._seed, "learn", batch.version))
        self._is_fresh = not any(batch.staleness())
        metrics = self._learn(data, batch, order)
        self._version = batch.version + 1
        return metrics

    def _collected(self, batch: Batch) -> TeamRound:
        """The samples of the round."""
        return TeamRound.of(batch.segments)

    def _learn(self, data: TeamRound, batch: Batch, order: np.random.Generator) -> Metrics:
        """Train everything on a round."""
        judged = self._judge(data)
        deviation = self._checked_ratio(judged.behaviour_log_ratios(data), batch.version)
        low = self._learn_low(data, judged, self._agent_rewards(data), batch.version, order)
        return {**low, "learn/first_ratio_max_dev": deviation}

    def _checked_ratio(self, log_ratios: Floats, version: int, times: float = 1.0) -> float:
        """Largest deviation of a ratio from 1; of fresh samples there must be none, up to rounding."""
        deviation = float(np.abs(np.expm1(log_ratios)).max(initial=0.0))
        bound = self._config.max_first_ratio_dev
        if self._is_fresh and bound is not None and not deviation <= bound * times:
            raise TrainError(
                f"round {version}: the data is not the learner's own: a ratio was {deviation:.2g} away from"
                f" 1 before the first step, and algorithm.max_first_ratio_dev is {bound:g}"
            )
        return deviation

    @property
    def _corrects(self) -> bool:
        """Whether this round's samples are corrected for their age."""
        correction = self._config.correction
        return correction == "decoupled" or (correction == "auto" and not self._is_fresh)

    # ------------------------------------------------------------ what a hierarchy changes

    def _agent_rewards(self, data: TeamRound) -> Floats:
        """Rewards of each agent, ``[T, B, A]``."""
        rewards: Floats = data["rewards"][..., None]
        return np.broadcast_to(rewards, data["alive"].shape)

    def _resets(self, data: TeamRound) -> Bools:
        """Steps before which memories are emptied, ``[T, B]``."""
        return data["starts"]

    # ------------------------------------------------------------ the acting level

    def _learn_low(
        self, data: TeamRound, judged: Judgement, rewards: Floats, version: int, order: np.random.Generator
    ) -> Metrics:
        targets = self._targets(data, rewards, judged)
        progress = self._optimise(data, judged, targets, version, order)
        return self._low_metrics(data, judged, targets, progress)

    def _skills_of(self, data: TeamRound) -> tuple[Array | None, Array | None]:
        """Team skills ``[T, B]`` and those of agents ``[T, B, A]``, None without a hierarchy."""
        skills = data.get("skills")
        return (None, None) if skills is None else (skills[..., 0], skills[..., 1:])

    @torch.inference_mode()
    def _judge(self, data: TeamRound) -> Judgement:
        """Look at the whole round with the networks as they are."""
        spec, (team, skills) = self._spec, self._skills_of(data)
        num_steps, num_envs, num_agents = data["alive"].shape
        rows, resets = num_envs * num_agents, self._resets(data)
        inputs = spec.actor_inputs(data["obs"], skills).reshape(num_steps, rows, -1)
        memory = self._first_memory(data, "memory").reshape(rows, -1)
        outputs, memories = self._run(self._actor, inputs, memory, np.repeat(resets, num_agents, axis=1))
        outputs = outputs.reshape(num_steps, num_envs, num_agents, -1)
        if spec.has_legal:
            outputs = np.where(data["legal"], outputs, IMPOSSIBLE)
        prox_logp = spec.actions.log_prob(outputs, data["actions"])
        seen = spec.critic_inputs(data["state"], team)
        raw, critic_memories = self._run(
            self._critic, seen, self._first_memory(data, "critic_memory"), resets
        )
        raw = raw[..., 0]
        values = self._in_units(raw)
        return Judgement(
            prox_logp,
            values,
            self._next_values(data, values, critic_memories),
            raw,
            memories,
            critic_memories,
        )

    def _next_values(self, data: TeamRound, values: Floats, memories: Floats) -> Floats:
        """Value after each step ``[T, B]``: that of the next one, or of what the step led to at an end."""
        following = np.concatenate([values[1:], np.zeros_like(values[:1])])
        steps, envs = np.nonzero(data.valid & (data.ended | data.is_last))
        team, _ = self._skills_of(data)
        inputs = self._spec.critic_inputs(
            data["next_state"][steps, envs], None if team is None else team[steps, envs]
        )
        raw, _ = self._run(
            self._critic, inputs[None], memories[steps, envs], np.zeros((1, len(steps)), np.bool_)
        )
        following[steps, envs] = self._in_units(raw[0, :, 0])
        return following

    def _targets(self, data: TeamRound, rewards: Floats, judged: Judgement) -> LowTargets:
        """Advantages and value targets of the acting level; the scale of values moves with them."""
        config, acted = self._config, data.acted
        ratios = weights = None
        old_logp: Floats = data["logp"]
        if self._corrects:
            ratios = np.where(acted, np.exp(judged.prox_logp - old_logp), np.float32(1))
            weights, old_logp = np.minimum(ratios, np.float32(config.behaviour_cap)), judged.prox_logp
        advantages, targets = gae_to_next(
            rewards,
            judged.values[..., None],
            judged.next_values[..., None],
            (data.ended if config.ends_at_time_limit else data["terminated"])[..., None],
            (data.ended | data.is_last)[..., None],
            acted,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            ratios=ratios,
            c_bar=config.c_bar,
        )
        if config.value_norm:
            self._value_norm = self._value_norm.updated(targets[acted])
        if config.norm_adv:
            advantages = masked_normalise(advantages, acted)
        return LowTargets(advantages, self._out_of_units(targets), old_logp, weights)

    def _optimise(
        self,
        data: TeamRound,
        judged: Judgement,
        targets: LowTargets,
        version: int,
        order: np.random.Generator,
    ) -> LowProgress:
        """Take ``num_epochs`` passes over the round."""
        config, progress = self._config, LowProgress()
        lesson = LowLesson.of(self._spec, data, judged, targets, self._resets(data), config.chunk_length)
        lr, actor, critic = config.lr_at(version), self._trainees["actor"], self._trainees["critic"]
        for epoch in range(config.num_epochs):
            measures = config.batch_rule == "noise_scale" and epoch == 0
            for columns in _split(order.permutation(lesson.num_columns), config.num_minibatches):
                actor.zero()
                critic.zero()
                num_parts = max(config.grad_accumulation, 2 if measures else 1)
                self._backward(lesson, columns, num_parts, measures, progress)
                progress.grad_norms.append(actor.step(lr, config.max_grad_norm))
                progress.critic_norms.append(critic.step(lr, config.max_grad_norm))
        return progress

    def _backward(
        self, lesson: LowLesson, columns: Array, num_parts: int, measures: bool, progress: LowProgress
    ) -> None:
        """Add the gradient of the mean loss of some chunks, part by part; measure its noise if asked."""
        total, grad = int(lesson.counts[columns].sum()), self._trainees["actor"].grad
        squares: list[tuple[int, float]] = []
        before = torch.zeros_like(grad) if measures else None
        for part in _split(columns, num_parts):
            samples = lesson.take(part, self._device)
            if not samples.count:
                continue
            share = samples.count / total
            self._differentiate(samples, share, progress)
            if len(progress.log_ratios) == 1:  # chunks of single precision see what the whole round saw
                log_ratios = progress.log_ratios[0].cpu().numpy()
                self._checked_ratio(log_ratios, self._version, CHUNK_TOLERANCE)
            if before is not None:
                squares.append((samples.count, float(((grad - before) / share).square().sum())))
                before = grad.clone()
        if measures:
            self._noise = self._noise.updated(squares, total, float(grad.square().sum()))

    @torch.no_grad()
    def _differentiate(self, samples: LowSamples, share: float, progress: LowProgress) -> None:
        """Add ``share`` of the gradient of the samples' mean loss."""
        config, spec = self._config, self._spec
        trace = self._actor.trace(samples.inputs, samples.memory, samples.resets)
        outputs = trace.outputs
        if samples.legal is not None:
            outputs = outputs.masked_fill(~samples.legal, float(IMPOSSIBLE))
        policy = likelihood(spec.actions, outputs[samples.acted], samples.actions)
        policy_loss, by_logp, log_ratio = clipped_policy_loss(
            policy.logp,
            samples.old_logp,
            samples.advantages,
            clip_coef=config.clip_coef,
            weights=samples.weights,
        )
        by_outputs = policy.backward(by_logp.mul_(share), -config.ent_coef * share / samples.count)
        grad = torch.zeros_like(trace.outputs)
        grad[samples.acted] = by_outputs
        self._actor.backward(trace, grad)
        critic = self._critic.trace(samples.critic_inputs, samples.critic_memory, samples.critic_resets)
        values = critic.outputs.expand(samples.critic_acted.shape)[samples.critic_acted]
        critic_loss, by_values = value_loss(
            values,
            samples.targets,
            old_values=samples.old_values if config.clip_vloss else None,
            clip_coef=config.clip_coef,
            huber_delta=config.huber_delta,
        )
        grad = torch.zeros(samples.critic_acted.shape, device=self._device)
        grad[samples.critic_acted] = by_values.mul_(share * config.vf_coef)
        self._critic.backward(critic, grad.sum(-1, keepdim=True))
        progress.add(Terms(policy_loss, critic_loss, policy.entropy.mean(), log_ratio))

    def _low_metrics(
        self, data: TeamRound, judged: Judgement, targets: LowTargets, progress: LowProgress
    ) -> Metrics:
        acted = data.acted
        behaviour = judged.behaviour_log_ratios(data)
        predictions = np.broadcast_to(self._out_of_units(judged.values)[..., None], acted.shape)[acted]
        config = self._config
        steps = progress.metrics(config.clip_coef)
        critic_loss, entropy = steps["learn/value_loss"], steps["learn/entropy"]
        metrics = {
            **steps,
            "learn/loss": steps["learn/policy_loss"]
            + config.vf_coef * critic_loss
            - config.ent_coef * entropy,
            "learn/critic_grad_norm": float(np.mean(progress.critic_norms)),
            "learn/explained_variance": explained_variance(predictions, targets.values[acted]),
            "learn/num_epochs": float(config.num_epochs),
            "learn/ess": effective_sample_size(behaviour),
            "learn/behaviour_kl": approx_kl(behaviour),
            "learn/learning_rate": config.lr_at(self._version),
            "learn/batch_size": float(self.batch_size(self._version)),
        }
        if config.batch_rule == "noise_scale":
            metrics["learn/noise_scale"] = self._noise.value or 0.0
        return metrics

    # ------------------------------------------------------------ help

    def _run(
        self, network: Recurrent, inputs: Floats, memory: Floats, resets: Bools
    ) -> tuple[Floats, Floats]:
        arrays = (torch.from_numpy(np.ascontiguousarray(part)) for part in (inputs, memory, resets))
        trace = network.trace(*(part.to(self._device) for part in arrays))
        return trace.outputs.cpu().numpy(), trace.memories.cpu().numpy()

    def _first_memory(self, data: TeamRound, name: str) -> Floats:
        found = data.get(name)
        shape = data["alive"].shape[1:] if name == "memory" else data["alive"].shape[1:2]
        return np.zeros((*shape, 0), np.float32) if found is None else found

    def _in_units(self, raw: Floats) -> Floats:
        """From what the critic gives to the units of rewards."""
        return self._value_norm.denormalise(raw) if self._config.value_norm else raw

    def _out_of_units(self, values: Floats) -> Floats:
        return self._value_norm.normalise(values) if self._config.value_norm else values

    def batch_size(self, version: int) -> int:
        """Samples that the round of this version should have."""
        config = self._config
        start, end = config.sync_batch_size, config.batch_size_end or config.sync_batch_size
        if config.batch_rule == "linear":
            wanted = linear_schedule(start, end, step=version, num_steps=config.schedule_rounds or 1)
        elif config.batch_rule == "noise_scale":
            wanted = min(max(self._noisy_batch() or start, start), end)
        else:
            return start
        return max(1, round(wanted / self._num_envs)) * self._num_envs

    def _noisy_batch(self) -> float | None:
        """Samples of a round, in its unit, whose minibatches have as much signal as noise."""
        if self._noise.value is None:
            return None
        actions = self._noise.value * self._config.num_minibatches
        return actions if self._config.sync_unit == "agent_steps" else actions / self._spec.num_agents

    # ------------------------------------------------------------ weights and state

    def weights(self) -> dict[str, Array]:
        """What collectors need, by name: the actor, and the critic for its memory."""
        found = self._trainees["actor"].arrays("actor")
        if self._spec.recurrent:
            found |= self._trainees["critic"].arrays("critic")
        if self._config.batch_rule != "fixed":
            found[BATCH_SIZE] = np.array(self.batch_size(self._version))
        return found

    def state_dict(self) -> StateTree:
        """Everything the next round depends on."""
        return {
            "version": self._version,
            "value_norm": self._value_norm.state_dict(),
            "noise": self._noise.state_dict(),
            **{name: trainee.state_dict() for name, trainee in self._trainees.items()},
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._version = int(state["version"])
        self._value_norm = ValueNorm.from_state(state["value_norm"])
        self._noise = NoiseScale.from_state(state["noise"])
        for name, trainee in self._trainees.items():
            trainee.load_state_dict(state[name])


def make_learner(config: RunConfig, spec: TeamSpec) -> TeamLearner:
    """Make the learner of a run in the calling process."""
    torch.set_num_threads(config.runtime.torch_threads)
    return TeamLearner(
        mappo_config(config),
        spec,
        seed=config.run.seed,
        num_envs=envs_per_round(config),
        device=config.trainer.device,
    )


def _split(index: Array, num_parts: int) -> Iterator[Array]:
    """Parts of an index as even as can be, none of them empty."""
    yield from np.array_split(index, max(1, min(num_parts, len(index))))
