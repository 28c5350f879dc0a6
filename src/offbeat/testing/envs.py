"""Environments that misbehave on command, to test what a run does about it.

Every fault has an id: ``offbeat.testing.envs:offbeat-test/Raise-v0`` and so on, in any process. With
``once``, the path of a file that does not exist yet, the fault happens a single time over all processes, so
that a replaced worker goes on.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.envs.registration import registry
from numpy.typing import NDArray

Fault = Literal["none", "raise", "hang", "nan", "shape", "dtype", "reward", "exit", "kill", "slow"]
FAULTS: dict[str, Fault] = {
    "Healthy": "none",
    "Raise": "raise",
    "Hang": "hang",
    "NaN": "nan",
    "WrongShape": "shape",
    "WrongDtype": "dtype",
    "NaNReward": "reward",
    "Exit": "exit",
    "Kill": "kill",
    "Slow": "slow",
}
"""Names in ids to faults: ``offbeat-test/WrongShape-v0`` has the fault ``shape``."""
EXIT_CODE = 3
"""What a process returns when the fault ``exit`` ends it."""
_MAX_HANG_S = 3600.0
_OBS_SIZE = 4
_NUM_ACTIONS = 2


class FaultError(RuntimeError):
    """What the fault ``raise`` raises."""


def register_test_envs() -> None:
    """Make the faulty environments known to Gymnasium as ``offbeat-test/NAME-v0``; calling twice is fine."""
    for name, fault in FAULTS.items():
        env_id = f"offbeat-test/{name}-v0"
        if env_id not in registry:
            gymnasium.register(env_id, entry_point="offbeat.testing.envs:FaultyEnv", kwargs={"fault": fault})


class FaultyEnv(gymnasium.Env[NDArray[Any], np.int64]):
    """An easy task, with one fault at the ``at_step``-th step this object takes (the first is 1).

    The task: observations are ``[4]`` float32 noise, reward 1 for action 1 when the first number is positive
    and for action 0 when it is not; episodes have ``length`` steps. The fault ``slow`` sleeps at every step
    for a log-normal time with median ``sleep_s`` and shape ``sleep_sigma``, drawn apart from the task; with
    ``once`` only those environments do that live in the first process to reach ``at_step``: one slow worker.

    Example: ``FaultyEnv("kill", at_step=100, once="/tmp/killed")``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        fault: Fault = "none",
        at_step: int = 1,
        once: str | None = None,
        length: int = 20,
        sleep_s: float = 0.001,
        sleep_sigma: float = 1.0,
    ) -> None:
        if fault not in FAULTS.values():
            raise ValueError(f"fault must be one of {sorted(FAULTS.values())}, not {fault!r}")
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (_OBS_SIZE,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(_NUM_ACTIONS)
        self._fault = fault
        self._at_step = at_step
        self._once = once
        self._length = length
        self._sleep = (sleep_s, sleep_sigma)
        self._sleep_rng = np.random.default_rng(0)
        self._is_slow: bool | None = None if once is not None else True
        self._num_steps = 0
        self._episode_steps = 0
        self._obs = np.zeros(_OBS_SIZE, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode; a seed also seeds the sleeping times."""
        super().reset(seed=seed)
        if seed is not None:
            self._sleep_rng = np.random.default_rng(seed)
        self._episode_steps = 0
        return self._draw(), {}

    def step(self, action: int | np.int64) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Go one step on, or wrong."""
        self._num_steps += 1
        self._episode_steps += 1
        reward = float((self._obs[0] > 0) == bool(action))
        obs = self._draw()
        is_over = self._episode_steps >= self._length
        if self._fault == "slow":
            if self._is_one_to_doze():
                self._doze()
        elif self._num_steps == self._at_step and self._is_due():
            obs, reward = self._go_wrong(obs, reward)
        return obs, reward, is_over, False, {}

    def _draw(self) -> NDArray[np.float32]:
        self._obs = self.np_random.standard_normal(_OBS_SIZE, np.float32)
        return self._obs.copy()

    def _is_one_to_doze(self) -> bool:
        if self._is_slow is None and self._num_steps >= self._at_step:
            assert self._once is not None
            self._is_slow = _claimed_by_this_process(self._once)
        return bool(self._is_slow)

    def _doze(self) -> None:
        median_s, sigma = self._sleep
        time.sleep(median_s * float(self._sleep_rng.lognormal(0.0, sigma)))

    def _is_due(self) -> bool:
        if self._fault == "none" or self._once is None:
            return self._fault != "none"
        try:
            os.close(os.open(self._once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _go_wrong(self, obs: NDArray[np.float32], reward: float) -> tuple[NDArray[Any], float]:
        match self._fault:
            case "raise":
                raise FaultError(f"asked to raise at step {self._at_step}")
            case "hang":
                _hang()
            case "exit":
                os._exit(EXIT_CODE)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "nan":
                obs[1] = np.nan
            case "shape":
                return obs[:-1], reward
            case "dtype":
                return obs.astype(np.float64), reward
            case "reward":
                return obs, float("nan")
        return obs, reward


def _claimed_by_this_process(path: str) -> bool:
    """Whether this process was the first to ask."""
    try:
        with open(path, "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    with open(path) as file:
        return file.read() == str(os.getpid())


def _hang() -> None:
    deadline = time.monotonic() + _MAX_HANG_S
    while time.monotonic() < deadline:
        time.sleep(0.05)


register_test_envs()
