"""What a search does: which rule, how many simulations, which constants."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from offbeat.errors import ConfigError

Kind = Literal["puct", "gumbel"]
FirstPlay = Literal["mean", "low"]


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """Constants of a search; all trees of a `Trees` share them.

    Example: ``SearchConfig("puct", num_simulations=25, discount=0.997)``.
    """

    kind: Kind = "puct"
    """``puct``: MuZero (https://arxiv.org/abs/1911.08265); ``gumbel``: Gumbel MuZero, which needs fewer
    simulations (https://openreview.net/forum?id=bERaNdoegnO)."""
    num_simulations: int = 25
    """Model steps per search."""
    discount: float = 0.997
    """Worth of a value one step later."""
    pb_c_init: float = 1.25
    """Weight of the prior in pUCT (MuZero, appendix B). A node's own visit counts in its N, so that the prior
    decides the first choice there."""
    pb_c_base: float = 19652.0
    """Visits beyond which the prior's weight grows (MuZero, appendix B)."""
    value_delta_max: float = 0.01
    """Smallest range of Q that is stretched to [0, 1]: smaller differences are not blown up (LightZero)."""
    dirichlet_alpha: float = 0.3
    """Concentration of the Dirichlet noise at the root; for pUCT."""
    root_noise_weight: float = 0.25
    """Share of the noise in the root's prior; for pUCT."""
    two_player: bool = False
    """Players alternate: a value is that of the player to move, a reward that of the player who moved."""
    max_considered: int = 16
    """Actions that sequential halving starts with; for Gumbel (its paper)."""
    c_visit: float = 50.0
    """Visits added when Q is weighed against the prior; for Gumbel (its paper)."""
    c_scale: float = 0.1
    """Weight of Q against the prior; for Gumbel (mctx; EfficientZero V2)."""
    first_play: FirstPlay = "mean"
    """Q of an action not yet tried; for pUCT. ``mean``: of its tried siblings, and below the root of what was
    so at the node above (LightZero); ``low``: the lowest Q of the tree."""

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, get_args(Kind))
        _check_name("first_play", self.first_play, get_args(FirstPlay))
        _check(self.num_simulations >= 1, "num_simulations", self.num_simulations, "1 or more")
        _check(0 < self.discount <= 1, "discount", self.discount, "above 0 and at most 1")
        _check(_is_size(self.pb_c_init), "pb_c_init", self.pb_c_init, "0 or more")
        _check(_is_size(self.pb_c_base) and self.pb_c_base > 0, "pb_c_base", self.pb_c_base, "above 0")
        positive = _is_size(self.value_delta_max) and self.value_delta_max > 0
        _check(positive, "value_delta_max", self.value_delta_max, "above 0")
        _check(
            _is_size(self.dirichlet_alpha) and self.dirichlet_alpha > 0,
            "dirichlet_alpha",
            self.dirichlet_alpha,
            "above 0; for a search without noise give it no noise",
        )
        _check(
            0 <= self.root_noise_weight <= 1, "root_noise_weight", self.root_noise_weight, "between 0 and 1"
        )
        _check(self.max_considered >= 1, "max_considered", self.max_considered, "1 or more")
        _check(_is_size(self.c_visit), "c_visit", self.c_visit, "0 or more")
        _check(_is_size(self.c_scale), "c_scale", self.c_scale, "0 or more")

    @property
    def num_nodes(self) -> int:
        """Nodes of a full tree: the root and one per simulation."""
        return self.num_simulations + 1


def _is_size(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _check(holds: bool, name: str, value: float, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"search: {name} is {value}; set it to {wanted}")


def _check_name(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"search: {name} is {value!r}; set it to one of {', '.join(known)}")
