"""A small policy-gradient loop for CartPole. async_loop.py is the same, made asynchronous."""

import argparse

import gymnasium
import numpy as np
import torch
from torch.distributions import Categorical

torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = 1000
env = gymnasium.make("CartPole-v1")
policy = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)


def collect(seed):
    """Play whole episodes until there are STEPS steps."""
    rng = np.random.default_rng(seed)
    steps, scores = [], []
    while len(steps) < STEPS:
        obs, _ = env.reset(seed=int(rng.integers(2**31)))
        rewards, done = [], False
        while not done:
            with torch.no_grad():
                logp = torch.log_softmax(policy(torch.from_numpy(obs)), -1).numpy()
            action = int(rng.random() < np.exp(logp[1]))
            steps.append((obs, action, logp[action]))
            obs, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
            done = terminated or truncated
        scores.append(rewards)
    obs, actions, logp = (np.array(column) for column in zip(*steps, strict=True))
    returns = np.concatenate([reward_to_go(rewards) for rewards in scores])
    return {
        "obs": obs,
        "actions": actions,
        "logp": logp,
        "returns": returns,
        "scores": list(map(sum, scores)),
    }


def reward_to_go(rewards, gamma=0.99):
    total, result = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        result.append(total)
    return np.array(result[::-1], np.float32)


def train(data, epochs=20):
    """Raise the probability of actions that did better than average, with PPO's clipped ratio."""
    obs, actions, old_logp = (torch.from_numpy(data[name]) for name in ("obs", "actions", "logp"))
    advantages = torch.from_numpy(data["returns"] - data["returns"].mean()) / data["returns"].std()
    for _ in range(epochs):
        logp = Categorical(logits=policy(obs)).log_prob(actions)
        ratio = torch.exp(logp - old_logp)
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        optimizer.zero_grad()
        (-gain.mean()).backward()
        optimizer.step()
    print(f"mean return {np.mean(data['scores']):.1f}", flush=True)


def main(rounds):
    for number in range(rounds):
        data = collect(number)
        train(data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80)
    main(parser.parse_args().rounds)
