"""Metrics to Weights & Biases; without a network or an account they stay on the disk until synced."""

from __future__ import annotations

import importlib
import logging
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import ConfigError
from offbeat.reading import DESCRIPTION_BYTES, read_file

_log = logging.getLogger(__name__)


class WandbSink:
    """One W&B run per run directory: a resumed run continues the same W&B run.

    W&B reads ``WANDB_MODE``, ``WANDB_API_KEY`` and its other variables as usual. When it cannot reach its
    server or has no account, the run is written offline, to be uploaded later with ``wandb sync``.
    """

    def __init__(
        self, directory: Path, project: str, name: str | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        wandb = import_wandb()
        settings: dict[str, Any] = {
            "project": project,
            "name": name or directory.name,
            "dir": str(directory),
            "id": _run_id(directory),
            "resume": "allow",
            "config": dict(config or {}),
        }
        try:
            self._run = wandb.init(**settings)
        except wandb.errors.Error as error:
            _log.warning(
                "W&B goes on offline (%s); upload later with `wandb sync %s/wandb`", error, directory
            )
            self._run = wandb.init(**settings, mode="offline")
        # Results of evaluations come late and out of order, which W&B's own step counter would refuse.
        self._run.define_metric("*", step_metric="version")

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Log every finite number."""
        kept = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._run.log({**kept, "version": version})

    def close(self) -> None:
        """Finish the W&B run; a second call does nothing."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def import_wandb() -> Any:
    """The package; ConfigError with the fix where it is not installed."""
    # By name: this module is called wandb as well, and an import statement reads as if it meant itself.
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "observe.use_wandb is true, but wandb is not installed: "
            "run `pip install 'offbeat[wandb]'` or set observe.use_wandb to false"
        ) from error


def _run_id(directory: Path) -> str:
    path = directory / "wandb_id"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8) + "\n")
    return read_file(path, DESCRIPTION_BYTES).decode(errors="replace").strip()
