"""From windows of the replay to what a model is trained on. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.algorithms.muzero.config import PlanningConfig
from offbeat.algorithms.muzero.steps import POLICY
from offbeat.ops.n_step import n_step_targets, within_episode
from offbeat.replay.streams import Windows
from offbeat.types import Array

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lesson:
    """B steps with the H that follow.

    ``obs`` ``[B, H + 1, ...]``, ``actions`` ``[B, H, ...]``, ``rewards`` ``[B, H]``, ``values`` and
    ``policies`` ``[B, H + 1, ...]``. ``moved`` ``[B, H]`` says which actions belong to the episode, ``paid``
    ``[B, H]``, ``valued`` and ``judged`` ``[B, H + 1]`` where a reward, a value and a policy are to be
    learned: after a terminated episode nothing is to be gained any more. ``is_final`` ``[B, H + 1]`` are the
    last observations of such. ``weights`` ``[B]`` are those of the draw.
    """

    obs: Array
    actions: Array
    rewards: Floats
    values: Floats
    policies: Floats
    candidates: Floats | None
    moved: Bools
    paid: Bools
    valued: Bools
    judged: Bools
    is_final: Bools
    weights: Floats


def make_lesson(
    windows: Windows, values: Floats, config: PlanningConfig, *, version: int, two_player: bool
) -> Lesson:
    """Targets of what was drawn, windows of H + 1 + n steps, with the ``values`` of all of these."""
    ahead, found = config.num_unroll, windows.items
    terminated, truncated = found["terminated"], found["truncated"]
    targets = n_step_targets(
        found["rewards"][:, :-1],
        values,
        terminated[:, :-1],
        truncated[:, :-1],
        num_targets=ahead + 1,
        num_steps=td_steps(config, version - windows.versions),
        discount=config.discount,
        two_player=two_player,
    )
    belongs = within_episode(terminated, truncated)[:, : ahead + 1]
    # The step after an episode's last shows its final observation: there is no action to be learned there,
    # and where the episode was terminated nothing to be gained, then and later.
    is_final = np.zeros_like(belongs)
    is_final[:, 1:] = (belongs & terminated[:, : ahead + 1])[:, :-1]
    is_over = np.cumsum(is_final, axis=1) > 0
    candidates = found.get("candidates")
    return Lesson(
        obs=found["obs"][:, : ahead + 1],
        actions=found["actions"][:, :ahead],
        rewards=np.where(belongs[:, :ahead], found["rewards"][:, :ahead], np.float32(0)),
        values=np.where(is_over, np.float32(0), targets),
        policies=found[POLICY][:, : ahead + 1],
        candidates=None if candidates is None else candidates[:, : ahead + 1],
        moved=belongs[:, :ahead],
        paid=(belongs | is_over)[:, :ahead],
        valued=belongs | is_over,
        judged=belongs & found["valid"][:, : ahead + 1],
        is_final=is_final,
        weights=windows.weights,
    )


def td_steps(config: PlanningConfig, ages: Ints) -> int | Ints:
    """Real rewards in a value target: fewer for older steps, whose actions are less and less our own."""
    if config.td_steps_min is None:
        return config.td_steps
    return np.clip(config.td_steps - ages // config.td_age, config.td_steps_min, config.td_steps)


def first_in_context(valid: Bools) -> Ints:
    """Where the episode of the last of C steps begins, from which of them were valid ``[B, C]``.

    An episode begins after a step that was not.
    """
    context = valid.shape[1]
    starts = np.zeros(valid.shape, np.int64)
    starts[:, 1:] = np.where(~valid[:, :-1], np.arange(1, context), 0)
    found: Ints = starts.max(axis=1)
    return found
