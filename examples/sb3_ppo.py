"""Stable-Baselines3's PPO, asynchronous: its own rollouts, its own train(), offbeat between them.

Needs `pip install 'offbeat[sb3]'`. Collectors and learner each hold a whole SB3 model. A collector fills its
model's rollout buffer and sends it; the learner puts the buffers side by side into its own and trains.
"""

import argparse

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from offbeat import Pipeline, Segment
from offbeat.roles import PerWorker
from offbeat.types import Episodes

ENV_ID, NUM_WORKERS, ENVS_PER_WORKER, NUM_STEPS = "CartPole-v1", 2, 4, 32
ARRAYS = ("observations", "actions", "values", "log_probs", "advantages", "returns")


def linear(start):
    return lambda progress_remaining: start * progress_remaining


def make_model(num_envs, seed):
    """A PPO model with the settings that RL Zoo tuned for CartPole."""
    torch.set_num_threads(1)
    return PPO(
        "MlpPolicy",
        make_vec_env(ENV_ID, num_envs, seed=seed % 2**31),
        n_steps=NUM_STEPS,
        batch_size=NUM_STEPS * num_envs,
        n_epochs=20,
        gamma=0.98,
        gae_lambda=0.8,
        ent_coef=0.0,
        learning_rate=linear(0.001),
        clip_range=linear(0.2),
        seed=seed % 2**31,
        device="cpu",
    )


def to_numpy(policy):
    return {name: tensor.numpy().copy() for name, tensor in policy.state_dict().items()}


def load_numpy(policy, weights):
    policy.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})


class Collector:
    """Lives in a worker: its model's environments and rollout buffer."""

    def __init__(self, context):
        self.model = make_model(ENVS_PER_WORKER, context.seed)
        _, self.callback = self.model._setup_learn(total_timesteps=1)

    def collect(self, ticket, weights):
        load_numpy(self.model.policy, weights)
        torch.manual_seed(ticket.seed)
        self.model.ep_info_buffer.clear()
        buffer = self.model.rollout_buffer
        self.model.collect_rollouts(self.model.env, self.callback, buffer, NUM_STEPS)
        data = {name: getattr(buffer, name).copy() for name in ARRAYS}
        returns, lengths = ([ended[key] for ended in self.model.ep_info_buffer] for key in ("r", "l"))
        units = {"env_steps": NUM_STEPS * ENVS_PER_WORKER}
        episodes = Episodes(tuple(returns), tuple(lengths))
        return Segment(ticket, data, np.array([ticket.version]), units, episodes)

    def state_dict(self):
        """None: SB3's environments cannot give their state, so a replaced collector starts new episodes."""
        return None

    def load_state_dict(self, state):
        """Never called, since there is no state."""


class Learner:
    """Lives in the driver: SB3's optimizer and its train()."""

    def __init__(self, rounds, seed):
        self.model = make_model(NUM_WORKERS * ENVS_PER_WORKER, seed)
        self.model._setup_learn(total_timesteps=1)
        self.rounds, self.trained = rounds, 0

    def train(self, segments):
        model, buffer = self.model, self.model.rollout_buffer
        buffer.reset()
        for name in ARRAYS:
            setattr(buffer, name, np.concatenate([segment[name] for segment in segments], axis=1))
        buffer.pos, buffer.full = NUM_STEPS, True
        model._update_current_progress_remaining(self.trained, self.rounds)
        model.train()
        self.trained += 1
        logged = model.logger.name_to_value
        return {"loss": logged["train/loss"], "clip_fraction": logged["train/clip_fraction"]}

    def weights(self):
        return to_numpy(self.model.policy)


def evaluate(weights):
    """Mean return of 20 episodes."""
    model = make_model(1, seed=0)
    load_numpy(model.policy, weights)
    mean, _ = evaluate_policy(model, gymnasium.make(ENV_ID), n_eval_episodes=20, warn=False)
    return mean


def main(rounds, off_policy_degree=1, seed=0):
    report = Pipeline(
        collect=PerWorker(Collector),
        train=Learner(rounds, seed),
        evaluate=evaluate,
        off_policy_degree=off_policy_degree,
        runtime="processes",
        num_workers=NUM_WORKERS,
        seed=seed,
    ).run(rounds)
    metrics = report.metrics
    print(f"{report.version} rounds in {report.wall_s:.1f} s")
    print(f"mean return of the last 100 training episodes {metrics['rollout/return_mean_100']:.1f}")
    print(f"mean age of the last round's samples {metrics['pace/avg_sample_age']:.1f} versions")
    print(f"evaluation {report.eval_metrics['eval/return_mean']:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=390)
    main(parser.parse_args().rounds)
