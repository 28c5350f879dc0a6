"""The tuner behind ``off_policy_degree = -1``: the smallest k that keeps the bottleneck busy."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from offbeat.pacing.events import Signals


@dataclass(frozen=True, slots=True)
class AutoConfig:
    """Settings of the tuner. Idle shares and gains are fractions, ``window`` is rounds, patience is windows.

    ``min_gain`` is the change in time per round below which two settings count as equally fast. The limit for
    searches leaves room for what they improve at k = 0: a KL of 0.02 to 0.16 in CartPole.
    """

    maximum: int = 8
    window: int = 5
    idle_tolerance: float = 0.05
    min_gain: float = 0.02
    min_ess: float = 0.5
    max_behaviour_kl: float = 0.1
    max_search_kl: float = 0.5
    patience: int = 4
    max_patience: int = 64


@dataclass(slots=True)
class _Limit:
    """A k that is not crossed for ``hold`` windows; each time one is found, the next holds twice as long."""

    patience: int
    level: int = 0
    hold: int = 0

    def remember(self, level: int) -> None:
        self.level, self.hold = level, self.patience

    def found(self, level: int, max_patience: int) -> None:
        self.remember(level)
        self.patience = min(2 * self.patience, max_patience)


class AutoDial:
    """Moves k after each window of rounds, by trial: a step is kept if the time per round agrees.

    Up while even the busier side idles, and back when that made rounds no faster. Down as a probe
    whether a smaller k does as well, and back when it made rounds slower. Down to half when the data says
    that staleness costs too much (effective sample size, KL between behaviour and current policy).
    What a failed trial found is a limit for a while, so that k comes to rest.
    """

    def __init__(self, config: AutoConfig, degree: int = 0) -> None:
        self.config = config
        self.degree = min(degree, config.maximum)
        self.reason = ""  # of the last move
        self._window: list[Signals] = []  # rounds at this k
        self._settling = 1  # rounds that still belong to the k before
        self._trial: tuple[int, float] | None = None  # direction, and time per round before
        self._ceiling = _Limit(config.patience)
        self._floor = _Limit(config.patience)

    def update(self, signals: Signals) -> int:
        """Take a round's measurements; return the k to use from now on."""
        if self._settling:
            self._settling -= 1
            return self.degree
        self._window.append(signals)
        if len(self._window) >= self.config.window:
            before = self.degree
            self._step(self._window)
            self._window = []
            self._settling = 0 if self.degree == before else max(before, self.degree) + 1
        return self.degree

    def _step(self, window: list[Signals]) -> None:
        config = self.config
        for limit in (self._ceiling, self._floor):
            limit.hold = max(0, limit.hold - 1)
        trial, self._trial = self._trial, None
        round_s = _mean([one.round_s for one in window]) or 0.0
        idle = [_mean([one.collect_idle for one in window]), _mean([one.train_idle for one in window])]
        if self.degree > 0 and (found := excess(window, config)) is not None:
            self.reason = found
            self.degree //= 2
            self._ceiling.found(self.degree, config.max_patience)
        elif trial is None or self._succeeded(trial, round_s):
            self._try_next(min(share or 0.0 for share in idle), round_s)

    def _succeeded(self, trial: tuple[int, float], round_s: float) -> bool:
        """Judge a trial: what was learned becomes a limit; a step that failed is taken back."""
        direction, before_s = trial
        if direction > 0 and round_s <= (1 - self.config.min_gain) * before_s:
            self._floor.remember(self.degree)
        elif direction > 0:
            self.reason = f"rounds were no faster: {round_s:.3g} s after {before_s:.3g} s"
            self.degree -= 1
            self._ceiling.found(self.degree, self.config.max_patience)
            return False
        elif round_s <= (1 + self.config.min_gain) * before_s:
            self._ceiling.remember(self.degree)
        else:
            self.reason = f"rounds were slower: {round_s:.3g} s after {before_s:.3g} s"
            self.degree += 1
            self._floor.found(self.degree, self.config.max_patience)
            return False
        return True

    def _try_next(self, idle: float, round_s: float) -> None:
        top = self._ceiling.level if self._ceiling.hold else self.config.maximum
        bottom = self._floor.level if self._floor.hold else 0
        if idle > self.config.idle_tolerance and self.degree < top:
            self._trial = (+1, round_s)
            self.reason = f"collectors and learner idle {idle:.0%} of the time or more: a larger k is tried"
        elif self.degree > bottom:
            self._trial = (-1, round_s)
            self.reason = "a smaller k is tried, which may be as fast"
        if self._trial is not None:
            self.degree += self._trial[0]

    def state_dict(self) -> dict[str, Any]:
        """Return what the tuner has learned, as plain numbers."""
        limits = {"ceiling": self._ceiling, "floor": self._floor}
        return {
            "degree": self.degree,
            **{name: [limit.patience, limit.level, limit.hold] for name, limit in limits.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; the running window starts again."""
        self.degree = min(state["degree"], self.config.maximum)
        self._ceiling, self._floor = _Limit(*state["ceiling"]), _Limit(*state["floor"])
        self._window, self._settling, self._trial = [], self.degree + 1, None


def excess(window: Collection[Signals], config: AutoConfig) -> str | None:
    """Return why staleness costs too much, by what was measured; None when it does not."""
    kl, search_kl = _mean([one.behaviour_kl for one in window]), _mean([one.search_kl for one in window])
    ess = _mean([one.ess for one in window])
    if kl is not None and kl > config.max_behaviour_kl:
        return f"KL to the policy that acted is {kl:.3f}, above {config.max_behaviour_kl:g}"
    if search_kl is not None and search_kl > config.max_search_kl:
        return f"KL of searches to the network is {search_kl:.3f}, above {config.max_search_kl:g}"
    if ess is not None and ess < config.min_ess:
        return f"effective sample size is {ess:.2f}, below {config.min_ess:g}"
    return None


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that were measured; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
