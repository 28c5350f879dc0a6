"""Settings with which a run that has reached its end trains on."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.cli.history import RunHistory, read_history
from offbeat.errors import ConfigError

_EPISODES = 100
_HUGE = 1e300


@dataclass(frozen=True, slots=True)
class Goals:
    """Settings of a run that end it; None where one is not set or not known."""

    rounds: int | None = None
    stop_return: float | None = None
    stop_eval_return: float | None = None


def resume_command(run_dir: str, metrics: Mapping[str, object], version: int, goals: Goals) -> str:
    """Return the command that trains a run on, with the settings without which it would train nothing.

    ``metrics`` are those of the last round and of the last evaluation.
    """
    settings = _needed(metrics, version, goals)
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
    goals = Goals(settings.rounds, settings.stop_return, settings.stop_eval_return)
    missing = _needed(last_metrics(history), history.version, goals)
    if not missing or not _is_whole(Path(run), history.version):
        return
    why = []
    if history.version >= settings.rounds:
        why.append(f"has trained {history.version:,} rounds already, and run.rounds is {settings.rounds:,}")
    reached = {"run.stop_return": goals.stop_return, "run.stop_eval_return": goals.stop_eval_return}
    why += [f"has reached {name} = {goal:g}" for name, goal in reached.items() if f"{name}=null" in missing]
    replaced = {one.partition("=")[0] for one in missing}
    if "run.rounds" in replaced:
        replaced.add("run.total_timesteps")  # beside run.rounds, the shorter of the two would hold
    kept = [one for one in overrides if _full_name(one) not in replaced]
    command = " ".join(["offbeat resume", *map(shlex.quote, [run, *kept, *missing])])
    raise ConfigError(f"nothing is left to train: {run} {' and '.join(why)}. To train on: {command}")


def last_metrics(history: RunHistory) -> dict[str, object]:
    """Return the metrics of the last round and of the last evaluation of a run."""
    evaluation = history.evaluation or {}
    return {**history.metrics, **evaluation.get("metrics", {})}


def _needed(metrics: Mapping[str, object], version: int, goals: Goals) -> list[str]:
    settings = []
    if goals.rounds is not None and version >= goals.rounds:
        settings.append(f"run.rounds={2 * version}")
    episodes, mean = (
        _number(metrics.get(f"rollout/{name}")) for name in ("total_episodes", "return_mean_100")
    )
    if goals.stop_return is not None and episodes >= _EPISODES and mean >= goals.stop_return:
        settings.append("run.stop_return=null")
    evaluated = _number(metrics.get("eval/return_mean"))
    if goals.stop_eval_return is not None and evaluated >= goals.stop_eval_return:
        settings.append("run.stop_eval_return=null")
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
