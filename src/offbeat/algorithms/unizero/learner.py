"""UniZero's learner: the transformer is trained on whole sequences of what was seen and done."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.algorithms.muzero.fitting import Fit
from offbeat.algorithms.muzero.learner import Losses, ModelLearner
from offbeat.algorithms.muzero.lessons import Lesson
from offbeat.algorithms.unizero.config import UniZeroConfig, unizero_config
from offbeat.config.models import RunConfig
from offbeat.models.computing import compiled
from offbeat.models.unizero import TransformerSpec, UniZeroNetwork
from offbeat.seeding import derive_seed
from offbeat.types import Array

Floats = NDArray[np.float32]


class UniZeroLearner(ModelLearner):
    """Every token is judged where it really stood: nothing is unrolled in imagination.

    So what follows an episode's last observation is of another one, and not learned from.
    """

    _network: UniZeroNetwork
    _target: UniZeroNetwork
    _config: UniZeroConfig

    def __init__(self, run: RunConfig, fit: Fit, network: UniZeroNetwork) -> None:
        super().__init__(run, fit, network)
        how = self._config.network.computing
        self._look = compiled(self._network.forward, how, self._device)
        self._look_back = compiled(self._target.forward, how, self._device)

    @property
    def _num_targets(self) -> int:
        return self._config.num_unroll

    @torch.inference_mode()
    def _values(self, obs: Array, actions: Array) -> Floats:
        length, count = self._config.num_unroll, obs.shape[1]
        if count > length:  # more than was ever trained at once
            pieces = [slice(at, at + length) for at in range(0, count, length)]
            return np.concatenate([self._values(obs[:, piece], actions[:, piece]) for piece in pieces], 1)
        latents = self._target.encode(self._see(obs))
        # Compiled for one size of batch.
        is_usual = len(obs) == self._config.batch_size and count == length
        look = self._look_back if is_usual else self._target
        outputs = look(latents, self._tensor(actions))
        found: Floats = self._target.values.mean(outputs.value).float().cpu().numpy()
        return found

    def _losses(self, lesson: Lesson) -> Losses:
        config, network, ahead = self._config, self._network, self._config.num_unroll
        obs, steps = self._see(lesson.obs), slice(0, ahead)
        latents = network.encode(obs[:, :ahead])
        outputs = self._look(latents, self._tensor(lesson.actions))
        with torch.no_grad():
            later = self._target.encode(obs[:, 1:])
        moved, judged = self._tensor(lesson.moved), self._tensor(lesson.judged[:, :ahead])
        valued = self._tensor(lesson.moved | lesson.is_final[:, :ahead])
        values, rewards = self._tensor(lesson.values[:, :ahead]), self._tensor(lesson.rewards)
        policy_loss, entropy = self._policy_loss(outputs.policy, lesson, steps)
        smoothing = config.label_smoothing
        found = {
            "policy_loss": (policy_loss * judged).mean(1),
            "entropy": (entropy * judged).mean(1),
            "value_loss": (network.values.loss(outputs.value, values, smoothing=smoothing) * valued).mean(1),
            "reward_loss": (network.rewards.loss(outputs.reward, rewards, smoothing=smoothing) * valued).mean(
                1
            ),
            "latent_loss": ((outputs.latent.float() - later.float()).square().mean(-1) * moved).mean(1),
        }
        whole = self._sum(found, config.latent_coef * found["latent_loss"])
        guesses = network.values.mean(outputs.value.detach())
        errors = ((guesses - values).abs() * moved).sum(1) / moved.sum(1)
        means = {name: part.mean() for name, part in found.items()}
        return Losses(whole, means | self._search_kl(outputs.policy, lesson, steps), errors)


def transformer_spec(config: UniZeroConfig) -> TransformerSpec:
    """The size of a run's transformer."""
    return TransformerSpec(config.network.layers, config.network.heads)


def make_learner(run: RunConfig, fit: Fit) -> UniZeroLearner:
    """Make the learner of a run in the calling process."""
    torch.set_num_threads(run.runtime.torch_threads)
    generator = torch.Generator().manual_seed(derive_seed(run.run.seed, "init"))
    network = UniZeroNetwork(fit.spec, transformer_spec(unizero_config(run)), generator)
    return UniZeroLearner(run, fit, network)
