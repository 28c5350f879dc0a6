"""What a round is trained on: records of both levels and of the discriminators, none older than allowed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.mappo.rounds import TeamRound
from offbeat.ops.skills import Periods, Reason, find_periods
from offbeat.types import Array, Segment, StateTree

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Choices:
    """M choices of skills that the high level learns from: one for each period that has ended.

    ``state`` ``[M, S]``, ``obs`` ``[M, A, O]``, ``skills`` and ``logp`` ``[M, 1 + A]`` are those of the
    moment of choice; ``rewards`` ``[M]`` sum up the whole period; ``next_state`` and ``next_obs`` are what it
    led to; ``version`` ``[M]`` chose. ``periods`` say when and why it ended.
    """

    periods: Periods
    state: Floats
    obs: Floats
    skills: Ints
    logp: Floats
    rewards: Floats
    next_state: Floats
    next_obs: Floats
    version: Ints

    def __len__(self) -> int:
        return len(self.periods)


@dataclass(slots=True)
class RoundStore:
    """Takes segments in, refuses those that are too old, hands all of it out once and is empty again.

    Nothing is ever dropped in silence: ``refused`` counts transitions, ``refused_choices`` choices of skills.
    """

    refused: int = 0
    refused_choices: int = 0
    _segments: list[Segment] = field(default_factory=list)
    _allowed_ages: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, segment: Segment, version: int) -> bool:
        """Take a segment that the learner may train at ``version``; False, and counted, if it is too old.

        It may be as old as the dial allowed when its ticket was issued; turning it down later is no matter.
        """
        valid, stamps = segment.data["valid"], segment.data["stamps"]
        seen = stamps[..., 1:][valid]
        oldest = int(seen[seen >= 0].min(initial=version))
        if version - oldest > _allowed_age(segment):
            self.refused += int(np.count_nonzero(valid))
            return False
        self._segments.append(segment)
        return True

    def __len__(self) -> int:
        return sum(int(np.count_nonzero(segment.data["valid"])) for segment in self._segments)

    def take(self) -> TeamRound | None:
        """Everything that was added, side by side; the store is empty then."""
        segments, self._segments = self._segments, []
        sizes = [one.data["valid"].shape[1] for one in segments]
        self._allowed_ages = np.repeat([_allowed_age(one) for one in segments], sizes)
        return TeamRound.of(segments) if segments else None

    def choices(self, data: TeamRound, version: int) -> Choices:
        """The choices of skills whose period has ended in what was taken, those that are too old left out."""
        found = choices_of(data)
        fresh = version - found.version <= self._allowed_ages[found.periods.env]
        self.refused_choices += int(np.count_nonzero(~fresh))
        return _picked(found, fresh)


def _allowed_age(segment: Segment) -> int:
    """The dial when the segment's ticket was issued."""
    return segment.ticket.deadline - segment.ticket.version


def choices_of(data: TeamRound) -> Choices:
    """All choices of skills whose period has ended in a round."""
    rewards = np.where(data.valid, data["rewards"], np.float32(0))
    periods = find_periods(data["selected"], data["reason"], rewards)
    env, first, last = periods.env, np.maximum(periods.first, 0), periods.last
    carried = periods.is_carried

    def at_choice(name: str, begun: str) -> Array:
        here, before = data[name][first, env], data[begun][env]
        return np.where(carried.reshape(-1, *[1] * (here.ndim - 1)), before, here)

    earned = periods.rewards + np.where(carried, data["begun_rewards"][env], 0.0).astype(np.float32)
    return Choices(
        periods=periods,
        state=at_choice("state", "begun_state"),
        obs=at_choice("obs", "begun_obs"),
        skills=at_choice("skills", "begun_skills"),
        logp=at_choice("skill_logp", "begun_logp"),
        rewards=earned,
        next_state=data["next_state"][last, env],
        next_obs=data["next_obs"][last, env],
        version=np.where(carried, data["begun_version"][env], data["stamps"][first, env, 0]),
    )


def _picked(choices: Choices, chosen: Bools) -> Choices:
    names = ("state", "obs", "skills", "logp", "rewards", "next_state", "next_obs", "version")
    return Choices(choices.periods.pick(chosen), *(getattr(choices, name)[chosen] for name in names))


def contributions(choices: Choices, num_envs: int) -> dict[str, float]:
    """How many choices there were by reason, and the least and most that one environment gave."""
    reasons = choices.periods.reason
    by_reason = {
        f"learn/periods_{reason.name.lower()}": float(np.count_nonzero(reasons == reason))
        for reason in Reason
        if reason is not Reason.GOES_ON
    }
    by_env = np.bincount(choices.periods.env, minlength=num_envs)
    return {
        **by_reason,
        "learn/periods": float(len(choices)),
        "learn/periods_by_env_min": float(by_env.min()) if num_envs else 0.0,
        "learn/periods_by_env_max": float(by_env.max()) if num_envs else 0.0,
    }


class Lessons:
    """What discriminators train on: the newest ``capacity`` samples (s', Z, o', z), None for all of them."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._arrays: dict[str, Array] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._arrays["state"]) if self._arrays else 0

    def add(self, samples: dict[str, Array]) -> None:
        """Put samples ``[M, ...]`` in, over the oldest ones."""
        capacity = self._capacity or len(self) + len(samples["state"])
        newest = {name: array[-capacity:] for name, array in samples.items()}
        if len(self) < capacity:
            free = capacity - len(self)
            head = {name: array[:free] for name, array in newest.items()}
            before = self._arrays or {name: array[:0] for name, array in head.items()}
            self._arrays = {name: np.concatenate([before[name], head[name]]) for name in head}
            newest = {name: array[free:] for name, array in newest.items()}
        count = len(newest["state"])
        if count:
            places = (self._next + np.arange(count)) % capacity
            for name, array in newest.items():
                self._arrays[name][places] = array
            self._next = (self._next + count) % capacity

    def pick(self, index: Array) -> dict[str, Array]:
        """Some of the samples."""
        return {name: array[index] for name, array in self._arrays.items()}

    def clear(self) -> None:
        """Forget all of them."""
        self._arrays, self._next = {}, 0

    def state_dict(self) -> StateTree:
        """All samples, not copied."""
        return {"arrays": dict(self._arrays), "next": self._next}

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        self._arrays = {name: np.array(array) for name, array in state["arrays"].items()}
        self._next = int(state["next"])
        if self._capacity not in (None, len(self)):  # it may be another one than before: the newest stay
            self._arrays = {
                name: np.roll(array, -self._next, axis=0)[-self._capacity :]
                for name, array in self._arrays.items()
            }
            self._next = 0


def lessons_of(data: TeamRound) -> dict[str, Array]:
    """Samples of a round for the discriminators: what each valid step led to, and the skills in force."""
    valid, skills = data.valid, data["skills"]
    return {
        "state": data["next_state"][valid],
        "obs": data["next_obs"][valid],
        "skills": skills[valid],
        "alive": data["alive"][valid],
    }
