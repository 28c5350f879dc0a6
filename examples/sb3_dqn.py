"""Stable-Baselines3's DQN, asynchronous: its own buffer, its own train(), offbeat between them.

Needs `pip install 'offbeat[sb3]'`. Collectors and learner each hold a whole SB3 model. A collector plays with
the exploration that SB3 has at this step of the run, and sends what it played; the learner adds that to its
replay buffer and trains on samples of it.
"""

import argparse

import gymnasium
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit

from offbeat import Pipeline, Segment
from offbeat.roles import PerWorker
from offbeat.types import Episodes

ENV_ID, NUM_WORKERS, NUM_STEPS, GRADIENT_STEPS = "CartPole-v1", 2, 128, 128
LEARNING_STARTS = 1000
ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


def make_model(buffer_size, seed, rounds=1):
    """A DQN model with the settings that RL Zoo tuned for CartPole; its schedules end with the run."""
    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        make_vec_env(ENV_ID, 1, seed=seed % 2**31),
        buffer_size=buffer_size,
        learning_rate=2.3e-3,
        batch_size=64,
        learning_starts=LEARNING_STARTS,
        target_update_interval=10,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed % 2**31,
        device="cpu",
    )
    _, model.callback = model._setup_learn(total_timesteps=rounds * NUM_WORKERS * NUM_STEPS)
    return model


def load_numpy(network, weights):
    network.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})


class Collector:
    """Lives in a worker: its model's environment, and a buffer for one segment."""

    def __init__(self, context, rounds):
        self.model = make_model(NUM_STEPS, context.seed, rounds)

    def collect(self, ticket, weights):
        model, buffer = self.model, self.model.replay_buffer
        load_numpy(model.q_net, weights)
        model.set_random_seed(ticket.seed % 2**31)
        model.num_timesteps = ticket.steps_collected  # by all collectors: exploration follows the whole run
        model.ep_info_buffer.clear()
        buffer.reset()
        steps = TrainFreq(NUM_STEPS, TrainFrequencyUnit.STEP)
        model.collect_rollouts(model.env, model.callback, steps, buffer, learning_starts=LEARNING_STARTS)
        data = {name: getattr(buffer, name).copy() for name in ARRAYS}
        returns, lengths = ([ended[key] for ended in model.ep_info_buffer] for key in ("r", "l"))
        episodes = Episodes(tuple(returns), tuple(lengths))
        return Segment(ticket, data, np.array([ticket.version]), {"env_steps": NUM_STEPS}, episodes)


class Learner:
    """Lives in the driver: SB3's replay buffer, optimizer and train()."""

    def __init__(self, rounds, seed):
        self.model = make_model(50_000, seed, rounds)

    def train(self, segments):
        model = self.model
        for segment in segments:
            for obs, following, action, reward, done, timeout in zip(*map(segment.get, ARRAYS), strict=True):
                infos = [{"TimeLimit.truncated": bool(timeout[0])}]
                model.replay_buffer.add(obs, following, action, reward, done, infos)
                model._on_step()  # counts steps, and updates the target network when it is time
        model.train(GRADIENT_STEPS, model.batch_size)
        return {"loss": model.logger.name_to_value["train/loss"]}

    def weights(self):
        return {name: tensor.numpy().copy() for name, tensor in self.model.q_net.state_dict().items()}


def evaluate(weights):
    """Mean return of 20 episodes."""
    model = make_model(1, seed=0)
    load_numpy(model.q_net, weights)
    mean, _ = evaluate_policy(model, gymnasium.make(ENV_ID), n_eval_episodes=20, warn=False)
    return mean


def main(rounds, off_policy_degree=1, seed=0):
    report = Pipeline(
        collect=PerWorker(lambda context: Collector(context, rounds)),
        train=Learner(rounds, seed),
        evaluate=evaluate,
        off_policy_degree=off_policy_degree,
        runtime="processes",
        num_workers=NUM_WORKERS,
        seed=seed,
        mode="replay",
        replay_ratio=1 / NUM_WORKERS,  # one round for the segments of all workers, as SB3's train_freq
        min_segments=LEARNING_STARTS // NUM_STEPS,
    ).run(rounds)
    print(f"{report.version} rounds in {report.wall_s:.1f} s")
    print(f"mean return of the last 100 training episodes {report.metrics['rollout/return_mean_100']:.1f}")
    print(f"evaluation {report.eval_metrics['eval/return_mean']:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=195)
    main(parser.parse_args().rounds)
