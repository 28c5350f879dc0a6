"""Advice: a notice when what a run measures says that a setting should be another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from offbeat.observe.text import number, plain
from offbeat.pacing.auto import AutoConfig, excess
from offbeat.pacing.config import AUTO
from offbeat.pacing.events import DialTurned, EvalDone, Handlers, RoundTrained, SegmentArrived, Signals
from offbeat.types import TIMEOUT

_ROUNDS = 5
_ROUNDS_TIMED, _ROUNDS_UNTIMED = 20, 5  # the first ones at a k compile kernels and fill queues
_ROUND_S = 0.1  # shorter rounds are mostly bookkeeping
_EPISODES = 5  # fewer say too little about two policies
_LIMITS = AutoConfig()


class Advisor:
    """Watches what staleness costs at a fixed k, what another k could gain, and whether an evaluation depends
    on how actions are chosen.

    Each advice is given once, as a text to ``tell``. The limits are those at which the tuner lowers k.
    ``is_parallel``: collectors and learner can work at the same time.
    """

    def __init__(self, dial: int, tell: Callable[[str], None], *, is_parallel: bool = True) -> None:
        self._dial, self._is_parallel = dial, is_parallel
        self._tell = tell
        self._degree = 0
        self._signals: deque[Signals] = deque(maxlen=_ROUNDS)  # of rounds at this k
        self._timed: deque[Signals] = deque(maxlen=_ROUNDS_TIMED)
        self._num_at_degree = 0
        self._has_told_of_age = self._has_told_of_actions = self._has_told_of_time = False
        self._has_told_of_limits = False

    def handlers(self) -> Handlers:
        return {
            SegmentArrived: self._arrived,
            RoundTrained: self._round_trained,
            EvalDone: self._evaluated,
            DialTurned: self._dial_turned,
        }

    def _dial_turned(self, event: DialTurned, now_s: float) -> None:
        self._dial = event.off_policy_degree

    def _arrived(self, event: SegmentArrived, now_s: float) -> None:
        """Say where weights at k = 0 begin to depend on time: a limit of time ended something."""
        if self._has_told_of_limits or self._dial != 0:
            return
        pieces, number = event.segment.pieces, event.segment.ticket.number
        ends = {piece.end for piece in pieces} & {"timeout", "cut"}
        if ends or any(answer.error == TIMEOUT for piece in pieces for answer in piece.answers):
            self._has_told_of_limits = True
            self._tell(
                f"a time limit ended something of ticket {number}: from here on another run at k = 0 comes to"
                " other weights, though a replay of this one to the same. Raise algorithm.reward.timeout_s or"
                " algorithm.tool.timeout_s, or make what is called faster"
            )

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        """Look at the last rounds at one k."""
        if self._dial == AUTO:
            return
        if event.batch.off_policy_degree != self._degree:
            self._signals.clear()
            self._timed.clear()
            self._degree, self._num_at_degree = event.batch.off_policy_degree, 0
        self._num_at_degree += 1
        self._weigh_age(event)
        self._weigh_time(event)

    def _weigh_time(self, event: RoundTrained) -> None:
        """Say once which side is the bottleneck, and what a larger k could gain."""
        if self._has_told_of_time or not self._is_parallel or self._num_at_degree <= _ROUNDS_UNTIMED:
            return
        self._timed.append(event.signals)
        if len(self._timed) == _ROUNDS_TIMED and (found := possible_gain(self._timed, self._degree)):
            self._has_told_of_time = True
            self._tell(f"mean of {_ROUNDS_TIMED} rounds until {event.version}: {found}")

    def _weigh_age(self, event: RoundTrained) -> None:
        """Compare the mean cost of the last rounds with the limits."""
        degree = self._degree
        if self._has_told_of_age or degree == 0:
            return
        self._signals.append(event.signals)
        if len(self._signals) < _ROUNDS:
            return
        if (found := excess(self._signals, _LIMITS)) is None:
            return
        self._has_told_of_age = True
        self._tell(
            f"mean of {_ROUNDS} rounds until {event.version}: {found}: at k = {degree} samples come from a"
            " policy far from the one being trained. Lower async_training.off_policy_degree, or set it to -1"
            " to have it tuned"
        )

    def _evaluated(self, event: EvalDone, now_s: float) -> None:
        """Compare returns with the most likely actions and with drawn ones."""
        found = action_dependence(event.metrics or {})
        if self._has_told_of_actions or found is None:
            return
        self._has_told_of_actions = True
        self._tell(f"evaluation of version {event.version}: {found}")


def possible_gain(rounds: Sequence[Signals], degree: int) -> str | None:
    """Return which side holds rounds up and how much faster they could be at a larger k; None for short ones.

    No k makes a round shorter than the busier side's part of it. That part is measured, and may shrink: an
    engine that is left with the last few responses of a round is busy, and could work on more of them.
    """
    round_s, collect_s, train_s = (
        sum([signals[place] or 0.0 for signals in rounds]) / len(rounds) for place in range(3)
    )
    busiest_s = max(collect_s, train_s)
    if round_s < _ROUND_S or not busiest_s > 0.0:
        return None
    slower, beyond = "training", "only faster training helps"
    if collect_s > train_s:
        slower, beyond = "collecting", "add collectors"
    gain = max(0.0, round_s / busiest_s - 1.0)
    return (
        f"collecting takes {collect_s:.2g} s and training {train_s:.2g} s of rounds of {round_s:.2g} s:"
        f" {slower} is the bottleneck. At k = {degree}, a larger k could make rounds {gain:.0%} faster at"
        f" most, and more only where collectors wait for a few long tickets; beyond that, {beyond}"
    )


def action_dependence(metrics: Mapping[str, float]) -> str | None:
    """Return the advice on an evaluation whose return differs greatly with drawn actions; None otherwise."""
    names = ("return_mean", "return_mean_sampled", "return_std", "return_std_sampled")
    likely, drawn, *deviations = (number(metrics, f"eval/{name}") for name in names)
    apart = abs(likely - drawn)  # NaN, and so never large, where one is not reported
    is_large = apart > 0.5 * max(abs(likely), abs(drawn)) and apart > 2 * max(deviations)
    if not is_large or number(metrics, "eval/episodes") < _EPISODES:
        return None
    return (
        f"return {plain(likely)} with the most likely actions, but {plain(drawn)} with drawn ones: the policy"
        " still depends on chance. eval/return_mean is the first; set eval.deterministic=false to evaluate"
        " the policy as it acts in training"
    )
