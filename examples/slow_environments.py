"""64 environments in one collector, whose steps take very different times: none waits for another.

Each environment is stepped by a thread of its own, which wakes the collector when a step is done. Environment
i works on the tickets n with n mod 64 = i, in order, so at k = 0 the weights do not depend on who is faster,
and above k = 0 a run can be repeated bit for bit. docs/wide-collectors.md explains the contract.

    python examples/slow_environments.py --rounds 40
"""

import argparse
import heapq
import time
from collections import deque
from itertools import groupby
from queue import SimpleQueue
from threading import Thread

import numpy as np

from offbeat import PerWorker, Pipeline, Segment
from offbeat.types import Piece, Progress, Span

NUM_ENVS, NUM_STEPS, MEAN_S = 64, 16, 0.05


class SlowEnv:
    """Rewards action 1 where the first observed number is the larger one, else 0. Steps take their time."""

    def __init__(self, index):
        self.times = np.random.default_rng(index)

    def reset(self, seed):
        self.rng = np.random.default_rng(seed)
        self.obs = self.rng.normal(size=2)
        return self.obs, 0.0

    def step(self, action):
        time.sleep(self.times.exponential(MEAN_S))
        reward = float(action == (self.obs[0] > self.obs[1]))
        self.obs = self.rng.normal(size=2)
        return self.obs, reward


class Episode:
    """The episode of one ticket; ``plan`` has the version for each step where it is repeated."""

    def __init__(self, ticket, script):
        self.ticket = ticket
        self.uniforms = np.random.default_rng(ticket.seed).random(NUM_STEPS)
        self.plan = [span.version for piece in script for span in piece.spans for _ in range(span.size)]
        self.obs, self.actions, self.rewards, self.versions = [], [], [], []

    def lacks(self, version):
        """Return the version that the next step has to be made with, if another one is loaded."""
        return self.plan[len(self.actions)] if self.plan and self.plan[len(self.actions)] != version else 0

    def act(self, version, weights):
        is_likely = 1.0 / (1.0 + np.exp(-self.obs[-1] @ weights))
        self.actions.append(int(self.uniforms[len(self.actions)] < is_likely))
        self.versions.append(version)
        return self.actions[-1]

    def segment(self):
        data = {"obs": self.obs, "actions": self.actions, "rewards": self.rewards}
        data = {name: np.array(rows) for name, rows in data.items()}
        spans = tuple(Span(version, len(list(steps))) for version, steps in groupby(self.versions))
        pieces = (Piece(spans, "length"),)
        return Segment(self.ticket, data, np.array(self.versions), {"env_steps": NUM_STEPS}, pieces=pieces)


class SlowEnvironments:
    """A wide collector: enough tickets that each environment always has the next one."""

    capacity = 5 * NUM_ENVS

    def __init__(self, context):
        self.wake = context.wake
        self.queues = [[] for _ in range(NUM_ENVS)]  # of each environment, by ticket
        self.running = {}  # environment -> its episode
        self.ready = []  # environments that want an action
        self.done = deque()  # what the threads have done: environment, observation, reward
        self.inboxes = [SimpleQueue() for _ in range(NUM_ENVS)]
        for index in range(NUM_ENVS):
            Thread(target=self.serve, args=(index, SlowEnv(index)), daemon=True).start()

    def serve(self, index, env):
        """Do what the inbox of an environment asks for, in its thread."""
        while True:
            method, argument = self.inboxes[index].get()
            self.done.append((index, *getattr(env, method)(argument)))
            self.wake()

    def accept(self, ticket, begun=None, script=()):
        queue = self.queues[ticket.number % NUM_ENVS]
        heapq.heappush(queue, (ticket.number, Episode(ticket, script)))

    def load(self, version, weights):
        self.version, self.weights = version, weights

    def advance(self):
        began_s, segments, num_steps = time.monotonic(), [], 0
        while self.done:
            index, obs, reward = self.done.popleft()
            episode = self.running[index]
            if episode.actions:
                episode.rewards.append(reward)
                num_steps += 1
            if len(episode.rewards) == NUM_STEPS:
                segments.append(self.running.pop(index).segment())
            else:
                episode.obs.append(obs)
                self.ready.append(index)
        for index, queue in enumerate(self.queues):
            if queue and index not in self.running:
                _, self.running[index] = heapq.heappop(queue)
                self.inboxes[index].put(("reset", self.running[index].ticket.seed))
        lacking = {index: self.running[index].lacks(self.version) for index in self.ready}
        for index in self.ready:
            if not lacking[index]:
                self.inboxes[index].put(("step", self.running[index].act(self.version, self.weights)))
        self.ready = [index for index in self.ready if lacking[index]]
        needs = min(lacking.values()) if self.ready and len(self.ready) == len(self.running) else None
        return Progress(
            segments, time.monotonic() - began_s, {"env_steps": num_steps}, idle=True, needs=needs
        )

    def state_dict(self):
        return {}  # each ticket begins an episode, so nothing outlives it

    def load_state_dict(self, state):
        pass


class Learner:
    """Logistic regression on which action was rewarded."""

    def __init__(self):
        self.w = np.zeros(2)

    def train(self, batch):
        rewards = [segment.data["rewards"] for segment in batch.segments]
        for segment in batch.segments:
            obs, actions = segment.data["obs"], segment.data["actions"]
            better = np.where(segment.data["rewards"] > 0.5, actions, 1 - actions)
            self.w = self.w + 0.02 * (better - 1.0 / (1.0 + np.exp(-obs @ self.w))) @ obs
        return {"learn/reward": float(np.mean(rewards))}

    def weights(self):
        return self.w

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--k", type=int, default=4)
    options = parser.parse_args()
    report = Pipeline(
        collect=PerWorker(SlowEnvironments),
        train=Learner(),
        off_policy_degree=options.k,
        segments_per_round=NUM_ENVS,
        runtime="threads",
    ).run(rounds=options.rounds)
    metrics = report.metrics
    lock_step = NUM_ENVS / (MEAN_S * sum(1 / n for n in range(1, NUM_ENVS + 1)))
    print(
        f"{report.steps_per_s:.0f} steps/s; {lock_step:.0f} is the most if every step waits for the slowest; "
        f"mean reward {metrics['learn/reward']:.2f}, mean age {metrics['pace/avg_sample_age']:.1f} versions"
    )
