"""Where metrics go besides ``events.jsonl``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import ConfigError
from offbeat.observe.callbacks import MetricValue


class Sink(Protocol):
    """Takes metrics keyed by version. Values that are not finite numbers may be left out."""

    def write(self, version: int, metrics: Mapping[str, MetricValue]) -> None:
        """Take the metrics of a round, or of an evaluation of ``version``."""
        ...

    def close(self) -> None:
        """Hand over what is still held back; a second call does nothing."""
        ...


class SinkList:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = tuple(sinks)

    def write(self, version: int, metrics: Mapping[str, MetricValue]) -> None:
        """Write to each."""
        for sink in self.sinks:
            sink.write(version, metrics)

    def close(self) -> None:
        """Close each."""
        for sink in self.sinks:
            sink.close()


def make_sinks(
    directory: Path,
    *,
    tensorboard: bool | None = None,
    use_wandb: bool = False,
    wandb_project: str = "offbeat",
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resumed_from: int | None = None,
) -> SinkList:
    """Open the sinks that the section ``observe`` asks for, for the run in ``directory``.

    ``tensorboard`` None means: when it is installed. ``config`` is shown by W&B beside the curves.
    """
    sinks: list[Sink] = []
    if _wants_tensorboard(tensorboard):
        from offbeat.observe.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(directory / "tensorboard", resumed_from))
    if use_wandb:
        from offbeat.observe.wandb import WandbSink

        sinks.append(WandbSink(directory, wandb_project, name, config))
    return SinkList(sinks)


def _wants_tensorboard(asked: bool | None) -> bool:
    installed = importlib.util.find_spec("tensorboard") is not None
    if asked and not installed:
        raise ConfigError(
            "observe.tensorboard is true, but TensorBoard is not installed: "
            "run `pip install 'offbeat[tensorboard]'` or set observe.tensorboard to null"
        )
    return installed and asked is not False
