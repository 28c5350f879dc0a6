"""Stable-Baselines3's PPO on the logged CartPole, with the settings that RL Baselines3 Zoo tuned for it.

Run by ``cartpole.py`` in a virtual environment of its own: ``python stable_baselines3_ppo.py SEED``. The
environments carry no Monitor: the log takes its place, and the peer is spared the cost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from logged_cartpole import make_logged_cartpole
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv


def linear(start: float) -> Callable[[float], float]:
    return lambda progress_remaining: progress_remaining * start


def main(seed: int) -> None:
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        DummyVecEnv([make_logged_cartpole] * 8),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=linear(1e-3),
        clip_range=linear(0.2),
        seed=seed,
        device="cpu",
    )
    model.learn(100_000)


if __name__ == "__main__":
    main(int(sys.argv[1]))
