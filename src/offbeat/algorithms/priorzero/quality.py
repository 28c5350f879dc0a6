"""Quality of a prior: how it ranks the expert's action among the valid ones of states it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.algorithms.priorzero.priors import Prior
from offbeat.algorithms.priorzero.transcripts import Example

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over states: is the expert's action the most likely one, among the first three, its log-prob.

    Ties share their places, so that a uniform prior has the top-1 of chance. ``chance`` is what drawing a
    valid action blindly gives as top-1, ``chance_log_prob`` as log-prob.
    """

    top_1: float
    top_3: float
    log_prob: float
    entropy: float
    chance: float
    chance_log_prob: float
    states: int


def quality_of(prior: Prior, examples: Sequence[Example]) -> Quality:
    """Judge a prior on states with labels."""
    rows = np.array([row for _, row in judged(prior, examples)])
    top_1, top_3, log_prob, entropy, chance, chance_log_prob = rows.mean(0).tolist()
    return Quality(top_1, top_3, log_prob, entropy, chance, chance_log_prob, len(rows))


def judged(prior: Prior, examples: Sequence[Example]) -> list[tuple[Example, tuple[float, ...]]]:
    """Return each state with its own figures, in the order of `Quality`."""
    found: list[tuple[Example, tuple[float, ...]]] = []
    for begin in range(0, len(examples), _BATCH):
        part = examples[begin : begin + _BATCH]
        priors = prior.log_probs([one.prompt for one in part], [one.actions for one in part])
        for one, own in zip(part, priors, strict=True):
            at, count = one.actions.index(one.label), len(one.actions)
            entropy = -float((np.exp(own) * own).sum())
            figures = _top(own, at, 1), _top(own, at, 3), float(own[at]), entropy, 1 / count, -np.log(count)
            found.append((one, figures))
    return found


def _top(own: np.ndarray, at: int, most: int) -> float:
    """Return the chance that an action is among the first ``most`` when ties are drawn."""
    above, same = int((own > own[at]).sum()), int((own == own[at]).sum())
    return min(1.0, max(0.0, (most - above) / same))
