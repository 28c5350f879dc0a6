"""An environment of your own, trained by a recipe: `env.id` names the class as `module:Class`.

From this folder the same works on the command line:
`offbeat train cartpole-ppo env.id=custom_env:Landing env.num_envs=16`.
"""

import argparse

import gymnasium
import numpy as np

import offbeat


class Landing(gymnasium.Env):
    """Bring a falling body to the ground softly: engine on or off, fuel is dear.

    Observations are height and speed (up is positive), actions 0 (off) and 1 (on). A landing is worth 1,
    less the speed of the impact and 0.01 for each step of the engine.
    """

    def __init__(self, gravity: float = 1.0, thrust: float = 2.0, step_s: float = 0.1) -> None:
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._gravity, self._thrust, self._step_s = gravity, thrust, step_s
        self._height = self._speed = 0.0
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        """Start somewhere high; all randomness comes from `self.np_random`, so that runs can be repeated."""
        super().reset(seed=seed)
        self._height, self._speed = float(self.np_random.uniform(3.0, 6.0)), 0.0
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        """One tenth of a second."""
        self.steps += 1
        self._speed += (self._thrust * int(action) - self._gravity) * self._step_s
        self._height += self._speed * self._step_s
        landed = self._height <= 0.0
        reward = (1.0 - abs(self._speed) if landed else 0.0) - 0.01 * int(action)
        return self._observation(), reward, landed, self.steps >= 200, {}

    def _observation(self):
        return np.array([self._height, self._speed], np.float32)


def main(rounds):
    result = offbeat.train(
        "cartpole-ppo",
        rounds=rounds,
        off_policy_degree=1,
        overrides={
            "env.id": "custom_env:Landing",
            "env.num_envs": 16,
            "env.kwargs": {"gravity": 1.2},
            "algorithm.num_steps": 128,
            "run.name": "landing",
        },
    )
    env, total, done = Landing(gravity=1.2), 0.0, False
    obs, _ = env.reset(seed=1)
    while not done:
        obs, reward, terminated, truncated, _ = env.step(result.policy.act(obs))
        total, done = total + reward, terminated or truncated
    how = "touched down" if terminated else "still in the air"
    print(f"{how} at speed {obs[1]:.2f} after {env.steps} steps, return {total:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    main(parser.parse_args().rounds)
