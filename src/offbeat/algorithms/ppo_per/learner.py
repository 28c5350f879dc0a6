"""The learner of PPO with prioritized replay: a round takes segments in, draws batches and trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.algorithms.ages import age_metrics
from offbeat.algorithms.ppo.augment import Augment
from offbeat.algorithms.ppo.learner import Lesson, PPOLearner, refuse_non_finite, staleness_metrics
from offbeat.algorithms.ppo.rounds import Floats, Round, Shares
from offbeat.algorithms.ppo_per.config import PPOPERConfig
from offbeat.algorithms.ppo_per.items import Ints, from_items, item_versions, to_items
from offbeat.errors import TrainError
from offbeat.models.spec import NetworkSpec
from offbeat.ops.advantages import td_errors
from offbeat.ops.priorities import segment_priority
from offbeat.replay.prioritized import Handles, Sample
from offbeat.replay.shared import Replay
from offbeat.roles import Ranks
from offbeat.seeding import derive_seed
from offbeat.types import Batch, Metrics, StateTree

_NOTHING: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one update trains on: segments side by side, and how much each counts.

    First come the fresh ones at the positions ``chosen``, then those of the replay, named by ``handles``.
    """

    data: Round
    handles: Handles | None
    versions: Ints
    shares: Shares
    chosen: Ints


class PPOPERLearner(PPOLearner):
    """PPO whose batches come from a prioritized replay: that of this process, or one that ranks share.

    Randomness of a round, draws and minibatches alike, comes from (run seed, "learn", version).
    """

    def __init__(
        self,
        config: PPOPERConfig,
        spec: NetworkSpec,
        replay: Replay,
        *,
        seed: int,
        device: str,
        ranks: Ranks,
        staleness_threshold: int = 0,
        augment: Augment | None = None,
    ) -> None:
        super().__init__(config, spec, seed=seed, device=device, ranks=ranks, augment=augment)
        self._per = config
        self._replay = replay
        self._threshold = staleness_threshold

    def train(self, batch: Batch) -> Metrics:
        """Draw and train ``updates_per_round`` batches; then take the batch's segments into the replay."""
        version = batch.version
        arrived = self._arrived(batch)
        fresh = self._let_go_of_old(arrived, version)
        order = np.random.default_rng(derive_seed(self._seed, "learn", version))
        pairs = []
        for _ in range(self._per.updates_per_round):
            draw = self._draw(fresh, version, order)
            lesson = self._learn(draw.data, version, order, is_stale=True, shares=draw.shares)
            self._give_priorities(draw, lesson, fresh)
            pairs.append((draw, lesson))
        if fresh is not None:
            self._store(fresh)
        if arrived is not None:
            self._measure_observations(arrived.data)
        self._version = version + 1
        num_late = 0 if arrived is None else len(arrived) - (0 if fresh is None else len(fresh))
        return {**self._report(pairs, version), "learn/expired_on_arrival": float(num_late)}

    # ------------------------------------------------------------ the replay

    def _arrived(self, batch: Batch) -> _Fresh | None:
        """The batch's segments side by side; None when there are none."""
        if not batch.segments:
            return None
        data = Round.of(batch.segments)
        refuse_non_finite(data, batch.version)
        self._measure_returns(data)
        return _Fresh.of(data, item_versions(batch.segments))

    def _let_go_of_old(self, arrived: _Fresh | None, version: int) -> _Fresh | None:
        """Drop what is older than ``max_age`` from the replay, and from what has just arrived."""
        if self._per.max_age is None:
            return arrived
        oldest = version - self._per.max_age
        self._replay.expire(oldest)
        fresh = None if arrived is None else arrived.since(oldest)
        if not len(self._replay) and fresh is None:
            raise TrainError(
                f"round {version} was not trained: every segment is older than max_age {self._per.max_age}; "
                "raise algorithm.max_age, or lower algorithm.replay_ratio so that rounds wait for new ones"
            )
        return fresh

    def _draw(self, fresh: _Fresh | None, version: int, rng: np.random.Generator) -> Draw:
        """Some fresh segments, the rest from the replay: by priority, or half of it evenly for the policy.

        Fresh ones are not in the replay yet: none is drawn beside itself.
        """
        config, parts, chosen = self._per, [], _NOTHING
        has_replay = len(self._replay) > 0
        if fresh is not None:
            wanted = round(config.fresh_fraction * config.batch_size) if has_replay else config.batch_size
            chosen = np.sort(rng.choice(len(fresh), min(wanted, len(fresh)), replace=False))
            if len(chosen):
                parts.append(_Part.fresh(fresh, chosen))
        num_replayed = config.batch_size - len(chosen) if has_replay else 0
        num_even = num_replayed // 2 if config.per_for == "critic" else 0
        if num_even:
            parts.append(_Part.of(self._replay.sample_uniform(rng, num_even)))
        if num_replayed - num_even:
            by_priority = self._replay.sample(rng, num_replayed - num_even, beta=config.beta_at(version))
            parts.append(_Part.of(by_priority, only_critic=config.per_for == "critic"))
        return _joined(parts, chosen)

    def _give_priorities(self, draw: Draw, lesson: Lesson, fresh: _Fresh | None) -> None:
        """Note what the lesson says about each segment: in the replay, or for those that go there later."""
        priorities, num_fresh = self._priorities(lesson), len(draw.chosen)
        if fresh is not None:
            fresh.priorities[draw.chosen] = priorities[:num_fresh]
        if draw.handles is not None:
            self._replay.update(draw.handles, priorities[num_fresh:])

    def _store(self, fresh: _Fresh) -> None:
        """Add fresh segments to the replay; those that no batch had get the largest priority there is."""
        is_known = ~np.isnan(fresh.priorities)
        items = to_items(fresh.data)
        for chosen, priorities in (
            (np.flatnonzero(is_known), fresh.priorities[is_known]),
            (np.flatnonzero(~is_known), None),
        ):
            # In pieces that fit: of more than the replay holds, those that no batch had stay.
            for start in range(0, len(chosen), self._per.buffer_capacity):
                piece = slice(start, start + self._per.buffer_capacity)
                some = {name: array[chosen[piece]] for name, array in items.items()}
                given = None if priorities is None else priorities[piece]
                self._replay.add(some, fresh.versions[chosen[piece]], given)

    def _priorities(self, lesson: Lesson) -> Floats:
        """|TD errors| of each segment with the critic that chose its targets."""
        data = lesson.data
        deltas = td_errors(data.rewards, lesson.values, data.terminated, data.valid, self._config.gamma)
        return segment_priority(deltas, data.valid, self._per.per_eta)

    # ------------------------------------------------------------ reports and state

    def _report(self, pairs: Sequence[tuple[Draw, Lesson]], version: int) -> Metrics:
        """Means over the round's updates; ages of what was drawn."""
        several = [self._lesson_metrics(lesson, version) for _, lesson in pairs]
        metrics = {name: float(np.mean([one[name] for one in several])) for name in several[0]}
        metrics["learn/gradient_steps"] = sum(one["learn/gradient_steps"] for one in several)
        ages = version - np.concatenate([draw.versions for draw, _ in pairs])
        return {
            **metrics,
            **_behaviour_metrics(pairs, version),
            **age_metrics(ages, self._threshold),
            "learn/per_beta": self._per.beta_at(version),
            "learn/per_weight_min": float(min(draw.shares.critic.min() for draw, _ in pairs)),
            "learn/replay_size": float(len(self._replay)),
        }

    def state_dict(self) -> StateTree:
        """Everything the next round depends on, the replay included."""
        return {**super().state_dict(), "replay": self._replay.state_dict()}

    def load_state_dict(self, state: StateTree) -> None:
        """Go on from a saved state."""
        super().load_state_dict(state)
        self._replay.load_state_dict(state["replay"])


@dataclass(frozen=True, slots=True)
class _Fresh:
    """Segments that have just arrived, and the priorities that training gave them, NaN before it did."""

    data: Round
    versions: Ints
    priorities: Floats

    @classmethod
    def of(cls, data: Round, versions: Ints) -> _Fresh:
        """Segments that nothing is known of yet."""
        return cls(data, versions, np.full(len(versions), np.nan, np.float32))

    def __len__(self) -> int:
        return len(self.versions)

    def since(self, version: int) -> _Fresh | None:
        """Those that are not older than ``version``; None when all are."""
        chosen = np.flatnonzero(self.versions >= version)
        if len(chosen) == len(self):
            return self
        return _Fresh.of(self.data.columns(chosen), self.versions[chosen]) if len(chosen) else None


@dataclass(frozen=True, slots=True)
class _Part:
    """Segments drawn in one way, with their weights ``[B]`` for policy and critic, 1 on average."""

    data: Round
    handles: Handles | None
    versions: Ints
    policy: Floats
    critic: Floats

    @staticmethod
    def fresh(fresh: _Fresh, chosen: Ints) -> _Part:
        """Some of those that have just arrived."""
        ones = np.ones(len(chosen), np.float32)
        return _Part(fresh.data.columns(chosen), None, fresh.versions[chosen], ones, ones)

    @staticmethod
    def of(sample: Sample, *, only_critic: bool = False) -> _Part:
        """What was drawn from the replay, each segment with its importance weight."""
        critic = sample.weights / sample.weights.mean()
        policy = np.zeros_like(critic) if only_critic else critic
        return _Part(from_items(sample.items), sample.handles, sample.versions, policy, critic)


def _joined(parts: Sequence[_Part], chosen: Ints) -> Draw:
    """Parts side by side. What the policy does not train on is made up for by the rest of the batch."""
    policy = np.concatenate([part.policy for part in parts])
    num_trained = sum(len(part.policy) for part in parts if part.policy.any())
    handles = [part.handles for part in parts if part.handles is not None]
    return Draw(
        Round.side_by_side([part.data for part in parts]),
        _concatenated(handles) if handles else None,
        np.concatenate([part.versions for part in parts]),
        Shares(policy * np.float32(len(policy) / num_trained), np.concatenate([p.critic for p in parts])),
        chosen,
    )


def _concatenated(several: Sequence[Handles]) -> Handles:
    if len(several) == 1:
        return several[0]
    index = np.concatenate([one.index for one in several])
    return Handles(index, np.concatenate([one.generation for one in several]))


def _behaviour_metrics(pairs: Sequence[tuple[Draw, Lesson]], version: int) -> Metrics:
    """What age costs: of fresh samples, which the dial governs, and of replayed ones."""
    fresh, replayed = [], []
    for draw, lesson in pairs:
        valid, log_ratios, first = lesson.data.valid, lesson.behaviour_log_ratios, len(draw.chosen)
        fresh.append(log_ratios[:, :first][valid[:, :first]])
        replayed.append(log_ratios[:, first:][valid[:, first:]])
    of_replay = staleness_metrics(np.concatenate(replayed))
    # Only in the round's first update is the network still the one that acted.
    draw, lesson = pairs[0]
    newest = lesson.behaviour_log_ratios[lesson.data.valid & (draw.versions == version)]
    return {
        **staleness_metrics(np.concatenate(fresh)),
        "learn/replay_ess": of_replay["learn/ess"],
        "learn/replay_kl": of_replay["learn/behaviour_kl"],
        "learn/first_ratio_max_dev": float(np.abs(np.expm1(newest)).max(initial=0.0)),
    }
