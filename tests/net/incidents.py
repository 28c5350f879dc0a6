"""Four incidents on one recipe: what a run does about each is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import offbeat
from offbeat.observe.callbacks import RoundInfo
from tests.callbacks import EndAt
from tests.net.recording import Record, Witness, record_of
from tests.net.small import overrides

RECIPE = "cartpole-ppo"
ROUNDS = 6
AT_STEP = 3 * 16 + 8
"""Steps of an environment until something goes wrong: in the fourth round, after a checkpoint."""


class Faulty(CartPoleEnv):
    """CartPole that goes wrong a single time over all processes: it raises, or pays out of all proportion."""

    def __init__(self, once: str, fault: str) -> None:
        super().__init__()
        self._once, self._fault = once, fault
        self._num_steps = 0

    def step(self, action: Any) -> Any:
        self._num_steps += 1
        obs, reward, *rest = super().step(action)
        if self._num_steps == AT_STEP and _claimed(self._once):
            if self._fault == "raise":
                raise RuntimeError("asked to raise")
            reward = 1e30
        return obs, reward, *rest


def _claimed(path: str) -> bool:
    """Make the file; False when it is there already."""
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Kill(offbeat.Callback):
    """Kills the process of the first collector after a round."""

    def __init__(self, version: int) -> None:
        self._version = version

    def on_round(self, info: RoundInfo) -> None:
        if info.version == self._version:
            first = [child for child in psutil.Process().children() if _is_first(child)]
            assert len(first) == 1, first
            first[0].kill()


def _is_first(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1:] == ["worker_0"]
    except psutil.Error:  # the remains of another one
        return False


def killed(directory: Path) -> Record:
    """A collector is killed by the system."""
    witness = Witness()
    _train(directory, {}, witness, Kill(3))
    return record_of(directory, witness)


def raised(directory: Path) -> Record:
    """A collector raises, once. There is only one, so that it is always the same."""
    witness = Witness()
    _train(directory, {**_faulty(directory, "raise"), "runtime.num_workers": 1}, witness)
    return record_of(directory, witness)


def diverged(directory: Path) -> Record:
    """The learner's loss is not finite, and the run goes back."""
    witness = Witness()
    _train(directory, {**_faulty(directory, "pay"), "run.on_nan": "rollback"}, witness)
    return record_of(directory, witness)


def resumed(directory: Path) -> Record:
    """A run is stopped half-way and resumed."""
    witness = Witness()
    _train(directory, {}, witness, EndAt(3))
    offbeat.resume(directory, callbacks=[witness])
    return record_of(directory, witness)


INCIDENTS: dict[str, Callable[[Path], Record]] = {
    "killed": killed,
    "raised": raised,
    "diverged": diverged,
    "resumed": resumed,
}


def record_incident(name: str, directory: Path) -> Record:
    """Digest, rounds, metrics of what was learnt, and the records of the incident in their order."""
    return own_records(INCIDENTS[name](directory))


def own_records(record: Record) -> Record:
    """The part that tells of the incident: the rest may come in another order each time.

    Of the health of parts that is the first collector's, which the incidents are about.
    """
    rounds = [line for line in record["schedule"] if json.loads(line)["kind"] == "round"]
    learnt = {
        version: {name: value for name, value in metrics.items() if name.startswith("learn/")}
        for version, metrics in record["metrics"].items()
    }
    return {
        "digest": record["digest"],
        "schedule": rounds,
        "metrics": learnt,
        "callbacks": record["callbacks"],
        "journal": [entry for entry in record["journal"] if entry.get("component") in (None, "collector_0")],
    }


def _train(directory: Path, changes: dict[str, Any], *callbacks: offbeat.Callback) -> None:
    settings = {
        **overrides(RECIPE),
        "runtime.kind": "processes",
        "run.dir": str(directory),
        "run.rounds": ROUNDS,
        "run.restart_delay_s": 0.0,
        "eval.interval_rounds": None,
        "eval.at_end": False,
        **changes,
    }
    offbeat.train(RECIPE, overrides=settings, callbacks=callbacks)


def _faulty(directory: Path, fault: str) -> dict[str, Any]:
    """Settings of the faulty environment; the evaluator's never gets that far."""
    once = str(directory.with_name("happened"))
    return {
        "env.id": f"{__name__}:Faulty",
        "env.kwargs": {"once": once, "fault": fault},
        "env.max_episode_steps": 40,
    }
