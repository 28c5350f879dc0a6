"""Settings with which a run that has reached its end trains on."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.cli.history import RunHistory, read_history
from offbeat.errors import ConfigError

_EPISODES = 100
_HUGE = 1e300


def resume_command(
    run_dir: str, metrics: Mapping[str, object], version: int, rounds: int | None, stop_return: float | None
) -> str:
    """Return the command that trains a run on, with the settings without which it would train nothing."""
    settings = _needed(metrics, version, rounds, stop_return)
    return " ".join([f"offbeat resume {shlex.quote(run_dir)}", *settings])


def refuse_if_done(run: str, overrides: Sequence[str]) -> None:
    """Raise ConfigError when a resume would train nothing: the run has ended at its last round or its goal.

    A run that was killed in its last evaluation is not refused: that evaluation is still to come.
    """
    history = _history_of_ended(Path(run))
    if history is None:
        return
    from offbeat.run.start import load_for_resume

    settings = load_for_resume(run, overrides).run
    missing = _needed(history.metrics, history.version, settings.rounds, settings.stop_return)
    if not missing or not _is_whole(Path(run), history.version):
        return
    why = []
    if history.version >= settings.rounds:
        why.append(f"has trained {history.version:,} rounds already, and run.rounds is {settings.rounds:,}")
    if any(one.startswith("run.stop_return") for one in missing):
        why.append(f"has reached run.stop_return = {settings.stop_return:g}")
    replaced = {one.partition("=")[0] for one in missing}
    kept = [one for one in overrides if _full_name(one) not in replaced]
    command = " ".join(["offbeat resume", *map(shlex.quote, [run, *kept, *missing])])
    raise ConfigError(f"nothing is left to train: {run} {' and '.join(why)}. To train on: {command}")


def _needed(
    metrics: Mapping[str, object], version: int, rounds: int | None, stop_return: float | None
) -> list[str]:
    settings = []
    if rounds is not None and version >= rounds:
        settings.append(f"run.rounds={2 * version}")
    episodes, mean = (
        _number(metrics.get(f"rollout/{name}")) for name in ("total_episodes", "return_mean_100")
    )
    if stop_return is not None and episodes >= _EPISODES and mean >= stop_return:
        settings.append("run.stop_return=null")
    return settings


def _number(value: object) -> float:
    """Return a metric as a number; NaN for one that is not known."""
    return float(value) if isinstance(value, int | float) and abs(value) < _HUGE else math.nan


def _full_name(override: str) -> str:
    """Return the key of an override; those of the section ``run`` may be given without it."""
    key = override.partition("=")[0].strip()
    return {"num_iterations": "run.rounds"}.get(key, key if "." in key else f"run.{key}")


def _history_of_ended(directory: Path) -> RunHistory | None:
    """Return the history of a run that has ended well; None for any other directory."""
    if not (directory / "manifest.json").exists() or not (directory / "events.jsonl").exists():
        return None
    history = read_history(directory / "events.jsonl")
    return None if history.finish is None or history.finish.get("failed") else history


def _is_whole(directory: Path, version: int) -> bool:
    """Return True if the run's newest good checkpoint is of this version: no round is to be trained again."""
    from offbeat.checkpoint import CheckpointManager

    manager = CheckpointManager(directory / "checkpoints")
    return bool(manager.versions()) and manager.load().version == version
