"""MuZero's learner: takes steps in, draws windows, trains the model, and wishes for searches."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from offbeat.algorithms.ages import age_metrics
from offbeat.algorithms.muzero.config import MuZeroConfig, num_streams, planning_config
from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.lessons import (
    Lesson,
    first_in_context,
    make_lesson,
)
from offbeat.algorithms.muzero.planning import gaussian, observed
from offbeat.algorithms.muzero.steps import REFRESHED, VALUE, step_spec
from offbeat.algorithms.muzero.wishes import Wishes
from offbeat.config.models import RunConfig
from offbeat.errors import TrainError
from offbeat.models.computing import autocast, enable_tf32
from offbeat.models.muzero import MuZeroNetwork
from offbeat.models.ranks import choose_device
from offbeat.models.trainee import Trainee
from offbeat.ops.supports import Support
from offbeat.replay.streams import Places, StreamReplay, Windows
from offbeat.seeding import derive_seed
from offbeat.types import Array, Batch, Metrics, Segment, StateTree

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Losses:
    """Loss of each sample ``[B]``, means of its parts by name, and how wrong the values were, ``[B]``."""

    whole: Tensor
    parts: dict[str, Tensor]
    errors: Tensor


class ModelLearner(ABC):
    """Owns the world model, its target network, the optimizer and the replay.

    Updates are counted by the steps that came: ``replay_ratio`` for each, whatever the dial and however
    segments are spread over rounds. Randomness: parameters from (run seed, "init"), draws from (run seed,
    "learn", version), wishes from (run seed, "wishes", version).
    """

    def __init__(self, run: RunConfig, fit: Fit, network: nn.Module) -> None:
        self._run, self._config, self._fit = run, planning_config(run), fit
        self._seed = run.run.seed
        enable_tf32(self._config.network.computing)
        self._device = choose_device(run.trainer.device, 0)
        self._network = network.to(self._device)
        self._target = deepcopy(network).requires_grad_(False)
        self._trainee = Trainee("model", self._network, eps=1e-8)
        self._target_flat = list(self._target.parameters())
        config = self._config
        # Matrices are drawn to 0, not what is added to their products.
        self._decays = torch.cat(
            [
                torch.full((parameter.numel(),), config.weight_decay * (parameter.ndim > 1))
                for parameter in self._network.parameters()
            ]
        ).to(self._device)
        self._replay = StreamReplay(
            step_spec(fit),
            num_streams(run),
            config.buffer_capacity // num_streams(run),
            after=config.num_unroll + config.td_steps,
            alpha=config.per_alpha,
        )
        self._limit = Support(config.network.value_support).limit
        self._version = 0
        self._next_start = np.full(run.runtime.num_workers, -1)
        self._num_collected = 0
        self._num_updates = 0
        self._num_refreshed = 0

    # ------------------------------------------------------------ a round

    def train(self, batch: Batch) -> Metrics:
        """Take in what came, and make up for the updates that are due by now."""
        version = batch.version
        collected = [segment for segment in batch.segments if segment.data["is_new"][0]]
        # In the order in which environments took their steps: after a loss tickets may be out of it.
        for segment in sorted(collected, key=lambda s: (s.ticket.collector, int(s.data["start"][0]))):
            self._take(segment)
        for segment in batch.segments:
            if not segment.data["is_new"][0]:
                self._refresh(segment)
        due = math.floor(self._num_collected * self._config.replay_ratio + 1e-9) - self._num_updates
        rng = np.random.default_rng(derive_seed(self._seed, "learn", version))
        metrics = self._learn(version, due, rng) if due else {}
        self._num_updates += due
        self._version = version + 1
        return {
            **metrics,
            "learn/gradient_steps": float(due),
            "learn/updates_per_step": self._num_updates / max(1, self._num_collected),
            "learn/replay_size": float(self._replay.num_stored),
            "learn/refreshed_steps": float(self._num_refreshed),
        }

    def _take(self, segment: Segment) -> None:
        data, lane = segment.data, segment.ticket.collector
        num_steps, num_envs = data["rewards"].shape
        if not all(np.isfinite(data[name]).all() for name in ("obs", "rewards")):
            raise TrainError(
                f"ticket {segment.ticket.number} brought observations or rewards that are not finite"
            )
        streams = lane * num_envs + np.arange(num_envs)
        steps = {name: data[name] for name in self._replay.spec}
        start = int(data["start"][0])
        begins = np.full(num_envs, start != self._next_start[lane])
        self._next_start[lane] = start + num_steps
        self._replay.extend(streams, steps, segment.ticket.version, eligible=data["valid"], begins=begins)
        self._num_collected += int(np.count_nonzero(data["valid"]))

    def _refresh(self, segment: Segment) -> None:
        data = segment.data
        asked = data["stream"] >= 0
        places = Places(data["stream"][asked], data["number"][asked])
        names = [*REFRESHED, *(("candidates",) if "candidates" in data else ())]
        found = {name: data[name][asked] for name in names}
        self._num_refreshed += self._replay.refresh(places, found, segment.ticket.version)

    def _learn(self, version: int, num_updates: int, rng: np.random.Generator) -> Metrics:
        """Make some updates; return their metrics. Losses are read from the device at the end."""
        config, reports, norms = self._config, [], []
        ages: list[Ints] = []
        target_ages: list[Ints] = []
        windows = self._replay.sample(rng, config.batch_size, beta=config.per_beta)
        for left in range(num_updates - 1, -1, -1):
            ages.append(version - windows.versions)
            target_ages.append(version - windows.refreshed)
            parts, errors = self._differentiate(windows, version)
            drawn = windows.places
            if left and not config.per_alpha:  # while a GPU is at work
                windows = self._replay.sample(rng, config.batch_size, beta=config.per_beta)
            norms.append(self._step(config.lr_at(version)))
            if config.per_alpha:
                self._replay.set_priorities(drawn, errors.cpu().numpy())
                if left:
                    windows = self._replay.sample(rng, config.batch_size, beta=config.per_beta)
            reports.append(torch.stack([*parts.values(), errors.mean()]))
        means = torch.stack(reports).mean(0).tolist()
        target_age = np.concatenate(target_ages)
        return {
            **dict(zip([f"learn/{name}" for name in parts], means, strict=False)),
            "learn/value_error": means[-1],
            "learn/grad_norm": float(np.mean(norms)),
            "learn/learning_rate": config.lr_at(version),
            **age_metrics(np.concatenate(ages), self._run.async_training.staleness_threshold),
            "learn/target_age_mean": float(target_age.mean()),
            "learn/target_age_max": float(target_age.max()),
        }

    def _differentiate(self, windows: Windows, version: int) -> tuple[dict[str, Tensor], Tensor]:
        """Put the gradient of the mean loss of what was drawn into place; return its parts and the errors."""
        config = self._config
        self._trainee.zero()
        with autocast(config.network.computing, self._device):
            lesson = self._lesson(windows, version)
            losses = self._losses(lesson)
        loss = (losses.whole * self._tensor(lesson.weights)).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        clipped = float(np.mean(np.abs(lesson.values) > self._limit))
        parts = {"loss": loss, **losses.parts, "clipped_targets": torch.tensor(clipped, device=self._device)}
        detached = {name: part.detach() for name, part in parts.items()}
        return detached, losses.errors.detach()

    @torch.no_grad()
    def _step(self, lr: float) -> float:
        """Move network and target network; return the length of the gradient."""
        config = self._config
        norm = self._trainee.step(lr, config.max_grad_norm, self._decays)
        for target, parameter in zip(self._target_flat, self._network.parameters(), strict=True):
            target.lerp_(parameter, config.target_tau)
        return norm

    # ------------------------------------------------------------ targets

    def _lesson(self, windows: Windows, version: int) -> Lesson:
        values = self._bootstraps(windows)
        return make_lesson(windows, values, self._config, version=version, two_player=self._fit.two_player)

    def _bootstraps(self, windows: Windows) -> Floats:
        """Values ``[B, H + 1 + n]`` from the drawn steps on, as far as targets may need them; else 0."""
        config = self._config
        if config.bootstrap == "search":
            return windows.items[VALUE]
        obs, actions, far = windows.items["obs"], windows.items["actions"], config.td_steps
        values = np.zeros(obs.shape[:2], np.float32)
        terminated, truncated = (windows.items[name][:, :far] for name in ("terminated", "truncated"))
        if not (terminated.any(axis=1) | truncated[:, :-1].any(axis=1)).all():  # else all end before it
            needed = slice(far, far + self._num_targets)
            values[:, needed] = self._values(obs[:, needed], actions[:, needed])
        # Only an episode that was cut off needs a value before that, or a step whose target is shorter.
        near = truncated.any(axis=1) | (config.td_steps_min is not None)
        if near.any():
            values[near, :far] = self._values(obs[near, :far], actions[near, :far])
        return values

    @property
    @abstractmethod
    def _num_targets(self) -> int:
        """Steps of a window whose values are learned, from the first on."""

    @abstractmethod
    def _values(self, obs: Array, actions: Array) -> Floats:
        """Values by the target network of consecutive observations ``[B, K, ...]``, ``[B, K]``."""

    @abstractmethod
    def _losses(self, lesson: Lesson) -> Losses:
        """Compute the losses of one minibatch."""

    def _policy_loss(self, outputs: Tensor, lesson: Lesson, step: int | slice) -> tuple[Tensor, Tensor]:
        """Cross entropy of policies ``[..., P]`` against what searches found, and their entropy."""
        targets = self._tensor(lesson.policies[:, step])
        if lesson.candidates is None:
            log_probs = functional.log_softmax(outputs.float(), -1)
            return -(targets * log_probs).sum(-1), -(log_probs.exp() * log_probs).sum(-1)
        mean, deviation = gaussian(outputs.float())
        away = (self._tensor(lesson.candidates[:, step]) - mean.unsqueeze(-2)) / deviation.unsqueeze(-2)
        size = deviation.log().sum(-1)
        log_probs = -0.5 * away.square().sum(-1) - size.unsqueeze(-1)
        return -(targets * log_probs).sum(-1), size

    @torch.no_grad()
    def _search_kl(self, outputs: Tensor, lesson: Lesson, step: int | slice) -> dict[str, Tensor]:
        """Mean KL divergence of what searches found from policies ``[..., P]``; nothing for candidates.

        Candidates were drawn from a policy that is not stored, so that theirs cannot be told.
        """
        if lesson.candidates is not None:
            return {}
        targets, judged = (self._tensor(part[:, step]) for part in (lesson.policies, lesson.judged))
        log_probs = functional.log_softmax(outputs.float(), -1)
        apart = (torch.xlogy(targets, targets) - targets * log_probs).sum(-1)
        return {"search_kl": (apart * judged).sum() / judged.sum().clamp(min=1)}

    def _sum(self, parts: dict[str, Tensor], rest: Tensor | float) -> Tensor:
        """The loss ``[B]`` of parts that all have, by their weights, and of the ``rest``."""
        config = self._config
        return (
            parts["policy_loss"]
            - config.ent_coef * parts["entropy"]
            + config.value_coef * parts["value_loss"]
            + config.reward_coef * parts["reward_loss"]
            + rest
        )

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _see(self, obs: Array) -> Tensor:
        return observed(obs, self._fit.spec, self._device)

    # ------------------------------------------------------------ weights and state

    def weights(self) -> dict[str, Array]:
        """The network."""
        return self._trainee.parameters.arrays()

    def published(self) -> dict[str, Array]:
        """The network, and steps of the replay to be searched anew."""
        return {**self.weights(), **self._wishes()}

    def _wishes(self) -> dict[str, Array]:
        config, run = self._config, self._run
        dial = run.async_training
        num_parts = config.reanalyse.segments_per_round * (dial.largest_degree + dial.weight_sync_interval)
        if not num_parts:
            return {}
        rng = np.random.default_rng(derive_seed(self._seed, "wishes", self._version))
        count = num_parts * config.num_steps * run.envs_per_worker
        before = config.context - 1
        places = self._replay.draw_oldest(rng, count, config.reanalyse.oldest, before=before)
        if places is None:
            return {}
        items = self._replay.windows(places, before, 0)
        first = first_in_context(items["valid"])
        wishes = Wishes(items["obs"], items["actions"][:, :-1], first, places.stream, places.number)
        return wishes.to_weights(num_parts)

    def state_dict(self) -> StateTree:
        """Everything the next round depends on."""
        return {
            "version": self._version,
            "num_collected": self._num_collected,
            "num_updates": self._num_updates,
            "num_refreshed": self._num_refreshed,
            "next_start": self._next_start.copy(),
            "model": self._trainee.state_dict(),
            "target": {name: p.cpu().numpy().copy() for name, p in self._target.named_parameters()},
            "replay": self._replay.state_dict(),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        for name in ("version", "num_collected", "num_updates", "num_refreshed"):
            setattr(self, f"_{name}", int(state[name]))
        self._next_start[:] = state["next_start"]
        self._trainee.load_state_dict(state["model"])
        with torch.no_grad():
            for name, parameter in self._target.named_parameters():
                parameter.copy_(torch.from_numpy(np.array(state["target"][name])))
        self._replay.load_state_dict(state["replay"], _CALLED)


class MuZeroLearner(ModelLearner):
    """Unrolls the model along real actions, and compares what it says with what came and was found."""

    _network: MuZeroNetwork
    _target: MuZeroNetwork
    _config: MuZeroConfig

    @property
    def _num_targets(self) -> int:
        return self._config.num_unroll + 1

    @torch.inference_mode()
    def _values(self, obs: Array, actions: Array) -> Floats:
        seen = self._see(obs.reshape(-1, *obs.shape[2:]))
        _, values = self._target.judge(self._target.encode(seen))
        found: Floats = self._target.values.mean(values).float().cpu().numpy().reshape(obs.shape[:2])
        return found

    def _losses(self, lesson: Lesson) -> Losses:
        config, network, ahead = self._config, self._network, self._config.num_unroll
        obs, actions = self._see(lesson.obs), self._tensor(lesson.actions)
        rewards, values = self._tensor(lesson.rewards), self._tensor(lesson.values)
        moved, valued, paid = (self._tensor(mask) for mask in (lesson.moved, lesson.valued, lesson.paid))
        judged = self._tensor(lesson.judged)
        latent = network.encode(obs[:, 0])
        seen = self._seen(obs) if config.consistency_coef else None
        sums = {name: torch.zeros(len(obs), device=self._device) for name in _PARTS}
        for step in range(ahead + 1):
            policy, value = network.judge(latent)
            loss, entropy = self._policy_loss(policy, lesson, step)
            sums["policy_loss"] += loss * judged[:, step]
            sums["entropy"] += entropy * judged[:, step]
            sums["value_loss"] += network.values.loss(value, values[:, step]) * valued[:, step]
            if step == 0:
                search_kl = self._search_kl(policy, lesson, step)
                errors = (network.values.mean(value.detach()) - values[:, 0]).abs()
            if step == ahead:
                break
            latent, reward = network.imagine(latent, actions[:, step])
            sums["reward_loss"] += network.rewards.loss(reward, rewards[:, step]) * paid[:, step]
            if seen is not None:
                sums["consistency_loss"] += network.consistency(latent, seen[:, step]) * moved[:, step]
            latent = 0.5 * latent + 0.5 * latent.detach()  # half the gradient at each step, as MuZero has it
        parts = {name: total / (ahead + 1) for name, total in sums.items()}
        whole = self._sum(parts, config.consistency_coef * parts["consistency_loss"])
        means = {name: part.mean() for name, part in parts.items()}
        return Losses(whole, means | search_kl, errors)

    @torch.no_grad()
    def _seen(self, obs: Tensor) -> Tensor:
        later = obs[:, 1:]
        latents = self._network.encode(later.flatten(0, 1))
        return latents.view(*later.shape[:2], *latents.shape[1:])


_CALLED = {
    "num_streams": "environments (env.num_envs):",
    "length": "steps of each environment (algorithm.buffer_capacity):",
    "after": "algorithm.num_unroll + algorithm.td_steps =",
    "alpha": "algorithm.per_alpha =",
}
"""What users call the settings of the replay."""
_PARTS = ("policy_loss", "value_loss", "reward_loss", "consistency_loss", "entropy")


def make_learner(run: RunConfig, fit: Fit) -> MuZeroLearner:
    """Make the learner of a run in the calling process."""
    torch.set_num_threads(run.runtime.torch_threads)
    generator = torch.Generator().manual_seed(derive_seed(run.run.seed, "init"))
    return MuZeroLearner(run, fit, MuZeroNetwork(fit.spec, generator))
