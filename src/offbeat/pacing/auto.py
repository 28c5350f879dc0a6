"""The tuner behind ``off_policy_degree = -1``: the smallest k that keeps the bottleneck busy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from offbeat.pacing.messages import Signals


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """How the tuner moves. Idle shares and gains are fractions, windows are rounds."""

    maximum: int = 8
    window: int = 5
    idle_tolerance: float = 0.05
    min_gain: float = 0.02
    min_ess: float = 0.5
    max_behaviour_kl: float = 0.1
    patience: int = 4


@dataclass(slots=True)
class _Window:
    rounds: int = 0
    round_s: float = 0.0
    idle: float = 0.0
    costly: bool = False
    settling: bool = True


@dataclass(slots=True)
class AutoDial:
    """Moves k by one per window of rounds.

    Up while even the busier side idles and the last step up paid in time per round; down when the data
    says that staleness costs too much (effective sample size, KL between behaviour and current policy),
    when a step up did not pay, and now and then as a probe whether a smaller k does as well. What was
    found out is remembered as ``ceiling`` (do not go above) or ``floor`` (do not go below) for
    ``patience`` windows, twice as long each time the same is found again.
    """

    config: AutoConfig
    degree: int = 0
    _window: _Window = field(default_factory=_Window)
    _before_s: float | None = None
    _ceiling: int = 0
    _floor: int = 0
    _hold: int = 0
    _patience: int = 0

    def __post_init__(self) -> None:
        self.degree = min(self.degree, self.config.maximum)
        self._ceiling = self.config.maximum
        self._patience = self.config.patience

    def update(self, signals: Signals) -> int:
        """Take a round's measurements; return the k to use from now on."""
        window = self._window
        if window.settling:  # the round in which k changed belongs to both settings
            window.settling = False
            return self.degree
        window.rounds += 1
        window.round_s += signals.round_s
        window.idle += min(signals.collect_idle, signals.train_idle)
        window.costly |= self._costly(signals)
        if window.costly or window.rounds >= self.config.window:
            self._step(window)
        return self.degree

    def _costly(self, signals: Signals) -> bool:
        ess_low = signals.ess is not None and signals.ess < self.config.min_ess
        kl_high = signals.behaviour_kl is not None and signals.behaviour_kl > self.config.max_behaviour_kl
        return ess_low or kl_high

    def _step(self, window: _Window) -> None:
        round_s, idle = window.round_s / window.rounds, window.idle / window.rounds
        self._forget()
        before_s, self._before_s = self._before_s, None
        did_not_pay = before_s is not None and round_s > (1 - self.config.min_gain) * before_s
        if window.costly or did_not_pay:
            self._move(-1)
            self._remember(ceiling=self.degree)
        elif idle > self.config.idle_tolerance and self.degree < self._ceiling:
            self._before_s = round_s
            self._move(+1)
            self._remember_floor_if_probed()
        elif idle <= self.config.idle_tolerance and self.degree > self._floor and self._hold == 0:
            self._move(-1)
        self._window = _Window()

    def _move(self, by: int) -> None:
        self.degree = max(0, min(self.config.maximum, self.degree + by))

    def _remember(self, ceiling: int) -> None:
        self._ceiling, self._hold = ceiling, self._patience
        self._patience *= 2

    def _remember_floor_if_probed(self) -> None:
        self._floor, self._hold = self.degree, self._patience

    def _forget(self) -> None:
        self._hold = max(0, self._hold - 1)
        if self._hold == 0:
            self._ceiling, self._floor = self.config.maximum, 0

    def state_dict(self) -> dict[str, Any]:
        """What the tuner has learned, as plain numbers."""
        return {"degree": self.degree, "ceiling": self._ceiling, "floor": self._floor, "hold": self._hold}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; the running window starts anew."""
        self.degree, self._ceiling = state["degree"], state["ceiling"]
        self._floor, self._hold = state["floor"], state["hold"]
