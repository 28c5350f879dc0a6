"""Sinks for metrics besides ``events.jsonl``."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offbeat.config.models import ObserveConfig
from offbeat.errors import ConfigError

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes metrics keyed by version. Values that are not finite numbers may be left out."""

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a round, or of an evaluation of ``version``."""
        ...

    def close(self) -> None:
        """Hand over what is still held back; a second call does nothing."""
        ...


class SinkList:
    """Several sinks as one. One that the disk fails is given up, and ``on_fault`` is called."""

    def __init__(self, sinks: Sequence[Sink] = (), on_fault: Callable[[str], None] = _log.warning) -> None:
        self.sinks = tuple(sinks)
        self._on_fault = on_fault

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Write to each."""
        for sink in self.sinks:
            try:
                sink.write(version, metrics)
            except OSError as error:
                self._give_up(sink, error)

    def close(self) -> None:
        """Close each."""
        for sink in self.sinks:
            try:
                sink.close()
            except OSError as error:
                self._give_up(sink, error)

    def _give_up(self, sink: Sink, error: OSError) -> None:
        # Half a record may be in its file already: whatever came after it could not be read.
        self.sinks = tuple(other for other in self.sinks if other is not sink)
        with contextlib.suppress(OSError):
            sink.close()
        self._on_fault(f"{type(sink).__name__} gets no more metrics in this start of the run: {error}")


def make_sinks(
    directory: Path,
    *,
    tensorboard: bool | None = None,
    use_wandb: bool = False,
    wandb_project: str = "offbeat",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resumed_from: int | None = None,
    on_fault: Callable[[str], None] = _log.warning,
) -> SinkList:
    """Open the sinks that the section ``observe`` asks for, for the run in ``directory``.

    ``tensorboard`` None means: when it is installed. ``config`` is shown by W&B beside the curves.
    ``on_fault`` is called for a sink that is given up because the disk failed it.
    """
    sinks: list[Sink] = []
    if _wants_tensorboard(tensorboard):
        from offbeat.observe.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(directory / "tensorboard", resumed_from))
    if use_wandb:
        from offbeat.observe.wandb import WandbSink

        sinks.append(WandbSink(directory, wandb_project, name, config))
    return SinkList(sinks, on_fault)


def check_sinks(observe: ObserveConfig) -> None:
    """Refuse what is asked for and not installed, naming the fix, before anything runs."""
    if observe.tensorboard.serve and not _has_tensorboard():
        raise ConfigError(
            "observe.tensorboard.serve is true, but TensorBoard is not installed: "
            'run `pip install "offbeat[tensorboard]"` or set observe.tensorboard.serve to false'
        )
    _wants_tensorboard(observe.tensorboard.enabled)
    if observe.use_wandb:
        from offbeat.observe.wandb import import_wandb

        import_wandb()


def _wants_tensorboard(asked: bool | None) -> bool:
    installed = _has_tensorboard()
    if asked and not installed:
        raise ConfigError(
            "observe.tensorboard is true, but TensorBoard is not installed: "
            "run `pip install 'offbeat[tensorboard]'` or set observe.tensorboard to null"
        )
    return installed and asked is not False


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None
