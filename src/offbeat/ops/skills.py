"""Skill periods: which there were in a round, what they earned, and what skills add to rewards. numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from offbeat.ops.advantages import gae_to_next
from offbeat.types import Array

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Reason(IntEnum):
    """Why a skill period ended at a step."""

    GOES_ON = 0
    PERIOD_END = 1
    TERMINATED = 2
    TRUNCATED = 3
    FORCED = 4


@dataclass(frozen=True, slots=True)
class Periods:
    """M skill periods that ended in a round, ordered by environment and time.

    ``env`` ``[M]``, first and last step ``first`` and ``last`` ``[M]``, ``reason`` ``[M]`` (see `Reason`) and
    ``rewards`` ``[M]``, the undiscounted sum of the steps in this round. ``first`` is -1 for a period that
    was begun before the round.
    """

    env: Ints
    first: Ints
    last: Ints
    reason: Ints
    rewards: Floats

    def __len__(self) -> int:
        return len(self.env)

    @property
    def is_carried(self) -> Bools:
        """Which ``[M]`` were begun before the round."""
        return self.first < 0

    def pick(self, chosen: Bools) -> Periods:
        """Some of the periods."""
        parts = (getattr(self, name) for name in ("env", "first", "last", "reason", "rewards"))
        return Periods(*(part[chosen] for part in parts))


def find_periods(selected: Bools, reason: NDArray[np.int8], rewards: Floats) -> Periods:
    """Find the periods that ended in a round, from arrays ``[T, N]``.

    Args:
        selected: skills were chosen before the step.
        reason: why a period ended with the step, 0 where it did not.
        rewards: those of the steps; 0 where a step does not count.
    """
    steps = np.arange(len(selected))[:, None]
    first_at = np.maximum.accumulate(np.where(selected, steps, -1), axis=0)
    env, last = np.nonzero(reason.T)
    first = first_at[last, env]
    sums = np.concatenate([np.zeros((1, rewards.shape[1])), np.cumsum(rewards, axis=0, dtype=np.float64)])
    earned = sums[last + 1, env] - sums[np.maximum(first, 0), env]
    codes = reason[last, env].astype(np.int64)
    return Periods(env, first, last, codes, earned.astype(np.float32))


def period_advantages(
    periods: Periods,
    rewards: Floats,
    values: Floats,
    next_values: Floats,
    *,
    gamma: float,
    gae_lambda: float,
    ratios: Floats | None = None,
    c_bar: float = 1.0,
) -> tuple[Floats, Floats]:
    """Advantages and value targets ``[M, H]`` of periods, for each of H value heads by itself.

    The trace goes on from a period to the next one of its environment when the first ended by its length;
    an episode that terminated has no future, one that was cut off has the value of its last state.

    Args:
        periods: M periods.
        rewards: ``[M]``.
        values: ``[M, H]`` where skills were chosen.
        next_values: ``[M, H]`` where the period ended.
        gamma: discount per period.
        gae_lambda: decay of the trace.
        ratios: ``[M]``, of the choices; None for 1.
        c_bar: bound on ratios in the trace.
    """
    if not len(periods):
        return np.zeros_like(values), np.zeros_like(values)
    is_new = np.concatenate([[True], periods.env[1:] != periods.env[:-1]])
    position = np.arange(len(periods))
    rank = position - np.maximum.accumulate(np.where(is_new, position, 0))
    column = np.cumsum(is_new) - 1
    shape = (int(rank.max()) + 1, int(column[-1]) + 1)

    def laid_out(part: Array) -> Array:
        whole = np.zeros((*shape, *part.shape[1:]), part.dtype)
        whole[rank, column] = part
        return whole

    ended = periods.reason != Reason.PERIOD_END
    terminated = periods.reason == Reason.TERMINATED
    valid = np.ones(len(periods), np.bool_)
    advantages, targets = gae_to_next(
        laid_out(rewards)[..., None],
        laid_out(values),
        laid_out(next_values),
        laid_out(terminated)[..., None],
        laid_out(ended)[..., None],
        laid_out(valid)[..., None],
        gamma=gamma,
        gae_lambda=gae_lambda,
        ratios=None if ratios is None else laid_out(ratios)[..., None],
        c_bar=c_bar,
    )
    return advantages[rank, column], targets[rank, column]


def mixed_rewards(
    rewards: Floats,
    log_q_team: Floats,
    log_q_skill: Floats,
    *,
    extrinsic_coef: float,
    team_coef: float,
    skill_coef: float,
    num_team_skills: int,
    num_skills: int,
    with_baseline: bool,
) -> Floats:
    """What each agent of the low level is rewarded with, ``[..., A]``: equation 4 of HMASD.

    ``r^i = l_e r + l_D log q(Z | s') + l_d log q(z^i | o', Z)``; ``with_baseline`` adds ``log nZ`` and
    ``log nz``, so that a discriminator that knows nothing gives 0.

    Args:
        rewards: ``[...]``, the team's.
        log_q_team: ``[...]``.
        log_q_skill: ``[..., A]``.
        extrinsic_coef: l_e.
        team_coef: l_D.
        skill_coef: l_d.
        num_team_skills: nZ.
        num_skills: nz.
        with_baseline: see above.
    """
    team, skill = log_q_team, log_q_skill
    if with_baseline:
        team = team + np.float32(math.log(num_team_skills))
        skill = skill + np.float32(math.log(num_skills))
    common = np.float32(extrinsic_coef) * rewards + np.float32(team_coef) * team
    mixed: Floats = (common[..., None] + np.float32(skill_coef) * skill).astype(np.float32)
    return mixed
