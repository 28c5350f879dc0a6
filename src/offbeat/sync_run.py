"""A strictly synchronous run, step by step: collect, stop collecting, train, publish, and again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

from offbeat import launch
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError, OffbeatError, RunStopped
from offbeat.launch import Opened, Overrides, Result, Start
from offbeat.observe.callbacks import Callback, MetricValue
from offbeat.pacing.config import not_stepwise
from offbeat.pacing.events import GatesSet, StopRequested
from offbeat.running import OpenRun


class SyncRun:
    """A run at k = 0 that collects and trains when it is told to. The rest is as in ``offbeat.train``.

    It is used in a with-block, by one thread. A run that is asked to end (Ctrl-C, ``info.stop``) leaves the
    block; leaving it early ends the run with a checkpoint. ``result`` is there once the block is left.

    Example::

        with offbeat.SyncRun("cartpole-ppo", rounds=50) as run:
            while not run.finished:
                run.enable_data_collection()
                while not run.should_sync_update():
                    run.wait()
                run.disable_data_collection()
                metrics = run.sync_update()
        print(run.result.eval_return)
    """

    def __init__(
        self,
        recipe: str | Path | RunConfig,
        *,
        rounds: int | None = None,
        seed: int | None = None,
        overrides: Overrides | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        chosen = launch.joined(overrides, {"run.rounds": rounds, "run.seed": seed})
        config = launch.load(recipe, chosen)
        self._prepare(config, callbacks, lambda: launch.start_anew(recipe, chosen, config))

    @classmethod
    def resume(
        cls, run_dir: str | Path, *, overrides: Overrides | None = None, callbacks: Sequence[Callback] = ()
    ) -> Self:
        """Go on, step by step, with a run from its newest good checkpoint; see ``offbeat.resume``."""
        config = launch.load_again(run_dir, overrides or ())
        run = cls.__new__(cls)
        run._prepare(config, callbacks, lambda: launch.start_again(run_dir, overrides or (), config))
        return run

    def _prepare(self, config: RunConfig, callbacks: Sequence[Callback], start: Callable[[], Start]) -> None:
        if (degree := config.async_training.off_policy_degree) != 0:
            raise ConfigError(not_stepwise(degree))
        self._start = start
        self._callbacks = tuple(callbacks)
        self._stack = contextlib.ExitStack()
        self._opened: Opened | None = None
        self._is_over = False
        self._gates = GatesSet(collect=False, until=0)
        self._stopped: RunStopped | None = None
        self._result: Result | None = None

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        if self._opened is not None:
            raise OffbeatError("a SyncRun is used once: make another one, or SyncRun.resume(run_dir)")
        start = self._start()
        with contextlib.ExitStack() as stack:
            with launch.without_trace(start):
                self._opened = stack.enter_context(launch.opened(start, self._callbacks, stepwise=True))
            self._deal_with_requests()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._opened is not None
        self._is_over = True
        if error is not None and error is not self._stopped:
            self._stack.__exit__(kind, error, trace)
            return False
        run = self._opened.run
        with self._stack:
            if not (coordinator := run.coordinator).is_ending:
                rounds = f"{coordinator.version} of {coordinator.config.rounds} rounds"
                run.ask(StopRequested(f"its with-block was left after {rounds}"))
            while not run.finished:
                run.step()
            report = run.report()
        self._result = self._opened.result(report)
        return True

    @property
    def result(self) -> Result:
        """How the run ended, as ``offbeat.train`` returns it; there once the with-block is left."""
        if self._result is None:
            raise OffbeatError(
                "the run has no result: it has one once its with-block is left without an error"
            )
        return self._result

    # ------------------------------------------------------------ steps

    @property
    def finished(self) -> bool:
        """Whether no round is left to train: all are, the goal is reached, or the run was asked to end."""
        return self._is_over or self._current().coordinator.is_ending

    @property
    def version(self) -> int:
        """Rounds trained so far."""
        return self._current().coordinator.version

    def enable_data_collection(self) -> None:
        """Let collectors begin new segments, with the weights that were published last."""
        self._going_on()
        self._set_gates(collect=True)

    def disable_data_collection(self) -> None:
        """Let collectors begin no new segments; those under way come in and wait to be trained."""
        if not self._current().coordinator.is_ending:
            self._set_gates(collect=False)

    def should_sync_update(self) -> bool:
        """Whether all that the next round needs has come in, so that `sync_update` can train it."""
        return self._current().coordinator.can_train(perf_counter())

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Let the run go on until the next round can be trained; whether it can, after ``timeout_s`` at most.

        An error when nothing would ever come, because data collection is disabled.
        """
        run, until_s = self._going_on(), perf_counter() + timeout_s
        while not self.should_sync_update():
            if run.coordinator.is_held and not run.has_requests:
                raise OffbeatError(f"nothing to wait for: {run.coordinator.waiting_for()}")
            left_s = until_s - perf_counter()
            run.step(max(left_s, 0.0))
            self._going_on()
            if left_s <= 0:
                break
        return self.should_sync_update()

    def sync_update(self) -> dict[str, MetricValue]:
        """Train the next round on what has come in, publish its weights, and return its metrics."""
        run = self._going_on()
        if not self.should_sync_update():
            raise OffbeatError(
                f"round {self.version} cannot be trained yet: {run.coordinator.waiting_for()}. "
                "Call wait() first, or ask should_sync_update()"
            )
        target = self.version + 1
        self._set_gates(until=target)
        while not self._has_trained(target):
            run.step()
        self._deal_with_requests()
        return run.metrics

    def _has_trained(self, version: int) -> bool:
        coordinator = self._current().coordinator
        if coordinator.version >= version:
            return coordinator.finished or not coordinator.is_publishing
        if coordinator.finished:
            raise self._stop()
        return False

    # ------------------------------------------------------------ what they share

    def _current(self) -> OpenRun:
        """The run, from the beginning of its with-block to the end."""
        if self._opened is None:
            raise OffbeatError('a SyncRun goes in a with-block: `with offbeat.SyncRun("...") as run:`')
        if self._is_over:
            directory = self._opened.start.run_dir
            raise OffbeatError(
                f"the run has ended: go on with SyncRun.resume({str(directory)!r}), or a new one"
            )
        return self._opened.run

    def _going_on(self) -> OpenRun:
        """The run, while it has a round to train."""
        run = self._current()
        if run.coordinator.is_ending:
            raise self._stop()
        return run

    def _stop(self) -> OffbeatError:
        """What to raise when no round is left: a misuse, unless somebody asked the run to end."""
        coordinator = self._current().coordinator
        if coordinator.version >= coordinator.config.rounds:
            return OffbeatError(f"all {coordinator.version} rounds are trained: go on while not run.finished")
        self._stopped = self._stopped or RunStopped("the run was asked to end")
        return self._stopped

    def _set_gates(self, collect: bool | None = None, until: int | None = None) -> None:
        before = self._gates
        collects = before.collect if collect is None else collect
        self._gates = GatesSet(collects, before.until if until is None else until)
        self._current().ask(self._gates)

    def _deal_with_requests(self) -> None:
        """Let the run take in what was asked of it meanwhile, so that `finished` is true at once."""
        run = self._current()
        while run.has_requests:
            run.step()
