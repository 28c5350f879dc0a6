"""A strictly synchronous run, step by step: collect, stop collecting, train, publish, and again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from offbeat.config.loader import ConfigSource
from offbeat.config.models import RunConfig
from offbeat.errors import ConfigError, OffbeatError, RunStopped
from offbeat.observe.callbacks import Callback
from offbeat.pacing.config import not_stepwise
from offbeat.pacing.coordinator import Coordinator
from offbeat.pacing.events import GatesSet, StopRequested
from offbeat.run.directory import Overrides, joined
from offbeat.run.restarts import OpenRun
from offbeat.run.start import (
    PreparedRun,
    Result,
    load,
    load_for_resume,
    open_run,
    prepare_resume,
    prepare_run,
    remove_dir_if_refused,
    result_of,
)
from offbeat.runtime.clock import SYSTEM_CLOCK, Clock
from offbeat.types import Metrics

_MOMENT_S = 0.01


class SyncRun:
    """A run at k = 0 that collects and trains on request. The rest is as in ``offbeat.train``.

    It is used in a with-block, by one thread. A run that is asked to end (Ctrl-C, ``info.stop``) leaves the
    block; leaving it early ends the run with a checkpoint. ``result`` is there once the block is left.
    ``clock`` drives the run; tests bring their own.

    Example::

        with offbeat.SyncRun("cartpole-ppo", rounds=50) as run:
            while not run.finished:
                run.enable_data_collection()
                while not run.should_sync_update():
                    ...  # or run.wait()
                run.disable_data_collection()
                metrics = run.sync_update()
        print(run.result.eval_return)
    """

    def __init__(
        self,
        recipe: ConfigSource,
        *,
        rounds: int | None = None,
        seed: int | None = None,
        overrides: Overrides | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        chosen = joined(overrides, {"run.rounds": rounds, "run.seed": seed})
        config = load(recipe, chosen)
        self._prepare(config, callbacks, clock, lambda: prepare_run(recipe, chosen, config, clock))

    @classmethod
    def resume(
        cls,
        run_dir: str | Path,
        *,
        overrides: Overrides | None = None,
        callbacks: Sequence[Callback] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> Self:
        """Continue a run step by step from its newest good checkpoint; see ``offbeat.resume``."""
        config = load_for_resume(run_dir, overrides or ())
        run = cls.__new__(cls)
        run._prepare(config, callbacks, clock, lambda: prepare_resume(run_dir, overrides or (), config))
        return run

    def _prepare(
        self,
        config: RunConfig,
        callbacks: Sequence[Callback],
        clock: Clock,
        prepare: Callable[[], PreparedRun],
    ) -> None:
        if (degree := config.async_training.off_policy_degree) != 0:
            raise ConfigError(not_stepwise(degree))
        self._prepare_run = prepare
        self._clock = clock
        self._callbacks = tuple(callbacks)
        self._stack = contextlib.ExitStack()
        self._prepared: PreparedRun | None = None
        self._open: OpenRun | None = None
        self._is_over = False
        self._gates = GatesSet(collect=False, until=0)
        self._has_chosen = False  # to enable or disable data collection
        self._has_asked_in_vain = False  # since the gates were set
        self._stopped: RunStopped | None = None
        self._result: Result | None = None

    # ------------------------------------------------------------ life

    def __enter__(self) -> Self:
        if self._open is not None:
            raise OffbeatError("a SyncRun is used once: make another one, or SyncRun.resume(run_dir)")
        self._prepared = prepared = self._prepare_run()
        with contextlib.ExitStack() as stack:
            with remove_dir_if_refused(prepared):
                run = open_run(prepared, self._callbacks, self._clock, stepwise=True)
                self._open = stack.enter_context(run)
            self._deal_with_requests()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        run, prepared = self._open, self._prepared
        assert run is not None
        assert prepared is not None
        self._is_over = True
        if error is not None and error is not self._stopped:
            self._stack.__exit__(kind, error, trace)
            return False
        with self._stack:
            if not (pace := run.pace).is_ending:
                rounds = f"{pace.version} of {pace.rounds} rounds"
                run.ask(StopRequested(f"its with-block was left after {rounds}"))
            report = run.complete()
        self._result = result_of(prepared, report, run.signals)
        return True

    @property
    def result(self) -> Result:
        """Outcome of the run, as ``offbeat.train`` returns it; there once the with-block is left."""
        if self._result is None:
            raise OffbeatError(
                "the run has no result: it has one once its with-block is left without an error"
            )
        return self._result

    # ------------------------------------------------------------ steps

    @property
    def finished(self) -> bool:
        """True when no round is left to train: all are, the goal is reached, or the run was asked to end."""
        return self._is_over or self._coordinator.is_ending

    @property
    def version(self) -> int:
        """Rounds trained so far."""
        return self._coordinator.version

    def enable_data_collection(self) -> None:
        """Let collectors start new segments, with the weights that were published last."""
        self._going_on()
        self._has_chosen = True
        self._set_gates(self._gates._replace(collect=True))

    def disable_data_collection(self) -> None:
        """Let collectors start no new segments; those under way come in and wait to be trained."""
        self._has_chosen = True
        if not self._coordinator.is_ending:
            self._set_gates(self._gates._replace(collect=False))

    @property
    def collection_enabled(self) -> bool:
        """True while collectors may start new segments."""
        return self._gates.collect

    def should_sync_update(self) -> bool:
        """Return True when all segments of the next round are here, so that `sync_update` can train it.

        Takes in what has arrived, and waits up to 10 ms for it: a loop that only asks ends, too. Asking again
        when nothing would ever come is an error, but for a run that has neither enabled nor disabled data
        collection yet: it is enabled then.
        """
        run = self._current()
        if self._is_ready():
            return True
        if (error := self._never_ready()) is None:
            run.step(_MOMENT_S)
            return self._is_ready()
        if not self._has_asked_in_vain:
            self._has_asked_in_vain = True
            return False
        if self._has_chosen or self.finished:
            raise error
        self.enable_data_collection()
        return self._is_ready()

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Continue until the next round can be trained, at most ``timeout_s``; return True if it can.

        An error when nothing would ever come, because data collection is disabled.
        """
        run, until_s = self._going_on(), self._clock.now_s() + timeout_s
        while not self._is_ready():
            if (error := self._never_ready()) is not None:
                raise error
            left_s = until_s - self._clock.now_s()
            run.step(max(left_s, 0.0))
            self._going_on()
            if left_s <= 0:
                break
        return self._is_ready()

    def sync_update(self) -> Metrics:
        """Train the next round on what has come in, publish its weights, and return its metrics."""
        run = self._going_on()
        if not self._is_ready():
            raise OffbeatError(
                f"round {self.version} cannot be trained yet: {self._coordinator.waiting_for()}. "
                "Call wait() first, or ask should_sync_update()"
            )
        target = self.version + 1
        self._set_gates(self._gates._replace(until=target))
        while not self._has_trained(target):
            run.step()
        self._deal_with_requests()
        return run.metrics

    def _is_ready(self) -> bool:
        return self._coordinator.can_train(self._clock.now_s())

    def _never_ready(self) -> OffbeatError | None:
        """Return the error to raise for waiting when nothing would ever come."""
        if self._coordinator.is_ending:
            return self._stop()
        if self._coordinator.is_paused and not self._current().has_requests:
            return OffbeatError(f"nothing to wait for: {self._coordinator.waiting_for()}")
        return None

    def _has_trained(self, version: int) -> bool:
        coordinator = self._coordinator
        if coordinator.version >= version:
            return coordinator.finished or not coordinator.is_publishing
        if coordinator.finished:
            raise self._stop()
        return False

    # ------------------------------------------------------------ what they share

    @property
    def _coordinator(self) -> Coordinator:
        pace = self._current().pace
        assert isinstance(pace, Coordinator)
        return pace

    def _current(self) -> OpenRun:
        """Return the run, from the beginning of its with-block to the end."""
        if self._open is None or self._prepared is None:
            raise OffbeatError('a SyncRun goes in a with-block: `with offbeat.SyncRun("...") as run:`')
        if self._is_over:
            directory = str(self._prepared.run_dir)
            raise OffbeatError(f"the run has ended: go on with SyncRun.resume({directory!r}), or a new one")
        return self._open

    def _going_on(self) -> OpenRun:
        """The run, while it has a round to train."""
        run = self._current()
        if self._coordinator.is_ending:
            raise self._stop()
        return run

    def _stop(self) -> OffbeatError:
        """Return the error to raise when no round is left: a misuse, unless the run was asked to end."""
        coordinator = self._coordinator
        if coordinator.version >= coordinator.rounds:
            return OffbeatError(f"all {coordinator.version} rounds are trained: go on while not run.finished")
        self._stopped = self._stopped or RunStopped("the run was asked to end")
        return self._stopped

    def _set_gates(self, gates: GatesSet) -> None:
        self._gates, self._has_asked_in_vain = gates, False
        self._current().ask(gates)

    def _deal_with_requests(self) -> None:
        """Let the run take in what was asked of it meanwhile, so that `finished` is true at once."""
        run = self._current()
        while run.has_requests:
            run.step()
