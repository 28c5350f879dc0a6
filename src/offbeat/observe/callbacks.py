"""Hooks into a run, with frozen messages of what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offbeat.config.errors import nearest
from offbeat.errors import ConfigError, OffbeatError
from offbeat.pacing.events import (
    CollectorDown,
    EvalDone,
    Finished,
    Handlers,
    Notice,
    Restarting,
    RoundTrained,
    Saved,
    Started,
)

if TYPE_CHECKING:
    from offbeat.observe.meter import Meter

Bottleneck = Literal["collect", "train", "balanced"]
"""The side that holds the other up."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Description of a run in a line. ``stop_return``: it may end before its last round, for reaching that.

    ``stop_within_s``: how long the end may take that a signal asks for; None where signals are not handled.

    Example: ``RunSummary("cartpole", "ppo", "CartPole-v1", "processes", 2, 300, 1, Path("runs/x"))``.
    """

    name: str
    algorithm: str = ""
    env_id: str = ""
    runtime: str = ""
    num_workers: int = 0
    rounds: int = 0
    off_policy_degree: int = 0
    directory: Path | None = None
    stop_return: float | None = None
    stop_within_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunControl:
    """Controls of a running run, for callbacks and any other thread.

    ``stop(reason)`` ends it cleanly, ``finish(reason)`` says that its goal is reached (it is evaluated as at
    the end), ``turn(k)`` turns ``off_policy_degree``.
    """

    stop: Callable[[str], None]
    finish: Callable[[str], None]
    turn: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run starts, or continues at ``resumed_from``; ``control`` acts on it at any later time."""

    summary: RunSummary
    control: RunControl
    resumed_from: int | None = None

    @property
    def stop(self) -> Callable[[str], None]:
        """Ends the run cleanly, with a reason."""
        return self.control.stop

    @property
    def finish(self) -> Callable[[str], None]:
        """Ends the run because its goal is reached, with a reason."""
        return self.control.finish

    @property
    def turn(self) -> Callable[[int], None]:
        """Turns ``off_policy_degree``."""
        return self.control.turn


@dataclass(frozen=True, slots=True)
class RoundInfo:
    """A round was trained; ``version`` is the version it made, ``metrics`` what it measured.

    ``bottleneck`` is the side that held the other up.
    """

    version: int
    metrics: Mapping[str, float]
    bottleneck: Bottleneck = "balanced"


@dataclass(frozen=True, slots=True)
class EvalInfo:
    """An evaluation ended; ``version`` is the one it judged, which may be older than the learner's."""

    version: int
    metrics: Mapping[str, float]


CheckpointInfo = Saved
"""A checkpoint of ``version`` is on the disk; ``seconds`` is what saving it took."""


@dataclass(frozen=True, slots=True)
class CollectorLostInfo:
    """A collector died, hung or raised and is being replaced; ``restarts`` counts all of them so far."""

    collector: int
    reason: str
    restarts: int

    @property
    def lane(self) -> int:
        """Older name of ``collector``."""
        return self.collector


WorkerLostInfo = CollectorLostInfo
"""Older name of `CollectorLostInfo`."""


@dataclass(frozen=True, slots=True)
class FinishInfo:
    """The run is over, well (``error`` is None) or badly.

    ``restart`` is not None when it is restarted from a checkpoint, and gives the reason. ``stopped``: it
    ended early because that was asked for.
    """

    version: int
    reason: str
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: BaseException | None = None
    restart: str | None = None
    stopped: bool = False


class Callback:
    """Override what you need. All calls come from the run's main thread, so keep them short.

    An exception raised in a callback ends the run with its traceback.

    Example::

        class StopAtGoal(Callback):
            def on_start(self, info: RunInfo) -> None:
                self.finish = info.finish

            def on_eval(self, info: EvalInfo) -> None:
                if info.metrics["eval/return_mean"] >= 475:
                    self.finish("solved")
    """

    def on_start(self, info: RunInfo) -> None:
        """Called once, before the first ticket is issued."""

    def on_round(self, info: RoundInfo) -> Mapping[str, float] | None:
        """Called after each round; metrics returned under new names go wherever the others go."""
        return None

    def on_eval(self, info: EvalInfo) -> None:
        """Called when an evaluation's result is in."""

    def on_checkpoint(self, info: CheckpointInfo) -> None:
        """Called when a checkpoint is on the disk."""

    def on_collector_lost(self, info: CollectorLostInfo) -> None:
        """Called when a collector was lost."""
        self.on_worker_lost(info)

    def on_worker_lost(self, info: CollectorLostInfo) -> None:
        """Older name of `on_collector_lost`."""

    def on_notice(self, text: str) -> None:
        """Called with what the user should know, e.g. that a torn checkpoint was passed over."""

    def on_finish(self, info: FinishInfo) -> None:
        """Called once at the end, whatever the end is."""


_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_hooks(callbacks: Sequence[Callback]) -> None:
    """Raise ConfigError for what is no callback, and for a method that looks like a hook and is none."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            made = f"{callback.__qualname__}()" if isinstance(callback, type) else "an object of such a class"
            raise ConfigError(
                f"callbacks has {callback!r}, which is no offbeat.Callback: give {made}, whose class "
                "inherits from offbeat.Callback"
            )
        kind = type(callback)
        for name in dir(kind):
            if name.startswith("on_") and name not in _HOOKS and callable(getattr(kind, name)):
                meant = f"did you mean {near}? " if (near := nearest(name, _HOOKS)) else ""
                raise ConfigError(
                    f"{kind.__qualname__}.{name} is never called; {meant}"
                    f"Hooks are {', '.join(_HOOKS)}; a method of your own needs a name without on_ in front"
                )


def call_all(callbacks: Sequence[Callback], hook: str, info: object) -> None:
    """Call a hook of each callback in turn. An exception goes up, with a note that names the callback."""
    for callback in callbacks:
        with _attributed(callback, hook):
            getattr(callback, hook)(info)


def added_metrics(callbacks: Sequence[Callback], info: RoundInfo) -> dict[str, float]:
    """Call ``on_round`` of each callback; return the metrics they add."""
    extra: dict[str, float] = {}
    for callback in callbacks:
        with _attributed(callback, "on_round"):
            added = callback.on_round(info)
            if not added:
                continue
            if taken := [name for name in added if name in info.metrics or name in extra]:
                raise OffbeatError(
                    f"the metric names {taken} are taken; return metrics under names of your own"
                )
            extra.update({name: float(value) for name, value in added.items()})
    return extra


def finish_all(callbacks: Sequence[Callback], info: FinishInfo) -> None:
    """Call ``on_finish`` of each callback, also after one that raises: they may hold open files."""
    first: Exception | None = None
    for callback in callbacks:
        try:
            call_all([callback], "on_finish", info)
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


class CallbackObserver:
    """Calls a run's callbacks with the metrics of its meter."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        summary: RunSummary,
        control: RunControl,
        meter: Meter,
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._summary = summary
        self._control = control
        self._meter = meter
        self._num_lost = 0
        self._version = 0
        self._started_s: float | None = None

    def round_handlers(self) -> Handlers:
        """Return the handler that adds metrics to a round, before others write them."""
        return {RoundTrained: self._round_trained}

    def handlers(self) -> Handlers:
        """Return the handlers of other events."""
        return {
            Started: self._started,
            EvalDone: self._evaluated,
            Saved: self._saved,
            CollectorDown: self._collector_down,
            Notice: lambda event, _: call_all(self._callbacks, "on_notice", event.text),
            Restarting: self._end,
            Finished: self._end,
        }

    def _started(self, event: Started, now_s: float) -> None:
        self._started_s, self._version = now_s, event.version
        resumed_from = event.version if event.resumed else None
        call_all(self._callbacks, "on_start", RunInfo(self._summary, self._control, resumed_from))

    def _round_trained(self, event: RoundTrained, now_s: float) -> None:
        self._version, metrics = event.version, self._meter.metrics
        info = RoundInfo(event.version, metrics, self._meter.bottleneck)
        metrics.update(added_metrics(self._callbacks, info))

    def _evaluated(self, event: EvalDone, now_s: float) -> None:
        if event.metrics is not None:
            call_all(self._callbacks, "on_eval", EvalInfo(event.version, self._meter.eval_metrics))

    def _saved(self, event: Saved, now_s: float) -> None:
        call_all(self._callbacks, "on_checkpoint", event)

    def _collector_down(self, event: CollectorDown, now_s: float) -> None:
        self._num_lost += 1
        info = CollectorLostInfo(event.collector, event.reason, self._num_lost)
        call_all(self._callbacks, "on_collector_lost", info)

    def _end(self, event: Restarting | Finished, now_s: float) -> None:
        if self._started_s is None:
            return
        is_restart = isinstance(event, Restarting)
        info = FinishInfo(
            version=self._version if is_restart else event.version,
            reason=event.reason.splitlines()[0] if event.reason else "",
            seconds=now_s - self._started_s,
            metrics=self._meter.metrics,
            error=event.error,
            restart=str(event) if is_restart else None,
            stopped=isinstance(event, Finished) and event.stopped,
        )
        finish_all(self._callbacks, info)


@contextmanager
def _attributed(callback: Callback, method: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the callback {type(callback).__qualname__}.{method}, which ended the run")
        raise
