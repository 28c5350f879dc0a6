"""An advantage actor-critic in torch as users write one: its state holds what torch returns, without a copy.

``algorithm.name=tests.torch_a2c:ALGORITHM``.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from offbeat.algorithms.base import Algorithm, Roles
from offbeat.config.models import AlgorithmConfig, RunConfig
from offbeat.envs import make_world
from offbeat.roles import PerWorker
from offbeat.types import Batch, Episodes, Segment, Ticket


class A2CConfig(AlgorithmConfig):
    """Settings of the test's algorithm."""

    lr: float = Field(0.02, gt=0, description="Learning rate.")
    work_s: float = Field(0.0, ge=0, description="Seconds of native code in each round.")
    keeps: Literal["nothing", "lambda", "file"] = Field("nothing", description="What its state also holds.")
    fails_from: int | None = Field(None, description="Round from which the state cannot be saved.")
    copies: bool = Field(True, description="Whether weights are copies.")


_MAKING = threading.Lock()  # torch's generator is shared by all threads


def network(seed: int = 0) -> nn.Sequential:
    with _MAKING:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def play(net: nn.Module, world: Any, seed: int, greedy: bool) -> dict[str, Any]:
    """Play an episode in each environment; arrays [T, N, ...]."""
    obs, rng = world.reset(seed), np.random.default_rng(seed)
    valid, steps = np.ones(world.num_envs, bool), []
    while valid.any() and len(steps) < 60:
        with torch.no_grad():
            logits = net(torch.as_tensor(obs))[..., :2].double().numpy()
        odds = 1 / (1 + np.exp(logits[:, 0] - logits[:, 1]))
        actions = (odds > (0.5 if greedy else rng.random(len(odds)))).astype(np.int64)
        result = world.step(actions)
        steps.append((obs, actions, result.rewards * valid, valid))
        obs, valid = result.obs, valid & ~(result.terminated | result.truncated)
    names = ("obs", "actions", "rewards", "valid")
    return {name: np.stack(part) for name, part in zip(names, zip(*steps, strict=True), strict=True)}


@dataclass
class Collector:
    world: Any

    def __post_init__(self) -> None:
        self.net = network()

    def collect(self, ticket: Ticket, weights: Any) -> Segment:
        self.net.load_state_dict(weights)
        data = play(self.net, self.world, ticket.seed, greedy=False)
        returns, lengths = data["rewards"].sum(0), data["valid"].sum(0)
        episodes = Episodes(tuple(returns.tolist()), tuple(lengths.tolist()))
        versions = np.array([ticket.version])
        return Segment(ticket, data, versions, {"env_steps": int(lengths.sum())}, episodes)

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def _work(seconds: float) -> None:
    end_s, square = time.monotonic() + seconds, torch.zeros(700, 700)
    while time.monotonic() < end_s:
        square = square @ square


class Learner:
    def __init__(self, config: RunConfig) -> None:
        self.config: Any = config.algorithm
        self.net = network(config.run.seed)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=self.config.lr)
        self.rounds = 0

    def train(self, batch: Batch) -> dict[str, float]:
        _work(self.config.work_s)
        losses = [self._loss(segment.data) for segment in batch.segments]
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.rounds += 1
        return {"learn/loss": float(loss.detach())}

    def _loss(self, data: dict[str, Any]) -> torch.Tensor:
        returns = np.cumsum(data["rewards"][::-1], 0)[::-1][data["valid"]].astype(np.float32) / 60
        out = self.net(torch.as_tensor(data["obs"][data["valid"]]))
        actions = torch.as_tensor(data["actions"][data["valid"]])
        advantages = torch.as_tensor(returns) - out[:, 2]
        logp = torch.log_softmax(out[:, :2], -1)[torch.arange(len(actions)), actions]
        return -(logp * advantages.detach()).mean() + advantages.square().mean()

    def weights(self) -> Any:
        live = self.net.state_dict()
        return {name: value.clone() for name, value in live.items()} if self.config.copies else live

    def state_dict(self) -> Any:
        state = {"net": self.net.state_dict(), "opt": self.optimizer.state_dict(), "rounds": self.rounds}
        match self.config.keeps:
            case "lambda":
                state["schedule"] = [1, {"lr": lambda version: 0.1}]
            case "file":
                state["log"] = Path(__file__).open()  # noqa: SIM115
        if self.config.fails_from is not None and self.rounds >= self.config.fails_from:
            state["history"] = {1, 2}
        return state

    def load_state_dict(self, state: Any) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["opt"])
        self.rounds = state["rounds"]


@dataclass
class Evaluator:
    world: Any

    def evaluate(self, weights: Any, seed: int) -> dict[str, float]:
        net = network()
        net.load_state_dict(weights)
        return {"eval/return_mean": float(play(net, self.world, seed, greedy=True)["rewards"].sum(0).mean())}


class Policy:
    def __init__(self, weights: Any) -> None:
        self._net = network()
        self._net.load_state_dict(weights)

    def act(self, obs: Any, *, deterministic: bool = True) -> Any:
        with torch.no_grad():
            return self._net(torch.as_tensor(obs))[..., :2].argmax(-1).numpy()

    def reset(self) -> None:
        pass


def build(config: RunConfig) -> Roles:
    return Roles(
        collect=PerWorker(lambda context: Collector(make_world(config.env, config.envs_per_worker))),
        learner=lambda ranks: Learner(config),
        evaluate=PerWorker(lambda context: Evaluator(make_world(config.env, config.eval.episodes))),
        policy=Policy,
        mode="stream",
        segments_per_round=config.segments_per_round,
    )


ALGORITHM = Algorithm("torch_a2c", A2CConfig, build)
