"""The settings of PPO, under the names CleanRL uses. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field

from offbeat.config.models import AlgorithmConfig, RunConfig
from offbeat.errors import ConfigError
from offbeat.models.spec import NetworkConfig
from offbeat.ops.schedules import linear_schedule

Correction = Literal["auto", "gae", "vtrace", "decoupled"]
Schedule = Literal["constant", "linear"]
Augmentation = Literal["none", "symmetry", "colours", "both"]
_LRS: Mapping[str, float] = {"lines": 5e-2}
_LR = 2.5e-4
_FAR = 30.0  # times another learning rate than the default: within it, every recipe learns


class PPOConfig(AlgorithmConfig):
    """Proximal policy optimisation, on-policy or corrected for stale data.

    Defaults named CleanRL are those of its ppo.py (https://docs.cleanrl.dev/rl-algorithms/ppo/).
    Example: ``algorithm: {name: ppo, num_steps: 32, lr: 3e-3}``.
    """

    name: str = Field("ppo", description="Which algorithm trains; `ppo` here.")
    num_steps: int = Field(
        128, ge=2, description="Steps of each environment in a segment. Default of CleanRL."
    )
    num_epochs: int = Field(4, ge=1, description="Passes over a round's samples. Default of CleanRL.")
    minibatch_size: int = Field(
        256,
        ge=1,
        description="Samples of one optimiser step; a round is split evenly into minibatches of about this"
        " size. Default of this project for 1,000 to 4,000 samples a round.",
    )
    grad_accumulation: int = Field(
        1,
        ge=1,
        description="Parts a minibatch is differentiated in, to save memory; the update stays the same.",
    )
    lr: float | None = Field(
        None,
        gt=0,
        description="Learning rate of Adam at the first round; null: 0.05 for the tables of network.kind"
        " lines, else 2.5e-4, CleanRL's.",
    )
    lr_schedule: Schedule = Field(
        "linear",
        description="`linear` takes the learning rate to 0 over schedule_rounds. Default of CleanRL.",
    )
    adam_eps: float = Field(
        1e-5, gt=0, description="Adam's epsilon. Default of CleanRL, from OpenAI baselines."
    )
    max_grad_norm: float = Field(
        0.5, gt=0, description="Gradients longer than this are shortened to it. Default of CleanRL."
    )
    schedule_rounds: int | None = Field(
        None, ge=1, description="Rounds a linear schedule takes; null: run.rounds."
    )
    gamma: float = Field(0.99, ge=0, le=1, description="Discount per step. Default of CleanRL.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="Decay of the advantage trace, arXiv:1506.02438. Default of CleanRL."
    )
    clip_coef: float = Field(
        0.2,
        gt=0,
        description="Largest change of an action's probability that is rewarded. Default of CleanRL.",
    )
    clip_vloss: bool = Field(
        False,
        description="Also clip the change of values by clip_coef. Off, unlike CleanRL: arXiv:2006.05990 finds"
        " that it does not help.",
    )
    ent_coef: float = Field(0.01, ge=0, description="Weight of the entropy bonus. Default of CleanRL.")
    ent_schedule: Schedule = Field(
        "constant", description="`linear` takes ent_coef to 0 over schedule_rounds. Default of CleanRL."
    )
    vf_coef: float = Field(0.5, ge=0, description="Weight of the value loss. Default of CleanRL.")
    target_kl: float | None = Field(
        None,
        gt=0,
        description="End the round after an epoch whose mean KL divergence is above this; null: never."
        " Default of CleanRL.",
    )
    norm_adv: bool = Field(
        True, description="Normalise advantages over the valid samples of a round. CleanRL does by minibatch."
    )
    normalize_obs: bool = Field(
        False,
        description="Normalise observations by running mean and deviation; they travel with the weights.",
    )
    normalize_reward: bool = Field(
        False,
        description="Divide rewards by the running deviation of discounted returns, as OpenAI baselines.",
    )
    correction: Correction = Field(
        "auto",
        description="How stale samples are corrected: `gae` not at all, `decoupled` (arXiv:2110.00641) or"
        " `vtrace` (arXiv:1802.01561); `auto` is `gae` when off_policy_degree is 0 and nothing is augmented,"
        " else `decoupled`.",
    )
    rho_bar: float = Field(
        1.0, gt=0, description="Bound on the ratio of a V-trace temporal difference. Default of IMPALA."
    )
    c_bar: float = Field(
        1.0, gt=0, description="Bound on ratios in off-policy traces, at most rho_bar. Default of IMPALA."
    )
    behaviour_cap: float = Field(
        2.0,
        gt=0,
        description="Bound on the weight of a stale sample in the decoupled loss. Default of this project,"
        " from the usual 1 to 2.",
    )
    behaviour_clip: float | None = Field(
        0.3,
        gt=0,
        description="Largest change of an action's probability since it was taken that is rewarded, in the"
        " decoupled loss of rounds with stale samples; null: no bound. Without it samples of k rounds push"
        " the policy one way before any shows where that leads. Default of this project, measured in"
        " benchmarks/dial.py.",
    )
    augment: Augmentation = Field(
        "none",
        description="Train on boards turned by a random `symmetry`, with random `colours`, or `both`: for"
        " environments whose actions are moves on a board.",
    )
    network: NetworkConfig = Field(NetworkConfig(), description="The network behind policy and value.")

    def resolved(self, config: RunConfig) -> Self:
        """Choose the correction by the dial, and the length of schedules by that of the run.

        A policy that has seen a board otherwise is another one: augmented samples are corrected at any dial.
        """
        is_on_policy = config.async_training.off_policy_degree == 0 and self.augment == "none"
        automatic: Correction = "gae" if is_on_policy else "decoupled"
        changes = {
            "correction": automatic if self.correction == "auto" else self.correction,
            "schedule_rounds": self.schedule_rounds or config.run.rounds,
        }
        return self.model_copy(update=changes)

    def problems(self, config: RunConfig) -> list[tuple[str, str]]:
        """Find settings that contradict each other or the run."""
        found: list[tuple[str, str]] = []
        if self.rho_bar < self.c_bar:
            found.append(("c_bar", f"must be at most rho_bar; lower it to {self.rho_bar} or raise rho_bar"))
        if self.network.kind == "gru" and self.minibatch_size < self.num_steps:
            found.append(
                (
                    "minibatch_size",
                    f"a gru trains whole segments: raise it to num_steps ({self.num_steps}) or more",
                )
            )
        if self.augment != "none" and self.correction == "gae":
            found.append(
                (
                    "correction",
                    f"gae takes actions of augment={self.augment} for the policy's own; use decoupled or"
                    " vtrace",
                )
            )
        if self.grad_accumulation > self.minibatch_size:
            found.append(
                ("grad_accumulation", "cannot split a minibatch into more parts than it has samples")
            )
        return found

    def lr_at(self, version: int) -> float:
        """Learning rate of the round that starts at ``version``."""
        return self._scheduled(_LR if self.lr is None else self.lr, self.lr_schedule, version)

    def for_network(self, kind: str) -> Self:
        """Fill in the learning rate of this kind of network where none is chosen."""
        return self.model_copy(update={"lr": _LRS.get(kind, _LR)}) if self.lr is None else self

    def lr_remark(self, kind: str) -> str | None:
        """Say that the learning rate is far from what this kind of network learns with."""
        usual = _LRS.get(kind, _LR)
        if self.lr is None or usual / _FAR <= self.lr <= usual * _FAR:
            return None
        relation = "below" if self.lr < usual else "above"
        return (
            f"{self.lr:g} is far {relation} {usual:g}, the default for network.kind {kind}, and may learn"
            f" nothing: set algorithm.lr to {usual:g} or null"
        )

    def ent_coef_at(self, version: int) -> float:
        """Entropy weight of the round that starts at ``version``."""
        return self._scheduled(self.ent_coef, self.ent_schedule, version)

    def _scheduled(self, start: float, schedule: Schedule, version: int) -> float:
        if schedule == "constant" or self.schedule_rounds is None:
            return start
        return linear_schedule(start, 0.0, step=version, num_steps=self.schedule_rounds)


def ppo_config(config: RunConfig) -> PPOConfig:
    """The resolved PPO settings of a run."""
    if not isinstance(config.algorithm, PPOConfig):
        raise ConfigError(f"algorithm.name is {config.algorithm.name!r}; PPO's roles need PPO's settings")
    return config.algorithm.resolved(config)
