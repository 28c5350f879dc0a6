"""Named losses, each made of a few independent choices. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offbeat.ops.aggregation import Aggregation
from offbeat.ops.group_advantages import Normalisation

Surrogate = Literal["clip", "detached", "own"]
Advantage = Literal["group", "leave_one_out", "gae"]
Ratio = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class Choices:
    """The parts of a loss. ``own`` is a user's function, which does not look at ratio and clipping."""

    paper: str
    surrogate: Surrogate
    advantage: Advantage
    norm_adv: Normalisation
    ratio: Ratio | None
    clip_low: float | None
    clip_high: float | None
    aggregation: Aggregation


_MEAN: Aggregation = "token_mean"
LOSSES = {
    "grpo": Choices("2402.03300", "clip", "group", "group", "token", 0.2, 0.2, "sequence_mean"),
    "dr_grpo": Choices("2503.20783", "clip", "group", "none", "token", 0.2, 0.2, "constant"),
    "rloo": Choices("2402.14740", "clip", "leave_one_out", "none", "token", 0.2, 0.2, _MEAN),
    "dapo": Choices("2503.14476", "clip", "group", "group", "token", 0.2, 0.28, _MEAN),
    "gspo": Choices("2507.18071", "clip", "group", "group", "sequence", 3e-4, 4e-4, "sequence_mean"),
    # Its paper bounds weights from above only, and does not say by what; 5 is ScaleRL's (2510.13786).
    "cispo": Choices("2506.13585", "detached", "group", "group", "token", 1.0, 4.0, _MEAN),
    "ppo": Choices("1707.06347", "clip", "gae", "batch", "token", 0.2, 0.2, _MEAN),
}
"""Losses by name; papers are numbers of arXiv."""
OWN = Choices("", "own", "group", "group", None, None, None, _MEAN)
"""What a user's function is surrounded by, where the settings do not choose otherwise."""
FIELDS = ("advantage", "norm_adv", "ratio", "clip_low", "clip_high", "aggregation")
"""Choices that settings of the same name replace."""
